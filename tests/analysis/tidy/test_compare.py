"""Test comparisons of runs and logs: differences, their intervals, files of other programs, and wrong input."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from fewbits import cli
from fewbits.analysis.tidy.compare import LEVEL, SEEN, Run, compare, of_log, seeds_needed


def made(arm: str, finals: Sequence[float], seeds: Sequence[int | None]) -> list[Run]:
    """Return runs of an arm with these losses at the end, and curves that fall by 1 / √step before."""
    return [
        Run(f"{arm}-{n}", arm, seed, [(step, final + step**-0.5 - 0.1) for step in range(1, 101)], [(100.0, final)])
        for n, (final, seed) in enumerate(zip(finals, seeds, strict=True))
    ]


@pytest.mark.parametrize("paired", [True, False])
def test_intervals_contain_the_true_difference_as_often_as_they_say(paired: bool) -> None:
    """Check on 1,000 simulated pairs of arms: 95 % intervals contain the truth in 93.5 to 96.5 % of them."""
    rng, truth, inside, found = np.random.default_rng(5), 0.01, 0, 0
    for _ in range(1000):
        common = rng.normal(0, 0.02, 5)
        one, two = 3 + common + rng.normal(0, 0.004, 5), 3 + truth + common + rng.normal(0, 0.004, 5)
        if not paired:
            two = 3 + truth + rng.normal(0, 0.03, 7)
        seeds: list[int | None] = [*range(5)]
        other: list[int | None] = [*range(5)] if paired else [None] * 7
        row = compare([*made("a", one.tolist(), seeds), *made("b", two.tolist(), other)]).rows[1]
        assert row.interval is not None
        assert row.paired == paired
        inside += row.interval.low <= truth <= row.interval.high
        found += row.p is not None and row.p < 0.05
    assert 0.935 <= inside / 1000 <= 0.965
    assert found > (800 if paired else 50)


@pytest.mark.parametrize("sd", [0.001, 0.004, 0.01, 0.03])
def test_the_stated_number_of_seeds_finds_the_difference_in_four_of_five_experiments(sd: float) -> None:
    needed = seeds_needed(sd, paired=True)
    assert needed is not None
    rng = np.random.default_rng(2)

    def power(n: int) -> float:
        x = rng.normal(SEEN, sd, (20_000, n))
        t = x.mean(1) / (x.std(1, ddof=1) / np.sqrt(n))
        return float((np.abs(t) > stats.t.ppf((1 + LEVEL) / 2, n - 1)).mean())

    assert power(needed) >= 0.79
    assert needed == 2 or power(needed - 1) < 0.81


def test_seeds_in_common_are_paired_and_the_loss_gap_becomes_tokens() -> None:
    a = made("a", [3.0, 3.1, 3.2], [1, 2, 3])
    b = made("b", [3.01, 3.11, 3.21], [1, 2, 3])
    row = compare([*a, *reversed(b)]).rows[1]
    assert row.mean == pytest.approx(0.01)
    assert (row.seeds, row.paired) == (3, True)
    assert row.interval is not None
    assert row.interval.high - row.interval.low < 1e-12
    unpaired = compare([*a, *made("b", [3.01, 3.11, 3.21], [4, 5, 6])]).rows[1]
    assert unpaired.interval is not None
    assert not unpaired.paired
    assert unpaired.interval.low < 0 < unpaired.interval.high
    single = compare([a[0], b[0]]).rows[1]
    assert single.mean == pytest.approx(0.01)
    assert (single.interval, single.needed) == (None, None)


def test_independent_arms_are_compared_as_scipy_does() -> None:
    a, b = [3.0, 3.02, 3.05], [3.1, 3.11, 3.3, 3.2]
    row = compare([*made("a", a, [None] * 3), *made("b", b, [None] * 4)]).rows[1]
    theirs = stats.ttest_ind(b, a, equal_var=False)
    assert row.p == pytest.approx(theirs.pvalue)
    assert row.interval is not None
    low, high = theirs.confidence_interval(LEVEL)
    assert row.interval.low == pytest.approx(low)
    assert row.interval.high == pytest.approx(high)


# ------------------------------------------------------------------------------------------------ files


def _csv(folder: Path, name: str, offset: float, column: str = "train_loss") -> Path:
    path = folder / name
    pd.DataFrame({"step": range(1, 61), column: [3 + offset + 1 / s for s in range(1, 61)]}).to_csv(path, index=False)
    return path


def _wandb(folder: Path) -> list[Path]:
    table: dict[str, Sequence[float]] = {"Step": range(1, 61)}
    for run, offset in (("base-seed1", 0.0), ("base-seed2", 0.1), ("mine-seed1", 0.02), ("mine-seed2", 0.12)):
        losses = [3 + offset + 1 / step for step in range(1, 61)]
        table |= {f"{run} - train/loss{end}": losses for end in ("", "__MIN", "__MAX")}
    pd.DataFrame(table).to_csv(folder / "export.csv", index=False)
    return [folder / "export.csv"]


def _tensorboard(folder: Path) -> list[Path]:
    from torch.utils.tensorboard import SummaryWriter

    for run, offset in (("base-s1", 0.0), ("base-s2", 0.1), ("mine-s1", 0.02), ("mine-s2", 0.12)):
        with SummaryWriter(str(folder / run)) as writer:
            for step in range(1, 61):
                writer.add_scalar("train/loss", 3 + offset + 1 / step, step)
    return sorted(path for path in folder.iterdir() if path.is_dir())


def _csvs(folder: Path) -> list[Path]:
    runs = (("base-seed1", 0.0), ("base-seed2", 0.1), ("mine-seed1", 0.02), ("mine-seed2", 0.12))
    return [_csv(folder, f"{run}.csv", offset) for run, offset in runs]


@pytest.mark.parametrize("write", [_csvs, _wandb, _tensorboard])
def test_logs_of_other_programs_are_read(write: Callable[[Path], list[Path]], tmp_path: Path) -> None:
    runs = [run for path in write(tmp_path) for run in of_log(path)]
    assert {(run.arm, run.seed) for run in runs} == {("base", 1), ("base", 2), ("mine", 1), ("mine", 2)}
    row = compare(runs).rows[1]
    assert (row.arm, row.paired) == ("mine", True)
    assert row.mean == pytest.approx(0.02, abs=1e-5)


def test_a_log_with_losses_that_are_no_numbers_has_diverged(tmp_path: Path) -> None:
    text = "step,loss,accuracy\n2,2.5,\n1,3.0,0.1\n"
    for name, more in (("fine", "3,,0.2\n"), ("nan", "3,nan,\n"), ("inf", "3,inf,\n")):
        (tmp_path / f"{name}.csv").write_text(text + more)
        (run,) = of_log(tmp_path / f"{name}.csv")
        assert run.training == [(1.0, 3.0), (2.0, 2.5)]
        assert run.diverged == (name != "fine")


def test_the_command_prints_a_table_and_writes_a_page_a_picture_and_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = _csvs(tmp_path)
    out = tmp_path / "out"
    named = [f"a={path}" if "base" in path.name else f"b={path}" for path in paths]
    assert cli.main(["compare", *named, "--out", str(out)]) == 0
    assert re.search(r"b +2 pairs +3\.0870 +\+0\.0200", capsys.readouterr().out)
    assert {path.name for path in out.iterdir()} == {"comparison.html", "comparison.png", "comparison.csv"}
    assert "+0.0200" in (out / "comparison.html").read_text()
    assert cli.main(["compare", *named, "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[1]["difference"] == "+0.0200"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{0}"], "1 run(s) of one arm"),
        (["{0}", "{2}", "--loss", "accuracy"], "has no column or tag 'accuracy'; it has step, train_loss"),
        (["a=/nowhere/x.csv", "{0}"], "there is no file or folder /nowhere/x.csv"),
        (["{0}", "deadbeef"], "no run in"),
        (["{binary}", "{0}"], "is no CSV file"),
        (["{folder}", "{0}"], "neither a run nor a folder of TensorBoard's event files"),
        (["{other}", "{0}"], "which column or tag is the loss? Pass --loss with one of step, accuracy"),
    ],
)
def test_wrong_input_is_named_in_one_line(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = _csvs(tmp_path)
    (tmp_path / "binary").write_bytes(bytes(range(256)) * 9)
    (tmp_path / "folder").mkdir()
    other = _csv(tmp_path, "other.csv", 0, "accuracy")
    places = {"binary": tmp_path / "binary", "folder": tmp_path / "folder", "other": other}
    filled = [word.format(*paths, **places) for word in words]
    assert cli.main(["compare", *filled, "--out", str(tmp_path / "out"), "--runs", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
