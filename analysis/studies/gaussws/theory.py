"""Check GaussWS's theory of noise and casts with our own kernels; claims G1 to G4 use the results.

Rounding depends on mantissas only, so all cases can be enumerated: every mantissa of a block's maximum with every
mantissa of a weight, in all binades that matter. The sampled weight ŵ = cast(w + R · 2^(1−b) · max|w|), with the bit
width b, is computed by this definition for chosen noise R, and by the kernel for the R that it draws from a seed. The
definition and the kernel have to give the same bits for the same R.

Where the GaussWS paper can be read in two ways, both readings are checked. In Lemma 1, weights may lie only on the grid
of the cast, or also between its points. In Table C.1, the maximum of a block may be any number, or no power of two; if
it is a power of two, noise is exactly half a step of the cast, a tie.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

import torch
from torch import Tensor

from fewbits.analysis.engine.results.paper import paper
from fewbits.kernels.api import fake_quantize
from fewbits.kernels.formats import Format
from fewbits.kernels.noise import gaussian_noise, sample_weight, uniform_noise, unpack_noise
from fewbits.kernels.reference import noise as reference_noise

BF16_MANTISSA = 7
SQUARE = 32
PATTERNS = 1 << 16  # the patterns of the 16 random bits from which an element of R is computed
UNIFORM_4_BITS = tuple(k / 16 for k in range(1, 9))  # the magnitudes of U(−½, ½) in 4 bits; the smallest is 2^τ, τ = −4
MAXIMA = 128  # the largest number of mantissas that are tried for the maxima of blocks; BF16 has 128
WIDTHS = range(3, 14)  # the bit widths of Table C.1
# The number of binades of weights that are tried, from the maximum's down. Lower binades have finer steps, so that a
# cast swallows no more noise there than in the binades above.
BINADES = 4


# -------------------------------------------------------------------------------- eq. 10


def equation_10() -> dict[int, Fraction]:
    """Return the probability of each value of the noise R according to eq. 10 of the GaussWS paper.

    The formula of Pr(±1) contains Pr(±2), which is read as the probability of both signs together.
    """
    two = Fraction(3, 4) / 2**9
    one = Fraction(3, 4) ** 2 / 4 * (1 - 2 * two)
    return {-2: two, -1: one, 0: 1 - 2 * (one + two), 1: one, 2: two}


@cache
def generated() -> dict[int, Fraction]:
    """Return the probability of each value of GaussWS's noise R, counted over all patterns of 16 random bits.

    The reference generator computes one element of R from 16 random bits.
    """
    number = torch.arange(PATTERNS)
    nibbles = reference_noise.gaussian_nibbles([number >> bit & 1 for bit in range(16)])
    values = reference_noise.unpack_noise(nibbles, 8 * PATTERNS)[
        ::8
    ]  # a word holds eight elements, of which only the first is computed from a pattern
    return {value: Fraction(int((values == value).sum()), PATTERNS) for value in range(-2, 3)}


@dataclass(frozen=True)
class Drawn:
    """The rounded noise R that the kernel draws, compared with the reference generator and GaussWS's eq. 10.

    Eq. 10 gives the probability of each value of R.
    """

    elements: int  # the number of drawn elements
    different: int  # the number of elements that differ from the reference generator's
    chi_square: float  # χ² of the counts of R against eq. 10, with 4 degrees of freedom


def drawn(elements: int = 1 << 18, seed: int = 1) -> Drawn:
    """Compare the noise R that the kernel draws for one seed with the reference generator and with GaussWS's eq. 10.

    elements: the number of drawn elements.
    """
    found = noise("gaussian", elements, seed)
    expected = reference_noise.unpack_noise(reference_noise.gaussian_noise(elements, seed, "cpu"), elements)
    counts = torch.bincount(found.long() + 2, minlength=5).double()
    stated = torch.tensor([float(p) * elements for p in equation_10().values()], dtype=torch.float64)
    return Drawn(elements, int((found != expected).sum()), float(((counts - stated) ** 2 / stated).sum()))


def noise(kind: str, count: int, seed: int) -> Tensor:
    """Return `count` elements of the noise R that the kernel draws, as float32. kind: gaussian or uniform."""
    if kind == "gaussian":
        return unpack_noise(gaussian_noise(count, seed), count).float()
    return uniform_noise(count, seed).float()


# -------------------------------------------------------------------------------- Lemma 1: noise that a cast swallows


def cast(x: Tensor, mantissa: int) -> Tensor:
    """Return x rounded to a format with this number of mantissa bits and BF16's exponents."""
    return fake_quantize(x, f"e8m{mantissa}")


