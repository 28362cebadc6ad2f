"""Test what holds for the studies' own sweeps at every scale, without their data."""

import math
from functools import cache

import pytest

from fewbits.experiments.data.preparation.web import COLLECTIONS
from fewbits.experiments.data.python_sources import PYTHON, TORCH
from fewbits.experiments.distributed.memory import fits
from fewbits.sweeps.planning.data import check_repeats
from fewbits.sweeps.planning.plan import Plan, plan
from fewbits.sweeps.planning.studies import STUDIES
from fewbits.sweeps.planning.sweep import load_sweeps

SCALES = ("cpu", "cpu-full", "questions", "gpu", "paper")
SIZES = {"python": PYTHON.size, "torch": TORCH.size} | {name: one.tokens for name, one in COLLECTIONS.items()}


def marks(scale: str) -> tuple[pytest.MarkDecorator, ...]:
    """Return the marks of a test at this scale: cpu-full and questions train what cpu does, or other recipes."""
    return (pytest.mark.deep,) if scale in ("cpu-full", "questions") else ()


@cache
def planned(study: str, scale: str) -> Plan:
    """Return the plan of a study at one seed; composing its configs takes seconds."""
    return plan(*load_sweeps((f"study={study}", f"scale={scale}", "seeds=[0]")), with_data=False)


@pytest.mark.parametrize(
    ("scale", "study"),
    [pytest.param(s, name, marks=marks(s)) for s in SCALES for name in STUDIES if s in STUDIES[name].scales],
)
def test_every_study_reads_its_data_as_often_as_its_files_allow(study: str, scale: str) -> None:
    """The size of the papers' unpublished token folders is unknown, so they are not checked."""
    trials = planned(study, scale).trials
    for one in trials.values():
        size = SIZES.get(one.trial.data.kind)
        if size is None:
            assert (scale, one.trial.data.kind) == ("paper", "bin")
        else:
            check_repeats(one.trial, one.earlier_tokens, one.trial.data.size or size)


@pytest.mark.parametrize("scale", ["smoke", *(pytest.param(s, marks=marks(s)) for s in SCALES)])
def test_what_switches_in_nvfp4_trains_after_its_switch(scale: str) -> None:
    found = planned("nvfp4", scale)
    trials = {member.cell.arm: found.trials[member.id].trial for member in found.members}
    switching = {arm: trial for arm, trial in trials.items() if trial.recipe.switches}
    after = switching.pop("switch-after", None)
    for arm, trial in switching.items():
        steps = trial.training.steps
        assert 0 < math.ceil(trial.recipe.switch.at * steps) < steps, arm
    if after is not None:
        assert math.ceil(after.recipe.switch.at * after.training.steps) == after.training.steps, "evaluation alone"


@pytest.mark.parametrize(("study", "too_large"), [("mor", set()), ("nvfp4", set())])
def test_the_papers_models_fit_on_their_gpus_or_are_known_not_to(study: str, too_large: set[str]) -> None:
    """The first arm of a model stands for all, whose memory differs little; the dry run names arms that do not fit."""
    models = {one.trial.model.name: one for one in reversed(planned(study, "paper").trials.values())}
    assert {name for name, one in models.items() if not fits(one.trial, one.resources.ranks, 80e9)} == too_large
