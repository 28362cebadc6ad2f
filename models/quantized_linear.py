"""Implement a linear layer whose three GEMMs read quantized operands.

    forward    y  = Q(x) · Q(w)ᵀ            x: tokens × in, w: out × in, dy: tokens × out
    backward   dx = Q(dy) · Q(w)            each Q is the quantizer or mixture of this operand's slot in the recipe
               dw = Q(dy)ᵀ · Q(x)           rounded to the recipe's wgrad.output, then stored in FP32

x and w are quantized in the dtype in which the layer computes: the dtype of x, or autocast's. The FP32 master copy of w
is cast to this dtype first; a sampler adds its noise to the master copy before the cast. The quantized x for wgrad is
computed in the forward pass and saved for the backward pass in place of x. w is quantized again only when it changes,
which is once per optimizer step; a w whose rotation has new signs for every GEMM is quantized for every micro-batch.
With `keep_weights=False`, w is quantized in each forward and each backward pass, to the same bits, so that no process
keeps a whole sharded weight between the two passes. Gradients pass straight through every rounding. A bias is added in
FP32, before y is rounded, as in nn.Linear.

A recipe with `execute` computes GEMMs from codes and scales (execution.py, kernels/scaled_products.py). Everything
above applies to it, with codes and scales in place of quantized values.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fewbits.kernels import ops
from fewbits.kernels.products import linear, matmul, matmul_fp32
from fewbits.kernels.replays import capture, step_seed
from fewbits.kernels.scaled_products import ScaledOperand, scaled_product
from fewbits.models.delayed import DelayedScales
from fewbits.models.hooks import THEN, first_quantizer
from fewbits.models.operand_pair import Operand, OperandPair, Seed, Statistics, resolve_spelling
from fewbits.models.recipe import GEMMS, SLOTS, Operands, Recipe, Sampler
from fewbits.models.runtime import current_stream, untraced, updates, version
from fewbits.models.weights import BlockLinear, is_conv1d

# Everything that needs random numbers: the rounding of a slot, a sampler's noise, and a GEMM's rotation signs. A seed
# depends on the index in this tuple.
DRAWS = (*SLOTS, "sampler", *GEMMS)
NOISE = {"gaussws": "gaussian", "diffq": "uniform"}  # `sampler.kind`: distribution of its noise
CAPTURED = (
    "a quantized layer is captured in a CUDA graph without its seeds, so every replay would round with the same random "
    "bits: capture it within CapturedSeeds.captured() (fewbits.kernels.replays), or run it without a graph"
)
OUTPUT = {"compute": None, "bf16": torch.bfloat16, "fp32": torch.float32}  # None: the dtype of the operands


@dataclass(frozen=True)
class StepContext:
    """The numbers on which seeds depend, and whether the recipe's switch to other quantizers has happened."""

    step: int = 0
    micro_batch: int = 0
    rank: int = 0
    switched: bool = False

    @property
    def numbers(self) -> tuple[int, int, int]:
        return self.step, self.micro_batch, self.rank


@dataclass(frozen=True)
class _Input:
    """The layer input that was quantized last, with its quantized values and their statistics.

    The next layers reuse the quantized values if they read the same input, as the layers q, k and v of attention do.
    """

    x: Tensor
    version: tuple[int, int]  # torch's version counter of x, and the stream on which x was quantized
    dtype: torch.dtype
    pair: OperandPair
    values: tuple[Operand, Operand]
    statistics: list[Statistics]


@dataclass(frozen=True)
class _Weights:
    """A layer's cached quantized weight, its cache key, and its statistics until the observer records them."""

    key: tuple[object, ...]
    source: Tensor  # the unquantized weight: kept alive because the key contains its address (see `version`)
    values: tuple[Operand, Operand]
    statistics: list[Statistics]
    bits: Tensor | None  # the learned bit widths of a sampled weight


class Recorder(Protocol):
    """The methods by which layers pass quantization statistics and weight gradients to an observer (observer.py)."""

    def record(self, layer: int, slot: str, counts: Tensor, choice: Tensor | None, *, switched: bool) -> None: ...

    def record_weight_gradient(self, layer: int, quantized: Tensor, exact: Tensor) -> None: ...


