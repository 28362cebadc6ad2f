"""Define products with a chosen accumulator, in plain torch and exact float64 arithmetic.

Every step below is exact in float64 (at most 53 bits are needed) except where a comment says that it rounds. The class
Accumulator (kernels/accumulators.py) describes the kinds of accumulators: `format`, `fused` and `grouped`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fewbits.kernels.formats import Format

LOWEST = -126  # a sum is never aligned to a smaller exponent
NAN_BITS = 0x7FFFFFFF  # NaN of the tensor cores


def fused_sum(
    a: Tensor, b: Tensor, emin: tuple[int, int], length: int, fraction: int, kept: int, promote: int
) -> Tensor:
    """Return a · b, summed by a `fused` accumulator: it aligns, truncates and adds `length` products at a time.

    emin: the exponents of the smallest normal values of the formats of a and b. fraction: the number of fraction bits
    that an aligned product keeps. kept: the number of fraction bits of the sum. promote: the number of products after
    which the sum is added to a separate float32 sum and set to zero; 0: never.
    """
    c = outside = torch.zeros(a.shape[0], b.shape[1], device=a.device)
    for start in range(0, a.shape[1], length):
        block = slice(start, start + length)
        (sa, ea), (sb, eb) = _parted(a[:, block], emin[0]), _parted(b[block].T, emin[1])
        significands, exponents = sa[:, None] * sb[None], ea[:, None] + eb[None]
        c = _added(c, significands, exponents, fraction, kept, a[:, block].double() @ b[block].double())
        if promote and (start + length) % promote == 0:
            outside, c = outside + c, torch.zeros_like(c)  # the float32 addition rounds to nearest
    return _with_one_nan(outside + c if promote else c)


def grouped_sum(
    a: Tensor,
    b: Tensor,
    a_scales: Tensor,
    b_scales: Tensor,
    emin: tuple[int, int],
    length: int,
    fraction: int,
    kept: int,
) -> Tensor:
    """Return a [M, K] · b [K, N], summed by a `grouped` accumulator, for E2M1 values with a scale per group along K.

    The products of a group are added exactly, and their sum is multiplied by the group's scales of a and of b. `length`
    such terms at a time are aligned, truncated and added. When a term is aligned, its exponent is taken to be the sum
    of the exponents of its two scales.

    a_scales: [M, groups]. b_scales: [groups, N]. emin: the exponents of the smallest normal values of the formats of
    a_scales and b_scales. fraction: the number of fraction bits that an aligned term keeps. kept: the number of
    fraction bits of the result.
    """
    m, n, groups = a.shape[0], b.shape[1], a_scales.shape[1]
    sums = torch.einsum("mgk,gkn->mng", a.view(m, groups, -1).double(), b.view(groups, -1, n).double())
    (sa, ea), (sb, eb) = _parted(a_scales, emin[0]), _parted(b_scales.T, emin[1])
    significands, exponents = sums * sa[:, None] * sb[None], ea[:, None] + eb[None]
    c = torch.zeros(m, n, device=a.device)
    for start in range(0, groups, length):
        block = slice(start, start + length)
        terms = significands[..., block]
        c = _added(c, terms, exponents[..., block], fraction, kept, terms.sum(-1))
    return _with_one_nan(c)


def sum_in_format(a: Tensor, b: Tensor, f: Format) -> Tensor:
    """Return a · b, summed by a `format` accumulator: it adds float32 products one by one, and rounds each sum to f."""
    c = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64, device=a.device)
    for k in range(a.shape[1]):
        p = (a[:, k, None] * b[None, k]).double()  # rounds to nearest in float32
        c = _nearest(_sum_to_odd(c, p), f)
    return _with_one_nan(c.float())


def _parted(x: Tensor, emin: int) -> tuple[Tensor, Tensor]:
    """Return (significands, exponents): x = significand · 2^exponent with 1 ≤ |significand| < 2.

    A magnitude below 2^emin, a subnormal, has the exponent emin and a significand below 1.
    """
    exponent = (torch.frexp(x.double())[1] - 1).clamp(min=emin)
    return torch.where(x.isfinite(), _scaled(x.double(), -exponent), x.double()), exponent


def _scaled(x: Tensor, exponent: Tensor) -> Tensor:
    """Return x · 2^exponent; torch.ldexp would compute the power in float32, whose range is too small."""
    return x * (exponent.long() + 1023 << 52).view(torch.float64)


def _added(c: Tensor, significands: Tensor, exponents: Tensor, fraction: int, kept: int, plain: Tensor) -> Tensor:
    """Return c plus all terms significand · 2^exponent of the last axis, which are aligned and truncated first.

    arithmetic.md ("Accumulators") defines these steps. fraction: the number of fraction bits of an aligned term.
    kept: the number of fraction bits of the result. plain: the ordinary sum of the terms; where plain + c is infinite
    or NaN, it is the result.
    """
    sc, ec = _parted(c, LOWEST)
    s, e = torch.cat([significands, sc[..., None]], -1), torch.cat([exponents, ec[..., None]], -1)
    top = e.where(s != 0, LOWEST).amax(-1, keepdim=True).clamp(min=LOWEST)
    steps = torch.trunc(_scaled(s.nan_to_num(0, 0, 0), fraction + e - top))  # truncates each term
    total = _scaled(steps.sum(-1), top[..., 0] - fraction)
    special = plain + c
    return torch.where(special.isfinite(), _truncated(total, kept), special).float()


def _truncated(v: Tensor, kept: int) -> Tensor:
    """Round toward zero to float32 numbers with `kept` fraction bits; beyond float32 the result becomes ±inf."""
    significand, exponent = _parted(v, LOWEST)
    return _scaled(torch.trunc(significand * 2**kept), exponent - kept)


def _sum_to_odd(a: Tensor, b: Tensor) -> Tensor:
    """Return a + b rounded to odd: a sum between two adjacent float64 numbers becomes the one whose last bit is 1.

    Rounding the result to at least two bits fewer gives the same value as rounding the exact sum once.
    """
    s = a + b
    from_b = s - a
    error = (a - (s - from_b)) + (b - from_b)
    bits = s.view(torch.int64)
    toward_zero = bits - ((error * s) < 0).long()
    return torch.where((error != 0) & error.isfinite(), toward_zero | 1, bits).view(torch.float64)


def _nearest(v: Tensor, f: Format) -> Tensor:
    """Round v to the format, ties to even; a result beyond the format's largest value becomes ±inf."""
    step = torch.frexp(v)[1].sub(1).clamp(min=f.emin).sub(f.mantissa_bits)
    rounded = _scaled(torch.round(_scaled(v, -step)), step)
    return torch.where(rounded.abs() > f.max, torch.copysign(torch.full_like(v, torch.inf), v), rounded)


def _with_one_nan(c: Tensor) -> Tensor:
    nan = torch.tensor(NAN_BITS, dtype=torch.int32, device=c.device).view(torch.float32)
    return torch.where(c.isnan(), nan, c)
