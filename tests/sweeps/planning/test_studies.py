"""Test the studies: their table, and their sweeps at all scales, for which the training data are not needed.

Trials repeat their data only as often as allowed, the papers' models fit on their GPUs, arms that switch recipes train
after the switch, arms without a part of NVFP4 lack this part alone, and branches continue the learning rate schedule.
"""

import math
from functools import cache

import pytest

from fewbits.experiments.config import load_trial
from fewbits.experiments.data.python_sources import PYTHON, TORCH
from fewbits.experiments.data.web_text import COLLECTIONS
from fewbits.experiments.distributed.memory import fits
from fewbits.experiments.optimization.schedules import factor
from fewbits.experiments.trial import Trial
from fewbits.models.recipe import Recipe
from fewbits.sweeps.planning.plan import Plan, check_repeats, plan
from fewbits.sweeps.planning.studies import STUDIES, load_sweeps
from fewbits.sweeps.planning.sweep import Cell, expand

# ------------------------------------------------------------------------------------------------ all scales

SCALES = ("cpu", "cpu-full", "questions", "gpu", "paper")
SIZES = {"python": PYTHON.size, "torch": TORCH.size} | {name: one.tokens for name, one in COLLECTIONS.items()}


def marks(scale: str) -> tuple[pytest.MarkDecorator, ...]:
    """Return the mark `deep` for scales whose sweeps are much like those of the scale cpu."""
    return (pytest.mark.deep,) if scale in ("cpu-full", "questions") else ()


@cache
def planned(study: str, scale: str) -> Plan:
    """Return the plan of a study's sweeps for one seed; cached, since it takes seconds to compose the configs."""
    return plan(*load_sweeps((f"study={study}", f"scale={scale}", "seeds=[0]")), with_data=False)


@pytest.mark.parametrize(
    ("scale", "study"),
    [pytest.param(s, name, marks=marks(s)) for s in SCALES for name in STUDIES if s in STUDIES[name].scales],
)
def test_every_study_reads_its_data_as_often_as_its_files_allow(study: str, scale: str) -> None:
    """No trial reads its data more than `data.repeat` times.

    Token folders (`data=bin`) are not checked, since the papers' folders are not published and their size is unknown.
    """
    trials = planned(study, scale).trials
    for one in trials.values():
        size = SIZES.get(one.trial.data.kind)
        if size is None:
            assert (scale, one.trial.data.kind) == ("paper", "bin")
        else:
            check_repeats(one.trial, one.earlier_tokens, one.trial.data.size or size)


@pytest.mark.parametrize(
    "scale",
    ["smoke", *(pytest.param(s, marks=marks(s)) for s in SCALES if s in STUDIES["nvfp4"].scales)],
)
def test_what_switches_in_nvfp4_trains_after_its_switch(scale: str) -> None:
    found = planned("nvfp4", scale)
    trials = {member.cell.arm: found.trials[member.id].trial for member in found.members}
    switching = {arm: trial for arm, trial in trials.items() if trial.recipe.switches}
    after = switching.pop("switch-after", None)
    for arm, trial in switching.items():
        steps = trial.training.steps
        assert 0 < math.ceil(trial.recipe.switch.at * steps) < steps, arm
    if after is not None:
        # Only the evaluation at the end is after the switch.
        assert math.ceil(after.recipe.switch.at * after.training.steps) == after.training.steps


@pytest.mark.parametrize("study", ["mor", "nvfp4"])
def test_the_papers_models_fit_on_their_gpus(study: str) -> None:
    """Check that each model of scale paper fits into 80 GB for each rank.

    Only the first arm of each model is checked, since its other arms need nearly the same memory.
    """
    models = {one.trial.model.name: one for one in reversed(planned(study, "paper").trials.values())}
    assert all(fits(one.trial, one.resources.ranks, 80e9) for one in models.values())


# ------------------------------------------------------------------------------------------------ NVFP4


def first_cells(sweep: str, scale: str) -> dict[str, Cell]:
    """Return the cells of a sweep of NVFP4's study with its first seed, by arm."""
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
    found = first_cells("scratch", scale)
    whole = load_trial(found["nvfp4-whole"].overrides)[0]
    for times in (1.0, 1.25, 1.36, 1.5):
        parent, at, branch = line(found[f"mxfp4-{times:.2f}"])
        steps = at + branch.training.steps
        assert steps == pytest.approx(times * whole.training.steps, abs=1)
        ours = [rate(parent, step) for step in some(at)] + [rate(branch, step) for step in some(branch.training.steps)]
        uncut = [*some(at), *(at + step for step in some(branch.training.steps))]
        assert ours == pytest.approx([factor(whole.schedule, step, steps) for step in uncut]), times


def differing(one: Recipe, other: Recipe) -> dict[str, tuple[str, str]]:
    """Return operand slot → (quantizer of `one`, quantizer of `other`), for the slots in which the recipes differ."""
    return {
        slot: (str(ours.spec), str(theirs.spec))
        for (slot, ours), (_, theirs) in zip(one.operands.items(), other.operands.items(), strict=True)
        if ours != theirs
    }


@pytest.mark.parametrize("prefix", ["", "long-"])
def test_each_arm_without_a_part_lacks_that_part_alone(prefix: str) -> None:
    cells = first_cells("switch" if prefix else "recipe", "cpu")
    found = {arm: load_trial(cell.overrides)[0] for arm, cell in cells.items()}
    whole = found["nvfp4-long" if prefix else "nvfp4"]
    without = {part: found[prefix + part] for part in ("no-sr", "no-rht", "no-2d")}
    changed = {part: differing(whole.recipe, trial.recipe) for part, trial in without.items()}
    parts = (("no-sr", "stochastic", "stochastic"), ("no-rht", "rht16", "rht"), ("no-2d", "16x16", "16x16"))
    for part, has, lacks in parts:
        for slot, (ours, theirs) in changed[part].items():
            assert (has in ours, lacks in theirs) == (True, False), (part, slot)
    assert set(changed["no-sr"]) == {"dgrad.dy", "wgrad.dy"}
    assert set(changed["no-rht"]) == {"wgrad.dy", "wgrad.x"}
    assert set(changed["no-2d"]) == {"fprop.w", "dgrad.w"}
    for trial in without.values():
        assert trial.recipe.keep == whole.recipe.keep
        assert (trial.training, trial.schedule) == (whole.training, whole.schedule)
