"""Skip tests marked `gpu` without a CUDA device and `deep` ones in a short run; distribute files over workers.

All tests of a file run in one worker (--dist loadfile), so that the fixtures that they share are made once. So do all
files of a group: those that start a Ray cluster, since one cluster at a time is as much as two processors carry; those
that use one MLflow server; and those that judge or show made-up results of one study, whose plans take seconds.
"""

import gc
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from xdist.scheduler.loadfile import LoadFileScheduling

from tests.effort import DEEP, load_profile

load_profile()

STARTS_A_CLUSTER = (
    "sweeps/cluster/test_on_cluster.py",
    "sweeps/cluster/test_capacity.py",
    "sweeps/cluster/test_several_nodes.py",
    "sweeps/running/test_ray.py",
    "infra/test_slurm.py",
)

USES_THE_MLFLOW_SERVER = (
    "sweeps/tracking/test_secrets.py",
    "sweeps/tracking/test_mlflow_databases.py",
    "sweeps/tracking/test_mlflow_owners.py",
)
OF_ONE_STUDY = tuple(f"tests/analysis/{study}/" for study in ("mor", "nvfp4", "gaussws"))

# Files of more than eight seconds of processor time, the longest first; a short file runs beside the last of them.
LONG = (
    "sweeps/running/test_driver.py",
    "sweeps/tracking/test_secrets.py",
    "analysis/mor/test_verdicts.py",
    "experiments/storage/test_resume.py",
    "kernels/backends/gpu/test_cuda_emulated.py",
    "analysis/report/test_report.py",
    "experiments/test_distributed.py",
    "sweeps/commands/test_multirun.py",
    "analysis/nvfp4/test_figures.py",
    "experiments/fingerprint/test_same_bits.py",
    "experiments/test_titan.py",
    "kernels/backends/test_parity.py",
    "kernels/backends/test_reference.py",
    "test_examples.py",
    "sweeps/tracking/test_mlflow_view.py",
    "sweeps/commands/test_ui.py",
    "experiments/tracking/test_tracker.py",
    "analysis/gaussws/test_figures.py",
    "experiments/test_training.py",
    "kernels/test_ops.py",
    "sweeps/planning/test_every_scale.py",
    "experiments/fingerprint/test_fingerprint.py",
    "models/test_quantize.py",
    "kernels/test_mix.py",
    "experiments/commands/test_prepare_data.py",
    "analysis/test_other_machine.py",
    "experiments/test_composition.py",
    "experiments/bench/test_bench_train.py",
    "sweeps/dry_run/test_outline.py",
    "kernels/test_products.py",
    "analysis/report/test_notebooks.py",
    "experiments/fingerprint/test_identity.py",
    "kernels/backends/test_build.py",
    "kernels/test_accumulators.py",
    "test_portable.py",
    "experiments/commands/test_hydra_options.py",
    "experiments/distributed/test_sharding.py",
)

# Set before torch is imported: if there are more workers and child processes than processors, threads that spin while
# they wait take three quarters of the time.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


# The garbage collector took a fifth of a worker's time, most of it for objects of imported modules, which stay.
gc.set_threshold(20_000, 10, 10)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()


def pytest_configure() -> None:
    """Restore the handler of SIGINT: a shell ignores it in background jobs, and child processes inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class ByFile(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    """Give a worker whole files, and all files of a group to the same one."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        for group in (STARTS_A_CLUSTER, USES_THE_MLFLOW_SERVER):
            if file.endswith(group):
                return group[0]
        return next((folder for folder in OF_ONE_STUDY if file.startswith(folder)), file)


@pytest.hookimpl(optionalhook=True)  # unknown with -p no:xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    return ByFile(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=turn)
    skip(items, "deep", "make test-deep runs it", unless=lambda: DEEP)
    skip(items, "gpu", "needs a CUDA device", unless=has_cuda)


def turn(item: pytest.Item) -> int:
    """Return when an item runs: the clusters first, since they wait the most, then long files, then all others."""
    path = item.path.as_posix()
    if path.endswith(STARTS_A_CLUSTER):
        return -1
    return next((at for at, file in enumerate(LONG) if path.endswith(f"/{file}")), len(LONG))


def skip(items: list[pytest.Item], mark: str, reason: str, unless: Callable[[], bool]) -> None:
    marked = [item for item in items if item.get_closest_marker(mark)]
    if marked and not unless():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


def has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
