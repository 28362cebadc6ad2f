"""What GaussWS's theory says of noise and casts, asked of our own kernels whenever a report is made (G1 to G4).

Rounding sees mantissas alone, so that cases can be counted out: every mantissa of a block's maximum beside every
mantissa of a weight, in all binades that matter. ŵ = cast(w + R · 2^(1−b) · max|w|) is computed by its definition for
chosen R, and by the kernel for the R of a seed; where both are there they are the same bits.

What the paper leaves to the reader is asked both ways (facts 1.3.5): weights that lie on the cast's grid or beside it
(Lemma 1), and blocks whose maximum is a power of two, where noise is exactly half a step and ties decide (Table C.1).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

import torch
from torch import Tensor

from fewbits.analysis.engine.paper import paper
from fewbits.kernels.api import fake_quantize
from fewbits.kernels.formats import Format
from fewbits.kernels.noise import gaussian_noise, sample_weight, uniform_noise, unpack_noise
from fewbits.kernels.reference import noise as reference_noise

BF16_MANTISSA = 7
SQUARE = 32
PATTERNS = 1 << 16  # of the 16 bits that an element of R is made of
UNIFORM_4_BITS = tuple(k / 16 for k in range(1, 9))  # magnitudes of U(−½, ½) in 4 bits: τ = −4
MAXIMA = 128  # mantissas of blocks' maxima, at most: all of BF16's
WIDTHS = range(3, 14)  # Table C.1's
BINADES = 4  # of weights, from the maximum's own down: the others' steps are finer, and lose nothing that these keep


# -------------------------------------------------------------------------------- eq. 10


def equation_10() -> dict[int, Fraction]:
    """Pr(R). What is printed without a sign inside Pr(±1) is the probability of both signs."""
    two = Fraction(3, 4) / 2**9
    one = Fraction(3, 4) ** 2 / 4 * (1 - 2 * two)
    return {-2: two, -1: one, 0: 1 - 2 * (one + two), 1: one, 2: two}


@cache
def generated() -> dict[int, Fraction]:
    """Pr(R) of the generator: a count over every pattern of its 16 bits."""
    number = torch.arange(PATTERNS)
    nibbles = reference_noise.gaussian_nibbles([number >> bit & 1 for bit in range(16)])
    values = reference_noise.unpack_noise(nibbles, 8 * PATTERNS)[::8]  # one element to a word here
    return {value: Fraction(int((values == value).sum()), PATTERNS) for value in range(-2, 3)}


@dataclass(frozen=True)
class Drawn:
    """What the kernel draws, beside the generator by definition."""

    elements: int
    different: int
    chi_square: float  # of counts beside eq. 10's, 4 degrees of freedom


def drawn(elements: int = 1 << 18, seed: int = 1) -> Drawn:
    found = noise("gaussian", elements, seed)
    expected = reference_noise.unpack_noise(reference_noise.gaussian_noise(elements, seed, "cpu"), elements)
    counts = torch.bincount(found.long() + 2, minlength=5).double()
    said = torch.tensor([float(p) * elements for p in equation_10().values()], dtype=torch.float64)
    return Drawn(elements, int((found != expected).sum()), float(((counts - said) ** 2 / said).sum()))


def noise(kind: str, count: int, seed: int) -> Tensor:
    """R of the kernel, as float32."""
    if kind == "gaussian":
        return unpack_noise(gaussian_noise(count, seed), count).float()
    return uniform_noise(count, seed).float()


# -------------------------------------------------------------------------------- Lemma 1: noise that a cast swallows


def cast(x: Tensor, mantissa: int) -> Tensor:
    """To that many bits of mantissa and BF16's exponents."""
    return fake_quantize(x, f"e8m{mantissa}")


def sampled(w: Tensor, r: Tensor | float, scale: Tensor, mantissa: int = BF16_MANTISSA) -> Tensor:
    """ŵ by definition (eq. 3), after its cast."""
    return cast(w + r * scale, mantissa)


def scales(bits: float, maxima: Tensor) -> Tensor:
    """Of noise: as the kernel has bit widths, in float32."""
    exact = 1 - torch.tensor(bits, dtype=torch.float32).double()
    return torch.exp2(exact).float() * maxima


def mantissas(count: int, steps: int) -> Tensor:
    """From 1 to below 2, on a grid of that many steps; `count` of them where there are more, the first among them."""
    return 1 + torch.linspace(0, steps - 1, min(count, steps)).round() / steps


@dataclass(frozen=True)
class Swallowed:
    """Noise that is not zero and that a cast makes nothing of: fp(ŵ) = fp(w)."""

    lost: int
    cases: int

    @staticmethod
    def of(same: Iterable[Tensor]) -> Swallowed:
        """Count the cases in which a cast made nothing of the noise."""
        counts = [(int(one.sum()), one.numel()) for one in same]
        return Swallowed(sum(lost for lost, _ in counts), sum(cases for _, cases in counts))

    @property
    def share(self) -> float:
        return self.lost / self.cases


