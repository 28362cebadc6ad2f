"""Test `fewbits status` (states of trials, stale results) and `fewbits explain` (differences between two runs)."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from fewbits import cli
from fewbits.experiments.storage.lease import leased
from fewbits.experiments.storage.run_folder import RunFolder
from fewbits.sweeps.planning import store
from tests.messages import names
from tests.sweeps.conftest import Undisturbed
from tests.sweeps.sweep_inputs import folders, planned, tiny


def status(undisturbed: Undisturbed, capsys: pytest.CaptureFixture[str], *arguments: str, runs: Path) -> list[Any]:
    capsys.readouterr()
    assert cli.main(["status", str(undisturbed.file), *arguments, "--runs", str(runs), "--json"]) == 0
    rows: list[Any] = json.loads(capsys.readouterr().out)
    return rows


@pytest.fixture
def some(undisturbed: Undisturbed, tmp_path: Path) -> list[RunFolder]:
    """Return the run folders that the sweep FAMILY would have in an empty store; none of them exists."""
    return folders(planned(undisturbed.file, f"runtime.runs={tmp_path}"))


def test_states_follow_from_files(
    undisturbed: Undisturbed, some: list[RunFolder], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done, diverged, failed, stopped, again, odd, *planned_ones = some
    for folder, state in ((done, "done"), (diverged, "diverged"), (odd, "lost")):
        folder.path.mkdir(parents=True)
        (folder.path / "result.json").write_text(json.dumps({"id": folder.id, "status": state, "step": 5}))
    for folder in (failed, again):
        store.write_failure(folder, store.Failure("it broke", False, 2, ["a line"]))
    (stopped.checkpoints / "step-00000006").mkdir(parents=True)
    (again.path / store.PROGRESS).write_text(json.dumps({"step": 3, "steps": 8, "loss": 1.0}))
    with leased(again.path):
        rows = {row["folder"]: row for row in status(undisturbed, capsys, runs=tmp_path)}
        assert cli.main(["status", str(undisturbed.file), "--runs", str(tmp_path)]) == 0
        shown = capsys.readouterr().out
    states = [rows[folder.path.name]["state"] for folder in some]
    assert states[:6] == ["done", "diverged", "failed", "planned", "running", "failed"]
    assert sorted(states[6:]) == ["blocked", "planned"]
    assert rows[some[states.index("blocked")].path.name]["note"].endswith(
        f"{diverged.path.name} diverged before step 4"
    )
    assert "result.json is damaged or another trial's" in rows[odd.path.name]["note"]
    assert rows[failed.path.name]["note"] == "it broke"
    steps = [rows[folder.path.name]["step"] for folder in (done, stopped, again)]
    assert steps[0] == 5
    assert steps[2] == 3
    assert re.search(rf"{failed.path.name} +failed 0/8 +it broke\n", shown)
    assert re.search(rf"{stopped.path.name} +half done 6/8\n", shown)
    table = shown.partition("\n\n")[0].splitlines()
    assert len({line.index("nemotron-nano-") for line in table}) == 1
    assert "8 trials: 1 planned, 1 half done, 1 running, 1 done, 2 failed, 1 diverged, 1 blocked\n" in shown
    assert len(planned_ones) == 2


@pytest.mark.parametrize("command", ["status", "ui"])
def test_a_misspelt_store_is_told_and_not_made(
    command: str, undisturbed: Undisturbed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    arguments = [] if command == "ui" else [str(undisturbed.file)]
    for name in ("rnus", "file", "file/below"):
        assert cli.main([command, *arguments, "--runs", str(tmp_path / name)]) == 2
        assert names(capsys.readouterr().err, "--runs", tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_status_writes_nothing_and_uses_no_run_with_another_config(
    undisturbed: Undisturbed, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(undisturbed.store.rglob("*"))
    rows = status(undisturbed, capsys, runs=undisturbed.store)
    assert [(row["state"], row["step"], row["steps"], row["note"]) for row in rows] == [("done", 8, 8, "")] * 8
    assert {tuple(row["place"]) for row in rows} == {("arm", "seed"), ("arm", "optimizer.lr", "seed")}
    rows = status(undisturbed, capsys, "training.blow_up=2", runs=undisturbed.store)
    assert {row["state"] for row in rows} == {"planned"}
    assert not any((undisturbed.store / row["folder"]).exists() or row["note"] for row in rows)
    assert sorted(undisturbed.store.rglob("*")) == before


def test_two_trials_are_explained_field_by_field(undisturbed: Undisturbed, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(undisturbed.file, f"runtime.runs={undisturbed.store}")
    by_place = {tuple(member.cell.place.values()): plan.trials[member.id].folder.path.name for member in plan.members}

    def explain(*argv: str) -> list[str]:
        assert cli.main(["explain", *argv, "--runs", str(undisturbed.store)]) == 0
        return capsys.readouterr().out.splitlines()

    a, b, seed, plain, late = (
        by_place[place]
        for place in (
            ("noisy", "0.001", "0"),
            ("noisy", "0.002", "0"),
            ("noisy", "0.001", "1"),
            ("plain", "0"),
            ("late", "0"),
        )
    )
    assert explain(a, b) == ["optimizer.lr: 0.001 → 0.002"]
    assert explain(a, a.rpartition("-")[2])[1:] == ["the same trial"]
    assert explain(str(undisturbed.store / a), seed) == ["seed: 0 → 1"]
    lines = explain(plain, late)
    assert f"parent: None → {plain}@4" in lines
    assert any(line.startswith("recipe.") for line in lines)


def test_an_edit_of_the_code_is_named_by_its_file(
    undisturbed: Undisturbed, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    source = next(undisturbed.store.glob("*-bf16-*"))
    run = tmp_path / source.name
    run.mkdir()
    provenance = json.loads((source / "provenance.json").read_text())
    provenance["sources"] = {"models/networks/decoder.py": "0" * 32}
    provenance["identity"]["edited"] = "1" * 64
    (run / "provenance.json").write_text(json.dumps(provenance))
    (run / "config.yaml").write_text((source / "config.yaml").read_text())
    assert cli.main(["explain", run.name, "--runs", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2  # the second line explains what `stale` means
    assert lines[0] == "edited source models/networks/decoder.py: 000000000000 → (none)"


def test_a_run_that_is_not_there_is_told(undisturbed: Undisturbed, capsys: pytest.CaptureFixture[str]) -> None:
    zeros = "0" * 64
    for name in ("nothing", "nemotron", "*", "~recipe", "", "abc", zeros):
        message = f"no run '{name}' has started" if name not in ("", "abc") else "4 or more digits of its hash"
        assert cli.main(["explain", name, "--runs", str(undisturbed.store)]) == 2
        shown = capsys.readouterr()
        assert (f"has a hash that begins with '{zeros}'" if name == zeros else message) in shown.err
        assert (shown.err.count("\n"), shown.out) == (1, "")


def test_a_run_is_found_by_the_beginning_of_its_hash_if_that_is_of_one(
    undisturbed: Undisturbed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = next(undisturbed.store.glob("*-bf16-*"))
    digits = json.loads((source / "provenance.json").read_text())["id"]
    shutil.copytree(source, tmp_path / source.name)
    for length in (4, 7, 8, 12, 64):
        assert cli.main(["explain", digits[:length], "--runs", str(tmp_path)]) == 0
        named, same = capsys.readouterr().out.splitlines()
        assert names(named, digits[:length], source.name)
        assert names(same, "the same trial")
    other = tmp_path / f"other-{digits[:4]}{'0' * 4}"
    shutil.copytree(source, other)
    assert cli.main(["explain", digits[:4], "--runs", str(tmp_path)]) == 2
    assert f"2 runs in {tmp_path} have a hash that begins with '{digits[:4]}': " in capsys.readouterr().err
    assert cli.main(["explain", digits[:8], str(other), "--runs", str(tmp_path)]) == 0


def test_a_run_is_compared_with_what_its_overrides_give_now(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("defaults: [nvfp4, _self_]\nkeep: {last: 1}\n")
    words = tiny(cache, "training.steps=1", "recipe=./mine.yaml", f"runtime.runs={tmp_path / 'runs'}")
    monkeypatch.setattr("sys.argv", ["fewbits", "train", *words])  # which the run records
    assert cli.main(["train", *words]) == 0
    (run,) = (tmp_path / "runs").glob("*-*")

    def explain() -> list[str]:
        capsys.readouterr()
        assert cli.main(["explain", str(run)]) == 0
        return capsys.readouterr().out.splitlines()

    assert explain() == ["the current code computes the same trial"]
    recipe.write_text("defaults: [nvfp4, _self_]\nkeep: {last: 2}\n")
    assert explain() == ["recipe.keep.last: 1 → 2"]
    recipe.unlink()
    assert names(explain()[0], "mine.yaml")


def test_a_result_of_other_code_is_shown_and_noted(
    undisturbed: Undisturbed, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fewbits.sweeps.running.progress.is_current", lambda provenance: False)
    for row in status(undisturbed, capsys, runs=undisturbed.store):
        assert row["state"] == "done"
        assert row["step"] == 8
        digits = row["folder"].rpartition("-")[2]
        assert f"`fewbits explain {digits} --runs {undisturbed.store}`" in row["note"]
