"""Select the GEMMs that multiply FP8 codes in a recipe with `execute: fp8`; refuse such a recipe if it needs emulation.

A GEMM is executed in FP8 if both operands have quantizers whose codes torch's FP8 product can multiply
(kernels/fp8_products.py). It is computed as usual if both operands are unquantized. A recipe with any other GEMM is
refused, because an executed recipe must not emulate any GEMM.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from fewbits.kernels.fp8_products import MULTIPLE, VALID, is_executable
from fewbits.kernels.quantizer import Quantizer
from fewbits.models.recipe import AXES, EMULATE, FP8, GEMMS, HIGH, Operands, Recipe, Slot

HINT = f"or set execute: {EMULATE}"


def executed_gemms(recipe: Recipe, operands: Operands) -> frozenset[str]:
    """Return the names of the GEMMs that multiply FP8 codes; there are none without `execute: fp8`.

    These are the GEMMs with at least one quantized operand. `check_execution` refuses a recipe in which only one
    operand of a GEMM is quantized.

    operands: a layer's six operand slots: `recipe.operands`, `recipe.switched` (those after a change during training)
    or `recipe.kept` (those of the layers that `recipe.keep` selects).
    """
    if recipe.execute != FP8:
        return frozenset()
    return frozenset(gemm for gemm in GEMMS if any(slot.spec is not None for _, slot in _slots(operands, gemm)))


def check_execution(recipe: Recipe, layers: Iterable[tuple[str, tuple[int, int]]], kept: Collection[str]) -> None:
    """Raise ValueError if a recipe with `execute: fp8` does not suit the layers: pairs of name and (out, in).

    A GEMM with a quantized operand must be executable in FP8: this depends on the quantizers of both operands and on
    the layer's sizes. GEMMs without a quantized operand are not checked, but at least one must have one. A layer in
    `kept`, the names of the layers that the recipe's `keep` selects, has in every slot the quantizer of the recipe's
    setting `keep.by` (by default none) instead of the slot's own.
    """
    if recipe.execute != FP8:
        return
    executes = False
    for name, sizes in layers:
        each = (recipe.kept,) if name in kept else _every(recipe)
        for operands in each:
            for problem in problems(operands):
                raise ValueError(f"execute {FP8}: layer {name}: {problem}; {HINT}")
            if gemms := executed_gemms(recipe, operands):
                executes = True
                if any(size % MULTIPLE for size in sizes):
                    raise ValueError(
                        f"execute {FP8}: layer {name} is {sizes[0]}x{sizes[1]}: for {', '.join(sorted(gemms))} in FP8, "
                        f"both sizes must be multiples of {MULTIPLE}; use another layer size, {HINT}"
                    )
    if not executes:
        raise ValueError(
            f"execute {FP8}: no GEMM of recipe {recipe.name} has quantized operands: give both operands of a GEMM "
            f"{VALID}, {HINT}"
        )


def check_tokens(recipe: Recipe, tokens: int) -> None:
    """Raise ValueError if wgrad is executed in FP8 and the number of tokens of a micro-batch is no multiple of 16."""
    wgrad = any("wgrad" in executed_gemms(recipe, each) for each in (*_every(recipe), recipe.kept))
    if wgrad and tokens % MULTIPLE:
        raise ValueError(
            f"execute {FP8}: wgrad sums over the {tokens} tokens of a micro-batch, which must be a multiple of "
            f"{MULTIPLE}: change training.micro_batch or training.length, {HINT}"
        )


def problems(operands: Operands) -> Iterator[str]:
    """Yield a message for each operand that prevents its GEMM from being executed in FP8.

    GEMMs whose operands are both unquantized are skipped.
    """
    for gemm in GEMMS:
        slots = list(_slots(operands, gemm))
        if all(slot.spec is None for _, slot in slots):
            continue
        for name, slot in slots:
            if not is_executable(slot.spec):
                yield f"{name} is {slot.spec or HIGH}: valid in FP8 products is {VALID}"
            elif _block(slot) == "channel" and slot.axis != AXES[name]:
                yield f"{name} is `same`, whose channels lie across the sum of {gemm}: give {name} its own quantizer"


def _every(recipe: Recipe) -> list[Operands]:
    """Return the slots of layers that `keep` does not select: by the recipe, by its rules, and after a switch."""
    own = [recipe.operands_by(rule) for rule in (None, *recipe.rules)]
    return [*own, *(recipe.switched_from(each) for each in own)]


def _slots(operands: Operands, gemm: str) -> Iterator[tuple[str, Slot]]:
    return ((name, slot) for name, slot in operands.items() if name.startswith(f"{gemm}."))


def _block(slot: Slot) -> str:
    assert isinstance(slot.spec, Quantizer)
    return str(slot.spec.block)
