"""A sweep of a paper's own size can be read without its data: each arm with its hyper-parameters and FLOPs."""

import re
from pathlib import Path

import pytest

from fewbits import cli
from fewbits.sweeps.cost import work_of
from fewbits.sweeps.outline import MARK, describe, missing_data, outline
from fewbits.sweeps.sweep import load_sweeps

PAPER = ("study=mor", "scale=paper")


def test_mors_own_runs_are_listed_with_what_the_paper_states_and_what_is_assumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["sweep", *PAPER, "--dry-run"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    columns = re.split(r" {2,}", head)
    found = {}
    for row in rows[: rows.index("")]:
        cells = dict(zip(columns, re.split(r" {2,}", row), strict=True))
        found[cells["sweep"], cells["place"]] = cells
    block = found["partitions", "arm=block configuration=2 seed=0"]
    assert block["model"] == "nemotron3-8b, 8.54 B"
    assert (block["tokens"], block["batch"], block["schedule"]) == ("1.000 T", "1,536", "cosine"), "the paper's"
    assert (block["length"], block["learning rate"], block["warm-up"]) == (
        f"4,096{MARK}",
        f"0.0003{MARK}",
        f"2,000{MARK}",
    )
    assert block["operands"] == "e4m3:128x128:gam @ error<0.045 | bf16"
    assert found["partitions", "arm=block configuration=1 seed=0"]["batch"] == "1,024"
    assert all(float(cells["FLOPs"]) == pytest.approx(5.14e22, rel=0.01) for cells in found.values()), "facts: 5.1e22"
    tables = {"bf16", "block", "tensor", "channel", "block-64", "threshold-5", "amax", "e8m0", "two-way", "three-way"}
    assert tables <= {place.split()[0].removeprefix("arm=") for _, place in found}
    assert rows[-3].startswith(f"{MARK} assumed")
    assert rows[-2].startswith("16 trials, ")
    assert rows[-1].endswith(": data/nemotron-4-sample, data/nemotron-h")
    assert not list(tmp_path.iterdir()), "nothing is written"


def test_what_it_takes_is_of_each_trial_once() -> None:
    sweeps, extra = load_sweeps(PAPER)
    trials = {outlined.trial: work_of(outlined.trial) for outlined in outline(sweeps, extra)}
    assert f"{len(trials)} trials, {sum(trials.values()):.2e} FLOPs" in describe(sweeps, extra)
    assert len(outline(sweeps, extra)) > len(trials), "BF16 is in every sweep"


def test_data_that_are_prepared_into_the_cache_are_named_where_they_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    cache = tmp_path / "cache"
    assert cli.main(["sweep", "study=gaussws", "scale=paper", f"runtime.cache={cache}", "--dry-run"]) == 0
    *rows, last = capsys.readouterr().out.splitlines()
    assert last == f"data to be had before it can run: {cache / 'openwebtext'}, {cache / 'c4'}"
    gaussws = next(row for row in rows if "arm=gaussws-8-6" in row and row.startswith("llama2"))
    assert "llama2-134m" in gaussws
    assert gaussws.endswith("high; gaussws noise on weights, 8 to 6 bits")
    assert any(row.endswith("gaussws noise on weights of qkv, 6 to 0 bits") for row in rows)


def test_running_without_the_data_is_still_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["sweep", *PAPER]) == 2
    assert "no folder data/nemotron-4-sample" in capsys.readouterr().err


def test_data_that_every_machine_has_are_not_missing() -> None:
    assert missing_data(*load_sweeps(("study=mor", "scale=smoke"))) == []


def test_a_mistake_is_told_although_the_data_are_missing_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sweep", *PAPER, "training.steps=-1", "--dry-run"]) == 2
    assert "training.steps" in capsys.readouterr().err
