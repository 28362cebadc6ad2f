"""Implement a linear layer whose three GEMMs read quantized operands.

    forward    y  = Q(x) · Q(w)ᵀ            x: tokens × in, w: out × in, dy: tokens × out
    backward   dx = Q(dy) · Q(w)            each Q is that operand's slot of the recipe
               dw = Q(dy)ᵀ · Q(x)           rounded to the recipe's wgrad.output, then FP32

x and w are quantized in the dtype the layer computes in (that of x, or autocast's). The FP32 master copy of w is cast
to it first; a sampler adds its noise to the master copy before the cast. The quantized x of wgrad is made in forward
and kept instead of x. w is quantized once for as long as it does not change, so once per optimizer step, except for
rotations whose signs are drawn for every GEMM. With `keep_weights=False`, w is quantized again in each forward and
backward, to the same bits; this is for sharded weights, so that no process keeps a whole one between them. The gradient
passes straight through every rounding. A bias is added in FP32, before y is rounded, as in nn.Linear.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.optim.optimizer import register_optimizer_step_post_hook

from fewbits.kernels.products import linear
from fewbits.kernels.seeds import derive_seed
from fewbits.models.gemm import product
from fewbits.models.operand_pair import OperandPair
from fewbits.models.recipe import GEMMS, SLOTS, Operands, Recipe, Sampler
from fewbits.models.untraced import untraced

DRAWS = (
    *SLOTS,
    "sampler",
    *GEMMS,
)  # seeds depend on the index here; GEMMs are for signs
NOISE = {"gaussws": "gaussian", "diffq": "uniform"}
OUTPUT = {"compute": None, "bf16": torch.bfloat16, "fp32": torch.float32}  # None: the dtype of the operands


@dataclass(frozen=True)
class StepContext:
    """The position in training, on which seeds depend, and whether the recipe has switched."""

    step: int = 0
    micro_batch: int = 0
    rank: int = 0
    switched: bool = False

    @property
    def numbers(self) -> tuple[int, int, int]:
        return self.step, self.micro_batch, self.rank


class _Updates:
    """A counter of all optimizers' updates; fused ones, and those that write to `.data`, leave no other trace."""

    count = 0

    @classmethod
    def add(cls, *_: object) -> None:
        cls.count += 1


register_optimizer_step_post_hook(_Updates.add)

Statistics = tuple[str, Tensor, Tensor | None]  # a slot, its counts (kernels/README.md), and a mixture's choices


@dataclass
class _Weights:
    """The quantized weight, the key it was made for, and its statistics that are not recorded yet."""

    key: tuple[object, ...]
    source: Tensor  # kept alive, so that no other weight can get the address that the key contains
    values: tuple[Tensor, Tensor]
    statistics: list[Statistics]

    def take(self) -> list[Statistics]:
        statistics, self.statistics = self.statistics, []
        return statistics


class Owner(Protocol):
    """The interface of the `Quantization` that layers share (fewbits.models.quantize)."""

    recipe: Recipe
    seed: int
    context: StepContext
    watching: bool
    watching_gradients: bool
    keep_weights: bool

    def recomputes(self, layer: QuantizedLinear) -> bool: ...

    def quantize_input(
        self, layer: QuantizedLinear, pair: OperandPair, x: Tensor, rows: Tensor
    ) -> tuple[Tensor, Tensor]: ...

    def quantize_gradient(
        self, layer: QuantizedLinear, pair: OperandPair, dy: Tensor, context: StepContext, for_x: bool, for_weight: bool
    ) -> tuple[Tensor, Tensor]: ...

    def record(self, layer: QuantizedLinear, statistics: list[Statistics], context: StepContext) -> None: ...

    def record_weight_gradient(self, layer: QuantizedLinear, quantized: Tensor, exact: Tensor) -> None: ...


class Plan:
    """The operands of a layer, paired by tensor."""

    def __init__(self, operands: Operands) -> None:
        o = operands
        self.operands = o
        self.x = OperandPair(o.fprop_x, o.wgrad_x, ("fprop.x", "wgrad.x"))
        self.w = OperandPair(o.fprop_w, o.dgrad_w, ("fprop.w", "dgrad.w"))
        self.dy = OperandPair(o.dgrad_dy, o.wgrad_dy, ("dgrad.dy", "wgrad.dy"))
        self.draws_signs = any(pair.draws_signs for pair in (self.x, self.w, self.dy))