@dataclass
class Shared:
    """The state that the quantized layers of one model share; `Quantization` (fewbits.models.quantize) sets it."""

    recipe: Recipe
    seed: int
    observer: Recorder | None = None
    keep_weights: bool = True  # cache quantized weights until they change
    context: StepContext = field(default_factory=StepContext)
    watching: bool = False  # collect statistics also of plain quantizers; those of mixtures are always collected
    watching_gradients: bool = False  # measure the error of every weight gradient, which takes another GEMM
    last_input: _Input | None = None
    recorded: set[int] = field(default_factory=set)  # layers whose input the observer has recorded in this step
    called: set[int] = field(default_factory=set)  # layers that have computed a product
    positioned: bool = False  # the loop has said which step it is, by `begin` or `attach`
    updates: int = field(default_factory=updates)  # of all optimizers when the model was quantized
    delayed: DelayedScales | None = None  # the state of the slots with delayed scales


class Plan:
    """The six slots of a layer, grouped by tensor: two GEMMs read each of x, w and dy, so each has an OperandPair.

    executed: the names of the GEMMs that are computed from codes and scales. scales: the state of delayed scales, and
    the number there of the layer's first slot; None: all scales are current.
    """

    def __init__(
        self,
        operands: Operands,
        executed: frozenset[str] = frozenset(),
        scales: tuple[DelayedScales, int] | None = None,
    ) -> None:
        self.operands, self.executed = operands, executed
        self.x, self.w, self.dy = (
            OperandPair(operands[first], operands[second], (first, second), executed, scales)
            for first, second in (("fprop.x", "wgrad.x"), ("fprop.w", "dgrad.w"), ("dgrad.dy", "wgrad.dy"))
        )
        self.draws_signs = any(pair.draws_signs for pair in (self.x, self.w, self.dy))
        # A GEMM that requantizes rotated values returns a rotated result: along `in` for x and w, along `out` for dy.
        self.rotated: dict[str, list[tuple[str, int]]] = {gemm: [] for gemm in GEMMS}
        for pair, axis in ((self.x, -1), (self.w, -1), (self.dy, 0)):
            spec = pair.first.spec
            if pair.requantizes and spec is not None and first_quantizer(spec).hadamard:
                self.rotated[pair.names[1].partition(".")[0]].append((pair.names[0], axis))

    def rotate_back(self, gemm: str, result: Tensor, seed: Seed) -> Tensor:
        """Return the result of a GEMM in the basis of its unquantized operands. seed: as for OperandPair."""
        for slot, axis in self.rotated[gemm]:
            spec = self.operands[slot].spec
            assert spec is not None
            spelling = resolve_spelling(first_quantizer(spec), slot, seed)
            result = torch.ops.fewbits.unrotate(result, spelling, axis)
        return result