def sampled(w: Tensor, r: Tensor | float, scale: Tensor, mantissa: int = BF16_MANTISSA) -> Tensor:
    """Return the sampled weight ŵ by its definition in GaussWS's eq. 3: cast(w + r · scale).

    r: the noise R. scale: the factor of the noise (see `scales`). mantissa: the mantissa bits of the cast.
    """
    return cast(w + r * scale, mantissa)


def scales(bits: float, maxima: Tensor) -> Tensor:
    """Return the factors of the noise, 2^(1 − bits) · maxima, with `bits` rounded to float32, as in the kernel.

    bits: the bit width. maxima: the greatest magnitudes of blocks of weights.
    """
    exact = 1 - torch.tensor(bits, dtype=torch.float32).double()
    return torch.exp2(exact).float() * maxima


def mantissas(count: int, steps: int) -> Tensor:
    """Return all numbers 1 + i / steps in [1, 2), for integers i; if there are more than `count`, return a selection.

    The selection has `count` numbers, which are evenly spaced except for rounding, and begins with 1.
    """
    return 1 + torch.linspace(0, steps - 1, min(count, steps)).round() / steps


@dataclass(frozen=True)
class Swallowed:
    """The number of tried cases, and of those in which the cast of weight + noise swallows a term: noise, or weight."""

    count: int  # cases in which the result is the same with and without the term
    cases: int  # all cases

    @staticmethod
    def of(same: Iterable[Tensor]) -> Swallowed:
        """Count the cases in which a term (noise, or weight) has no effect on the cast of weight + noise.

        Each tensor in `same` has an element for each case, true if the term has no effect.
        """
        counts = [(int(one.sum()), one.numel()) for one in same]
        return Swallowed(sum(count for count, _ in counts), sum(cases for _, cases in counts))

    @property
    def share(self) -> float:
        return self.count / self.cases


def swallowed_noise(
    bits: float,
    magnitude: float = 1.0,
    mantissa: int = BF16_MANTISSA,
    *,
    beside_grid: bool = False,
    ties: bool = True,
) -> Swallowed:
    """Count the cases in which noise with |R| = magnitude has no effect: the cast of w + noise equals the cast of w.

    The cases are all mantissas of the block's maximum with all weights w in the BINADES binades from the maximum's
    down, and with both signs of R. If the cast has more mantissa bits than BF16, only MAXIMA evenly spaced mantissas of
    the maximum, and only weights in the maximum's binade, are tried.

    bits: the bit width b. mantissa: the mantissa bits of the cast. beside_grid: also try weights between the values of
    the cast's format, at sixteenths of a step, as FP32 master weights can have. ties: also try maxima that are powers
    of two, where noise can be exactly half a step of the cast, a tie in rounding.
    """
    steps = 1 << mantissa
    maxima = mantissas(MAXIMA, steps)[0 if ties else 1 :, None]
    weights = mantissas(steps, steps)
    if beside_grid:
        weights = (weights + torch.arange(-7, 9)[:, None] / (16 * steps)).flatten()
    found = []
    for binade in range(BINADES if mantissa <= BF16_MANTISSA else 1):
        w = weights * 2.0**-binade
        within = w <= maxima
        for r in (magnitude, -magnitude):
            found.append((sampled(w, r, scales(bits, maxima), mantissa) == cast(w, mantissa))[within])
    return Swallowed.of(found)


@dataclass(frozen=True)
class Sampled:
    """Weights w and the sampled weights ŵ that the kernel returns.

    The weights were made so that each of BF16's mantissas is that of the greatest |w| of some square (a block of 32×32
    weights).
    """

    w: Tensor
    scale: Tensor  # for each element, the factor of the noise in its square
    r: Tensor  # the noise R
    kernel: Tensor  # the kernel's ŵ in BF16, stored as float32

    @property
    def defined(self) -> bool:
        """True if the kernel's ŵ equals cast(w + r · scale) to the bit."""
        return torch.equal(self.kernel, sampled(self.w, self.r, self.scale))

    @property
    def swallowed(self) -> Swallowed:
        return Swallowed.of([(self.kernel == self.w)[self.r != 0]])


