"""Test the estimate of a trial's memory, and the advice for trials that do not fit."""

from dataclasses import replace
from typing import Any

import pytest

from fewbits.experiments.config import load_trial
from fewbits.experiments.distributed.memory import complaint, estimate, fits, least_ranks
from fewbits.experiments.trial import Trial
from fewbits.models.networks.registry import parameters


def tiny(**training: Any) -> Trial:
    asked = [
        "model=nemotron-nano",
        "model.layers=2",
        "model.width=64",
        "model.heads=2",
        "model.kv_heads=2",
        "recipe=bf16",
    ]
    trial, _ = load_trial([*asked, "training.batch=8", "training.micro_batch=1", "training.length=64"])
    return replace(trial, training=replace(trial.training, **training))


def test_one_rank_holds_every_parameter_its_gradient_and_two_moments() -> None:
    memory, size = estimate(tiny()), 4 * parameters(tiny().model)
    assert (memory.weights, memory.gradients, memory.states, memory.gathered) == (size, size, 2 * size, 0)


def test_ranks_share_weights_and_states_but_gather_blocks_and_add_up_whole_gradients() -> None:
    one, two, eight = (estimate(tiny(), ranks) for ranks in (1, 2, 8))
    assert one.weights / 2 <= two.weights < 0.6 * one.weights
    assert two.states == 2 * two.weights
    assert two.gradients == two.weights + one.weights  # whole gradients are summed over micro-batches
    assert eight.gradients == eight.weights
    assert estimate(tiny(reduce_each=True), 2).gradients == two.weights
    assert two.gathered == eight.gathered > 0


def test_activations_grow_with_the_micro_batch_and_shrink_with_recompute() -> None:
    small, large = (estimate(tiny(micro_batch=size)).activations for size in (1, 2))
    assert 1.9 < large / small < 2.1
    assert estimate(tiny(recompute=True)).activations < small


def test_what_does_not_fit_names_the_ranks_that_would() -> None:
    trial = tiny()
    needed = {ranks: estimate(trial, ranks).total for ranks in (1, 2, 4, 8)}
    device = needed[8] / 0.9 + 1
    assert complaint(trial, 8, device) is None
    assert least_ranks(trial, device) == 8
    assert fits(trial, 8, device)
    assert not fits(trial, 4, device)
    text = complaint(trial, 2, device)
    assert text is not None
    assert "2 ranks need" in text
    assert "8 ranks would fit" in text
    assert least_ranks(trial, 1000) is None


def test_what_does_not_fit_names_the_setting_that_would_help() -> None:
    trial = tiny(recompute=True)
    device = estimate(tiny(recompute=True, reduce_each=True), 2).total / 0.9 + 1
    text = complaint(trial, 2, device)
    assert text is not None
    assert "training.reduce_each=true would fit" in text
    assert complaint(tiny(recompute=True, reduce_each=True), 2, device) is None


@pytest.mark.parametrize("recipe", ["mor/block", "nvfp4", "gaussws"])
def test_quantized_operands_are_saved_instead_of_the_inputs(recipe: str) -> None:
    trial, _ = load_trial(["model=nemotron-nano", f"recipe={recipe}"])
    plain, _ = load_trial(["model=nemotron-nano", "recipe=bf16"])
    assert estimate(trial).activations < 1.5 * estimate(plain).activations
