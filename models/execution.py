"""Select the GEMMs that a recipe with `execute` computes from codes and scales; say why the others are emulated.

    execute: emulate            no GEMM: operands are rounded to the values of their formats, and multiplied as such
             fp8, mxfp8, nvfp4  all GEMMs with a quantized operand, in products of this kind; a recipe with another
                                such GEMM is refused, and so is a GPU without these products; a CPU decodes first
             auto               the GEMMs that torch can multiply on the device: none on a CPU; others are emulated

A GEMM can be executed if both operands have quantizers whose codes a scaled product can multiply (FORMS and GPUS in
kernels/scaled_products.py), if it sums along their blocks, and if the sizes are multiples of what the product needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from fewbits.kernels.quantizer import Quantizer
from fewbits.kernels.scaled_products import FORMS, FP8_SINCE, GPUS, MULTIPLE, Capability, form_of
from fewbits.models.recipe import AUTO, AXES, EMULATE, GEMMS, HIGH, Operands, Recipe, Slot
from fewbits.models.weights import BlockLinear

HINT = f"or set execute: {EMULATE}"
UNQUANTIZED = "its operands are not quantized"
WhyEmulated = Mapping[str, str | None]  # GEMM: why it is emulated; None: it is executed


@dataclass(frozen=True)
class Executor:
    """A device that multiplies. capability: the compute capability of a GPU; None: a CPU."""

    name: str = "cpu"
    capability: Capability | None = None

    @staticmethod
    def of(device: torch.device, execute: str) -> Executor:
        """Return the executor for a device; for `auto` on meta this machine's GPU, or its CPU if it has none."""
        if device.type == "meta" and execute == AUTO and torch.cuda.is_available():
            device = torch.device("cuda")
        if device.type != "cuda":
            return Executor()
        return Executor(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))

    def __str__(self) -> str:
        number = self.capability and f" (compute capability {self.capability[0]}.{self.capability[1]})"
        return f"{self.name}{number or ''}"

    def multiplies(self, pair: tuple[str, str]) -> bool:
        return self.capability is not None and self.capability >= FP8_SINCE and self.capability[0] in GPUS[pair]

    def lacks(self, pair: tuple[str, str]) -> str | None:
        """Return why this device cannot multiply operands of two forms, or None if it can; a CPU decodes them."""
        if self.capability is None or self.multiplies(pair):
            return None
        kind, has = FORMS[pair[0]].kind, sorted({FORMS[a].kind for a, b in GPUS if self.multiplies((a, b))})
        blocks = f" of {' and '.join(dict.fromkeys(pair))}" if kind in has else ""
        return f"{self} has no {kind} product{blocks}, {'only ' + ', '.join(has) if has else 'nor any other'}"


def why_emulated(recipe: Recipe, operands: Operands, layer: BlockLinear | None, on: Executor) -> WhyEmulated:
    """Return for each GEMM why it is emulated, or None if it is executed; an empty dictionary for `execute: emulate`.

    operands: a layer's six operand slots. layer: None leaves sizes unchecked.
    """
    if recipe.execute == EMULATE:
        return {}
    return {gemm: _why_emulated(recipe.execute, gemm, operands, layer, on) for gemm in GEMMS}


def check_execution(recipe: Recipe, layers: Iterable[BlockLinear], kept: Collection[str], on: Executor) -> None:
    """Raise ValueError if a recipe that executes products of one kind cannot do so on this device and these layers.

    Every GEMM with a quantized operand must be executable, and there must be one. kept: the names of the layers that
    the recipe's `keep` selects.
    """
    if recipe.execute in (EMULATE, AUTO):
        return
    executes = False
    for layer in layers:
        for operands in (recipe.kept,) if layer.name in kept else _every(recipe):
            for gemm, why in why_emulated(recipe, operands, layer, on).items():
                executes = executes or why is None
                if why not in (None, UNQUANTIZED):
                    raise ValueError(f"execute {recipe.execute}: layer {layer.name}: {gemm}: {why}; {HINT}")
    if not executes:
        raise ValueError(
            f"execute {recipe.execute}: no GEMM of recipe {recipe.name} has quantized operands: "
            f"{_valid(recipe.execute)}, {HINT}"
        )


def check_device(recipe: Recipe, device: torch.device) -> None:
    """Raise ValueError if a device has no products of the kind that the recipe executes."""
    on = Executor.of(device, recipe.execute)
    for operands in (*_every(recipe), recipe.kept) if recipe.execute != AUTO else ():
        for why in why_emulated(recipe, operands, None, on).values():
            if why and why.startswith(str(on)):
                raise ValueError(f"execute {recipe.execute}: {why}; {HINT}")


