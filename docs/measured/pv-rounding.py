"""Round the sums of attention's second product, P·V, to BF16, and measure the error and bias of the gradient.

    python docs/measured/pv-rounding.py RUN… > docs/measured/pv-rounding.txt     # pv-rounding.md discusses the results

A published explanation of loss explosions in BF16 (Qiu and Yao, 2025) is this: flash attention rounds the unnormalised
output, Σ e^(score − largest score)·v. The backward pass computes the probabilities again, and uses the rounded output
only in Σ y·dy. If several exponentials of a row are exactly 1, the rounding errors of the row have the same sign, and
the gradient is biased.

Here the sums, and the exponentials in the products e^(…)·v, are rounded to BF16; everything else is computed in FP32.
RUN is a finished run. Each variant is compared with exact attention on the same weights and windows. With GaussWS, the
variant and exact attention get the same noise on weights, which is new in each batch. `error` is the mean relative
error of the attention layers' gradient of one batch. `bias` is the part of the error that all batches have in common,
relative to the common part of the gradient: the square root of the mean product of neighbouring batches' errors, in
which independent noise of the batches cancels.
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
LOWER = math.log(4 / 3)  # subtracted from scores, so that the largest exponential is not 1 but 0.75, exact in BF16
VARIANTS = {  # name → (number of keys between two roundings of the sums, whether LOWER is subtracted from scores)
    "rounded once": (LENGTH, False),
    "rounded after 32 keys": (32, False),
    "rounded after each key": (1, False),
    "after each key, no exponential is 1": (1, True),
}


class Attention(torch.autograd.Function):
    """Causal attention in FP32 whose unnormalised output is rounded to BF16 after every `span` keys; None: never."""

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
    """Make models compute attention with `Attention` while the `with` block runs. lower: subtracted from scores."""

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
    """Return a bench with a run's last weights in FP32, and batches (inputs, targets) of held-out windows."""
    trial = run_folder.saved_trial(run)
    trial, corpus = with_data(replace(trial, training=replace(trial.training, dtype="fp32")), Runtime())
    latest = checkpoints.newest(run / "checkpoints")
    if latest is None:
        raise ValueError(f"{run} has no checkpoint to read the weights from: name a run that has one")
    inputs, targets = corpus.windows("validation", BATCHES * WINDOWS, LENGTH)
    windows = list(zip(inputs.split(WINDOWS), targets.split(WINDOWS), strict=True))
    return make_bench(trial, latest, torch.device("cpu"), torch.float32), windows


def measure(bench: Bench, windows: Sequence[tuple[Tensor, Tensor]], recipe: str) -> dict[str, tuple[float, float]]:
    """Return name → (error, bias) for each of VARIANTS, with the weights quantized or made noisy by the recipe."""
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
    """Return the mean scalar product of neighbouring vectors: the squared length of the part that all have in common.

    The noise of neighbours is independent, so that its products average to 0.
    """
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
