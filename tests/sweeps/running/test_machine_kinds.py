"""Test the kinds of machines that computed runs: which runs are alike, and that a run of another kind starts again."""

import json
import shutil
from pathlib import Path

from fewbits import cli
from fewbits.experiments.environment import alike, describe_kinds, kinds_of, processor_kind
from fewbits.sweeps.planning import store
from tests.messages import names
from tests.sweeps.conftest import Undisturbed
from tests.sweeps.sweep_inputs import all_left, attempts, folders, planned, reported_steps


def test_runs_are_alike_if_kind_backend_and_torch_are() -> None:
    avx, amx = (("amd-avx2", "cpu", "2.13", None),), (("intel-amx", "cpu", "2.13", None),)
    newer, limited = (("amd-avx2", "cpu", "2.15", None),), (("amd-avx2", "cpu", "2.13", "MKL_CBWR=AVX"),)
    assert alike(avx, avx)
    assert alike((), ()), "both unknown"
    assert not any(alike(avx, other) for other in (amx, newer, limited, ()))
    assert not alike(avx + amx, avx + amx), "the runs may have changed machines at different steps"
    assert describe_kinds(avx, [amx]) == "amd-avx2"
    assert describe_kinds(avx, [newer]) == "amd-avx2 (torch 2.13)"
    assert describe_kinds(limited, [avx]) == "amd-avx2 (limits MKL_CBWR=AVX)"
    assert describe_kinds(avx + amx) == "amd-avx2, then intel-amx"


def test_a_run_of_another_kind_starts_again_and_finished_ones_are_kept(
    undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """Two runs have steps of another kind of machine: the unfinished one starts again, and the finished one stays."""
    runs = tmp_path / "runs"
    shutil.copytree(undisturbed.store, runs)
    plan = planned(undisturbed.file, f"runtime.runs={runs}")
    done, unfinished = folders(plan)[:2]
    for folder in (done, unfinished):
        path = folder.path / "provenance.json"
        provenance = json.loads(path.read_text())
        provenance["segments"][-1]["environment"]["kind"] = "other-kind"
        path.write_text(json.dumps(provenance))
    (unfinished.path / "result.json").unlink()
    assert store.reached(unfinished) > 0
    assert cli.main(["sweep", str(undisturbed.file), "--runs", str(runs), "--backend", "local"]) == 0
    assert [kinds_of(folder.computed()) for folder in (done, unfinished)] == [("other-kind",), (processor_kind(),)]
    assert (attempts(done), attempts(unfinished)) == (1, 2)
    assert [steps[0] for steps in reported_steps(unfinished) if steps] == [1, 1]
    log = (unfinished.path / store.LOG).read_text()
    assert sum(names(line, "other-kind", processor_kind(), "starts again") for line in log.splitlines()) == 1
    assert all_left(plan) == undisturbed.left