def check_tokens(recipe: Recipe, tokens: int) -> None:
    """Raise ValueError if wgrad is executed, and the tokens of a micro-batch are no multiple of what its sum needs."""
    on = Executor.of(torch.device("meta"), recipe.execute)
    for operands in (*_every(recipe), recipe.kept):
        if why_emulated(recipe, operands, None, on).get("wgrad", UNQUANTIZED) is None:
            multiple = max(FORMS[str(form_of_slot(slot))].multiple for _, slot in _slots(operands, "wgrad"))
            if tokens % multiple:
                raise ValueError(
                    f"execute {recipe.execute}: wgrad sums over the {tokens} tokens of a micro-batch, which must be a "
                    f"multiple of {multiple}: change training.micro_batch or training.length, {HINT}"
                )


def describe(recipe: Recipe, whys: Collection[WhyEmulated], on: Executor) -> str:
    """Return one line that says which GEMMs are executed and why others are not; whys: `why_emulated` of each layer."""
    counts = Counter((gemm, why) for each in whys for gemm, why in each.items() if why != UNQUANTIZED)
    merged: dict[tuple[str | None, int], list[str]] = {}
    for (gemm, why), count in counts.items():
        merged.setdefault((why, count), []).append(gemm)
    layers = [f" of {count} layers" if len(whys) > 1 else "" for _, count in merged]
    texts = [
        f"{', '.join(gemms)}{of} {'executed' if why is None else f'emulated ({why})'}"
        for ((why, _), gemms), of in zip(merged.items(), layers, strict=True)
    ]
    return f"execute {recipe.execute} on {on}: {'; '.join(texts) or 'no GEMM has quantized operands'}"


def _why_emulated(execute: str, gemm: str, operands: Operands, layer: BlockLinear | None, on: Executor) -> str | None:
    slots = list(_slots(operands, gemm))
    if all(slot.spec is None for _, slot in slots):
        return UNQUANTIZED
    if on.capability is None and execute == AUTO:
        return "a CPU has no scaled products"
    for name, slot in slots:
        if slot.delayed:
            return f"the scale of {name} is delayed"
        form = form_of_slot(slot)
        if form is None or (execute != AUTO and FORMS[form].kind != execute):
            return f"{name} is {slot.spec or HIGH}{'' if execute == AUTO else f': {_valid(execute)}'}"
        if slot.axis != AXES[name] and not _square(slot):
            return f"{name} is `same`, whose blocks lie across the sum of {gemm}: give {name} its own quantizer"
    pair = str(form_of_slot(slots[0][1])), str(form_of_slot(slots[1][1]))
    if pair not in GPUS:
        return f"torch has no product of {slots[0][1].spec} and {slots[1][1].spec}"
    multiple = max(FORMS[form].multiple for form in pair) if gemm != "wgrad" else MULTIPLE
    if layer is not None and any(size % multiple for size in layer.shape):
        return f"the layer is {layer.shape[0]}x{layer.shape[1]}, and both sizes must be multiples of {multiple}"
    if layer is not None and layer.is_expert and gemm == "wgrad":
        return f"it sums over an expert's tokens, whose number need not be a multiple of {MULTIPLE}"
    return on.lacks(pair)


def form_of_slot(slot: Slot) -> str | None:
    """Return the form (a key of FORMS) of what a slot's quantizer encodes, or None if no scaled product reads it."""
    return form_of(slot.spec) if isinstance(slot.spec, Quantizer) else None


def _square(slot: Slot) -> bool:
    assert isinstance(slot.spec, Quantizer)
    return slot.spec.block.rows == slot.spec.block.cols


def _valid(execute: str) -> str:
    listed = (text for form in FORMS.values() for text in form.quantizers if form.kind == execute)
    return f"valid in {execute} products are {', '.join(listed)}"


def _every(recipe: Recipe) -> list[Operands]:
    """Return the slots of layers that `keep` does not select: by the recipe, by its rules, and after a switch."""
    own = [recipe.operands_by(rule) for rule in (None, *recipe.rules)]
    return [*own, *(recipe.switched_from(each) for each in own)]


def _slots(operands: Operands, gemm: str) -> Iterator[tuple[str, Slot]]:
    return ((name, slot) for name, slot in operands.items() if name.startswith(f"{gemm}."))
