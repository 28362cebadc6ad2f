"""Compare 20 steps of Adam-mini with the package `adam-mini` 1.1.1."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import adam_mini
import pytest
import torch
from torch import nn

from fewbits.experiments.optimization.optimizers import OptimizerConfig, make_optimizer
from fewbits.models.networks.decoder import Decoder
from fewbits.models.networks.partition import adam_mini_partition
from fewbits.models.networks.presets import MODELS
from fewbits.models.networks.registry import build

STEPS, LR, BETAS, EPS, DECAY = 20, 3e-3, (0.9, 0.95), 1e-8, 0.1
THEIR_NAMES = {  # by part of our name, a name by which the package recognises the parameter
    "attention.q.": "wq.",
    "attention.k.": "wk.",
    "attention.v.": "wv.",
    "attention.out.": "wo.",
    "ffn.": "feed_forward.",
    "positions.": "position_embeddings.",
    "head.": "output.",
}


def named_parts(model: Decoder) -> Iterator[tuple[str, str, slice]]:
    """Yield (our name, the package's name, rows) of all parts that the package regards as parameters.

    The package has no rule for fused queries, keys and values, so these are three parts there.
    """
    config = model.config
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    for name, parameter in model.named_parameters():
        theirs = name
        for ours, other in THEIR_NAMES.items():
            theirs = theirs.replace(ours, other)
        if ".qkv." in name:
            bounds = (0, queries, queries + keys, queries + 2 * keys)
            for letter, first, last in zip("qkv", bounds, bounds[1:], strict=False):
                yield name, theirs.replace("attention.qkv", f"w{letter}"), slice(first, last)
        else:
            yield name, theirs, slice(0, len(parameter))


def small(name: str) -> Decoder:
    return build(replace(MODELS[name], layers=2, vocab=64), seed=0, device="cpu", compute_dtype=torch.float32)


def train(model: Decoder, step: Callable[[], object]) -> None:
    """Make 20 updates with the gradients of random batches."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        tokens = torch.randint(64, (2, 33), generator=generator)
        model.zero_grad()
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        step()


def ours(name: str, kind: str) -> Decoder:
    model = small(name)
    config = OptimizerConfig(kind=kind, lr=LR, beta1=BETAS[0], beta2=BETAS[1], eps=EPS, weight_decay=DECAY)
    train(model, make_optimizer(model, config, partition=adam_mini_partition(model)).step)
    return model


def assert_close(got: Decoder, expected: Decoder, atol: float = 1e-6) -> None:
    for (name, one), other in zip(got.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=atol, msg=name)


@pytest.mark.parametrize("name", ["gpt2-nano", "llama2-nano"])
def test_twenty_steps_equal_those_of_the_package(name: str) -> None:
    model = small(name)
    parts = [
        (own, rows, theirs, nn.Parameter(model.get_parameter(own).detach()[rows]))  # shares memory with our parameter
        for own, theirs, rows in named_parts(model)
    ]
    config = model.config
    optimizer = adam_mini.Adam_mini(
        [(theirs, part) for _, _, theirs, part in parts],
        lr=LR,
        betas=BETAS,
        eps=EPS,
        weight_decay=DECAY,
        dim=config.width,
        n_heads=config.heads,
        n_kv_heads=config.kv_heads,
        verbose=False,
    )

    def step() -> None:
        for own, rows, _, part in parts:
            gradient = model.get_parameter(own).grad
            assert gradient is not None
            part.grad = gradient[rows]
        optimizer.step()

    train(model, step)
    assert_close(ours(name, "adam-mini"), model)
