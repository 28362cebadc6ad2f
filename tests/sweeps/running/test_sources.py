"""Test what sweeps do with results and workers of other sources: another version, edited sources, fewbits 0.1.0."""

import hashlib
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from fewbits import cli
from fewbits.experiments import identity as numerics
from fewbits.experiments.identity import is_current
from fewbits.experiments.storage.run_folder import opened
from fewbits.sweeps.running.driver import job
from fewbits.sweeps.running.worker import work
from tests.messages import names
from tests.sweeps.sweep_inputs import folders, planned, tiny_file

ONE = {"seeds": [0], "arms": {"bf16": {"overrides": ["recipe=bf16", "training.steps=2"]}}}
RECORDED = numerics.recorded()[0]


@pytest.fixture(scope="module")
def finished(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a sweep file, and with its store, in which its only trial is finished."""
    folder = tmp_path_factory.mktemp("finished")
    plan = planned(tiny_file(folder, cache, ONE), f"runtime.runs={folder / 'runs'}")
    (trial,) = plan.trials.values()
    assert work(job(trial)).kind == "over"
    return folder


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "copy")
    return tmp_path / "copy"


def printed(capsys: pytest.CaptureFixture[str], *command: str | Path) -> str:
    capsys.readouterr()
    assert cli.main([str(word) for word in command]) == 0
    return capsys.readouterr().out


def test_a_worker_with_other_sources_than_the_driver_refuses_the_trial(cache: Path, tmp_path: Path) -> None:
    """Check the case in which both count as unedited: machines with different releases of the same numerics version."""
    (trial,) = planned(tiny_file(tmp_path, cache, ONE), f"runtime.runs={tmp_path / 'runs'}").trials.values()
    outcome = work(replace(job(trial), sources="0" * 64))
    assert (outcome.kind, outcome.wrong_input) == ("failed", True)
    assert names(outcome.reason, "000000000000", "install the same version of fewbits on all machines")
    assert not trial.folder.over


def test_an_upgrade_in_the_middle_of_a_study_shows_the_old_results_until_the_sweep_plans_again(
    copied: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, runs = copied / "tiny.yaml", copied / "runs"
    sweep = ("sweep", file, "--runs", runs, "--backend", "local")
    printed(capsys, *sweep)
    (old,) = (path.parent for path in runs.glob("*/result.json"))
    monkeypatch.setattr(numerics, "recorded", lambda: (RECORDED + 1, numerics.running()))
    (row,) = json.loads(printed(capsys, "status", file, "--runs", runs, "--json"))
    assert (row["folder"], row["state"]) == (old.name, "done")
    assert "another version of the code" in row["note"]
    explained = printed(capsys, "explain", old.name, "--runs", runs).splitlines()
    assert explained[0] == f"numerics version: {RECORDED} → {RECORDED + 1}"
    (new,) = folders(planned(file, f"runtime.runs={runs}"))
    assert new.path.name != old.name
    assert not new.over
    planned_again = printed(capsys, *sweep, "--dry-run", "--trials")
    assert names(planned_again, "changed: numerics", "1 result of the old plan not used")
    assert not [row for row in json.loads(printed(capsys, "prune", "--runs", runs, "--json")) if row["kind"] == "stale"]


def as_of_0_1_0(run: Path) -> Path:
    """Rewrite a run folder as fewbits 0.1.0 would have written it; return its new path."""
    provenance = json.loads((run / "provenance.json").read_text())
    identity = provenance["identity"] | {"config": {"seed": 0}, "numerics": ["a" * 64]}
    key = hashlib.sha256(json.dumps(identity, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    segments = [{**part, "numerics": "a" * 64} for part in provenance["segments"]]
    sources = {"kernels/formats.py": "b" * 64}
    old = {**provenance, "id": key, "identity": identity, "segments": segments, "sources": sources}
    (run / "provenance.json").write_text(json.dumps(old))
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps({**result, "id": key}))
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["evaluation"]["cloze"] = 0
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    return run.rename(run.with_name(f"{run.name.rpartition('-')[0]}-{key[:8]}"))


def test_runs_of_fewbits_0_1_0_are_readable_and_neither_matched_nor_pruned(
    copied: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, runs = copied / "tiny.yaml", copied / "runs"
    (now,) = (path.parent for path in runs.glob("*/result.json"))
    old = as_of_0_1_0(now)
    assert not is_current(opened(old).provenance() or {})
    assert json.loads(printed(capsys, "prune", "stale", "--runs", runs, "--json")) == []
    assert re.match(rf"numerics version: \['a+'\] → {RECORDED}\n", printed(capsys, "explain", old.name, "--runs", runs))
    (trial,) = planned(file, f"runtime.runs={runs}").trials.values()
    assert trial.folder.path == now
    assert not trial.folder.over
    assert work(job(trial)).kind == "over"
    assert re.search(rf"numerics version: .* → {RECORDED}", printed(capsys, "explain", old, now))
    assert "validation" in printed(capsys, "evaluate", old, "--cache", cache)
    exported = copied / "exported"
    printed(capsys, "export", old, "--format", "huggingface", "--out", exported, "--cache", cache)
    assert list(exported.glob("*.safetensors"))
