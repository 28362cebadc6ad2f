"""Metrics of NVFP4's trials that claims compare: losses before the learning rate decays, and errors of gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fewbits.analysis.engine.claims.hooks import exact, measure, metric
from fewbits.analysis.engine.claims.pairs import formula, score_distance
from fewbits.analysis.engine.results.data import Exact, Measured
from fewbits.analysis.engine.results.frames import Results, last_windows
from fewbits.analysis.engine.results.pairing import Metric
from fewbits.analysis.engine.statistics import extra_tokens
from fewbits.experiments.config import load_recipe
from fewbits.experiments.evaluation.tasks import TASK_GROUPS
from fewbits.kernels.api import fake_quantize
from fewbits.kernels.quantizer import Quantizer
from fewbits.models.networks.presets import MODELS
from fewbits.models.networks.registry import build
from fewbits.models.quantize import quantize
from fewbits.models.quantized_linear import QuantizedLinear
from fewbits.models.recipe import Recipe

LOSS, BEFORE = "validation_loss", "loss_before_decay"
LATE = ("switch", "large", "finetune")  # sweeps with late changes of the recipe; the first one that a scale has counts
LENGTHS = ("1.00", "1.25", "1.36", "1.50")  # of MXFP4's runs, in units of NVFP4's tokens
TASKS = [f"tasks.{n}.{task.metric}" for task in TASK_GROUPS["nvfp4"] if task.category != "Code" for n in task.names]
# The trunks in NVFP4 and in FP8 before the decay, and the trunk in BF16 from which they branch.
ARM, FP8, TRUNK = "nvfp4-trunk", "fp8-trunk", "trunk"
LAST_PART = 5  # the last 1/5 of the blocks, like the paper's last 4 of 20 blocks
ERROR = "gradient_error"


def gradient_errors(results: Results) -> pd.DataFrame:
    """Return a table of errors of weight gradients: id, block (from 1), part (such as qkv), gradient_error.

    It has a row for each linear layer and trial, from the last window of steps with measured gradients. The error is
    ‖g_q − g‖ / ‖g‖: g is a layer's weight gradient, and g_q the gradient with quantized operands.
    """
    numerics, columns = results.numerics(), ["id", "block", "part", ERROR]
    if numerics.empty or ERROR not in numerics:
        return pd.DataFrame(columns=columns)
    rows = numerics.dropna(subset=[ERROR]).drop_duplicates(["id", "step", "block", "part", "layer"])
    return last_windows(rows).assign(block=lambda last: last["block"] + 1)[columns]


def _errors_by_block(results: Results) -> dict[str, list[float]]:
    """Return, by trial, the mean error of the weight gradients of each block's linear layers."""
    means = gradient_errors(results).groupby(["id", "block"])[ERROR].mean()
    return {str(trial): of.tolist() for trial, of in means.groupby("id")}


@metric("nvfp4", "last_gradient_errors")
def last_gradient_errors(results: Results) -> Mapping[str, float]:
    """Return (mean error of weight gradients in the last fifth of the blocks) − (mean in other blocks), by trial."""
    found = {}
    for trial, errors in _errors_by_block(results).items():
        last = max(1, round(len(errors) / LAST_PART))
        if len(errors) > last:
            found[trial] = fmean(errors[-last:]) - fmean(errors[:-last])
    return found


@metric("nvfp4", "mean_gradient_error")
def mean_gradient_error(results: Results) -> Mapping[str, float]:
    return {trial: fmean(errors) for trial, errors in _errors_by_block(results).items()}


@metric("nvfp4", BEFORE)
def loss_before_decay(results: Results) -> Mapping[str, float]:
    """Return validation losses before the learning rate decays, by trial.

    The loss of an NVFP4 or FP8 trunk is its last one. The loss of a BF16 trunk is the one at the number of tokens at
    which the NVFP4 trunk of the same seed ends. For a run with a decay of its own, it is the last one before it begins.
    """
    curves = results.curves(LOSS).drop_duplicates(["id", "tokens"])
    ends = last_windows(curves[curves["arm"].isin((ARM, FP8))])
    at = ends.loc[ends["arm"] == ARM, ["seed", "tokens"]]
    trunks = curves[curves["arm"] == TRUNK].merge(at, on=["seed", "tokens"])
    begins = {
        trial: planned.trial.training.steps * (1 - planned.trial.schedule.decay_fraction)
        for trial, planned in results.plan.trials.items()
        if planned.trial.schedule.kind == "wsd"
    }
    own = curves[curves["step"] < curves["id"].map(begins).fillna(0.0)]
    rows = pd.concat([ends, trunks, last_windows(own)])
    return {str(trial): float(value) for trial, value in zip(rows["id"], rows["value"], strict=True)}


