"""Test the kinds of machines that computed runs: which runs are alike, and that a run of another kind starts again."""

import json
import shutil
from pathlib import Path

import pytest

from fewbits import cli
from fewbits.experiments.environment import alike, describe_kinds, kinds_of, processor_kind
from fewbits.sweeps.planning import store
from fewbits.sweeps.planning.plan import Plan, Planned
from fewbits.sweeps.running import driver
from fewbits.sweeps.running.driver import Job
from tests.messages import names
from tests.sweeps.conftest import Undisturbed
from tests.sweeps.sweep_inputs import all_left, attempts, folders, planned, reported_steps, tiny_file

ARMS = {
    "seeds": [0, 1],
    "arms": {
        "trunk": {"overrides": ["recipe=bf16"]},
        "branch": {"overrides": ["recipe=nvfp4"], "parent": "trunk", "at": 4},
        "scratch": {"overrides": ["recipe=nvfp4"]},
    },
}


def leave(job: Job, *kinds: str, torch: str = "2.13.0") -> None:
    """Write the run folder of a finished trial whose steps were computed on these kinds, one after the other.

    torch: the version of torch that computed all steps.
    """
    for step in job.runtime.keep_steps:
        (job.folder.kept / f"step-{step:08d}").mkdir(parents=True, exist_ok=True)
    job.path.mkdir(parents=True, exist_ok=True)
    environments = [{"kind": kind, "backend": "cpu", "torch": torch} for kind in kinds]
    segments = [{"step": step, "environment": one} for step, one in enumerate(environments)]
    (job.path / "provenance.json").write_text(json.dumps({"id": job.id, "segments": segments}))
    result = {"id": job.id, "status": "done", "step": job.trial.training.steps}
    (job.path / "result.json").write_text(json.dumps(result))


@pytest.fixture
def plan(cache: Path, tmp_path: Path) -> Plan:
    return planned(tiny_file(tmp_path, cache, ARMS, "arms"), f"runtime.runs={tmp_path / 'runs'}")


def trials(plan: Plan, seed: int) -> dict[str, Planned]:
    """Return the trials of this seed, by arm."""
    return {str(m.cell.arm): plan.trials[m.id] for m in plan.members if m.cell.seed == seed}


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


def test_status_has_a_column_of_kinds_where_they_differ(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["status", str(tmp_path / "arms.yaml"), "--runs", str(tmp_path / "runs")]
    leave(driver.job(trials(plan, 0)["trunk"]), "amd-avx2")
    assert cli.main(arguments) == 0
    assert "amd-avx2" not in capsys.readouterr().out
    leave(driver.job(trials(plan, 0)["scratch"]), "intel-amx", "amd-avx2")
    assert cli.main(arguments) == 0
    assert "intel-amx, then amd-avx2" in capsys.readouterr().out
    assert cli.main([*arguments, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["place"]["arm"]: row["kind"] for row in rows if row["place"]["seed"] == "0"} == {
        "trunk": "amd-avx2",
        "branch": None,
        "scratch": "intel-amx, then amd-avx2",
    }
