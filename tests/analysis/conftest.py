"""Fixtures for tests of the analysis: torch with one thread, and a store with eight tiny trials, of which two diverge.

The trials are trained once per test session: arms bf16 (2 seeds), mor (2 thresholds × 2 seeds) and wild (2 seeds).
"""

import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from fewbits.sweeps.planning.plan import Plan, plan
from fewbits.sweeps.planning.studies import load_sweeps
from fewbits.sweeps.running.run_sweep import Where, run_sweep, store_plan
from fewbits.sweeps.tracking.mirror import Mirror
from tests.experiments.data.data_inputs import shared_cache
from tests.once import once

SWEEP = """
overrides:
  - model=nemotron-nano
  - model.layers=2
  - data=synthetic
  - data.repeat=1000000000
  - data.size=65536
  - training.steps=4
  - training.batch=2
  - training.micro_batch=2
  - training.length=64
  - evaluation.windows=2
  - evaluation.every=2
  - observer.window=2
  - observer.every=1
seeds: [0, 1]
axes:
  recipe.threshold: [0.0001, 0.045]
arms:
  bf16: {overrides: [recipe=bf16], axes: []}
  mor: {overrides: [recipe=mor/tensor]}
  wild: {overrides: [recipe=bf16, training.blow_up=0.01], axes: []}
"""


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread of torch: the tensors are small, and other test processes run at the same time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return (folder with tiny.yaml and the finished store `runs`, folder of the data cache)."""
    data = shared_cache(tmp_path_factory)

    def make(folder: Path) -> None:
        (folder / "tiny.yaml").write_text(SWEEP)
        made = _plan(folder, folder / "runs", data)
        store_plan(made, ())
        assert run_sweep(made, Where("local", parallel=2), Mirror(made)) == 0

    return once(tmp_path_factory, "trained", make), data


@pytest.fixture
def planned(trained: tuple[Path, Path], tmp_path: Path) -> Callable[..., Plan]:
    """Return a cached function that plans the sweep with further overrides, over a store that tests may change."""
    folder, data = trained
    shutil.copytree(folder / "runs", tmp_path / "runs")
    return cache(lambda *more: _plan(folder, tmp_path / "runs", data, *more))


def _plan(folder: Path, runs: Path, data: Path, *more: str) -> Plan:
    where = (f"runtime.runs={runs}", f"runtime.cache={data}", "runtime.device=cpu")
    return plan(*load_sweeps((str(folder / "tiny.yaml"), *where, *more)))