# -------------------------------------------------------------------------------- numbers of several arms

Values = Mapping[str, float]


def _switches(results: Results) -> bool:
    """Return whether the scale has the sweep `switch`, whose arms branch from a run in NVFP4."""
    return "switch" in {member.cell.sweep for member in results.members}


def _losses(
    results: Results,
    sweeps: Sequence[str],
    arms: Mapping[str, str],
    combine: Callable[[Values], float],
    loss: str = LOSS,
) -> Measured:
    """Return a number that is computed from the losses of several arms of the first of the sweeps that a scale has."""
    return formula(results, {name: (sweeps, arm, loss) for name, arm in arms.items()}, combine, relative=False)


@measure("nvfp4", "N1")
def widening(results: Results) -> Mapping[str, Measured]:
    """Return by how much the relative gap to FP8 is greater after the decay than before it."""
    before, switches = loss_before_decay(results), _switches(results)
    ours, base, trunk, fp8 = ("nvfp4-long", "fp8-long", ARM, FP8) if switches else ("nvfp4", "fp8") * 2
    arms: dict[str, tuple[Sequence[str], str, Metric]] = {
        "end": (LATE, ours, LOSS),
        "base": (LATE, base, LOSS),
        "ours": (LATE, trunk, before),
        "trunk": (LATE, fp8, before),
    }
    return {"widening": formula(results, arms, lambda of: of["end"] / of["base"] - of["ours"] / of["trunk"])}


@measure("nvfp4", "N2")
def scores(results: Results) -> Mapping[str, Measured]:
    """Return the median distance of downstream scores from FP8's, in points, over all tasks except code."""
    distance = score_distance(results, ("nvfp4",), "fp8", TASKS, ("large", "recipe"))
    return {"median distance over all tasks": distance}


@measure("nvfp4", "N20")
def costs(results: Results) -> Mapping[str, Measured]:
    """Return the ratio of MXFP4's cost to NVFP4's cost, in two models; a cost is the increase of the loss over BF16."""

    def ratio(of: Values) -> float:
        return (of["mxfp4"] - of["bf16"]) / positive(of["nvfp4"] - of["bf16"])

    arms = {arm: arm for arm in ("mxfp4", "nvfp4", "bf16")}
    return {
        f"MXFP4's cost over NVFP4's, {name}": _losses(results, sweeps, arms, ratio)
        for name, sweeps in {"transformer": ("recipe", "finetune"), "hybrid": ("hybrid",)}.items()
    }


@measure("nvfp4", "N21")
def mxfp4_tokens(results: Results) -> Mapping[str, Measured]:
    """Return which fraction of its tokens MXFP4 needs in addition to reach NVFP4's loss.

    Loss is taken as linear in the logarithm of the number of tokens, with the slope of the MXFP4 runs of all lengths.
    """

    def extra(of: Values) -> float:
        slope = -float(np.polyfit(np.log([float(times) for times in LENGTHS]), [of[times] for times in LENGTHS], 1)[0])
        return extra_tokens(of[LENGTHS[0]] - of["nvfp4"], positive(slope))

    arms = {times: f"mxfp4-{times}" for times in LENGTHS} | {"nvfp4": "nvfp4-whole"}
    return {"extra tokens": _losses(results, ("scratch",), arms, extra)}


@measure("nvfp4", "N23")
def shares(results: Results) -> Mapping[str, Measured]:
    """Return which share of the gain of switching both passes the switch of the forward pass has."""

    def share(of: Values) -> float:
        return (of["none"] - of["forward"]) / positive(of["none"] - of["both"])

    none = "nvfp4-long" if _switches(results) else "nvfp4"
    arms = {"none": none, "forward": "switch-forward", "both": "switch-both"}
    return {
        "share of the gain": _losses(results, LATE, arms, share),
        "share of the gain, evaluated in BF16": _losses(results, LATE, arms, share, f"{LOSS}_unquantized"),
    }


def positive(divisor: float) -> float:
    """Return the divisor; raise ValueError unless it is positive: a ratio to no cost, or to no gain, means nothing."""
    if divisor <= 0:
        raise ValueError(f"a divisor is {divisor:.4g}, but must be positive")
    return divisor


# ------------------------------------------------------------------------------------------------ claim N19

# With square blocks, forward and backward pass multiply by the same quantized weights. A model is trained for some
# steps, while a torch dispatch mode records the second operand of every GEMM inside a quantized layer: wᵀ of y = x·wᵀ
# in the forward pass, and w of dx = dy·w in the backward pass. These are the tensors that the GEMMs read, after all
# caches, casts and views; nothing is computed again for the check.

