"""Check claims M1, M2 and M21 about GAM's scales with our own kernels, each time a report is made.

In GAM, the blocks of a group, by default a whole tensor, share the mantissa of their scales. The tensors have BF16
values, as in MoR, and are hard cases: blocks whose ideal scale has a mantissa just below or above their group's, so
that a scale rounded in the wrong direction saturates; magnitudes at both ends of BF16's range; heavy tails; blocks of
zeros; incomplete blocks at the edges. Numbers are compared to the bit in float64, which represents float32 scales and
BF16 values exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import torch
from torch import Tensor

from fewbits.analysis.engine.claims.hooks import exact
from fewbits.analysis.engine.results.data import Exact
from fewbits.kernels.api import QuantStats, fake_quantize
from fewbits.kernels.packed import Packed, decode, encode
from fewbits.kernels.quantizer import Quantizer

FORMATS = ("e4m3", "e5m2")
BLOCKS = ("tensor", "channel", "128x128", "64x64", "1x128")
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


@dataclass(frozen=True)
class Quantized:
    """A tensor and its quantization with one format and one size of blocks."""

    x: Tensor
    y: Tensor  # x quantized and decoded
    stats: QuantStats  # by block
    packed: Packed
    scales: Tensor  # the blocks' exponents, stored as codes
    group_scales: Tensor  # the mantissas that the blocks of a group share


@cache
def quantized() -> list[Quantized]:
    """Return all hard cases: every tensor of `hard_tensors`, quantized with each of FORMATS and BLOCKS."""
    found = []
    for x, element, block in product(hard_tensors().values(), FORMATS, BLOCKS):
        quantizer, source = Quantizer(format=element, block=block, scaling="gam"), x.bfloat16()
        y, stats = fake_quantize(source, quantizer, stats="block")
        packed = encode(source, quantizer)
        assert packed.scales is not None
        assert packed.group_scales is not None
        found.append(Quantized(source, y, stats, packed, packed.scales, packed.group_scales))
    return found


@dataclass(frozen=True)
class Scaled:
    """Numbers for claim M1 over all cases of `quantized`: how close scaled values come to the format's maximum.

    A scaled magnitude is an element's magnitude times the scale of its block, divided by the format's maximum.
    """

    cases: int
    blocks: int
    saturated: int  # the number of saturated elements
    greatest: float  # the greatest scaled magnitude
    least: float  # the minimum over nonzero blocks of a block's greatest scaled magnitude
    lost_maxima: int  # of the elements whose magnitude is their tensor's amax, the number that change
    # The number of blocks that would saturate if GAM did not lower the exponent of a block whose ideal scale has a
    # smaller mantissa than the group's.
    would_saturate: int


@cache
def scaled() -> Scaled:
    found = Scaled(0, 0, 0, 0.0, 1.0, 0, 0)
    for one in quantized():
        top, stats = one.packed.quantizer.format.max, one.stats
        within = stats.amax > top / torch.finfo(torch.float32).max  # otherwise float32 cannot hold the ideal scale
        factors = one.group_scales.double() * torch.exp2(one.scales.double() - 127)  # by which blocks are multiplied
        used = (stats.amax.double() * factors / top)[within]
        ideal = torch.full_like(stats.amax, top)[within] / stats.amax[within]
        undecremented = one.group_scales.double() * torch.exp2(torch.frexp(ideal.double()).exponent - 1.0)
        greatest = (one.x.abs() == one.x.abs().max()) & within.any()
        found = Scaled(
            found.cases + 1,
            found.blocks + used.numel(),
            found.saturated + int(stats.saturated.sum()),
            max([found.greatest, *used.tolist()]),
            min([found.least, *used.tolist()]),
            found.lost_maxima + int((one.y[greatest] != one.x[greatest]).sum()),
            found.would_saturate + int((undecremented > ideal).sum()),
        )
    return found


@dataclass(frozen=True)
class Metadata:
    """Numbers for claim M2 over all cases of `quantized`: how many bits store the scales, and whether these suffice.

    The bits suffice if decoding with them gives the quantized values exactly.
    """

    cases: int
    blocks: int
    exponent_bits: int  # the number of bits that are stored for each block
    mantissa_bits: int  # the number of the 32 bits of a group's scale that are not the same in all groups
    restored: int  # the cases that codes, exponents and these mantissa bits restore exactly


@cache
def metadata() -> Metadata:
    blocks, restored, count = 0, 0, 0
    widths, constant = set(), set()
    for one in quantized():
        bits = one.group_scales.view(torch.int32)
        rebuilt = ((bits & MANTISSA) | ONE_TO_TWO).view(torch.float32)
        same = torch.equal(decode(replace(one.packed, group_scales=rebuilt)), one.y)
        count, blocks, restored = count + 1, blocks + one.scales.numel(), restored + same
        widths.add(8 * one.scales.element_size())
        constant |= set((bits & ~MANTISSA).flatten().tolist())
    fraction = MANTISSA.bit_count()
    return Metadata(count, blocks, max(widths), fraction if constant == {ONE_TO_TWO} else 32, restored)


# -------------------------------------------------------------------------------- hooks


@exact("mor", "M1")
def m1() -> dict[str, Exact]:
    found = scaled()
    rounding = 1 + 2.0**-22  # float32 rounds twice: the ideal scale and its product with a magnitude
    blocks = f"{found.blocks:,} blocks of {found.cases} hard cases"
    notes = (
        f"if exponents were not rounded down, {found.would_saturate:,} of these blocks would saturate",
        "tensors whose greatest magnitude is below the format's maximum / 3.4e38 are out of the range of FP32 scales: "
        "they do not saturate either, but lose precision",
    )
    return {
        "nothing saturates": Exact(
            not found.saturated and found.greatest <= rounding,
            f"{found.saturated or 'no'} elements saturate in {blocks}",
            notes,
        ),
        "blocks use more than half of the range": Exact(
            found.least > 0.5,
            f"blocks' greatest magnitudes are between {found.least:.4f} and {found.greatest:.4f} times the maximum",
        ),
        "a tensor's greatest magnitude keeps its precision": Exact(
            not found.lost_maxima, f"quantization changes {found.lost_maxima or 'none'} of them"
        ),
    }


@exact("mor", "M2")
def m2() -> dict[str, Exact]:
    found = metadata()
    return {
        "8 bits a block": Exact(
            found.exponent_bits == 8, f"packed tensors have {found.exponent_bits} bits for each block"
        ),
        "23 bits a tensor": Exact(
            found.mantissa_bits == 23 and found.restored == found.cases,
            f"{found.mantissa_bits} bits of the group's scale vary; with only these, {found.restored} of {found.cases} "
            "hard cases are restored to the bit",
        ),
    }


@dataclass(frozen=True)
class Grouped:
    """Errors of GAM and bits of its scales: with one mantissa for the tensor, and with one for each row of blocks."""

    tensors: int
    worse: int  # the number of tensors whose error is greater with smaller groups
    error: tuple[float, float]  # the mean relative error: one mantissa for the tensor, and one for each row
    bits: tuple[float, float]  # the bits of all scales per block, in these two cases


WHOLE = Quantizer(format="e4m3", block="64x64", scaling="gam")
GROUPINGS = (WHOLE, replace(WHOLE, group="row"))  # a mantissa for the whole tensor, and for each row of blocks


@cache
def grouped(count: int = 24) -> Grouped:
    """Compare GAM with one mantissa for the tensor and with one for each row of blocks, on `count` random tensors.

    The tensors have heavy tails. They are a hard case, because many of a block's values are flushed to zero if the
    scale by which the block is multiplied before rounding is too small.
    """
    g = torch.Generator().manual_seed(1)
    sums, worse, bits = [0.0, 0.0], 0, [0.0, 0.0]
    for _ in range(count):
        x = torch.exp(2.5 * torch.randn(256, 256, generator=g)).bfloat16()
        errors = []
        for i, quantizer in enumerate(GROUPINGS):
            difference = (fake_quantize(x, quantizer).double() - x.double()).abs() / x.double()
            errors.append(float(difference.mean()))
            sums[i] += errors[i] / count
            packed = encode(x, quantizer)
            assert packed.scales is not None
            assert packed.group_scales is not None
            groups = 23 * packed.group_scales.numel()
            bits[i] = 8 * packed.scales.element_size() + groups / packed.scales.numel()
        worse += errors[1] > errors[0]
    return Grouped(count, worse, (sums[0], sums[1]), (bits[0], bits[1]))


@exact("mor", "M21")
def m21() -> dict[str, Exact]:
    found = grouped()
    return {
        "smaller groups take more bits": Exact(
            found.bits[1] > found.bits[0],
            f"scales take {found.bits[0]:.2f} bits per block with one group, {found.bits[1]:.2f} with a group per row",
        ),
        "smaller groups err less": Exact(
            found.error[1] < found.error[0] and not found.worse,
            f"mean relative error {found.error[0]:.4%} with one group, {found.error[1]:.4%} with one for each row; "
            f"greater in {found.worse or 'none'} of {found.tensors} heavy-tailed tensors",
        ),
    }
