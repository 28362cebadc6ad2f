"""Quantize only some slots or blocks of a model, to find which of them cause a recipe's effect.

The variant `only fprop.x` quantizes the slot fprop.x of every layer as the recipe does, and leaves all other slots in
high precision; `without fprop.x` quantizes all slots except fprop.x. GEMMs (`only wgrad`) and blocks (`only block 3`)
have such variants, too. If the recipe rotates both operands of a GEMM (Hadamard transform) and a variant leaves one in
high precision, this operand is still rotated, but not quantized, because a product needs both operands in the same
basis.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fewbits.kernels.quantizer import Quantizer
from fewbits.models.chain import Spec, first_quantizer
from fewbits.models.quantize import Quantization
from fewbits.models.quantized_linear import Plan, QuantizedLinear
from fewbits.models.recipe import AXES, FIRST_SLOT, GEMMS, SLOTS, Operands, Slot

ALL = "all"  # the name of the variant that is the recipe itself


@dataclass(frozen=True)
class Variant:
    """A variant of a recipe, which quantizes only some slots or only some blocks of a model."""

    name: str
    slots: frozenset[str] = frozenset(SLOTS)
    blocks: frozenset[int] | None = None  # block numbers; None: all blocks

    def apply(self, quantization: Quantization) -> None:
        """Change a quantized model so that only this variant's slots and blocks are quantized."""
        plans: dict[tuple[int, bool], tuple[Plan, Plan]] = {}
        for layer in quantization.layers:
            quantizes = self.blocks is None or layer.block in self.blocks
            key = (id(layer.plans), quantizes)
            if key not in plans:
                slots = self.slots if quantizes else frozenset()
                before, after = (_restricted(plan, slots) for plan in layer.plans)
                plans[key] = before, after
            layer.use(*plans[key])


def variants(parts: Sequence[str], quantization: Quantization) -> Iterator[Variant]:
    """Yield the variants `only X` and `without X` for each GEMM, slot or block X that the recipe quantizes.

    parts: which X to vary, any of `gemms`, `slots` and `blocks`. Two slots for which the recipe quantizes a tensor only
    once are varied together, under the name of the first.
    """
    layers = [layer for layer in quantization.layers if _quantizes(layer)]
    used = {slot for layer in layers for plan in layer.plans for slot, its in plan.operands.items() if its.spec}
    if "gemms" in parts:
        for gemm in GEMMS:
            slots = frozenset(slot for slot in SLOTS if slot.startswith(f"{gemm}."))
            if slots & used:
                yield from _both(gemm, slots)
    if "slots" in parts:
        for slot in SLOTS:
            first = FIRST_SLOT.get(slot)
            if slot in used and not (first and _always_equal(layers, first, slot)):
                second = next((other for other, its in FIRST_SLOT.items() if its == slot), None)
                joined = second is not None and _always_equal(layers, slot, second)
                yield from _both(slot, frozenset({slot, second} if joined and second else {slot}))
    if "blocks" in parts:
        blocks = sorted({layer.block for layer in layers})
        for block in blocks if len(blocks) > 1 else ():
            yield Variant(f"only block {block}", blocks=frozenset({block}))
            yield Variant(f"without block {block}", blocks=frozenset(blocks) - {block})


def _restricted(plan: Plan, slots: frozenset[str]) -> Plan:
    """Return the plan of a layer with only these slots quantized; incomplete GEMMs are not executed in FP8."""
    executed = frozenset(gemm for gemm in plan.executed if slots.issuperset(_slots(gemm)))
    return Plan(restricted(plan.operands, slots), executed)


def restricted(operands: Operands, slots: frozenset[str]) -> Operands:
    """Return the operands of a layer with only these slots quantized; others are rotated if the GEMM's other one is."""
    quantized = {gemm: any(slot in slots and operands[slot].spec for slot in _slots(gemm)) for gemm in GEMMS}
    return {
        slot: its if slot in slots or its.spec is None else _high(slot, its.spec, rotated=quantized[_gemm(slot)])
        for slot, its in operands.items()
    }


def _both(name: str, slots: frozenset[str]) -> Iterator[Variant]:
    """Yield the variant `only NAME`, which quantizes only these slots, and `without NAME`, which quantizes the rest."""
    yield Variant(f"only {name}", slots)
    yield Variant(f"without {name}", frozenset(SLOTS) - slots)


def _high(slot: str, spec: Spec, *, rotated: bool) -> Slot:
    """Return the Slot in high precision that replaces one with the quantizers `spec`. rotated: keep its rotation."""
    quantizer = first_quantizer(spec)
    if not (rotated and quantizer.hadamard):
        return Slot(None, AXES[slot])
    signs = "" if quantizer.signs is None else f":signs={quantizer.signs}"
    return Slot(Quantizer.parse(f"fp32:rht{quantizer.hadamard}{signs}"), AXES[slot])


def _quantizes(layer: QuantizedLinear) -> bool:
    return any(slot.spec for plan in layer.plans for slot in plan.operands.values())


def _always_equal(layers: Sequence[QuantizedLinear], first: str, second: str) -> bool:
    """Tell whether two slots of the same tensor quantize it equally in all layers, also after a `switch`."""
    return all(plan.operands[first].equals(plan.operands[second]) for layer in layers for plan in layer.plans)


def _slots(gemm: str) -> list[str]:
    return [slot for slot in SLOTS if _gemm(slot) == gemm]


def _gemm(slot: str) -> str:
    return slot.partition(".")[0]