BATCH, LENGTH = 2, 48  # no side of a weight is 2 · 48 long, so the shape tells weights and activations apart
STEPS, MICRO_BATCHES = 2, 2
GEMMS = ("aten::mm", "aten::addmm", "fewbits::matmul_fp32")


class Read(NamedTuple):
    """A layer's quantized weight as its GEMMs read it in both passes of a micro-batch, and its FP32 master weight."""

    forward: Tensor
    backward: Tensor
    master: Tensor


class Consistency(NamedTuple):
    """A comparison of the weights that the forward and the backward pass read, once for each layer and micro-batch."""

    reads: int  # the number of comparisons
    same: int  # those with the same bits in both passes
    quantized: int  # those whose forward weight is the kernel's quantization of the master weight in BF16
    apart: float  # the greatest ‖forward − backward‖ / ‖master‖


class _Watch(TorchDispatchMode):
    """A torch dispatch mode that records in `reads` the weights that GEMMs in the forward and backward pass read."""

    def __init__(self, layers: Sequence[QuantizedLinear]) -> None:
        super().__init__()
        self.at: tuple[QuantizedLinear, bool] | None = None  # the layer, and whether its backward pass runs
        self.reads: list[Read] = []
        self._forward: dict[str, Tensor] = {}
        for layer in layers:
            layer.register_forward_pre_hook(partial(self._enter, False))
            layer.register_forward_hook(self._leave)
            layer.register_full_backward_pre_hook(partial(self._enter, True))
            layer.register_full_backward_hook(self._leave)

    def _enter(self, backward: bool, layer: Any, _: Any) -> None:
        self.at = layer, backward

    def _leave(self, *_: Any) -> None:
        self.at = None

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        if self.at is not None and func._schema.name in GEMMS:
            (layer, backward), operand = self.at, args[-1]
            if not backward:
                self._forward[layer.name] = operand.t().clone()
            elif operand.shape == layer.weight.shape:  # otherwise the operand is the activation in Wgrad
                self.reads.append(Read(self._forward.pop(layer.name), operand.clone(), layer.weight.detach().clone()))
        return func(*args, **(kwargs or {}))


def weights_read(recipe: Recipe, model: str, *, autocast: bool) -> list[Read]:
    """Train a preset, with torch's autocast or as trials do; return a `Read` for each layer and micro-batch."""
    torch.manual_seed(0)
    decoder = build(MODELS[model], seed=0, compute_dtype=torch.float32 if autocast else torch.bfloat16)
    quantization = quantize(decoder, recipe, seed=0)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=1e-3)
    quantization.attach(decoder, optimizer)
    watch = _Watch([layer for layer in quantization.layers if layer.name not in quantization.kept])
    for _ in range(STEPS):
        for _ in range(MICRO_BATCHES):
            tokens = torch.randint(0, decoder.config.vocab, (BATCH, LENGTH + 1))
            with watch, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                decoder.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return watch.reads


@cache
def consistency(weights: str) -> Consistency:
    """Train a small transformer and a hybrid with these blocks of weights, and compare what the passes read."""
    recipe, spec = load_recipe("nvfp4", {"weights": weights}), Quantizer.parse(f"e2m1:{weights}:nvfp4")
    runs = (("nemotron-nano", True), ("nemotron-nano", False), ("hybrid-nano", False))
    reads = [read for model, autocast in runs for read in weights_read(recipe, model, autocast=autocast)]
    same = [torch.equal(read.forward.view(torch.int16), read.backward.view(torch.int16)) for read in reads]
    quantized = [torch.equal(read.forward, fake_quantize(read.master.bfloat16(), spec)) for read in reads]
    norm = torch.linalg.vector_norm
    apart = [norm(r.forward.double() - r.backward.double()) / norm(r.master.double()) for r in reads]
    return Consistency(len(reads), sum(same), sum(quantized), float(max(apart)))


@exact("nvfp4", "N19")
def n19() -> Exact:
    squares, rows = consistency("16x16"), consistency("1x16")
    holds = squares.same == squares.reads == squares.quantized and rows.same == 0 and rows.quantized == rows.reads
    what = (
        f"in {STEPS} training steps, with and without autocast, of small models of both families, both passes read the "
        f"same bits of {squares.same} of {squares.reads} weights in 16×16 blocks and of {rows.same} of {rows.reads} "
        "weights in 1×16 blocks"
    )
    note = f"in 1×16 blocks the passes' weights differ by up to {rows.apart:.1%} of the weight's norm"
    origin = "these are the operands of the GEMMs in training, not results of a kernel called for the check"
    return Exact(holds, what, (note, origin))
