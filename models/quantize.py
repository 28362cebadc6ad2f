"""Replace the linear layers of any module by quantized ones, whose operands a recipe defines.

weights.py says which layers these are. What is not quantized is named, with the reason, by `repr(quantization)` and
`layer_table`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fewbits.models.delayed import DelayedScales
from fewbits.models.execution import Executor, WhyEmulated, check_execution, describe, why_emulated
from fewbits.models.experts import ExpertLinear, install
from fewbits.models.layer_table import kept_by
from fewbits.models.networks.layers import Linear
from fewbits.models.observer import Observer
from fewbits.models.quantized_linear import Plan, QuantizedLinear, Shared, StepContext, quantized
from fewbits.models.recipe import EMULATE, PARTS, SLOTS, Operands, Recipe, Rule, Wgrad, parts
from fewbits.models.runtime import untraced, updates
from fewbits.models.weights import BlockLinear, OtherWeight, active_share, weights

UNKNOWN_STEP = (
    "the optimizer has state of earlier steps, but does not say how many, so noise would start again: call "
    "quantization.attach(model, optimizer, step=N) with the number of updates so far"
)
STEP = "fewbits_step"  # the key under which `attach` keeps the number of updates in the optimizer's first group


@dataclass(repr=False)
class Quantization(Shared):
    """The quantized layers of one model, and the state that they share: recipe, position in training, observer.

    A training loop calls `attach` once, which installs hooks that count the optimizer's updates and the model's forward
    passes. Alternatively, the loop calls `begin(step, micro_batch)` before every forward pass. Seeds depend on step and
    micro-batch, so a repeated step gets the same noise.
    """

    observer: Observer | None = None
    layers: list[QuantizedLinear] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)  # names of the layers that the recipe's `keep` selects
    summary: str = ""  # how much is quantized, and what is not
    execution: str = ""  # which GEMMs are executed on which device, and why others are not; empty: all are emulated
    penalised: bool = False  # a caller has asked for the penalty, so it adds it to the loss
    _hooks: list[RemovableHandle] = field(default_factory=list)  # those of `attach`
    _optimizer: torch.optim.Optimizer | None = None
    _begin: Callable[[], None] | None = None
    _looked: bool = False

    def __repr__(self) -> str:
        return f"<{self.recipe.name}: {self.summary}>"

    def begin(self, step: int, micro_batch: int = 0, *, rank: int = 0, progress: float = 0.0) -> None:
        """Set the step context (the position in training) of the following forward passes.

        step, micro_batch, rank: numbers from 0, on which the seeds of random numbers depend.
        progress: the fraction of training that is done, 0 to 1. If it is at least the recipe's `switch.at`, the layers
            use the recipe's quantizers for the time after the switch.
        """
        if self._unpenalised():
            warnings.warn(
                f"recipe {self.recipe.name} has a penalty on bit widths: add quantization.penalty() to the loss, or "
                "call quantization.attach(model, optimizer), which adds its gradient",
                stacklevel=2,
            )
            self.penalised = True  # warn once
        self.context, self.positioned = StepContext(step, micro_batch, rank, self.is_switched(progress)), True
        if self.delayed is not None:
            self.delayed.advance(step)
        self.last_input = None
        self.recorded.clear()
        if self.observer is not None:
            self.watching = self.observer.watches(step)
            self.watching_gradients = self.observer.watches_gradients(step) and micro_batch == 0

    def is_switched(self, progress: float) -> bool:
        """Tell whether the layers use the quantizers for the time after the switch; progress: as for `begin`."""
        return self.recipe.switches and progress >= self.recipe.switch.at

    def attach(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, steps: int | None = None, step: int | None = None
    ) -> None:
        """Install hooks that call `begin`, and add the gradient of the sampler's penalty unless `penalty` is called.

        The optimizer's updates are counted as steps, and the forward passes of training between them as micro-batches.
        The number of updates is part of the optimizer's state dict, so a training that is resumed by
        `optimizer.load_state_dict`, before or after this call, continues with the noise of an uninterrupted one. The
        rank is that of torch's process group.
        steps: the number of steps of the whole training; required if the recipe switches during training.
        step: the number of updates that have happened, if the optimizer's state does not say it.
        """
        if steps is None and self.recipe.switches:
            raise ValueError(
                f"recipe {self.recipe.name} switches at {self.recipe.switch.at} of training: pass steps= to attach, "
                "or call begin(step, progress=…) yourself"
            )
        known = optimizer.param_groups[0].get(STEP)
        if step is None and known is None and optimizer.state:
            raise ValueError(UNKNOWN_STEP)
        trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        sampled = [layer for layer in self.layers if layer.bit_scale is not None]
        if missing := [layer.name for layer in sampled if id(layer.bit_scale) not in trained]:
            message = f"the optimizer does not train the bit widths of {_abbreviate(missing)}: create it after quantize"
            warnings.warn(message, stacklevel=2)
        for hook in self._hooks:
            hook.remove()
        self._optimizer = optimizer
        self._count(step if step is not None else known if known is not None else self.context.step)
        in_group = dist.is_available() and dist.is_initialized()
        micro_batch, rank = -1, dist.get_rank() if in_group and not self.context.rank else self.context.rank

        def begin() -> None:
            done = optimizer.param_groups[0].get(STEP)
            if done is None:
                raise RuntimeError(UNKNOWN_STEP)
            self.begin(done, max(micro_batch, 0), rank=rank, progress=done / steps if steps else 0.0)

        @untraced
        def forward(module: nn.Module, *_: object) -> None:
            nonlocal micro_batch
            if module is model and model.training and torch.is_grad_enabled():  # a copy of the model has this hook, too
                if self.context.step != optimizer.param_groups[0].get(STEP):
                    micro_batch = -1  # another state of the optimizer has been loaded
                micro_batch += 1
                begin()

        def before_update(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            closure = args[1] if len(args) > 1 else kwargs.get("closure")  # the first argument is the optimizer
            if closure is None:
                self._add_penalty(optimizer)
                return None

            def with_penalty() -> Any:  # a closure may set gradients to zero, so the penalty's come after it
                loss = closure()
                self._add_penalty(optimizer)
                return loss

            return (args[0], with_penalty) if len(args) > 1 else args, {
                **kwargs,
                "closure": with_penalty,
            } if kwargs else {}

        def after_update(*_: object) -> None:
            nonlocal micro_batch
            if STEP in optimizer.param_groups[0]:
                self._count(optimizer.param_groups[0][STEP] + 1)
            micro_batch = -1
            begin()
            self._warn_of_layers_never_called()

        def loaded(*_: object) -> None:
            if STEP in optimizer.param_groups[0]:
                begin()

        self._begin = begin
        self._hooks = [
            model.register_forward_pre_hook(forward),
            optimizer.register_step_pre_hook(before_update),
            optimizer.register_step_post_hook(after_update),
            optimizer.register_load_state_dict_post_hook(loaded),
        ]
        begin()

    def _add_penalty(self, optimizer: torch.optim.Optimizer) -> None:
        """Add the gradient of the sampler's penalty, unless the loop adds the penalty to the loss."""
        if self.penalised:
            return
        with torch.enable_grad():
            if (penalty := self.penalty()) is not None:
                scale = getattr(optimizer, "grad_scale", None)  # a GradScaler's, if a fused optimizer divides by it
                (penalty if scale is None else penalty * scale.to(penalty.device)).backward()
        self.penalised = False

    def _warn_of_layers_never_called(self) -> None:
        """Warn once, after the first update, of layers whose weight the model reads without calling the layer."""
        if self._looked:
            return
        self._looked = True
        layers = [layer for layer in self.layers if layer.quantizes and not isinstance(layer, ExpertLinear)]
        if unused := [layer.name for layer in layers if layer.index not in self.called]:
            warnings.warn(
                f"{_abbreviate(unused)}: never called in the first step; if the model reads these weights directly, as "
                "Mamba does, they are not quantized",
                stacklevel=2,
            )

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs besides the model's and the optimizer's state: step, seed and recipe.

        With delayed scales it also has their history, and all ranks must call this.
        """
        delayed = {} if self.delayed is None else {"delayed": self.delayed.state()}
        return {"step": self.context.step, "seed": self.seed, "recipe": self.recipe.to_dict()} | delayed

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of a checkpoint; raise ValueError if it was made with another seed or recipe."""
        if state["seed"] != self.seed:
            raise ValueError(f"the checkpoint has the rounding seed {state['seed']}: pass it to quantize(…, seed=…)")
        if Recipe.from_dict(state["recipe"]).without_texts != self.recipe.without_texts:
            raise ValueError(
                f"the checkpoint was trained with another recipe than {self.recipe.name}, or other settings of it"
            )
        self._count(state["step"])
        if self.delayed is not None:
            self.delayed.load_state(state["delayed"])
        if self._begin is None:
            self.begin(state["step"], rank=self.context.rank)
        else:
            self._begin()

    def _count(self, step: int) -> None:
        if self._optimizer is not None:
            self._optimizer.param_groups[0][STEP] = step

    def _unpenalised(self) -> bool:
        """Tell whether an update has happened without the penalty that the recipe has."""
        return bool(
            (self.recipe.sampler.penalty and not self.penalised and not self._hooks)
            and (self.called and updates() > self.updates and any(layer.sampler for layer in self.layers))
        )

    def penalty(self) -> Tensor | None:
        """Return the penalty to add to the loss: λ · Σ over layers of mean |b_t − target| (GaussWS eq. 12).

        λ is the recipe's `sampler.penalty`, target its `sampler.target`; b_t are a layer's learned bit widths. Return
        None if λ is 0 or no layer has a sampler.
        """
        if not self.recipe.sampler.penalty:
            return None
        terms = (self.penalty_term(layer) for layer in self.layers)
        return self.weighted([term for term in terms if term is not None])

    def penalty_term(self, layer: QuantizedLinear) -> Tensor | None:
        """Return the mean of |b_t − target| over a layer's bit widths b_t; None if the layer has no sampler."""
        self.penalised |= torch.is_grad_enabled()  # otherwise the caller only looks at it
        bits = layer.bits
        return None if bits is None else (bits - self.recipe.sampler.target).abs().mean()

    def weighted(self, terms: list[Tensor]) -> Tensor | None:
        """Return `sampler.penalty` (λ) times the sum of the layers' penalty terms; None if the list is empty."""
        return self.recipe.sampler.penalty * torch.stack(terms).sum() if terms else None

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for copies and pickles, without the cached input and without the hooks of `attach`."""
        detached: dict[str, Any] = {"_hooks": [], "_optimizer": None, "_begin": None, "positioned": False}
        return {**self.__dict__, "last_input": None, **detached}


def quantize(
    model: nn.Module,
    recipe: Recipe,
    *,
    seed: int = 0,
    observer: Observer | None = None,
    keep_weights: bool = True,
) -> Quantization:
    """Replace the linear layers of the model's blocks, in place, by quantized ones with the same parameters.

    Create optimizers afterwards, because a sampler adds a parameter `bit_scale` to every layer with noise.
    seed: the rounding seed, from which the seeds of stochastic rounding, noise and rotation signs are derived.
    observer: collects statistics of the quantized operands.
    keep_weights: True quantizes and casts each weight once per update and keeps the result; False does so in every
        forward and backward pass, to save memory.

    >>> quantization = quantize(model, Recipe.from_dict({"fprop": {"x": "e4m3:1x128:amax", "w": "e4m3:128x128:amax"}}))
    >>> quantization.attach(model, optimizer)   # or quantization.begin(step) before every forward
    """
    every = list(weights(model))
    linears = [weight for weight in every if isinstance(weight, BlockLinear)]
    if not linears:
        raise ValueError(f"{type(model).__name__} has no linear layer in its blocks to quantize")
    blocks = 1 + max(layer.block for layer in linears)
    quantization = Quantization(recipe, seed, observer, keep_weights)
    if recipe.delayed.slots:
        quantization.delayed = DelayedScales(recipe.delayed, len(linears) * len(SLOTS))
    by_rule = dict(_operands_by_rule(recipe))
    kept = keep(recipe, linears, blocks)
    _check_parts(recipe, linears)
    rules = {layer.name: rule_of(recipe, layer, blocks) for layer in linears if layer.name not in kept}
    if unused := [rule for rule in recipe.rules if rule not in rules.values()]:
        raise ValueError(f"rules: no layer that `keep` and earlier rules leave has {unused[0].match}")
    _check_quantizes(recipe, rules, kept)
    on = Executor.of(next(linears[0].module.parameters()).device, recipe.execute)
    check_execution(recipe, linears, kept, on)
    plans: dict[Any, tuple[Plan, Plan]] = {}
    whys = []
    experts: dict[nn.Module, list[ExpertLinear]] = {}
    for index, layer in enumerate(linears):
        is_kept = layer.name in kept
        sampler = recipe.sampler if layer.part in recipe.sampled_parts and not is_kept else None
        before = recipe.kept if is_kept else by_rule[rules[layer.name]]
        after = before if is_kept else recipe.switched_from(before)
        why, later = (why_emulated(recipe, operands, layer, on) for operands in (before, after))
        scales = None if quantization.delayed is None else (quantization.delayed, index * len(SLOTS))
        # Layers with equal plans share them, unless they have a state.
        key = (id(before), *(tuple(each.values()) for each in (why, later)), index if scales else 0)
        own = plans.setdefault(key, _plans(before, after, why, later, scales))
        whys.append(why)
        settings = (layer, quantization, index, own, sampler)
        if layer.expert is None:
            new = quantized(*settings)
            parent, _, last = layer.name.rpartition(".")
            setattr(model.get_submodule(parent), last, new)
        else:
            new = ExpertLinear(*settings)
            experts.setdefault(layer.module, []).append(new)
        quantization.layers.append(new)
    for module, each in experts.items():
        install(module, each)
    quantization.execution = describe(recipe, whys, on) if recipe.execute != EMULATE else ""
    quantization.kept = [layer.name for layer in linears if layer.name in kept]
    quantization.summary = _summary(model, every, quantization)
    for module in model.modules():  # fewbits' own layers that were not replaced, because they are outside the blocks
        if isinstance(module, Linear):
            module.keeps_cast = keep_weights
    if observer is not None:
        observer.bind(len(linears))
    return quantization


@contextmanager
def unquantized(quantization: Quantization) -> Iterator[None]:
    """Compute all GEMMs from unquantized operands inside a `with` block, for evaluation in the compute dtype.

    A sampler's noise is not removed.
    """
    plan = Plan(Recipe().operands)  # the default recipe has `high` in every slot
    plans = [layer.plans for layer in quantization.layers]
    try:
        for layer in quantization.layers:
            layer.use(plan, plan)
        yield
    finally:
        for layer, own in zip(quantization.layers, plans, strict=True):
            layer.use(*own)


def keep(recipe: Recipe, layers: Sequence[BlockLinear], blocks: int) -> frozenset[str]:
    """Return the names of the layers that the recipe's setting `keep` selects, by block number, part or layer name.

    blocks: the number of blocks of the model.
    """
    k = recipe.keep
    if k.first + k.last >= blocks and (k.first or k.last):
        raise ValueError(
            f"recipe {recipe.name} keeps the first {k.first} and last {k.last} of {blocks} blocks in high precision: "
            "no layer would be quantized; use a deeper model or keep fewer blocks"
        )
    for glob in k.names:
        if not any(fnmatchcase(layer.name, glob) for layer in layers):
            raise ValueError(
                f"keep.names: no layer matches {glob!r}; the layers are {_abbreviate(layer.name for layer in layers)}"
            )
    return frozenset(layer.name for layer in layers if any(kept_by(recipe, layer, blocks)))


def _plans(
    before: Operands,
    after: Operands,
    why: WhyEmulated,
    later: WhyEmulated,
    scales: tuple[DelayedScales, int] | None,
) -> tuple[Plan, Plan]:
    """Return a layer's Plans before and after the recipe's switch; if the slots are equal, they are the same object.

    why, later: the results of `why_emulated` for both.
    """
    first, second = (
        Plan(operands, frozenset(gemm for gemm, reason in each.items() if reason is None), scales)
        for operands, each in ((before, why), (after, later))
    )
    return first, first if after == before else second


def _check_parts(recipe: Recipe, layers: Sequence[BlockLinear]) -> None:
    """Check that the recipe's `keep.parts` and `sampler.parts` can be applied to the layers.

    Raise ValueError if the recipe selects layers by part and the part of a layer is unknown, or if a part of `keep` or
    all parts of the sampler select no layer.
    """
    selected = parts(recipe.keep.parts) | recipe.sampled_parts
    selected |= {part for rule in recipe.rules for part in rule.match.parts}
    unknown = [layer.name for layer in layers if layer.part is None]
    if selected and unknown:
        raise ValueError(
            f"recipe {recipe.name} selects layers by part, but the part of {_abbreviate(unknown)} is unknown: give "
            f"the module an attribute `part`, one of {', '.join(PARTS)}"
        )
    have = sorted({str(layer.part) for layer in layers})
    for part in recipe.keep.parts:
        if parts((part,)).isdisjoint(have):
            raise ValueError(f"keep.parts: no layer has the part {part}; the model has only {', '.join(have)}")
    if recipe.sampler.kind != "none" and recipe.sampled_parts.isdisjoint(have):
        raise ValueError(
            f"sampler.parts {list(recipe.sampler.parts)}: they select no layer, so none would get noise; the model has "
            f"only the parts {', '.join(have)}"
        )


def rule_of(recipe: Recipe, layer: BlockLinear, blocks: int) -> Rule | None:
    """Return the first rule of the recipe that matches a layer; None if there is none. blocks: those of the model."""
    for rule in recipe.rules:
        m = rule.match
        ends = layer.block < m.first or layer.block >= blocks - m.last
        if (
            (ends or not (m.first or m.last))
            and (not m.parts or layer.part in parts(m.parts))
            and (not m.names or any(fnmatchcase(layer.name, glob) for glob in m.names))
        ):
            return rule
    return None


def _operands_by_rule(recipe: Recipe) -> Iterator[tuple[Rule | None, Operands]]:
    return ((rule, recipe.operands_by(rule)) for rule in (None, *recipe.rules))


def _check_quantizes(recipe: Recipe, rules: Mapping[str, Rule | None], kept: Collection[str]) -> None:
    """Raise ValueError if the recipe, unless it is called bf16, leaves every operand of every layer unquantized."""
    if recipe.name == Recipe().name or recipe.sampler.kind != "none" or recipe.wgrad.output != Wgrad().output:
        return
    used = [recipe.operands_by(rule) for rule in {*rules.values()}] + [recipe.kept] * bool(kept)
    if rules and recipe.switches:
        used.append(recipe.switched)
    if all(slot.spec is None for operands in used for slot in operands.values()):
        raise ValueError(f"recipe {recipe.name} quantizes no operand of any layer; only the recipe bf16 may do so")


def _summary(model: nn.Module, every: Sequence[BlockLinear | OtherWeight], quantization: Quantization) -> str:
    """Say how much of the model is quantized, by parameters and by FLOPs, and which weights are not and why."""
    total = sum(parameter.numel() for parameter in model.parameters())
    every = list({weight.key: weight for weight in reversed(every)}.values())[::-1]  # tied weights count once
    changed = {layer.name for layer in quantization.layers if layer.sampler or layer.quantizes}
    is_quantized = [isinstance(weight, BlockLinear) and weight.name in changed for weight in every]
    sizes = [math.prod(weight.shape) for weight in every]
    work = [size * active_share(model, weight) for size, weight in zip(sizes, every, strict=True)]
    flops = sum(work)
    parameters = sum(compress(sizes, is_quantized)) / total if total else 0.0
    reasons: dict[str, list[str]] = {}
    for weight, done in zip(every, is_quantized, strict=True):
        if not done:
            kept = "kept" if weight.name in quantization.kept else f"recipe {quantization.recipe.name}"
            reasons.setdefault(weight.why if isinstance(weight, OtherWeight) else kept, []).append(weight.name)
    left = "; ".join(f"{_abbreviate(names)} ({why})" for why, names in reasons.items())
    share = sum(compress(work, is_quantized)) / flops if flops else 0.0
    text = f"{parameters:.0%} of the parameters and {share:.0%} of the FLOPs of linear layers are quantized"
    return f"{text}; not: {left}" if left else text


def _abbreviate(names: Iterable[str]) -> str:
    """Join names for a message: the first six, and how many more there are."""
    names = list(names)
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