def by_kernel(bits: float, kind: str, *, exponents: tuple[int, int] = (-12, 1), seed: int = 1) -> Sampled:
    """Sample random BF16 weights with the kernel, which draws R from the seed.

    bits: the bit width. kind: gaussian or uniform noise. exponents: the first exponent of weights, and the end of the
    range, which is excluded. The maxima of the squares (blocks of 32×32 weights) have exponent 0; weights above their
    square's maximum are halved.
    """
    g = torch.Generator().manual_seed(seed)
    shape, steps = (SQUARE, SQUARE * MAXIMA), 1 << BF16_MANTISSA
    maxima = mantissas(MAXIMA, steps).repeat_interleave(SQUARE)[None].expand(shape)
    w = 1 + torch.randint(0, steps, shape, generator=g) / steps
    w = w * torch.exp2(torch.randint(*exponents, shape, generator=g).float())
    w = torch.where(w <= maxima, w, w / 2) * (torch.randint(0, 2, shape, generator=g) * 2 - 1)
    w[0, ::SQUARE] = maxima[0, ::SQUARE]
    widths = torch.full((1, MAXIMA), float(bits))
    kernel = sample_weight(w, widths, seed, noise="gaussian" if kind == "gaussian" else "uniform", block=SQUARE)
    return Sampled(w, scales(bits, maxima), noise(kind, w.numel(), seed).view(shape), kernel.float())


# -------------------------------------------------------------------------------- Lemma 2: weights that noise swallows


def cutoff(bits: float, maximum: float) -> int:
    """Return the exponent c of the cut-off in GaussWS's Lemma 2 (eq. 8): no weight above 2^c is swallowed.

    Noise swallows a weight if noise + weight is rounded to the same value as the noise alone.

    bits: the bit width. maximum: the greatest magnitude in the weight's block.
    """
    return math.floor(2 - bits + math.log2(maximum)) - BF16_MANTISSA


def swallowed_weights(bits: float, above: int = 0, magnitude: float = 1.0) -> Swallowed:
    """Count the cases in which a small weight w has no effect: BF16 rounds noise + w and noise alone to the same value.

    bits: the bit width. above: the binade of the weights; 0 is the one that starts at the cut-off of GaussWS's Lemma 2
    (see `cutoff`), −1 the one below. magnitude: |R|. The cases are all mantissas of the small weight and of the block's
    maximum, with both signs of the noise.
    """
    maxima = mantissas(MAXIMA, 1 << BF16_MANTISSA)
    exponents = torch.tensor([float(cutoff(bits, float(m)) + above) for m in maxima])
    small = torch.exp2(exponents)[:, None] * (maxima + 2.0**-8)  # strictly above the cut-off
    scale = scales(bits, maxima)[:, None]
    found = [sampled(small, r, scale) == sampled(torch.zeros_like(small), r, scale) for r in (magnitude, -magnitude)]
    return Swallowed.of(found)


# -------------------------------------------------------------------------------- Proposition 3, Table C.1


def exponent_bits(bits: int, *, after_noise: bool) -> int:
    """Return the exponent bits that GaussWS's Proposition 3 requires for a weight w or, with after_noise, for ŵ.

    bits: the bit width. ŵ is the sampled weight, w plus noise.
    """
    return math.ceil(math.log2(bits + (3 if after_noise else 1)))


def least_exponent_bits(bits: int, *, after_noise: bool) -> int:
    """Find the fewest exponent bits of a format for weights w or, with after_noise, for sampled weights ŵ.

    bits: the bit width. The greatest value of w or ŵ is in the format's top binade, and the format's smallest subnormal
    number must not exceed a bound from GaussWS's Proposition 3: for w, the cut-off of Lemma 2 (see `cutoff`); for ŵ,
    BF16's step at the magnitude of the smallest nonzero noise. One value of the exponent field is for zero and
    subnormals, and one is for infinities and NaN.
    """
    top, least = (1, 1 - bits - BF16_MANTISSA) if after_noise else (0, cutoff(bits, 1.0))
    for width in range(2, 9):
        grid = _ieee(width)
        if math.ldexp(grid.min_subnormal, top - grid.emax) <= 2.0**least:
            return width
    raise ValueError(
        f"bit width {bits} is too large: it needs a smaller step than any format with at most 8 exponent bits has"
    )


def least_mantissa_bits(bits: int, *, ties: bool) -> int:
    """Return the fewest mantissa bits with which the cast of weight + noise never swallows the noise.

    bits: the bit width. ties: also test blocks whose maximum is a power of two; there noise can be exactly half a step
    of the cast, a tie in rounding.
    """
    return next(m for m in range(1, 24) if not swallowed_noise(bits, mantissa=m, ties=ties).count)


@dataclass(frozen=True)
class Underflows:
    """The numbers of nonzero values that become zero in a format with the exponent bits of GaussWS's Proposition 3."""

    weights: int  # the number of weights that become zero
    sampled: int  # the number of values of ŵ that become zero
    values: int  # the number of all weights, which is also the number of all values of ŵ


