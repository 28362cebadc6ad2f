"""Round the sums of attention's second product, P·V, and measure the bias of the gradient: pv-rounding.md.

    python docs/measured/pv-rounding.py RUN… > docs/measured/pv-rounding.txt

A published explanation of loss explosions in BF16 (Qiu and Yao, 2025) is that flash attention rounds the unnormalised
output, Σ e^(score − largest)·v, while the backward pass computes the probabilities again and uses the output only in
Σ y·dy. If several exponentials are exactly 1, the rounding errors of one row have the same sign, and the gradient is
biased.

All else is FP32 here, so the only errors are those of the rounded sums. RUN is a finished run. Each variant is compared
with exact attention on the same weights and windows; with GaussWS's noise both have the same noise, a new one for each
batch. `error` is the relative error of one batch's gradient of the attention layers; `bias` is the part of it that
batches have in common, estimated without its own noise from the products of neighbouring batches' errors.
"""

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fewbits import load_recipe
from fewbits.experiments.probes.bench import Bench, backward, make_bench
from fewbits.experiments.storage import checkpoints, run_folder
from fewbits.experiments.training import with_data
from fewbits.experiments.trial import Runtime
from fewbits.kernels.reference.attention import rotate
from fewbits.models.networks import decoder

BATCHES, WINDOWS, LENGTH = 24, 4, 256
LOWER = math.log(4 / 3)  # subtracted from scores, so that the largest exponential is 0.75, which BF16 has, and not 1
VARIANTS = {  # keys between two roundings of the sums, and whether scores are lowered
    "rounded once": (LENGTH, False),
    "rounded after 32 keys": (32, False),
    "rounded after each key": (1, False),
    "after each key, no exponential is 1": (1, True),
}


class Attention(torch.autograd.Function):
    """Causal attention in FP32 whose unnormalised output is rounded to BF16 after every `span` keys."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, span: int | None, lower: float) -> Tensor:
        scores = (q @ k.mT) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
        top = scores.amax(-1, keepdim=True)
        p = (scores - top - lower).exp()
        total = p.sum(-1, keepdim=True)
        if span is None:
            y = p @ v / total
        else:
            sums, low = torch.zeros_like(q), p.bfloat16().float()
            for key in range(0, k.shape[-2], span):
                sums = (sums + low[..., key : key + span] @ v[..., key : key + span, :]).bfloat16().float()
            y = sums / total
        ctx.save_for_backward(q, k, v, y, p / total)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, y, p = ctx.saved_tensors
        ds = p * (dy @ v.mT - (y * dy).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
        return ds @ k, ds.mT @ q, p.mT @ dy, None, None


@contextmanager
def attention(span: int | None, lower: float = 0.0) -> Iterator[None]:
    """Let models compute attention by `Attention`."""

    def causal(q: Tensor, k: Tensor, v: Tensor, turns: Tensor | None) -> Tensor:
        q, k = rotate(q, turns), rotate(k, turns)
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
        y = Attention.apply(*(x.transpose(1, 2).float() for x in (q, k, v)), span, lower)
        return y.transpose(1, 2)

    def fused(x: Tensor, heads: int, turns: Tensor | None) -> Tensor:
        shared = (x.shape[2] - heads) // 2
        return causal(*x.split((heads, shared, shared), 2), turns)

    with patch.object(decoder, "causal_attention", causal), patch.object(decoder, "fused_causal_attention", fused):
        yield


def opened(run: Path) -> tuple[Bench, list[tuple[Tensor, Tensor]]]:
    """Return a run's last weights in FP32, and held-out windows."""
    trial = run_folder.saved_trial(run)
    trial, corpus = with_data(replace(trial, training=replace(trial.training, dtype="fp32")), Runtime())
    latest = checkpoints.newest(run / "checkpoints")
    if latest is None:
        raise ValueError(f"{run} has no checkpoint")
    inputs, targets = corpus.windows("validation", BATCHES * WINDOWS, LENGTH)
    windows = list(zip(inputs.split(WINDOWS), targets.split(WINDOWS), strict=True))
    return make_bench(trial, latest, torch.device("cpu"), torch.float32), windows


def measure(bench: Bench, windows: Sequence[tuple[Tensor, Tensor]], recipe: str) -> dict[str, tuple[float, float]]:
    """Return each variant's relative error and bias."""
    exact: list[Tensor] = []
    errors: dict[str, list[Tensor]] = {name: [] for name in VARIANTS}
    for number, (inputs, targets) in enumerate(windows):

        def gradient(span: int | None, lower: float, place: tuple[int, Tensor, Tensor]) -> Tensor:
            batch, inputs, targets = place
            with attention(span, lower):
                model, _ = bench.quantized(load_recipe(recipe), batch, 0)
                _, found = backward(model, inputs, targets)
            return torch.cat([g.flatten() for name, g in found.items() if ".attention." in name or ".mixer." in name])

        place = (number, inputs, targets)
        exact.append(gradient(None, 0.0, place))
        for name, (span, lowered) in VARIANTS.items():
            errors[name].append(gradient(span, LOWER * lowered, place) - exact[-1])
    size = _common(exact)
    return {
        name: (
            sum(float(e.norm() / g.norm()) for e, g in zip(found, exact, strict=True)) / len(found),
            math.copysign(math.sqrt(abs(_common(found)) / size), _common(found)),
        )
        for name, found in errors.items()
    }


def _common(vectors: Sequence[Tensor]) -> float:
    """Return the mean product of neighbours, whose own noise is independent."""
    return sum(float(a.double() @ b.double()) for a, b in pairwise(vectors)) / (len(vectors) - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'run':44} {'weights':10} {'variant':38} {'error':>9} {'bias':>9}")
    for run in options.runs:
        bench, windows = opened(run)
        for recipe in ("bf16", "gaussws"):
            for name, (error, bias) in measure(bench, windows, recipe).items():
                print(f"{run.name:44} {recipe:10} {name:38} {error:9.2e} {bias:+9.2e}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
