"""Hydra's launcher `fewbits`: the jobs of `--multirun` are trials of one sweep, run through the store.

Hydra finds plugins by this package's name; what it does is in `fewbits.sweeps.commands.multirun`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


@dataclass
class FewbitsLauncherConfig:
    _target_: str = "hydra_plugins.fewbits_launcher.FewbitsLauncher"


class FewbitsLauncher(Launcher):
    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Nothing that a sweep of trials does not know by itself."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from fewbits.sweeps.commands.multirun import launch

        return launch([list(words) for words in job_overrides])


ConfigStore.instance().store(group="hydra/launcher", name="fewbits", node=FewbitsLauncherConfig)