def swallowed(
    bits: float,
    magnitude: float = 1.0,
    mantissa: int = BF16_MANTISSA,
    *,
    beside_grid: bool = False,
    ties: bool = True,
) -> Swallowed:
    """Over all mantissas of maximum and weight, all binades, both signs, for |R| = magnitude.

    beside_grid: weights lie on sixteenths of a step, as FP32 masters may. ties: maxima are powers of two, too.
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
    """Squares whose maxima have every mantissa of BF16, and ŵ that the kernel made of them."""

    w: Tensor
    scale: Tensor  # of each element's square
    r: Tensor
    kernel: Tensor  # ŵ in BF16, as float32

    @property
    def defined(self) -> bool:
        """Whether the kernel's bits are the definition's."""
        return torch.equal(self.kernel, sampled(self.w, self.r, self.scale))

    @property
    def swallowed(self) -> Swallowed:
        return Swallowed.of([(self.kernel == self.w)[self.r != 0]])


def by_kernel(bits: float, kind: str, *, exponents: tuple[int, int] = (-12, 1), seed: int = 1) -> Sampled:
    """Weights on BF16's grid in those binades below their square's maximum, signs at random, for the R of a seed."""
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
    """Lemma 2: the exponent above which small weights survive in a block of that maximum (eq. 8)."""
    return math.floor(2 - bits + math.log2(maximum)) - BF16_MANTISSA


def drowned(bits: float, above: int = 0, magnitude: float = 1.0) -> Swallowed:
    """Small weights that make no difference to BF16 noise: those of the binade `above` the cut-off, in every mantissa,
    beside maxima of every mantissa and noise of both signs."""
    maxima = mantissas(MAXIMA, 1 << BF16_MANTISSA)
    exponents = torch.tensor([float(cutoff(bits, float(m)) + above) for m in maxima])
    small = torch.exp2(exponents)[:, None] * (maxima + 2.0**-8)  # ξ > the cut-off: strictly
    scale = scales(bits, maxima)[:, None]
    found = [sampled(small, r, scale) == sampled(torch.zeros_like(small), r, scale) for r in (magnitude, -magnitude)]
    return Swallowed.of(found)


# -------------------------------------------------------------------------------- Proposition 3, Table C.1


def exponent_bits(bits: int, *, after_noise: bool) -> int:
    """As Proposition 3 has it: of w, or of ŵ."""
    return math.ceil(math.log2(bits + (3 if after_noise else 1)))


def least_exponent_bits(bits: int, *, after_noise: bool) -> int:
    """The fewest whose format, its top binade where the greatest value lies, reaches down to the least step that
    Proposition 3 speaks of: the cut-off's for w, noise's own for ŵ. One field is for zero and subnormals, one for
    infinities and NaN."""
    top, least = (1, 1 - bits - BF16_MANTISSA) if after_noise else (0, cutoff(bits, 1.0))
    for width in range(2, 9):
        grid = _ieee(width)
        if math.ldexp(grid.min_subnormal, top - grid.emax) <= 2.0**least:
            return width
    raise ValueError(f"{bits} bits: no exponent of 8 bits or fewer reaches that far")


def least_mantissa_bits(bits: int, *, ties: bool) -> int:
    """The fewest with which no noise is swallowed; without ties, where blocks' maxima are no powers of two."""
    return next(m for m in range(1, 24) if not swallowed(bits, mantissa=m, ties=ties).lost)


@dataclass(frozen=True)
class Underflows:
    """Values that are not zero and become it in a format of Proposition 3's width."""

    weights: int
    sampled: int
    values: int


def underflows(bits: int) -> Underflows:
    """Of the kernel's ŵ, of weights above the cut-off as Proposition 3 assumes."""
    found = by_kernel(bits, "gaussian", exponents=(cutoff(bits, 1.0) + 1, 1))
    counts = []
    for values, after_noise in ((found.w, False), (found.kernel, True)):
        grid = _ieee(exponent_bits(bits, after_noise=after_noise))
        scaled = values * 2.0 ** (grid.emax - after_noise)  # noise may add a binade above the maximum's
        counts.append(int(((fake_quantize(scaled, str(grid)) == 0) & (values != 0)).sum()))
    return Underflows(counts[0], counts[1], found.w.numel())


def _ieee(exponent: int) -> Format:
    return Format.parse(f"e{exponent}m{BF16_MANTISSA}ieee")


FORMATS = ("e2m1", "e2m3", "e3m2", "e4m3", "e3m4", "e5m2", "bf16", "fp16", "fp32")  # today's, as Table C.1 has them


def formats_for(exponent: int, mantissa: int) -> tuple[str, ...]:
    """The narrowest of today's formats that have as many bits of both, spelled as in Table C.1: FP8 E4M3."""
    grids = map(Format.parse, FORMATS)
    fit = [grid for grid in grids if grid.exponent_bits >= exponent and grid.mantissa_bits >= mantissa]
    narrowest = min(grid.bits for grid in fit)
    names = {grid: str(grid).upper() for grid in fit if grid.bits == narrowest}
    return tuple(name if "FP" in name or "BF" in name else f"FP{grid.bits} {name}" for grid, name in names.items())


@dataclass(frozen=True)
class Masked:
    """Weights below the cut-off under the kernel's noise."""

    weights: int
    noisy: int  # whose R is not zero
    masked: int  # that made no difference
    masked_without_noise: int
    kept: int  # of those whose R is zero: came out as they are, in BF16


def masked(bits: float) -> Masked:
    low = cutoff(bits, 1.0)
    found = by_kernel(bits, "gaussian", exponents=(low - 6, low - 1))
    small = found.w.abs() < torch.exp2(torch.tensor(float(low)))
    without = sampled(torch.zeros_like(found.w), found.r, found.scale)
    gone, noisy = (found.kernel == without) & small, (found.r != 0) & small
    kept = (found.kernel == found.w) & small & ~noisy
    return Masked(int(small.sum()), int(noisy.sum()), int(gone.sum()), int((gone & ~noisy).sum()), int(kept.sum()))


def table_c1_rows() -> dict[str, list[tuple[float | str, float | str]]]:
    """Return Table C.1's rows, ours beside the paper's: bits that were searched for, not computed from its formulas."""
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
    """Spell "FP8 E4M3, E3M4" as "FP8 E4M3, FP8 E3M4"."""
    assert value is not None
    return value.replace("FP8 E4M3, E3M4", "FP8 E4M3, FP8 E3M4") if isinstance(value, str) else value