class QuantizedLinear(nn.Module):
    """A linear layer with quantized GEMMs and the parameters of the layer that it replaces; `quantized` creates it.

    Its subclasses say where the weight is.
    """

    weight: nn.Parameter  # as in the layer that was replaced; an expert, whose matrix is part of a parameter, has none
    bias: nn.Parameter  # or None
    bit_scale: nn.Parameter | None  # b_i of GaussWS eq. 11, one per square of the weight; None without a sampler

    def __init__(
        self, layer: BlockLinear, shared: Shared, index: int, plans: tuple[Plan, Plan], sampler: Sampler | None
    ) -> None:
        """Take over the parameters of `layer` without copying them.

        index: the layer's position among the model's quantized layers. plans: the six slots before and after the
        recipe's switch, a change of quantizers during training. sampler: the noise on the weight; None: no noise.
        """
        nn.Module.__init__(self)
        self.out_features, self.in_features = self.shape = layer.shape
        self.name, self.block, self.part = layer.name, layer.block, layer.part
        self.index, self.plans, self.sampler = index, plans, sampler
        self._adopt(layer)
        self.train(layer.module.training)
        self.output = OUTPUT[shared.recipe.wgrad.output]
        # The shared state is in a list, so that it cannot become a submodule, which would be a cycle for copy and
        # state_dict.
        self.owner = [shared]
        self.bit_scale = None
        if sampler:
            squares = [-(-n // sampler.block) for n in layer.shape]
            self.bit_scale = nn.Parameter(torch.ones(squares, dtype=torch.float32, device=self.matrix.device))
        self._weights: _Weights | None = None

    def _adopt(self, layer: BlockLinear) -> None:
        """Take over the parameters of the layer that this one replaces."""
        linear: Any = layer.module
        self.weight, self.bias = linear.weight, linear.bias

    @property
    def matrix(self) -> Tensor:
        """The weight as out × in, connected to the parameter: a gradient reaches it."""
        return self.weight

    @property
    def quantizes(self) -> bool:
        """Tell whether a slot has a quantizer, before or after the switch."""
        return any(slot.spec is not None for plan in self.plans for slot in plan.operands.values())

    @property
    def gradient(self) -> Tensor | None:
        """The gradient of the weight, in the shape of its parameter."""
        return self.weight.grad

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for copies and pickles, without the cached quantized weight.

        The copy quantizes its weight in its first forward pass.
        """
        return {**self.__dict__, "_weights": None}

    def use(self, before: Plan, after: Plan) -> None:
        """Set the plans before and after the recipe's switch, and drop the cached quantized weight."""
        self.plans, self._weights = (before, after), None

    def _get_name(self) -> str:
        return "QuantizedLinear"

    def extra_repr(self) -> str:
        slots = ", ".join(f"{n}={s.spec or 'high'}" for n, s in self.plans[0].operands.items())
        executed = "".join(f", {gemm} executed" for gemm in GEMMS if gemm in self.plans[0].executed)
        return f"{self.in_features} → {self.out_features}, {slots}{executed}"

    @property
    def bits(self) -> Tensor | None:
        """The learned bit widths b_t (GaussWS eq. 11); None without a sampler.

        There is one width for each square of `sampler.block` × `sampler.block` elements of the weight.
        """
        if self.sampler is None or self.bit_scale is None:
            return None
        return self.sampler.target + self.bit_scale.float() * (self.sampler.init - self.sampler.target)

    @untraced  # which operations a forward pass runs depends on the step
    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda and capture() is None and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(CAPTURED)
        owner, context = self.owner[0], self.owner[0].context
        if not owner.positioned and owner.updates < updates():
            self._refuse_repeated_noise()
        owner.called.add(self.index)
        rows = x.reshape(-1, self.in_features)
        if torch.is_autocast_enabled(x.device.type):
            rows = rows.to(torch.get_autocast_dtype(x.device.type))
        backward = torch.is_grad_enabled()
        if owner.delayed is not None:
            owner.delayed.recording = True  # also in evaluations, whose quantized weights training may reuse
        with torch.no_grad():
            sampled = self.sampler is not None and (self.training or self.sampler.in_evaluation)
            weight = self._cached_weight if owner.keep_weights else self._uncached_weight
            w_forward, w_backward = weight(context, rows.dtype, sampled, backward)
            if owner.delayed is not None:
                owner.delayed.recording = backward
            if backward:
                x_forward, x_backward = self._quantize_input(context, x, rows)
            else:
                x_forward = x_backward = self.plans[context.switched].x.quantize_one(0, rows, self._seeds(context))
        bias = None if self.bias is None else self.bias.to(rows.dtype)
        y = _ThreeGemms.apply(
            *(rows, self.matrix, self.bit_scale if sampled else None, bias),
            *(x_forward, x_backward, w_forward, w_backward, self, context),
        )
        return y.view(*x.shape[:-1], self.out_features)

    def _refuse_repeated_noise(self) -> None:
        """Raise RuntimeError if this layer draws noise in training, of which every step would get the same."""
        pairs = [pair for plan in self.plans for pair in (plan.x, plan.w, plan.dy)]
        if torch.is_grad_enabled() and self.training and (self.sampler or any(pair.needs_seed for pair in pairs)):
            raise RuntimeError(
                f"recipe {self.owner[0].recipe.name} draws noise, but the step is unknown, so every step would get the "
                "same: call quantization.attach(model, optimizer), or quantization.begin(step) before each forward pass"
            )

    def seed(self, context: StepContext, name: str) -> int:
        """Return the seed for a slot's rounding or a GEMM's rotation signs; `name` is the name of the slot or GEMM.

        Seeds differ between steps, micro-batches, ranks and layers. The seed of a weight's slot is the same for all
        micro-batches and ranks of a step.
        """
        slot, *stages = name.split(THEN)
        micro_batch, rank = (0, 0) if slot.endswith(".w") else (context.micro_batch, context.rank)
        own = (self.index, DRAWS.index(slot), *[len(stages)] * bool(stages))
        return step_seed(self.owner[0].seed, context.step, micro_batch, rank, *own)

    def _seeds(self, context: StepContext) -> Seed:
        return partial(self.seed, context)

    def sampler_seed(self, context: StepContext) -> int:
        return step_seed(self.owner[0].seed, context.step, self.index, DRAWS.index("sampler"))

    # ---- x and dy

    def _quantize_input(self, context: StepContext, x: Tensor, rows: Tensor) -> tuple[Operand, Operand]:
        """Return x quantized for fprop, and x quantized for wgrad. rows: x as tokens × in, in the compute dtype.

        If several layers (q, k, v) read the same tensor with the same plan, and nothing is random, the first of these
        layers quantizes it and the next ones reuse the result.
        """
        owner, pair = self.owner[0], self.plans[context.switched].x
        last, version = owner.last_input, (x._version, current_stream(x.device))
        if (
            last is None
            or (last.pair is not pair or last.dtype != rows.dtype)
            or (last.x is not x or last.version != version)
        ):
            statistics: list[Statistics] = []
            values = pair(rows, self._seeds(context), statistics, watch=owner.watching)
            last = _Input(x, version, rows.dtype, pair, values, statistics)
            owner.last_input = None if pair.needs_seed else last
        if not self._recomputes():
            owner.recorded.add(self.index)
            self._record(last.statistics, context)
        return last.values

    def quantize_gradient(
        self, context: StepContext, dy: Tensor, for_x: bool, for_weight: bool
    ) -> tuple[Operand, Operand]:
        """Return dy quantized for dgrad, and dy quantized for wgrad.

        for_x: dgrad is computed. for_weight: wgrad is computed. If only one of them is, both elements of the result are
        dy quantized for it.
        """
        owner, pair = self.owner[0], self.plans[context.switched].dy
        owner.last_input = None  # no further layer will read this input, because the forward pass is over
        if owner.delayed is not None:
            owner.delayed.recording = True
        statistics: list[Statistics] = []
        if for_x and for_weight:
            values = pair(dy, self._seeds(context), statistics, watch=owner.watching)
        else:
            which = 0 if for_x else 1
            values = (pair.quantize_one(which, dy, self._seeds(context), statistics, watch=owner.watching),) * 2
        self._record(statistics, context)
        return values

    def _recomputes(self) -> bool:
        """Tell whether the running forward pass is a repetition, by activation checkpointing in the backward pass.

        A repetition must not record statistics, because the first forward pass has recorded them.
        """
        return torch._C._current_graph_task_id() != -1 and self.index in self.owner[0].recorded

    def _record(self, statistics: list[Statistics], context: StepContext) -> None:
        observer = self.owner[0].observer
        if observer is not None:
            switched = context.switched and self.plans[0] is not self.plans[1]
            for slot, counts, choice in statistics:
                observer.record(self.index, slot, counts, choice, switched=switched)

    # ---- w

    def _cached_weight(
        self, context: StepContext, dtype: torch.dtype, sampled: bool, training: bool
    ) -> tuple[Operand, Operand]:
        """Return w quantized for fprop and w quantized for dgrad, from the cache if w has not changed.

        training: record the statistics of w, once for each quantization; False in evaluation, which must not change the
        statistics of training. The other arguments: see `_source`.
        """
        w, draws_signs = self.matrix, self.plans[context.switched].w.draws_signs
        key = (
            *(*version(w), dtype, sampled, self.owner[0].watching),
            *(context.numbers if draws_signs else (context.step,), context.switched),
            None if self.bit_scale is None else self.bit_scale._version,
        )
        if self._weights is None or self._weights.key != key:
            self._weights = None  # frees the old values before the new ones are allocated
            bits = self.bits if sampled else None
            self._weights = _Weights(key, w.detach(), *self._quantize_weight(context, dtype, sampled, bits), bits)
        if training:
            self._record(self._weights.statistics, context)
            self._weights.statistics.clear()
        return self._weights.values

    def _uncached_weight(
        self, context: StepContext, dtype: torch.dtype, sampled: bool, training: bool
    ) -> tuple[Operand, None]:
        """Return w quantized for fprop, without caching it, and None, because w for dgrad is not computed here.

        The backward pass quantizes w for dgrad, so that no whole sharded weight is kept between the two passes.
        training: record the statistics of w in the first micro-batch of a step on the first rank or, if the rotation of
        w has new signs for every GEMM, in every micro-batch; False in evaluation.
        """
        repeated = context.micro_batch or context.rank
        if not training or (repeated and not self.plans[context.switched].w.draws_signs):
            return self.quantize_weight_for(0, context, dtype, sampled), None
        (w, _), statistics = self._quantize_weight(context, dtype, sampled)
        if not self._recomputes():
            self._record(statistics, context)
        return w, None

    def quantize_weight_for(self, which: int, context: StepContext, dtype: torch.dtype, sampled: bool) -> Operand:
        """Return w quantized for fprop (which=0) or for dgrad (which=1), without the cache of quantized weights."""
        pair = self.plans[context.switched].w
        return pair.quantize_one(which, self._source(context, dtype, sampled), self._seeds(context))

    def _kept_bits(self) -> Tensor:
        """Return the bit widths with which the weight was sampled in the forward pass, from the cache if possible."""
        kept, scale = self._weights, self.bit_scale
        if kept is not None and kept.bits is not None and scale is not None and kept.key[-1] == scale._version:
            return kept.bits
        bits = self.bits
        assert bits is not None
        return bits

    def _quantize_weight(
        self, context: StepContext, dtype: torch.dtype, sampled: bool, bits: Tensor | None = None
    ) -> tuple[tuple[Operand, Operand], list[Statistics]]:
        """Return w quantized for fprop and w quantized for dgrad, as a pair, and the statistics of both."""
        statistics: list[Statistics] = []
        source, watch = self._source(context, dtype, sampled, bits), self.owner[0].watching
        return self.plans[context.switched].w(source, self._seeds(context), statistics, watch=watch), statistics

    def _source(self, context: StepContext, dtype: torch.dtype, sampled: bool, bits: Tensor | None = None) -> Tensor:
        """Return the unquantized weight, with the sampler's noise if `sampled`, in the compute dtype.

        bits: the learned bit widths, if they are known already.
        """
        if not sampled:
            return self.matrix.detach().to(dtype)
        assert self.sampler is not None
        noise, seed = NOISE[self.sampler.kind], self.sampler_seed(context)
        return ops.sample_weight(
            self.matrix.detach(), self.bits if bits is None else bits, seed, noise, self.sampler.block, dtype
        )


class _OfLinear(QuantizedLinear, nn.Linear):  # type: ignore[misc]
    """A quantized nn.Linear."""


@cache
def _of_conv1d() -> type[QuantizedLinear]:
    """Return the class of quantized Conv1D layers; transformers, which defines Conv1D, is imported only here."""
    from transformers.pytorch_utils import Conv1D

    class _OfConv1D(QuantizedLinear, Conv1D):
        def _adopt(self, layer: BlockLinear) -> None:
            super()._adopt(layer)
            self.nx, self.nf = self.in_features, self.out_features

        @property
        def matrix(self) -> Tensor:
            return super().matrix.t()

        def __reduce__(self) -> tuple[Any, ...]:
            return _empty_conv1d, (), self.__getstate__()

    return _OfConv1D


def _empty_conv1d() -> QuantizedLinear:
    """Return an empty quantized Conv1D, into which pickle and copy put the state."""
    cls = _of_conv1d()
    return cls.__new__(cls)


def quantized(
    layer: BlockLinear, shared: Shared, index: int, plans: tuple[Plan, Plan], sampler: Sampler | None
) -> QuantizedLinear:
    """Return a quantized layer with the parameters of an nn.Linear or Conv1D."""
    kind = _of_conv1d() if is_conv1d(layer.module) else _OfLinear
    return kind(layer, shared, index, plans, sampler)


def product(gemm: str, a: Operand, b: Operand, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """Return the product of a GEMM's operands (x · wᵀ, dy · w or dyᵀ · x) plus bias, rounded to dtype only at the end.

    Codes and scales are multiplied by torch's scaled product; they lie along the sum already. The products of ordinary
    tensors are summed in FP32; for an FP32 result of BF16 operands, `matmul_fp32` is used, because torch has no such
    product on CPUs.
    """
    if isinstance(a, ScaledOperand):
        assert isinstance(b, ScaledOperand)
        return scaled_product(a, b, dtype, bias)
    assert isinstance(b, Tensor)
    if bias is not None:
        return linear(a, b, bias)
    a, b = a.t() if gemm == "wgrad" else a, b.t() if gemm == "fprop" else b
    return matmul(a, b) if dtype == a.dtype else matmul_fp32(a, b).to(dtype)


def _parts(operand: Operand | None) -> tuple[tuple[Tensor | None, Tensor | None, Tensor | None], str | None]:
    """Return an operand as three values that `save_for_backward` accepts, and the form of a ScaledOperand."""
    return (operand[:3], operand.form) if isinstance(operand, ScaledOperand) else ((operand, None, None), None)


def _operand(parts: Sequence[Tensor], form: str | None) -> Any:
    """Return the operand (ScaledOperand, Tensor or None) for which `_parts` returned these values."""
    return parts[0] if form is None else ScaledOperand(parts[0], parts[1], parts[2], form)


class _ThreeGemms(torch.autograd.Function):
    """Multiplies the quantized x and w in the forward pass; computes dgrad and wgrad in the backward pass.

    w_backward=None: w is quantized again in the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bit_scale: Tensor | None,
        bias: Tensor | None,
        x_forward: Operand,
        x_backward: Operand,
        w_forward: Operand,
        w_backward: Operand | None,
        layer: QuantizedLinear,
        context: StepContext,
    ) -> Tensor:
        ctx.layer, ctx.context = layer, context
        ctx.watched = layer.owner[0].watching_gradients
        original = x if ctx.watched or layer.plans[context.switched].x.hook is not None else None
        # The context from which rotation signs are drawn is saved with the operands, because both operands of a GEMM
        # need the same signs: activation checkpointing may compute the operands again in another context.
        draws_signs = layer.plans[context.switched].draws_signs
        signs_context = torch.tensor(context.numbers, device="cpu") if draws_signs else None
        x_parts, x_form = _parts(x_backward)
        w_parts, w_form = _parts(w_backward)
        ctx.forms = x_form, w_form
        ctx.save_for_backward(weight, bit_scale, *x_parts, *w_parts, original, signs_context)
        return product("fprop", x_forward, w_forward, x.dtype, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        kind = dy.device.type  # autocast is disabled, because it would compute FP32 products in a lower precision
        with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
            return _ThreeGemms.gradients(ctx, dy.contiguous())

    @staticmethod
    def gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, bit_scale, *parts, original, signs_context = ctx.saved_tensors
        x, w = _operand(parts[:3], ctx.forms[0]), _operand(parts[3:], ctx.forms[1])
        layer, context = ctx.layer, ctx.context
        if signs_context is not None:
            step, micro_batch, rank = signs_context.tolist()
            context = StepContext(step, micro_batch, rank, context.switched)
        for_x, for_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        dy_dgrad, dy_wgrad = layer.quantize_gradient(context, dy, for_x, for_weight)
        if w is None and for_x:
            w = layer.quantize_weight_for(1, context, dy.dtype, bit_scale is not None)
        plan, seeds = layer.plans[context.switched], layer._seeds(context)
        dx = plan.rotate_back("dgrad", product("dgrad", dy_dgrad, w, dy.dtype), seeds) if for_x else None
        if dx is not None and plan.x.hook is not None:
            dx = plan.x.gradient(dx, original, seeds)
        d_bias = dy.sum(0) if ctx.needs_input_grad[3] else None
        if not for_weight:
            return dx, None, None, d_bias, *[None] * 6
        dw = plan.rotate_back("wgrad", product("wgrad", dy_wgrad, x, layer.output or dy.dtype), seeds)
        observer = layer.owner[0].observer
        if ctx.watched and observer is not None:
            observer.record_weight_gradient(layer.index, dw, product("wgrad", dy, original, torch.float32))
        if plan.w.hook is not None:
            dw = plan.w.gradient(dw, layer._source(context, dy.dtype, bit_scale is not None), seeds)
        d_scale = None
        if bit_scale is not None and ctx.needs_input_grad[2]:
            sampler, bits = layer.sampler, layer._kept_bits()
            assert sampler is not None
            d_bits = ops.sample_weight_backward(
                dw, weight, bits, layer.sampler_seed(context), NOISE[sampler.kind], sampler.block
            )
            d_scale = d_bits * (sampler.init - sampler.target)
        return dx, dw.to(weight.dtype), d_scale, d_bias, *[None] * 6
