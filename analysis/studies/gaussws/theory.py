"""GaussWS's theory of noise and casts, checked with our own kernels by enumerating cases (claims G1 to G4, Table C.1).

Rounding depends on mantissas only, so all cases can be enumerated: every mantissa of a block's maximum with every
mantissa of a weight, in all binades that matter. The sampled weight ŵ = cast(w + R · 2^(1−b) · max|w|), with the bit
width b, is computed by this definition for chosen noise R, and by the kernel for the R that it draws from a seed; both
have to give the same bits for the same R.

The smallest nonzero |R| is 2^τ; GaussWS has τ = 0. Noise 2^τ · R at b bits is the noise R at b − τ bits, so the kernel
gives the cases of every τ. Two statements of the paper can be read in two ways, and both readings are checked: in Lemma
1, weights may lie on the grid of the cast only, or also between its points; in Table C.1, the maximum of a block may be
any number, or no power of two (if it is one, noise is exactly half a step of the cast, a tie).
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from fewbits.analysis.engine.results.paper import paper
from fewbits.kernels.api import fake_quantize
from fewbits.kernels.formats import Format
from fewbits.kernels.noise import gaussian_noise, sample_weight, uniform_noise, unpack_noise
from fewbits.kernels.reference import noise as reference_noise

BF16_MANTISSA = 7
SQUARE = 32
SEED = 1
PATTERNS = 1 << 16  # the patterns of the 16 random bits from which an element of R is computed
UNIFORM_4_BITS = tuple(k / 16 for k in range(1, 9))  # the magnitudes of U(−½, ½) in 4 bits; the smallest is 2^−4
TAUS = (0, -2, -4)  # the exponents of the smallest noise for which Lemma 2 and Propositions 3 and 4 are checked
MAXIMA = 128  # the largest number of mantissas that are tried for the maxima of blocks; BF16 has 128
WIDTHS = range(3, 14)  # the bit widths of Table C.1
BINADES = 4  # binades of weights that are tried, from the maximum's down; lower ones have finer steps
# The formats of today's hardware that Table C.1 can name.
FORMATS = ("e2m1", "e2m3", "e3m2", "e4m3", "e3m4", "e5m2", "bf16", "fp16", "fp32")


# -------------------------------------------------------------------------------- eq. 10


def equation_10() -> dict[int, Fraction]:
    """Return the probability of each value of R by eq. 10; Pr(±2) in the formula of Pr(±1) is that of both signs."""
    two = Fraction(3, 4) / 2**9
    one = Fraction(3, 4) ** 2 / 4 * (1 - 2 * two)
    return {-2: two, -1: one, 0: 1 - 2 * (one + two), 1: one, 2: two}


@cache
def generated() -> dict[int, Fraction]:
    """Return the probability of each value of R, counted over all patterns of the reference generator's 16 bits."""
    number = torch.arange(PATTERNS)
    nibbles = reference_noise.gaussian_nibbles([number >> bit & 1 for bit in range(16)])
    # A word holds eight elements, of which only the first is computed from a pattern.
    values = reference_noise.unpack_noise(nibbles, 8 * PATTERNS)[::8]
    return {value: Fraction(int((values == value).sum()), PATTERNS) for value in range(-2, 3)}


def differing() -> int:
    """Return how many of 2^18 elements of the kernel's R differ from those of the reference generator."""
    elements = 1 << 18
    expected = reference_noise.unpack_noise(reference_noise.gaussian_noise(elements, SEED, "cpu"), elements)
    return int((noise("gaussian", elements, SEED) != expected).sum())


def noise(kind: str, count: int, seed: int) -> Tensor:
    """Return `count` elements of the noise R that the kernel draws, as float32. kind: gaussian or uniform."""
    if kind == "gaussian":
        return unpack_noise(gaussian_noise(count, seed), count).float()
    return uniform_noise(count, seed).float()


# -------------------------------------------------------------------------------- Lemma 1: noise that a cast swallows


def sampled(w: Tensor, r: Tensor | float, scale: Tensor, mantissa: int = BF16_MANTISSA) -> Tensor:
    """Return ŵ by its definition in eq. 3, in a format with this number of mantissa bits and BF16's exponents."""
    return fake_quantize(w + r * scale, f"e8m{mantissa}")


def scales(bits: float, maxima: Tensor) -> Tensor:
    """Return the factors of the noise, 2^(1 − bits) · maxima, with `bits` rounded to float32, as in the kernel."""
    exact = 1 - torch.tensor(bits, dtype=torch.float32).double()
    return torch.exp2(exact).float() * maxima


def mantissas(count: int, steps: int) -> Tensor:
    """Return all numbers 1 + i / steps in [1, 2); if there are more than `count`, an even selection that has 1."""
    return 1 + torch.linspace(0, steps - 1, min(count, steps)).round() / steps


