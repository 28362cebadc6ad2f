"""Configure pytest: which tests are skipped, and which worker process runs which test files.

Tests marked `gpu` are skipped without a CUDA device, and tests marked `deep` in a short run (`make test`).

All tests of a file run in the same worker (--dist loadfile), so that their shared fixtures are made once. All files of
a group also run in the same worker. The groups are: files that start a Ray cluster, since two cores can run only one
cluster at a time; and, for each study, the files in tests/analysis/STUDY, which share plans that take seconds to make.
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
    "sweeps/running/test_ray.py",
    "infra/test_slurm.py",
)

OF_ONE_STUDY = tuple(f"tests/analysis/{study}/" for study in ("mor", "nvfp4", "gaussws"))

# Test files that take more than eight seconds of processor time, the longest first. They start before all other files,
# so that at the end of a run no worker is left with a long file while the others have nothing to do.
LONG = (
    "sweeps/running/test_driver.py",
    "sweeps/tracking/test_servers.py",
    "analysis/mor/test_verdicts.py",
    "experiments/storage/test_resume.py",
    "kernels/backends/gpu/test_cuda_emulated.py",
    "analysis/report/test_report.py",
    "experiments/test_distributed.py",
    "commands/test_multirun.py",
    "analysis/nvfp4/test_figures.py",
    "experiments/test_titan.py",
    "kernels/backends/test_parity.py",
    "test_examples.py",
    "sweeps/tracking/test_arms.py",
    "commands/test_ui.py",
    "sweeps/tracking/test_single_runs.py",
    "analysis/gaussws/test_figures.py",
    "analysis/mor/test_figures.py",
    "experiments/test_training.py",
    "sweeps/planning/test_studies.py",
    "models/test_quantize.py",
    "commands/test_data.py",
    "analysis/test_other_machine.py",
    "experiments/test_composition.py",
    "experiments/bench/test_bench_train.py",
    "sweeps/planning/test_outline.py",
    "experiments/test_identity.py",
    "experiments/distributed/test_sharding.py",
)

# OpenMP's threads shall sleep while they wait. With more processes than cores, threads that spin while they wait took
# three quarters of the time. The variable has to be set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


# Run the garbage collector rarely. It took a fifth of a worker's time, mostly to search the objects of imported
# modules, which are never garbage; `gc.freeze` below excludes these.
gc.set_threshold(50_000, 20, 20)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()


def pytest_configure() -> None:
    """Restore Python's handler of SIGINT, which tests send to child processes.

    A shell makes background jobs ignore SIGINT, and child processes would inherit that.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class ByFile(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    """A scheduler of pytest-xdist that runs all tests of a file, and all files of a group, in the same worker."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        if file.endswith(STARTS_A_CLUSTER):
            return STARTS_A_CLUSTER[0]
        return next((folder for folder in OF_ONE_STUDY if file.startswith(folder)), file)


@pytest.hookimpl(optionalhook=True)  # optional, since this hook does not exist with -p no:xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    return ByFile(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=turn)
    skip(items, "deep", "make test-deep runs it", unless=lambda: DEEP)
    skip(items, "gpu", "needs a CUDA device", unless=has_cuda)


def turn(item: pytest.Item) -> int:
    """Return the sort key of a test; tests with lower keys start first.

    Files of STARTS_A_CLUSTER come first, since their tests wait most; then the files of LONG in their order; then all
    others.
    """
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
