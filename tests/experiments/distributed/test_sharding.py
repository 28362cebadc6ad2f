"""Test that a sharded model trains to the bits of a whole model on every rank, and the estimate of its memory."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from fewbits.experiments import training
from fewbits.experiments.config import load_trial
from fewbits.experiments.data.corpus import Corpus
from fewbits.experiments.devices import World
from fewbits.experiments.distributed.memory import complaint, estimate, fits, least_ranks
from fewbits.experiments.optimization.optimizers import set_learning_rate
from fewbits.experiments.optimization.schedules import factor
from fewbits.experiments.session import with_data
from fewbits.experiments.state import set_up
from fewbits.experiments.trial import ORDER, Trial
from fewbits.kernels.seeds import derive_seed
from fewbits.models.networks.partition import local, whole
from fewbits.models.networks.registry import parameters
from tests.effort import DEEP
from tests.experiments.distributed.ranks import on_ranks
from tests.experiments.trial_inputs import MOR, overrides

SMALL = ("training.steps=3", "training.length=64", "training.batch=8")  # two micro-batches on each rank
GPT2 = ("model=gpt2-nano", "model.ffn=128", "model.width=64", "model.heads=2", "model.kv_heads=2")
HYBRID = (
    *("model=hybrid-nano", "model.layers=4", "model.pattern=M-M*", "model.mamba_groups=2", "model.mamba_state=16"),
    *("model.mamba_head_dim=32",),
)
# Every architecture, kind of recipe and optimizer that the papers need. Gradients are always clipped in `tied gpt2`,
# and never in `gaussws`.
SCENARIOS: dict[str, tuple[str, ...]] = {
    "bf16": ("recipe=bf16",),
    "tied gpt2": (*GPT2, "recipe=bf16", "optimizer.clip=0.01"),
    "mor": (*MOR, "model=llama2-nano", "model.ffn=96"),
    "nvfp4 hybrid": (*HYBRID, "recipe=nvfp4", "recipe.keep.last=0", "recipe.keep.first=0", "recipe.wgrad.output=fp32"),
    "experts": (
        *("recipe=nvfp4", "optimizer=muon", "model=moe-nano", "model.layers=5", "model.width=64", "model.ffn=32"),
        *("model.heads=2", "model.kv_heads=2", "model.head_dim=32", "model.balance=1.0"),
    ),
    "gaussws": ("recipe=gaussws", "recipe.sampler.penalty=0.01", "optimizer.clip=null"),
    "adam-mini": ("recipe=bf16", "optimizer=adam-mini"),
    "adam-mini gaussws hybrid": (*HYBRID, "recipe=gaussws", "recipe.sampler.penalty=0.01", "optimizer=adam-mini"),
}
# Scenarios that not only `make test-deep` but also `make test` trains with recompute. Computing a block twice must
# neither draw new noise, nor choose formats again, nor count statistics twice.
RECOMPUTED = ("mor", "nvfp4 hybrid", "experts", "gaussws")
DEEP_ONLY = ("adam-mini",)  # only in `make test-deep`: the last scenario has the same optimizer


def _trials(cache: Path, runs: Path) -> Iterator[tuple[str, Trial, Corpus]]:
    for name, asked in SCENARIOS.items():
        if name in DEEP_ONLY and not DEEP:
            continue
        trial, runtime = load_trial(overrides(cache, runs, *SMALL, *asked))
        yield name, *with_data(trial, runtime)


def replicated(trial: Trial, corpus: Corpus, world: World) -> tuple[dict[str, Tensor], list[float]]:
    """Train with DistributedDataParallel; return the parameters, and the norm of all gradients in each step."""
    state, norms = set_up(trial, world.device), []
    loss_of = DistributedDataParallel(training._Loss(state.model))
    t = trial.training
    accumulation = t.batch // t.micro_batch // world.ranks
    for step in range(t.steps):
        for micro in range(accumulation):
            first = step * t.batch + (micro * world.ranks + world.rank) * t.micro_batch
            order = derive_seed(trial.seed, ORDER)
            inputs, targets = corpus.batch("train", first, t.micro_batch, t.length, order)
            state.quantization.begin(step, micro, rank=world.rank, progress=step / t.steps)
            with contextlib.nullcontext() if micro == accumulation - 1 else loss_of.no_sync():
                loss = loss_of(inputs, targets) / accumulation
                penalty = state.quantization.penalty() if micro == 0 else None  # once for each update
                (loss if penalty is None else loss + penalty).backward()
        grads = [parameter.grad for parameter in state.model.parameters() if parameter.grad is not None]
        norm = torch.stack([grad.double().norm() ** 2 for grad in grads]).sum().sqrt().float()
        norms.append(norm.item())
        if trial.optimizer.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(state.model.parameters(), trial.optimizer.clip, norm)
        set_learning_rate(state.optimizer, factor(trial.schedule, step, t.steps))
        state.optimizer.step()
        state.optimizer.zero_grad()
    return dict(state.model.named_parameters()), norms


def sharded(trial: Trial, corpus: Corpus, world: World) -> tuple[dict[str, Tensor], list[float]]:
    state, norms = set_up(trial, world.device, world.ranks), []
    loss_of = training._loss_module(state.model, trial)
    for step in range(trial.training.steps):
        norms.append(training.gradients(state, trial, corpus, world, loss_of)["gradient_norm"])
        set_learning_rate(state.optimizer, factor(trial.schedule, step, trial.training.steps))
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.step, state.position = step + 1, state.position + trial.training.batch
    held = sum(local(parameter).numel() for parameter in state.model.parameters())
    total = sum(parameter.numel() for parameter in state.model.parameters())
    assert held <= 0.6 * total
    return {name: whole(parameter.detach()) for name, parameter in state.model.named_parameters()}, norms


def _compare(world: World, cache: Path, runs: Path) -> None:
    wrong = []
    for name, trial, corpus in _trials(cache, runs):
        expected, norms = replicated(trial, corpus, world)
        for recompute in (False, True) if DEEP or name in RECOMPUTED else (False,):
            settings = replace(trial, training=replace(trial.training, recompute=recompute))
            found, own_norms = sharded(settings, corpus, world)
            same = found.keys() == expected.keys() and own_norms == norms
            different = [key for key in expected if not torch.equal(found[key], expected[key])]
            if not same or different:
                wrong.append(f"{name}, recompute {recompute}: {norms} {own_norms} {different}")
        if name == "bf16":  # reduce_each adds up gradients in another order
            settings = replace(trial, training=replace(trial.training, reduce_each=True))
            found, own_norms = sharded(settings, corpus, world)
            assert own_norms == pytest.approx(norms, rel=1e-4)
            assert not all(torch.equal(found[key], expected[key]) for key in expected)
    assert not wrong, "\n".join(wrong)


def test_two_ranks_with_shards_give_the_bits_of_two_that_hold_everything(cache: Path, tmp_path: Path) -> None:
    on_ranks(2, tmp_path, _compare, cache, tmp_path / "runs")


# The estimate of a trial's memory, and the advice for trials that do not fit


def tiny(**training: Any) -> Trial:
    model = ("model=nemotron-nano", "model.layers=2", "model.width=64", "model.heads=2", "model.kv_heads=2")
    trial, _ = load_trial([*model, "recipe=bf16", "training.batch=8", "training.micro_batch=1", "training.length=64"])
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
