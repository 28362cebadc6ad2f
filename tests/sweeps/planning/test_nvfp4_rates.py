"""Test that branches in NVFP4's study continue the learning rate schedule of an uninterrupted training."""

import pytest

from fewbits.experiments.config import load_trial
from fewbits.experiments.optimization.schedules import factor
from fewbits.experiments.trial import Trial
from fewbits.sweeps.planning.expand import Cell, expand
from fewbits.sweeps.planning.studies import load_sweeps

Cells = dict[str, Cell]


def cells(sweep: str, scale: str) -> Cells:
    sweeps, extra = load_sweeps(("study=nvfp4", f"scale={scale}", f"sweep={sweep}"))
    return {cell.arm: cell for one in sweeps for cell in expand(one, extra) if cell.seed == one.seeds[0]}


def rate(trial: Trial, step: int) -> float:
    return factor(trial.schedule, step, trial.training.steps)


def line(cell: Cell) -> tuple[Trial, int, Trial]:
    """Return the trial of the cell's parent, the step at which the branch starts, and the trial of the cell itself."""
    assert cell.parent is not None
    parent, branch = load_trial(cell.parent.overrides)[0], load_trial(cell.overrides)[0]
    return parent, parent.training.steps if cell.at is None else int(cell.at), branch


def some(steps: int) -> list[int]:
    """Return about fifty of the steps 0 to `steps` - 1, including both ends."""
    return sorted({0, steps - 1, *range(0, steps, max(1, steps // 50))})


@pytest.mark.parametrize("scale", ["cpu", "paper"])
def test_longer_trainings_from_one_parent_have_the_rates_of_whole_ones(scale: str) -> None:
    found = cells("scratch", scale)
    whole = load_trial(found["nvfp4-whole"].overrides)[0]
    for times in (1.0, 1.25, 1.36, 1.5):
        parent, at, branch = line(found[f"mxfp4-{times:.2f}"])
        steps = at + branch.training.steps
        assert steps == pytest.approx(times * whole.training.steps, abs=1)
        ours = [rate(parent, step) for step in some(at)] + [rate(branch, step) for step in some(branch.training.steps)]
        uncut = [*some(at), *(at + step for step in some(branch.training.steps))]
        assert ours == pytest.approx([factor(whole.schedule, step, steps) for step in uncut]), times


def test_branches_of_the_12b_go_on_at_its_rates() -> None:
    found = cells("large", "paper")
    branches = {arm: line(cell) for arm, cell in found.items() if cell.parent}
    assert len(branches) == 13
    for arm, (parent, at, branch) in branches.items():
        for step in some(branch.training.steps):
            assert rate(branch, step) == pytest.approx(rate(parent, at + step), abs=1e-5), (arm, step)
