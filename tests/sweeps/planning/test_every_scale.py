"""Test the sweeps of all studies at all scales; the training data are not needed.

Trials repeat their data only as often as allowed, arms that switch recipes train after the switch, and the papers'
models fit on their GPUs.
"""

import math
from functools import cache

import pytest

from fewbits.experiments.data.python_sources import PYTHON, TORCH
from fewbits.experiments.data.web_text import COLLECTIONS
from fewbits.experiments.distributed.memory import fits
from fewbits.sweeps.planning.plan import Plan, check_repeats, plan
from fewbits.sweeps.planning.studies import STUDIES, load_sweeps

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
        assert math.ceil(after.recipe.switch.at * after.training.steps) == after.training.steps, (
            "only the evaluation at the end is after the switch"
        )


@pytest.mark.parametrize(("study", "too_large"), [("mor", set()), ("nvfp4", set())])
def test_the_papers_models_fit_on_their_gpus_or_are_known_not_to(study: str, too_large: set[str]) -> None:
    """Check that each model of scale paper fits into 80 GB for each rank, except those in `too_large`.

    Only the first arm of each model is checked, since its other arms need nearly the same memory.
    """
    models = {one.trial.model.name: one for one in reversed(planned(study, "paper").trials.values())}
    assert {name for name, one in models.items() if not fits(one.trial, one.resources.ranks, 80e9)} == too_large