def swallowed_noise(
    bits: float,
    magnitude: float = 1.0,
    mantissa: int = BF16_MANTISSA,
    *,
    beside_grid: bool = False,
    ties: bool = True,
) -> Tensor:
    """Return by case whether noise with |R| = magnitude has no effect: the cast of w + noise equals the cast of w.

    The cases are all mantissas of the block's maximum with all weights in the BINADES binades below it, and both signs
    of R. For casts with more mantissa bits than BF16, MAXIMA mantissas of the maximum and the weights in its binade.

    beside_grid: also weights between the values of the cast's format, at sixteenths of a step, as FP32 master weights
    can have. ties: also maxima that are powers of two, where noise can be exactly half a step, a tie in rounding.
    """
    steps = 1 << mantissa
    maxima = mantissas(MAXIMA, steps)[0 if ties else 1 :, None]
    weights = mantissas(steps, steps)
    if beside_grid:
        weights = (weights + torch.arange(-7, 9)[:, None] / (16 * steps)).flatten()
    found = []
    for binade in range(BINADES if mantissa <= BF16_MANTISSA else 1):
        w = weights * 2.0**-binade
        within, plain, scale = w <= maxima, fake_quantize(w, f"e8m{mantissa}"), scales(bits, maxima)
        found += [(sampled(w, r, scale, mantissa) == plain)[within] for r in (magnitude, -magnitude)]
    return torch.cat(found)


class Sampled(NamedTuple):
    """Weights w, and ŵ by the kernel; each of BF16's mantissas is that of some square's maximum."""

    w: Tensor
    scale: Tensor  # for each element, the factor of the noise in its square
    r: Tensor  # the noise R
    kernel: Tensor  # the kernel's ŵ in BF16, stored as float32

    @property
    def defined(self) -> bool:
        """True if the kernel's ŵ equals cast(w + r · scale) to the bit."""
        return torch.equal(self.kernel, sampled(self.w, self.r, self.scale))

    @property
    def swallowed(self) -> Tensor:
        """True for the elements with noise that ŵ does not have."""
        return (self.kernel == self.w)[self.r != 0]


def by_kernel(bits: float, kind: str, *, exponents: tuple[int, int] = (-12, 1)) -> Sampled:
    """Sample random BF16 weights with the kernel, which draws R from a seed. kind: gaussian or uniform noise.

    exponents: the first exponent of weights, and the end of the range, which is excluded. The maxima of the squares
    have exponent 0; weights above their square's maximum are halved.
    """
    g = torch.Generator().manual_seed(SEED)
    shape, steps = (SQUARE, SQUARE * MAXIMA), 1 << BF16_MANTISSA
    maxima = mantissas(MAXIMA, steps).repeat_interleave(SQUARE)[None].expand(shape)
    w = 1 + torch.randint(0, steps, shape, generator=g) / steps
    w = w * torch.exp2(torch.randint(*exponents, shape, generator=g).float())
    w = torch.where(w <= maxima, w, w / 2) * (torch.randint(0, 2, shape, generator=g) * 2 - 1)
    w[0, ::SQUARE] = maxima[0, ::SQUARE]
    widths = torch.full((1, MAXIMA), float(bits))
    kernel = sample_weight(w, widths, SEED, noise="gaussian" if kind == "gaussian" else "uniform", block=SQUARE)
    return Sampled(w, scales(bits, maxima), noise(kind, w.numel(), SEED).view(shape), kernel.float())


# -------------------------------------------------------------------------------- Lemma 2: weights that noise swallows


def cutoff(bits: float, maximum: float, tau: float = 0) -> int:
    """Return the exponent c of Lemma 2 (eq. 8): the smallest noise, 2^tau, swallows no weight above 2^c.

    Noise swallows a weight if noise + weight is rounded to the same value as the noise alone.
    """
    return math.floor(tau + 2 - bits + math.log2(maximum)) - BF16_MANTISSA


def swallowed_weights(bits: float, above: int = 0, magnitude: float = 1.0, tau: int = 0) -> Tensor:
    """Return by case whether a small weight has no effect beside noise with |R| = magnitude · 2^tau.

    above: the binade of the weights; 0 starts at Lemma 2's cut-off, −1 is the one below. The cases are all mantissas of
    the weight and of the block's maximum, with both signs of the noise.
    """
    maxima = mantissas(MAXIMA, 1 << BF16_MANTISSA)
    exponents = torch.tensor([float(cutoff(bits, float(m), tau) + above) for m in maxima])
    small = torch.exp2(exponents)[:, None] * (maxima + 2.0**-8)  # strictly above the cut-off
    scale, size = scales(bits, maxima)[:, None], magnitude * 2.0**tau
    found = [sampled(small, r, scale) == sampled(torch.zeros_like(small), r, scale) for r in (size, -size)]
    return torch.cat(found).flatten()


# -------------------------------------------------------------------------------- Proposition 3, Table C.1