class QuantizedLinear(nn.Linear):
    """A linear layer with quantized GEMMs and the parameters of an nn.Linear; `quantize` creates it."""

    bit_scale: nn.Parameter | None  # b_i of GaussWS eq. 11, one per square

    def __init__(
        self,
        linear: nn.Linear,
        owner: Owner,
        *,
        name: str,
        index: int,
        block: int,
        plans: tuple[Plan, Plan],
        sampler: Sampler | None,
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.name, self.index, self.block = name, index, block
        self.part = getattr(linear, "part", None)
        self.plans, self.sampler = plans, sampler
        self.output = OUTPUT[owner.recipe.wgrad.output]
        self.owner = [owner]  # in a list, so that it is no submodule, and copy and state_dict follow no cycle
        self.bit_scale = None
        if sampler:
            squares = [-(-n // sampler.block) for n in linear.weight.shape]
            self.bit_scale = nn.Parameter(torch.ones(squares, dtype=torch.float32, device=linear.weight.device))
        self._weights: _Weights | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles, without the quantized weight, which they make again."""
        return {**self.__dict__, "_weights": None}

    def use(self, before: Plan, after: Plan) -> None:
        """Set the operands before and after the recipe's switch; a cached weight was made for the previous ones."""
        self.plans, self._weights = (before, after), None

    def extra_repr(self) -> str:
        slots = ", ".join(f"{n}={s.spec or 'high'}" for n, s in self.plans[0].operands.items())
        return f"{self.in_features} → {self.out_features}, {slots}"

    @property
    def bits(self) -> Tensor | None:
        """The bit widths b_t, one per square of the weight (GaussWS eq. 11)."""
        if self.sampler is None or self.bit_scale is None:
            return None
        return self.sampler.target + self.bit_scale.float() * (self.sampler.init - self.sampler.target)

    @untraced  # its operations depend on the step
    def forward(self, x: Tensor) -> Tensor:
        owner, context = self.owner[0], self.owner[0].context
        plan = self.plans[context.switched]
        rows = x.reshape(-1, self.in_features)
        if torch.is_autocast_enabled(x.device.type):
            rows = rows.to(torch.get_autocast_dtype(x.device.type))
        backward = torch.is_grad_enabled()
        with torch.no_grad():
            sampled = self.sampler is not None and (self.training or self.sampler.in_evaluation)
            weight = self._cached_weight if owner.keep_weights else self._uncached_weight
            w_forward, w_backward = weight(plan, context, rows.dtype, sampled, backward)
            if backward:
                x_forward, x_backward = owner.quantize_input(self, plan.x, x, rows)
            else:
                x_forward = x_backward = plan.x.quantize_one(0, rows, lambda name: self.seed(context, name))
        bias = None if self.bias is None else self.bias.to(rows.dtype)
        y = _ThreeGemms.apply(
            *(rows, self.weight, self.bit_scale if sampled else None, bias),
            *(x_forward, x_backward, w_forward, w_backward, self, plan, context),
        )
        return y.view(*x.shape[:-1], self.out_features)

    def seed(self, context: StepContext, name: str) -> int:
        """Return a seed that is independent for every step, micro-batch, rank, layer and slot or GEMM.

        The seed of a weight's slot is the same for all micro-batches and ranks of a step.
        """
        micro_batch, rank = (0, 0) if name.endswith(".w") else (context.micro_batch, context.rank)
        return derive_seed(self.owner[0].seed, context.step, micro_batch, rank, self.index, DRAWS.index(name))

    def sampler_seed(self, context: StepContext) -> int:
        return derive_seed(self.owner[0].seed, context.step, self.index, DRAWS.index("sampler"))

    def _cached_weight(
        self, plan: Plan, context: StepContext, dtype: torch.dtype, sampled: bool, training: bool
    ) -> tuple[Tensor, Tensor]:
        """Return w for fprop and for dgrad, cached.

        Its statistics are recorded only when training uses it, so that evaluation leaves no trace.
        """
        owner, w = self.owner[0], self.weight
        key: tuple[object, ...] = (
            _Updates.count,
            w._version,
            w.data_ptr(),
            dtype,
            context.step,
            context.switched,
            sampled,
            owner.watching,
        )
        if plan.w.draws_signs:
            key = (*key, context.micro_batch, context.rank)
        if self.bit_scale is not None:
            key = (*key, self.bit_scale._version)
        if self._weights is None or self._weights.key != key:
            self._weights = None  # frees the old values before the new ones are allocated
            self._weights = _Weights(key, w.detach(), *self._quantize_weight(plan, context, dtype, sampled))
        if training:
            owner.record(self, self._weights.take(), context)
        return self._weights.values

    def _uncached_weight(
        self, plan: Plan, context: StepContext, dtype: torch.dtype, sampled: bool, training: bool
    ) -> tuple[Tensor, None]:
        """Return w for fprop, not cached, but recorded as often as cached weights."""
        if not training or (context.micro_batch and not plan.w.draws_signs):
            return self.quantize_weight_for(0, plan, context, dtype, sampled), None
        (w, _), statistics = self._quantize_weight(plan, context, dtype, sampled)
        if not self.owner[0].recomputes(self):
            self.owner[0].record(self, statistics, context)
        return w, None

    def quantize_weight_for(
        self, which: int, plan: Plan, context: StepContext, dtype: torch.dtype, sampled: bool
    ) -> Tensor:
        """Return w for fprop (which=0) or for dgrad (1) alone."""
        return plan.w.quantize_one(which, self._source(context, dtype, sampled), lambda name: self.seed(context, name))

    def _quantize_weight(
        self, plan: Plan, context: StepContext, dtype: torch.dtype, sampled: bool
    ) -> tuple[tuple[Tensor, Tensor], list[Statistics]]:
        """Return w for fprop and for dgrad, and their statistics."""
        statistics: list[Statistics] = []
        values = plan.w(
            self._source(context, dtype, sampled),
            lambda name: self.seed(context, name),
            lambda *item: statistics.append(item),
            watch=self.owner[0].watching,
        )
        return values, statistics

    def _source(self, context: StepContext, dtype: torch.dtype, sampled: bool) -> Tensor:
        """Return the weight before it is quantized, in the dtype that the layer computes in."""
        if not sampled:
            return self.weight.detach().to(dtype)
        assert self.sampler is not None
        noise, seed = NOISE[self.sampler.kind], self.sampler_seed(context)
        return torch.ops.fewbits.sample_weight(self.weight.detach(), self.bits, seed, noise, self.sampler.block, dtype)


class _ThreeGemms(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bit_scale: Tensor | None,
        bias: Tensor | None,
        x_forward: Tensor,
        x_backward: Tensor,
        w_forward: Tensor,
        w_backward: Tensor | None,
        layer: QuantizedLinear,
        plan: Plan,
        context: StepContext,
    ) -> Tensor:
        ctx.layer, ctx.plan, ctx.context = layer, plan, context
        ctx.watched = layer.owner[0].watching_gradients
        original = x if ctx.watched else None
        # Saved with the operands, because activation checkpointing may make them again in another context, with other
        # signs.
        signs_context = torch.tensor(context.numbers) if plan.draws_signs else None
        ctx.save_for_backward(weight, bit_scale, x_backward, w_backward, original, signs_context)
        if bias is not None:
            return linear(x_forward, w_forward, bias)
        return product(x_forward, w_forward.t(), x_forward.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(dy.device.type, enabled=False):  # autocast would round FP32 products
            return _ThreeGemms.gradients(ctx, dy.contiguous())

    @staticmethod
    def gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, bit_scale, x, w, original, signs_context = ctx.saved_tensors
        layer, plan, context = ctx.layer, ctx.plan, ctx.context
        if signs_context is not None:
            step, micro_batch, rank = signs_context.tolist()
            context = StepContext(step, micro_batch, rank, context.switched)
        owner = layer.owner[0]
        for_x, for_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        dy_dgrad, dy_wgrad = owner.quantize_gradient(layer, plan.dy, dy, context, for_x, for_weight)
        if w is None and for_x:
            w = layer.quantize_weight_for(1, plan, context, x.dtype, bit_scale is not None)
        dx = product(dy_dgrad, w, dy.dtype) if for_x else None
        d_bias = dy.sum(0) if ctx.needs_input_grad[3] else None
        if not for_weight:
            return dx, None, None, d_bias, *[None] * 7
        dw = product(dy_wgrad.t(), x, layer.output or x.dtype)
        if original is not None:
            owner.record_weight_gradient(layer, dw, product(dy.t(), original, torch.float32))
        d_scale = None
        if bit_scale is not None and ctx.needs_input_grad[2]:
            sampler, bits = layer.sampler, layer.bits
            assert sampler is not None
            d_bits = torch.ops.fewbits.sample_weight_backward(
                dw, weight, bits, layer.sampler_seed(context), NOISE[sampler.kind], sampler.block
            )
            d_scale = d_bits * (sampler.init - sampler.target)
        return dx, dw.to(weight.dtype), d_scale, d_bias, *[None] * 7
