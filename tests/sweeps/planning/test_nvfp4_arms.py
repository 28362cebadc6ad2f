"""Test that the recipes of NVFP4's arms `no-…` differ from the whole recipe only in the part that the name says."""

from collections.abc import Iterator

import pytest

from fewbits.experiments.config import load_trial
from fewbits.experiments.trial import Trial
from fewbits.models.recipe import Recipe
from fewbits.sweeps.planning.expand import expand
from fewbits.sweeps.planning.studies import load_sweeps


def trials(scale: str, *overrides: str) -> Iterator[tuple[str, Trial]]:
    sweeps, extra = load_sweeps(("study=nvfp4", f"scale={scale}", *overrides))
    for sweep in sweeps:
        for cell in expand(sweep, extra):
            if cell.seed == sweep.seeds[0]:
                yield str(cell.arm), load_trial(cell.overrides)[0]


def differing(one: Recipe, other: Recipe) -> dict[str, tuple[str, str]]:
    """Return operand slot → (quantizer of `one`, quantizer of `other`), for the slots in which the recipes differ."""
    return {
        slot: (str(ours.spec), str(theirs.spec))
        for (slot, ours), (_, theirs) in zip(one.operands.items(), other.operands.items(), strict=True)
        if ours != theirs
    }


@pytest.mark.parametrize("prefix", ["", "long-"])
def test_each_arm_without_a_part_lacks_that_part_alone(prefix: str) -> None:
    found = dict(trials("cpu", "sweep=switch" if prefix else "sweep=recipe"))
    whole = found["nvfp4-long" if prefix else "nvfp4"]
    without = {part: found[prefix + part] for part in ("no-sr", "no-rht", "no-2d")}
    changed = {part: differing(whole.recipe, trial.recipe) for part, trial in without.items()}
    for part, (has, lacks) in {
        "no-sr": ("stochastic", ""),
        "no-rht": ("rht16", "rht"),
        "no-2d": ("16x16", "16x16"),
    }.items():
        assert changed[part]
        for slot, (ours, theirs) in changed[part].items():
            assert has in ours, (part, slot)
            assert (lacks or has) not in theirs, (part, slot)
    assert set(changed["no-sr"]) == {"dgrad.dy", "wgrad.dy"}
    assert set(changed["no-rht"]) == {"wgrad.dy", "wgrad.x"}
    assert set(changed["no-2d"]) == {"fprop.w", "dgrad.w"}
    for trial in without.values():
        assert trial.recipe.keep == whole.recipe.keep
        assert (trial.training, trial.schedule) == (whole.training, whole.schedule)
