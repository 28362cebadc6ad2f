"""Register the Hydra launcher `fewbits`, which runs the jobs of `--multirun` as the trials of one sweep.

Hydra finds plugins by the name of this package. The code is in `fewbits.commands.multirun`.
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
        """Do nothing: a sweep needs none of these values."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from fewbits.commands.multirun import launch

        return launch([list(overrides) for overrides in job_overrides])


ConfigStore.instance().store(group="hydra/launcher", name="fewbits", node=FewbitsLauncherConfig)
