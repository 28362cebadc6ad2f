"""Test the progress display: it fits the terminal's width and shows the time left."""

import io
import json
import re
from pathlib import Path

import pytest

from fewbits.experiments.storage.lease import leased
from fewbits.sweeps.planning import store
from fewbits.sweeps.planning.plan import Plan
from fewbits.sweeps.running.driver import Driver
from fewbits.sweeps.running.progress import Display
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
