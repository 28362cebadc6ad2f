"""Test sweeps on two nodes of a real Ray on this machine whose processors are of different kinds.

The processes of the second node may only use SSE4.1, by a setting of oneDNN, so its results differ in their last bits.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fewbits import cli
from fewbits.experiments.environment import processor_kind
from fewbits.kernels.backends.processor import processor_vendor
from fewbits.sweeps.planning.plan import Plan
from fewbits.sweeps.running import placement
from fewbits.sweeps.running.machine_kinds import computed, kinds_of
from tests.messages import names
from tests.ray_head import marked_environment, short_folder
from tests.sweeps.sweep_inputs import ROOT, planned, tiny_file

SMALL: dict[str, Any] = {"object_store_memory": 80_000_000, "memory": 1_000_000_000}
ARMS = {
    "seeds": [0, 1],
    "arms": {"plain": {"overrides": ["recipe=bf16"]}, "noisy": {"overrides": ["recipe=nvfp4"], "parent": "plain"}},
}
OURS, OLD = processor_kind(), f"{processor_vendor()}-sse"

pytestmark = pytest.mark.skipif(OURS == OLD, reason="this processor has no newer instructions than SSE4.1")


class TwoKinds:
    """A Ray cluster with one node of this machine's own kind, and one of the older kind."""

    def __init__(self, folder: Path) -> None:
        from ray.cluster_utils import Cluster

        source = {"PYTHONPATH": str(ROOT / "src")}
        head = {**SMALL, "num_cpus": 1, "include_dashboard": False, "temp_dir": str(folder), "env_vars": source}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.old = self.cluster.add_node(num_cpus=1, **SMALL, env_vars=source | {"ONEDNN_MAX_CPU_ISA": "SSE41"})

    def remove_old(self) -> None:
        self.cluster.remove_node(self.old)


@pytest.fixture(scope="module")
def two_kinds() -> Iterator[TwoKinds]:
    with marked_environment() as environment, short_folder() as folder, pytest.MonkeyPatch.context() as patch:
        for name in set(os.environ) - set(environment):
            patch.delenv(name)
        for name, value in environment.items():
            patch.setenv(name, value)
        there = started_at_last(folder)
        yield there
        there.cluster.shutdown()


def started_at_last(folder: Path) -> TwoKinds:
    """Start the nodes, repeatedly if necessary: Ray gives up after 30 seconds, which is too few on a busy machine."""
    for attempt in range(3):
        try:
            return TwoKinds(folder / str(attempt))
        except Exception as error:  # Ray raises no more specific one
            last = error
    raise last


def kinds(plan: Plan) -> dict[int, set[str]]:
    """Return the kinds that computed each seed's trials."""
    found: dict[int, set[str]] = {}
    for one in plan.trials.values():
        found.setdefault(one.trial.seed, set()).update(kinds_of(computed(one.folder)))
    return found


def test_seeds_keep_to_one_kind_like_replaces_the_others_and_a_lost_kind_does_not_block(
    two_kinds: TwoKinds,
    cache: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs, file = tmp_path / "runs", tiny_file(tmp_path, cache, ARMS)
    plan = planned(file, f"runtime.runs={runs}")
    sweep = ["sweep", str(file), "--runs", str(runs), "--address", two_kinds.cluster.address]

    assert cli.main(sweep) == 0
    assert f"{OURS} (1 trials at a time)" in capsys.readouterr().err
    assert sorted(map(sorted, kinds(plan).values())) == [[OURS], [OLD]]

    assert cli.main([*sweep, "--like", OLD]) == 0
    assert kinds(plan) == {0: {OLD}, 1: {OLD}}
    assert len(list((runs / "replaced").iterdir())) == 2

    monkeypatch.setattr(placement, "WAIT", 1.0)
    two_kinds.remove_old()
    noisy = next(plan.trials[member.id].folder for member in plan.members if member.cell.arm == "noisy")
    noisy.path.rename(tmp_path / "away")
    capsys.readouterr()
    assert cli.main(sweep) == 0
    logged = capsys.readouterr().err
    assert names(logged, OLD, "1 s", f"runs on {OURS}")
    assert sorted(map(sorted, kinds(plan).values())) == [sorted((OURS, OLD)), [OLD]]