def underflows(bits: int) -> Underflows:
    """Count random weights, and sampled weights ŵ, that become zero with the exponent bits of GaussWS's Proposition 3.

    As the proposition assumes, the weights exceed the cut-off of Lemma 2 (see `cutoff`). bits: the bit width.
    """
    found = by_kernel(bits, "gaussian", exponents=(cutoff(bits, 1.0) + 1, 1))
    counts = []
    for values, after_noise in ((found.w, False), (found.kernel, True)):
        grid = _ieee(exponent_bits(bits, after_noise=after_noise))
        scaled = values * 2.0 ** (grid.emax - after_noise)  # noise can move values to the binade above the maximum's
        counts.append(int(((fake_quantize(scaled, str(grid)) == 0) & (values != 0)).sum()))
    return Underflows(counts[0], counts[1], found.w.numel())


def _ieee(exponent: int) -> Format:
    return Format.parse(f"e{exponent}m{BF16_MANTISSA}ieee")


FORMATS = (
    "e2m1",
    "e2m3",
    "e3m2",
    "e4m3",
    "e3m4",
    "e5m2",
    "bf16",
    "fp16",
    "fp32",
)  # the formats of today's hardware that Table C.1 can name


def formats_for(exponent: int, mantissa: int) -> tuple[str, ...]:
    """Return the narrowest of FORMATS with at least these exponent and mantissa bits.

    They are named as in GaussWS's Table C.1, for example "FP8 E4M3" and "BF16".
    """
    grids = map(Format.parse, FORMATS)
    fit = [grid for grid in grids if grid.exponent_bits >= exponent and grid.mantissa_bits >= mantissa]
    narrowest = min(grid.bits for grid in fit)
    names = {grid: str(grid).upper() for grid in fit if grid.bits == narrowest}
    return tuple(name if "FP" in name or "BF" in name else f"FP{grid.bits} {name}" for grid, name in names.items())


@dataclass(frozen=True)
class SwallowedBelowCutoff:
    """Counts of the weights below the cut-off of GaussWS's Lemma 2, after the kernel has added noise to them.

    The cut-off is the magnitude below which noise may swallow a weight. ŵ is the sampled weight, with the noise.
    """

    weights: int  # all weights below the cut-off
    noisy: int  # weights whose R is not zero
    swallowed: int  # weights that do not change ŵ: it is the same for a weight of 0
    swallowed_without_noise: int  # weights that do not change ŵ and whose R is zero
    kept: int  # weights whose R is zero and whose ŵ is the weight itself


def swallowed_below_cutoff(bits: float) -> SwallowedBelowCutoff:
    """Count the weights below the cut-off of GaussWS's Lemma 2 that are swallowed: ŵ is as for a weight of 0.

    bits: the bit width. ŵ is the sampled weight, with the noise.
    """
    low = cutoff(bits, 1.0)
    found = by_kernel(bits, "gaussian", exponents=(low - 6, low - 1))
    small = found.w.abs() < torch.exp2(torch.tensor(float(low)))
    without = sampled(torch.zeros_like(found.w), found.r, found.scale)
    gone, noisy = (found.kernel == without) & small, (found.r != 0) & small
    kept = (found.kernel == found.w) & small & ~noisy
    return SwallowedBelowCutoff(
        int(small.sum()), int(noisy.sum()), int(gone.sum()), int((gone & ~noisy).sum()), int(kept.sum())
    )


def table_c1_rows() -> dict[str, list[tuple[float | str, float | str]]]:
    """Return the rows of GaussWS's Table C.1 by id; a row has a pair for each of WIDTHS: our value and the paper's.

    A value is a number of exponent or mantissa bits, or the names of formats. Our values are found by a search.
    """
    mantissa = [least_mantissa_bits(bits, ties=False) for bits in WIDTHS]
    sampled = [least_exponent_bits(bits, after_noise=True) for bits in WIDTHS]
    ours: dict[str, list[float | str]] = {
        "exponent": [float(least_exponent_bits(bits, after_noise=False)) for bits in WIDTHS],
        "exponent-sampled": [*map(float, sampled)],
        "mantissa-sampled": [*map(float, mantissa)],
        "format": [", ".join(formats_for(e, m)) for e, m in zip(sampled, mantissa, strict=True)],
    }
    printed = {row.id: [_plain(v) for v in row.values or row.text] for row in paper("gaussws").table("Table C.1").rows}
    return {name: list(zip(values, printed[name], strict=True)) for name, values in ours.items()}


def _plain(value: float | str | None) -> float | str:
    """Return a value of the paper's table; in text, write "FP8 E4M3, E3M4" out as "FP8 E4M3, FP8 E3M4"."""
    assert value is not None
    return value.replace("FP8 E4M3, E3M4", "FP8 E4M3, FP8 E3M4") if isinstance(value, str) else value
