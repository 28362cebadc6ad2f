"""Test the dry run of a sweep whose data are missing: it prints settings, FLOPs, time and disk space of all arms."""

import re
from pathlib import Path

import pytest

from fewbits import cli
from fewbits.sweeps.planning.outline import MARK
from fewbits.sweeps.planning.studies import load_sweeps

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
    block = found["partitions", "arm=block configuration=2"]
    assert block["model"] == "nemotron3-8b, 8.54 B"
    stated = [block[name] for name in ("tokens", "batch", "schedule")]
    assert stated == ["1.000 T", "1,536", "cosine"], "the values that the paper states"
    assumed = [block[name] for name in ("length", "learning rate", "warm-up")]
    assert assumed == [f"{value}{MARK}" for value in ("4,096", "0.0003", "2,000")]
    assert block["operands"] == "e4m3:128x128:gam @ error<0.045 | bf16"
    assert found["partitions", "arm=block configuration=1"]["batch"] == "1,024"
    work = {float(cells["FLOPs"]) for cells in found.values()}
    assert all(each == pytest.approx(5.14e22, rel=0.01) for each in work), "about 6 · 8.54 B · 1 T"
    tables = {"bf16", "block", "tensor", "channel", "block-64", "threshold-5", "amax", "e8m0", "two-way", "three-way"}
    assert tables <= {place.split()[0].removeprefix("arm=") for _, place in found}
    assert any(row.startswith(f"{MARK} assumed") for row in rows)
    assert "24 trials: 24 planned" in rows
    assert any(row.endswith(": data/nemotron-4-sample, data/nemotron-h") for row in rows)
    assert not list(tmp_path.iterdir()), "a dry run writes nothing"


def test_data_that_are_prepared_into_the_cache_are_named_where_they_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    cache = tmp_path / "cache"
    assert cli.main(["sweep", "study=gaussws", "scale=paper", f"runtime.cache={cache}", "--dry-run"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert any(row.endswith(f": {cache / 'openwebtext'}, {cache / 'c4'}") for row in rows)
    web, c4 = (row.partition("    #")[0] for row in rows if row.startswith("fewbits data"))
    assert web == f"fewbits data openwebtext --out {cache / 'openwebtext'}"
    assert c4 == f"fewbits data c4 --out {cache / 'c4'}", "the command prepares the whole data set"
    gaussws = next(row for row in rows if "arm=gaussws-8-6" in row and row.startswith("llama2"))
    assert "llama2-134m" in gaussws
    assert gaussws.endswith("high; gaussws noise on weights, 8 to 6 bits")
    assert any(row.endswith("gaussws noise on weights of qkv, 6 to 0 bits") for row in rows)


def arms(text: str) -> list[dict[str, str]]:
    """Return the rows of the table of arms in a dry run's output, each as column name → text."""
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("sweep") and "time each" in line)
    head, *rows = lines[start : lines.index("", start)]
    columns = re.split(r" {2,}", head)
    return [dict(zip(columns, re.split(r" {2,}", row), strict=True)) for row in rows]


@pytest.mark.parametrize(
    ("study", "prepare"),
    [
        # These two studies have the most arms, so their dry runs take longest.
        pytest.param("mor", ["openwebtext", "c4 --documents 10000000"], marks=pytest.mark.deep),
        pytest.param("nvfp4", ["c4-nemotron --documents 10000000"], marks=pytest.mark.deep),
        ("gaussws", ["openwebtext", "c4 --documents 10000000"]),
    ],
)
def test_a_study_on_a_gpu_says_what_each_arm_takes_before_its_data_are_there(
    study: str, prepare: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEWBITS_CACHE", str(tmp_path / "cache"))
    assert cli.main(["sweep", f"study={study}", "scale=gpu", "--dry-run"]) == 0
    text = capsys.readouterr().out
    rows = arms(text)
    assert {row["sweep"] for row in rows} <= {sweep.name for sweep in load_sweeps((f"study={study}", "scale=gpu"))[0]}
    for row in rows:
        assert 0 < float(row["epochs"]) < 1, "no trial reads its text more than once"
        assert row["trials"].endswith("3 seeds")
        assert re.fullmatch(r"\d+:\d\d(:\d\d)?", row["time each"]), "each trial takes less than a day"
        # Trials that another row counts add no time and no disk space.
        assert ("in " in row["total time"]) == (row["disk"] == "-")
    assert any(row["with trunk's"] != "-" for row in rows) == (study != "mor")
    days = re.search(r"^about (\d) days \d+ h, 1 at a time, .*assumed", text, re.MULTILINE)
    assert days
    assert int(days[1]) < 7
    commands = re.findall(r"^fewbits data (.*?) +# about", text, re.MULTILINE)
    assert commands == prepare


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((), "no folder data/nemotron-4-sample"), (("training.steps=-1", "--dry-run"), "training.steps")],
)
def test_without_the_data_running_is_refused_and_mistakes_are_named(
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["sweep", *PAPER, *arguments]) == 2
    assert message in capsys.readouterr().err
