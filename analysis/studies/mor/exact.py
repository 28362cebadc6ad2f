"""Check claims M1, M2 and M21 about GAM's scales with our own kernels, each time a report is made.

In GAM, the blocks of a group, by default a whole tensor, share the mantissa of their scales. The tensors have BF16
values, as in MoR, and are hard cases: blocks whose ideal scale has a mantissa just below or above their group's, so
that a scale rounded in the wrong direction saturates; magnitudes at both ends of BF16's range; heavy tails; blocks of
zeros; incomplete blocks at the edges. Numbers are compared to the bit in float64, which represents float32 scales and
BF16 values exactly.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from fewbits.analysis.engine.claims.hooks import exact
from fewbits.analysis.engine.results.data import Exact
from fewbits.kernels.api import QuantStats, fake_quantize
from fewbits.kernels.packed import Packed, decode, encode
from fewbits.kernels.quantizer import Quantizer

MANTISSA, ONE_TO_TWO = 0x7FFFFF, 0x3F800000  # a float32's fraction bits; the sign and exponent bits of [1, 2)
SHAPE = (192, 320)  # several blocks of each size, some of them incomplete


def hard_tensors() -> dict[str, Tensor]:
    """Return tensors that are hard cases for GAM's scales, in float32 and of SHAPE; each key describes its tensor."""
    g = torch.Generator().manual_seed(0)
    normal = torch.randn(SHAPE, generator=g)
    steps = torch.randint(0, 128, SHAPE, generator=g)  # every BF16 mantissa
    exponents = torch.randint(-100, 100, (SHAPE[0] // 32, SHAPE[1] // 32), generator=g)
    by_block = torch.exp2(exponents.repeat_interleave(32, 0).repeat_interleave(32, 1).float())
    edges = torch.tensor([1.0, 1.0078125, 1.75, 1.7421875, 1.9921875])  # E4M3's and E5M2's maxima are 1.75 · 2^k
    patch = torch.zeros(SHAPE)
    patch[40:50, 200:210] = normal[40:50, 200:210]
    return {
        "normal": normal,
        "heavy tails": torch.exp(3 * normal) * torch.sign(torch.randn(SHAPE, generator=g)),
        "every mantissa, a binade for each block": (1 + steps / 128) * by_block,
        "mantissas of the formats' maxima": edges[steps % 5] * by_block,
        "at the top of BF16's range": torch.finfo(torch.bfloat16).max * (normal / normal.abs().max()),
        "where a float32 still holds the ideal scale": normal * 2.0**-100,
        "below that": normal * 2.0**-126,
        "zeros but for one patch": patch,
        "squared ReLU": torch.relu(normal) ** 2,
    }


class Quantized(NamedTuple):
    """A hard case x, its quantization y, statistics by block, and its encoding."""

    x: Tensor
    y: Tensor
    stats: QuantStats
    packed: Packed

    @property
    def scales(self) -> Tensor:
        """The blocks' exponents, stored as codes."""
        assert self.packed.scales is not None
        return self.packed.scales

    @property
    def mantissas(self) -> Tensor:
        """The scales' mantissas, which the blocks of a group share."""
        assert self.packed.group_scales is not None
        return self.packed.group_scales


def quantize(x: Tensor, quantizer: Quantizer) -> Quantized:
    return Quantized(x, *fake_quantize(x, quantizer, stats="block"), encode(x, quantizer))


@cache
def quantized() -> list[Quantized]:
    """Return all hard cases: every tensor of `hard_tensors`, quantized with both formats and blocks of five sizes."""
    blocks = ("tensor", "channel", "128x128", "64x64", "1x128")
    cases = product(hard_tensors().values(), ("e4m3", "e5m2"), blocks)
    return [quantize(x.bfloat16(), Quantizer(format=name, block=block, scaling="gam")) for x, name, block in cases]


@exact("mor", "M1")
def m1() -> dict[str, Exact]:
    """Check how close scaled magnitudes come to the format's maximum, over all cases of `quantized`."""
    saturated = lost = undone = 0
    used: list[float] = []  # by nonzero block, the greatest magnitude · scale / maximum
    for one in quantized():
        top, amax = one.packed.quantizer.format.max, one.stats.amax
        within = amax > top / torch.finfo(torch.float32).max  # otherwise float32 cannot hold the ideal scale
        ideal = torch.full_like(amax, top)[within] / amax[within]
        used += (amax.double() * one.mantissas.double() * torch.exp2(one.scales.double() - 127) / top)[within].tolist()
        # GAM lowers the exponent of a block whose ideal scale has a smaller mantissa than the group's.
        not_lowered = one.mantissas.double() * torch.exp2(torch.frexp(ideal.double()).exponent - 1.0)
        greatest = (one.x.abs() == one.x.abs().max()) & within.any()
        saturated += int(one.stats.saturated.sum())
        lost += int((one.y[greatest] != one.x[greatest]).sum())
        undone += int((not_lowered > ideal).sum())
    notes = (
        f"if exponents were not rounded down, {undone:,} of these blocks would saturate",
        "tensors whose greatest magnitude is below the format's maximum / 3.4e38 are out of the range of FP32 scales: "
        "they do not saturate either, but lose precision",
    )
    holds = not saturated and max(used) <= 1 + 2.0**-22  # float32 rounds the ideal scale and its product
    words = f"{saturated or 'no'} elements saturate in {len(used):,} blocks of {len(quantized())} hard cases"
    span = f"blocks' greatest magnitudes are between {min(used):.4f} and {max(used):.4f} times the maximum"
    kept = Exact(not lost, f"quantization changes {lost or 'none'} of them")
    return {
        "nothing saturates": Exact(holds, words, notes),
        "blocks use more than half of the range": Exact(min(used) > 0.5, span),
        "a tensor's greatest magnitude keeps its precision": kept,
    }


@exact("mor", "M2")
def m2() -> dict[str, Exact]:
    """Check how many bits store the scales, and that decoding with only them gives the quantized values exactly."""
    restored, widths, rest, cases = 0, set(), set(), len(quantized())
    for one in quantized():
        word = one.mantissas.view(torch.int32)
        rebuilt = ((word & MANTISSA) | ONE_TO_TWO).view(torch.float32)
        restored += torch.equal(decode(replace(one.packed, group_scales=rebuilt)), one.y)
        widths.add(8 * one.scales.element_size())
        rest |= set((word & ~MANTISSA).flatten().tolist())
    bits, varying = MANTISSA.bit_count() if rest == {ONE_TO_TWO} else 32, "bits of the group's scale vary"
    words = f"{bits} {varying}; with only these, {restored} of {cases} hard cases are restored to the bit"
    return {
        "8 bits a block": Exact(max(widths) == 8, f"packed tensors have {max(widths)} bits for each block"),
        "23 bits a tensor": Exact(bits == 23 and restored == cases, words),
    }


@exact("mor", "M21")
def m21(count: int = 24) -> dict[str, Exact]:
    """Compare GAM with one mantissa for a tensor and for each row of blocks; heavy tails flush many values to zero."""
    g = torch.Generator().manual_seed(1)
    tensors = [torch.exp(2.5 * torch.randn(256, 256, generator=g)).bfloat16() for _ in range(count)]
    errors, bits = [], []
    for group in ("tensor", "row"):
        quantizer = Quantizer(format="e4m3", block="64x64", scaling="gam", group=group)
        found = [quantize(x, quantizer) for x in tensors]
        errors.append([float(((one.y.double() - one.x.double()).abs() / one.x.double()).mean()) for one in found])
        scales, mantissas = found[0].scales, found[0].mantissas
        bits.append(8 * scales.element_size() + 23 * mantissas.numel() / scales.numel())
    worse = sum(rows > whole for whole, rows in zip(*errors, strict=True))
    one, each = (sum(some) / count for some in errors)
    more = f"scales take {bits[0]:.2f} bits per block with one group, {bits[1]:.2f} with one a row"
    less = (
        f"mean relative error {one:.4%} with one group, {each:.4%} with one for each row; greater in "
        f"{worse or 'none'} of {count} heavy-tailed tensors"
    )
    return {
        "smaller groups take more bits": Exact(bits[1] > bits[0], more),
        "smaller groups err less": Exact(each < one and not worse, less),
    }