def exponent_bits(bits: int, *, after_noise: bool, tau: int = 0) -> int:
    """Return the exponent bits that Proposition 3 requires for a weight w or, with after_noise, for ŵ."""
    return math.ceil(math.log2(bits - tau + (3 if after_noise else 1)))


def least_exponent_bits(bits: int, *, after_noise: bool, tau: int = 0) -> int:
    """Find the fewest exponent bits of a format for weights w or, with after_noise, for sampled weights ŵ.

    The greatest value is in the format's top binade, and its smallest subnormal number must not exceed a bound: for w,
    Lemma 2's cut-off; for ŵ, BF16's step at the smallest nonzero noise. One value of the exponent field is for zero and
    subnormals, and one for infinities and NaN.
    """
    top, least = (1, 1 + tau - bits - BF16_MANTISSA) if after_noise else (0, cutoff(bits, 1.0, tau))
    grids = {width: _ieee(width) for width in range(2, 9)}
    return next(n for n, grid in grids.items() if math.ldexp(grid.min_subnormal, top - grid.emax) <= 2.0**least)


def least_mantissa_bits(bits: int, *, ties: bool) -> int:
    """Return the fewest mantissa bits with which the cast never swallows noise. ties: as for `swallowed_noise`."""
    return next(m for m in range(1, 24) if not swallowed_noise(bits, mantissa=m, ties=ties).any())


def underflows(bits: int, tau: int = 0) -> tuple[int, int]:
    """Count weights above Lemma 2's cut-off, and values of ŵ, that are zero with Proposition 3's exponent bits."""
    found = by_kernel(bits - tau, "gaussian", exponents=(cutoff(bits, 1.0, tau) + 1, 1))
    counts = []
    for values, after_noise in ((found.w, False), (found.kernel, True)):
        grid = _ieee(exponent_bits(bits, after_noise=after_noise, tau=tau))
        scaled = values * 2.0 ** (grid.emax - after_noise)  # noise can move values to the binade above the maximum's
        counts.append(int(((fake_quantize(scaled, str(grid)) == 0) & (values != 0)).sum()))
    return counts[0], counts[1]


def _ieee(exponent: int) -> Format:
    return Format.parse(f"e{exponent}m{BF16_MANTISSA}ieee")


# -------------------------------------------------------------------------------- Proposition 4


def below_cutoff(bits: float, tau: int = 0) -> tuple[int, int, int, int, int]:
    """Return counts of weights below Lemma 2's cut-off, to which the kernel has added noise.

    The counts are of all weights; those whose R is not zero; those that are swallowed (ŵ is as for a weight of 0);
    those that are swallowed, although R is zero; and those whose R is zero and whose ŵ is the weight itself.
    """
    low = cutoff(bits, 1.0, tau)
    found = by_kernel(bits - tau, "gaussian", exponents=(low - 6, low - 1))
    small = found.w.abs() < torch.exp2(torch.tensor(float(low)))
    without = sampled(torch.zeros_like(found.w), found.r, found.scale)
    gone, noisy = (found.kernel == without) & small, (found.r != 0) & small
    kept = (found.kernel == found.w) & small & ~noisy
    return int(small.sum()), int(noisy.sum()), int(gone.sum()), int((gone & ~noisy).sum()), int(kept.sum())


# -------------------------------------------------------------------------------- Table C.1


def formats_for(exponent: int, mantissa: int) -> str:
    """Return the narrowest of FORMATS with at least these bits, named as in Table C.1, such as "FP8 E4M3"."""
    grids = map(Format.parse, FORMATS)
    fit = [grid for grid in grids if grid.exponent_bits >= exponent and grid.mantissa_bits >= mantissa]
    narrowest = min(grid.bits for grid in fit)
    names = (str(grid).upper() for grid in fit if grid.bits == narrowest)
    return ", ".join(name if "F" in name else f"FP{narrowest} {name}" for name in names)


def table_c1_rows() -> dict[str, list[tuple[float | str, float | str | None]]]:
    """Return the rows of Table C.1 by id; a row has for each of WIDTHS our value (by search) and the paper's.

    In the paper's text, "FP8 E4M3, E3M4" is written out as "FP8 E4M3, FP8 E3M4".
    """
    mantissa = [least_mantissa_bits(bits, ties=False) for bits in WIDTHS]
    exponent = [least_exponent_bits(bits, after_noise=True) for bits in WIDTHS]
    ours: dict[str, list[float | str]] = {
        "exponent": [float(least_exponent_bits(bits, after_noise=False)) for bits in WIDTHS],
        "exponent-sampled": [*map(float, exponent)],
        "mantissa-sampled": [*map(float, mantissa)],
        "format": [*map(formats_for, exponent, mantissa)],
    }
    rows = {row.id: row.values or row.text for row in paper("gaussws").table("Table C.1").rows}
    rows["format"] = tuple(str(text).replace("FP8 E4M3, E3M4", "FP8 E4M3, FP8 E3M4") for text in rows["format"])
    return {name: list(zip(values, rows[name], strict=True)) for name, values in ours.items()}
