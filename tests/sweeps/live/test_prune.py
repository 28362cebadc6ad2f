"""Test that `fewbits prune` lists what can be removed, removes it only with --delete, and keeps all that is needed.

Running trials, branches of stored plans, and results of the present code are needed.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from fewbits import cli
from fewbits.common.store_folder import bytes_below
from fewbits.experiments.storage import checkpoints
from fewbits.experiments.storage.lease import leased
from fewbits.experiments.storage.run_folder import RunFolder
from tests.messages import names
from tests.sweeps.conftest import Undisturbed
from tests.sweeps.sweep_inputs import all_left, folders, planned


@pytest.fixture
def store(undisturbed: Undisturbed, tmp_path: Path) -> Path:
    return Path(shutil.copytree(undisturbed.store, tmp_path / "runs"))


def files(store: Path) -> set[Path]:
    return {path for path in store.rglob("*") if path.is_file()}


def found(store: Path, capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert cli.main(["prune", *words, "--runs", str(store), "--json"]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return rows


def test_it_removes_older_checkpoints_of_ended_trials_and_the_sweep_stays_finished(
    undisturbed: Undisturbed, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = planned(undisturbed.file, f"runtime.runs={store}")
    before = files(store)
    rows = found(store, capsys)
    assert {row["kind"] for row in rows} == {"checkpoints"}
    assert {Path(row["path"]).parents[1].name for row in rows} == {folder.path.name for folder in folders(plan)}
    assert all(row["bytes"] == bytes_below(Path(row["path"])) > 0 for row in rows)
    assert files(store) == before
    assert found(store, capsys, "--delete") == rows
    removed = [Path(row["path"]) for row in rows]
    assert files(store) == {file for file in before if not any(file.is_relative_to(path) for path in removed)}
    assert found(store, capsys) == []
    for folder in folders(plan):
        assert [*checkpoints.steps(folder.checkpoints)] == [8]
        assert folder.has(plan.trials[folder.id].keep)
    assert all_left(plan) == undisturbed.left
    capsys.readouterr()
    assert cli.main(["sweep", str(undisturbed.file), "--runs", str(store), "--backend", "local"]) == 0
    assert names(capsys.readouterr().out, "8 done")


def test_what_is_left_of_killed_processes_goes_and_what_runs_stays(
    undisturbed: Undisturbed, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = folders(planned(undisturbed.file, f"runtime.runs={store}"))[:2]
    for folder in (one, other):
        (folder.checkpoints / ".step-00000009.abcd.partial").mkdir()
        (folder.path / ".metrics.parquet.abcd.partial").write_text("x")
    with leased(other.path):
        rows = found(store, capsys, "leftovers", "--delete")
    assert sorted((row["kind"], Path(row["path"]).name) for row in rows) == [
        ("leftovers", ".metrics.parquet.abcd.partial"),
        ("leftovers", ".step-00000009.abcd.partial"),
    ]
    assert not list(one.path.rglob("*.abcd.partial"))
    assert len(list(other.path.rglob("*.abcd.partial"))) == 2
    with leased(one.path):
        (one.path / ".metrics.parquet.abcd.partial").write_text("x")
        assert found(store, capsys, "leftovers", "--delete")[0]["path"].startswith(str(other.path))
    assert (one.path / ".metrics.parquet.abcd.partial").exists()


def test_stale_runs_go_only_by_name_and_unless_something_needs_them(
    undisturbed: Undisturbed, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = planned(undisturbed.file, f"runtime.runs={store}")
    branch = next(trial for trial in plan.trials.values() if trial.parent is not None)
    for folder in folders(plan):
        age(folder)
    assert found(store, capsys, "stale") == [], "runs in a stored plan are not listed as stale"
    shutil.rmtree(store / "plans")
    rows = found(store, capsys, "stale")
    parents = {plan.trials[trial.parent].folder.path.name for trial in plan.trials.values() if trial.parent}
    assert {Path(row["path"]).name for row in rows} == {folder.path.name for folder in folders(plan)} - parents
    assert "stale" not in {row["kind"] for row in found(store, capsys)}
    found(store, capsys, "stale", "--delete")
    assert not branch.folder.path.exists()
    assert all((store / name).is_dir() for name in parents)
    assert cli.main(["prune", "stlae", "--runs", str(store)]) == 2
    assert names(capsys.readouterr().err, "stlae", "stale", "checkpoints")


@pytest.mark.parametrize("incomplete", [False, True])
def test_no_run_goes_while_a_plan_cannot_be_read(
    undisturbed: Undisturbed, store: Path, capsys: pytest.CaptureFixture[str], incomplete: bool
) -> None:
    plan = planned(undisturbed.file, f"runtime.runs={store}")
    for folder in folders(plan):
        age(folder)
    (file,) = (store / "plans").glob("*.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), "trials": None}) if incomplete else "{")
    capsys.readouterr()
    assert cli.main(["prune", "stale", "checkpoints", "--delete", "--runs", str(store), "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == []
    assert printed.err.count("\n") == 1
    assert names(printed.err, str(file))
    assert all(folder.over for folder in folders(plan))
    file.unlink()
    assert found(store, capsys, "stale")


def test_the_last_intact_checkpoint_and_runs_that_cannot_be_read_stay(
    undisturbed: Undisturbed, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other, unreadable = folders(planned(undisturbed.file, f"runtime.runs={store}"))[:3]
    *_, before, newest = checkpoints.steps(one.checkpoints).values()
    (newest / checkpoints.TENSORS).write_bytes(b"damaged")
    (other.path / "result.json").write_text("{")
    (unreadable.path / "provenance.json").write_text("{")
    capsys.readouterr()
    assert cli.main(["prune", "checkpoints", "--delete", "--runs", str(store), "--json"]) == 0
    printed = capsys.readouterr()
    removed = {Path(row["path"]).parents[1].name for row in json.loads(printed.out)}
    assert one.path.name not in removed
    assert other.path.name not in removed, "a damaged result does not count as the end"
    assert unreadable.path.name not in removed
    assert len(removed) == 5
    assert one.checkpoint().path == before
    assert names(printed.err, str(newest / checkpoints.TENSORS), str(before))
    assert names(printed.err, str(unreadable.path / "provenance.json"))


def age(folder: RunFolder) -> None:
    """Change provenance.json so that the run seems to be computed by another version of the code (stale)."""
    path = folder.path / "provenance.json"
    provenance = json.loads(path.read_text())
    provenance["identity"]["numerics"] = 1
    path.write_text(json.dumps(provenance))
