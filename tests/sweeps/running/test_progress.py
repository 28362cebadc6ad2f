"""Test the progress display: it fits the terminal's width, shows the time left, and prints each event once."""

import io
import json
import re
from pathlib import Path

import pytest

from fewbits import cli
from fewbits.experiments.storage.lease import leased
from fewbits.sweeps.planning import store
from fewbits.sweeps.planning.cost import tokens_of
from fewbits.sweeps.planning.plan import Plan
from fewbits.sweeps.planning.store import Failure
from fewbits.sweeps.running.driver import Driver, Stage
from fewbits.sweeps.running.progress import Display
from tests.messages import names
from tests.sweeps.running.test_turns import Pretended
from tests.sweeps.sweep_inputs import planned, tiny_file


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    @property
    def screen(self) -> list[str]:
        """The non-empty lines that a terminal shows at the end, after control sequences have moved and erased text."""
        lines, row, column = [""], 0, 0
        for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", self.getvalue()):
            if part == "\r":
                column = 0
            elif part == "\n":
                row, column = row + 1, 0
                lines += [""] * (row + 1 - len(lines))
            elif part.startswith("\x1b"):
                row -= int(part[2:-1]) if part.endswith("A") else 0
                lines[row] = "" if part.endswith("2K") else lines[row]
            else:
                lines[row] = lines[row][:column].ljust(column) + part + lines[row][column + len(part) :]
                column += len(part)
        return [line.rstrip() for line in lines if line.strip()]


@pytest.fixture
def sweep(cache: Path, tmp_path: Path) -> Plan:
    file = tiny_file(tmp_path, cache, {"seeds": [0, 1, 2], "axes": {"training.steps": [8, 16]}})
    (tmp_path / "runs").mkdir()
    return planned(file, f"runtime.runs={tmp_path / 'runs'}")


def test_the_first_line_has_the_time_left_and_none_is_wider_than_the_terminal(
    sweep: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "48")
    first = next(iter(sweep.trials.values()))
    training = first.trial.training
    driver, terminal = Driver(sweep, Pretended()), Terminal()
    display = Display(terminal)
    (other,) = [trial for trial in sweep.trials.values() if trial.trial.seed == 2 and trial.trial.training.steps == 16]
    (other.folder.checkpoints / "step-00000006").mkdir(parents=True)  # it will resume
    with leased(first.folder.path):
        speed = float(training.batch * training.length)  # one step per second
        progress = {"step": 4, "steps": training.steps, "loss": 1.5, "tokens_per_second": speed}
        (first.folder.path / store.PROGRESS).write_text(json.dumps(progress))
        display(driver)
    summary, *rest, row = terminal.screen
    assert "1:02 left" in " ".join([summary, *rest])  # 3 × 8 + 3 × 16 - 4 - 6 = 62 steps of one second
    assert "4/8  loss 1.5000" in row
    assert row.startswith(first.folder.path.name[:3])
    assert "-s0-" in row  # the end of the name is shown although its middle is left out
    assert all(len(line) <= 48 for line in terminal.screen)


def test_a_wide_terminal_also_shows_a_bar_and_the_speed_of_each_running_trial(
    sweep: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    driver, terminal = Driver(sweep, Pretended()), Terminal()
    first, second, *_ = sweep.trials.values()
    with leased(first.folder.path), leased(second.folder.path):
        speed = tokens_of(first.trial) / 8.0  # tokens per second with which the whole trial takes eight seconds
        progress = {"step": 4, "steps": first.trial.training.steps, "loss": 1.5, "tokens_per_second": speed}
        (first.folder.path / store.PROGRESS).write_text(json.dumps(progress))
        Display(terminal)(driver)
    _, row, other = terminal.screen
    assert row.startswith(first.folder.path.name)
    assert "━" in row
    assert f"4/8  loss 1.5000  {speed:,.0f} tokens/s  0:04 left" in row
    assert other.startswith(second.folder.path.name)
    assert f"0/{second.trial.training.steps}" in other


def test_trials_that_do_not_run_are_counted_in_the_words_of_status(
    sweep: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, *_ = sweep.trials.values()
    for trial in (first, second):
        (trial.folder.checkpoints / "step-00000004").mkdir(parents=True)
    driver, stream = Driver(sweep, Pretended()), io.StringIO()
    with leased(first.folder.path):
        Display(stream)(driver)
    assert names(stream.getvalue(), "1 running", "1 half done", "4 planned")
    assert cli.main(["sweep", str(tmp_path / "tiny.yaml"), "--runs", str(tmp_path / "runs"), "--dry-run"]) == 0
    assert names(capsys.readouterr().out, "6 trials: 4 planned, 2 half done")


def test_a_second_attempt_is_said_once_and_what_is_live_is_wiped_out_at_the_end(sweep: Plan) -> None:
    driver, terminal = Driver(sweep, Pretended()), Terminal()
    display = Display(terminal)
    task = next(iter(driver.tasks.values()))
    task.failure = Failure("its process was ended", False, 0, [])
    for task.stage in (Stage.WAITING, Stage.STARTED, Stage.WAITING):
        display(driver)
    display.close()
    assert terminal.screen == [f"{task.planned.folder.path.name}: its process was ended; trying again"]
    for task in driver.tasks.values():
        task.stage = Stage.OVER
    display(driver)
    assert len(terminal.screen) == 1  # nothing more is drawn when all trials have ended
