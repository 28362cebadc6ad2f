"""Test the kinds of machines that computed runs: which runs are alike, and that a run of another kind starts again."""

import json
import shutil
from pathlib import Path

import pytest

from fewbits import cli
from fewbits.experiments.environment import alike, describe_kinds, kinds_of, processor_kind
from fewbits.sweeps.planning import store
from fewbits.sweeps.planning.plan import Planned
from tests.messages import names
from tests.sweeps.conftest import Undisturbed
from tests.sweeps.sweep_inputs import all_left, attempts, folders, planned, reported_steps, tiny_file


def leave(trial: Planned, *kinds: str) -> None:
    """Write the run folder of a finished trial whose steps were computed on these kinds, one after the other."""
    folder = trial.folder.path
    folder.mkdir(parents=True, exist_ok=True)
    environments = [{"kind": kind, "backend": "cpu", "torch": "2.13.0"} for kind in kinds]
    segments = [{"step": step, "environment": one} for step, one in enumerate(environments)]
    (folder / "provenance.json").write_text(json.dumps({"id": trial.id, "segments": segments}))
    result = {"id": trial.id, "status": "done", "step": trial.trial.training.steps}
    (folder / "result.json").write_text(json.dumps(result))


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
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arms = {recipe: {"overrides": [f"recipe={recipe}"]} for recipe in ("bf16", "nvfp4", "mxfp8")}
    file = tiny_file(tmp_path, cache, {"arms": arms})
    plan = planned(file, f"runtime.runs={tmp_path / 'runs'}")
    arguments = ["status", str(file), "--runs", str(tmp_path / "runs")]
    one, other, _ = plan.trials.values()
    leave(one, "amd-avx2")
    assert cli.main(arguments) == 0
    assert "amd-avx2" not in capsys.readouterr().out
    leave(other, "intel-amx", "amd-avx2")
    assert cli.main(arguments) == 0
    assert "intel-amx, then amd-avx2" in capsys.readouterr().out
    assert cli.main([*arguments, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    kinds = {"bf16": "amd-avx2", "nvfp4": "intel-amx, then amd-avx2", "mxfp8": None}
    assert {row["place"]["arm"]: row["kind"] for row in rows} == kinds
