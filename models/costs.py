"""Tell what operands cost: the bits per element of a quantizer, and how much faster GEMMs are than in BF16 at best."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from fewbits.kernels.quantizer import Mixture, Quantizer
from fewbits.kernels.scaled_products import FORMS, GPUS
from fewbits.models.chain import Chain, Spec
from fewbits.models.execution import form_of_slot
from fewbits.models.hooks import HookStage
from fewbits.models.recipe import GEMMS, Operands

if TYPE_CHECKING:
    from fewbits.models.quantize import Quantization

HIGH_BITS = 16.0
HOOK_BITS = {"quest": 4.0, "quest-mxfp4": 4.25}  # hooks that quantize: bits per element with their default settings
# The dense peak rates of products on Hopper and Blackwell data-center GPUs, as multiples of that of BF16 products.
RATES = {"fp8": 2.0, "mxfp8": 2.0, "nvfp4": 4.0}


def bits_per_element(spec: Spec | None) -> tuple[float, float]:
    """Return the fewest and the most bits of an element, with its share of its block's scale.

    Scales of a whole tensor or vector do not count. Mixtures may have several numbers. A chain has those of its last
    stage, or of its hook, if this quantizes and the stage after it only rotates.
    """
    if spec is None:
        return HIGH_BITS, HIGH_BITS
    if isinstance(spec, Chain):
        first = spec.stages[0]
        if isinstance(first, HookStage) and first.name in HOOK_BITS:
            bits_of_hook = dict(first.settings).get("bits", HOOK_BITS[first.name])
            return bits_of_hook, bits_of_hook
        last = spec.stages[-1]
        assert isinstance(last, Quantizer | Mixture)
        return bits_per_element(last)
    entries = [entry.quantizer for entry in spec.entries] if isinstance(spec, Mixture) else [spec]
    bits = [_bits(q) for q in entries]
    return min(bits), max(bits)


def _bits(q: Quantizer) -> float:
    scale, block = q.traits.stored, q.block
    shared = 0.0 if scale is None or block.rows is None or block.cols is None else scale.bits / block.rows / block.cols
    return q.format.bits + shared


def mean_bits(spec: Spec | None, shares: Mapping[str, float]) -> float:
    """Return the mean bits of an element. shares: of each format in a mixture's decisions; without them, the fewest."""
    if isinstance(spec, Mixture) and shares:
        bits = {str(one.quantizer.format): _bits(one.quantizer) for one in spec.entries}
        return sum(shares.get(name, 0.0) * bits[name] for name in bits)
    return bits_per_element(spec)[0]


def over_layers(quantization: Quantization, measure: Callable[[Operands], float]) -> float:
    """Return the mean of what `measure` says of the operands of each linear layer, weighted by the layers' sizes."""
    sizes = [layer.in_features * layer.out_features for layer in quantization.layers]
    values = [measure(layer.plans[0].operands) for layer in quantization.layers]
    return sum(size * value for size, value in zip(sizes, values, strict=True)) / sum(sizes)


def product_rates(operands: Operands, major: int | None = None) -> Mapping[str, float]:
    """Return for each GEMM the ratio of its peak rate to that of BF16: 1 if no scaled product has these operands.

    major: the compute capability of the GPUs on which torch must have the product; None: any.
    """
    rates = {}
    for gemm in GEMMS:
        forms = tuple(str(form_of_slot(slot)) for name, slot in operands.items() if name.startswith(f"{gemm}."))
        on = GPUS.get((forms[0], forms[1]), ()) if len(forms) == 2 else ()
        rates[gemm] = RATES[FORMS[forms[0]].kind] if on and major in (None, *on) else 1.0
    return rates


def layer_rate(operands: Operands, major: int | None = None) -> float:
    """Return the ratio of the peak rate of a layer's three GEMMs, which have equal work, to that of BF16."""
    return len(GEMMS) / sum(1 / rate for rate in product_rates(operands, major).values())
