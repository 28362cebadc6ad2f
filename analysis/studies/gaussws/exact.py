"""GaussWS's exact claims, checked with our kernels each time a report is made: noise, casts, gradients and memory.

theory.py has the computations behind G1 to G4. Here are those of G5 (is a weight quantized like its transpose?), G6 (do
noise and gradients of the backward pass agree with the forward pass?) and G17 (bytes of sampled weight and noise).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Literal

import torch
from torch import Tensor

from fewbits.analysis.engine.claims.hooks import exact
from fewbits.analysis.engine.results.data import Exact
from fewbits.analysis.studies.gaussws import theory
from fewbits.analysis.studies.gaussws.theory import SQUARE, TAUS, noise
from fewbits.kernels.api import fake_quantize
from fewbits.kernels.noise import gaussian_noise, sample_weight, uniform_noise

ROUNDED = 1e-6  # the greatest error of ∂L/∂b, relative to its largest possible value, that sums in float32 may cause
INT4 = "e1m2"  # with one exponent bit the grid is uniform: 0, ±1 … ±7 steps
SHAPE = (3 * SQUARE + 5, 2 * SQUARE + 9)  # not a multiple of the squares' side, so squares at two edges are smaller
SQUARES = (-(-SHAPE[0] // SQUARE), -(-SHAPE[1] // SQUARE))  # the rows and columns of squares


# -------------------------------------------------------------------------------- G1 to G4


@exact("gaussws", "G1")
def g1() -> Exact:
    found, stated, different = theory.generated(), theory.equation_10(), theory.differing()
    mean, variance = (float(sum(r**power * p for r, p in found.items())) for power in (1, 2))
    counts = ", ".join(f"{f'{r:+d}' if r else '0'}: {int(p * theory.PATTERNS):,}" for r, p in found.items())
    what = (
        f"counts of R over all {theory.PATTERNS:,} patterns of the generator's bits: {counts}; "
        f"{'exactly' if found == stated else 'not'} the probabilities of eq. 10, mean {mean:g}; "
        f"{different or 'none'} of the elements that the kernel drew differ from the generator's"
    )
    note = (
        f"the variance is {variance:.4f}; that of round(N(0, 1) / 2) is 0.3254. Eq. 10 holds if the Pr(±2) in the "
        "formula of Pr(±1) is the probability of both signs together"
    )
    return Exact(found == stated and not different and not mean, what, (note,))


@exact("gaussws", "G2")
def g2() -> Exact:
    """Check Lemma 1 for BF16: casts swallow no noise at bit widths below 9 (4-bit uniform noise: 5), but some there."""
    below = _swallowed_noise((3, 4, 5, 6, 7, 8, 8.5, 8.99), (1.0, 2.0))
    uniform = _swallowed_noise((3, 4, 4.5, 4.99), theory.UNIFORM_4_BITS)
    ends = _swallowed_noise((9,), (1.0, 2.0)), _swallowed_noise((5,), theory.UNIFORM_4_BITS)
    drawn = [theory.by_kernel(bits, "gaussian") for bits in (4, 6, 8, 8.99)]
    agrees = all(one.defined and not one.swallowed.any() for one in drawn)
    some, some_uniform = ("some are" if one.any() else "none is" for one in ends)
    what = (
        f"of {len(below):,} cases below 9 bits {int(below.sum()) or 'none'} are lost, and {some} at 9 bits; of "
        f"{len(uniform):,} cases of 4-bit uniform noise below 5 bits {int(uniform.sum()) or 'none'} are lost, and "
        f"{some_uniform} at 5 bits; the kernel {'agrees' if agrees else 'does not agree'}"
    )
    at_nine = theory.swallowed_noise(9)
    beside = {bits: theory.swallowed_noise(bits, beside_grid=True) for bits in (8, 8.5, 8.99)}
    whole = {bits: theory.by_kernel(bits, "uniform").swallowed for bits in (4.0, 6.0, 8.0)}
    notes = (
        f"at 9 bits noise is lost in {int(at_nine.sum()):,} of {len(at_nine):,} cases. They are ties: the maximum is a "
        "power of two, so the noise is half a step",
        "weights between the points of BF16's grid, such as FP32 master weights, keep all noise only up to 8 bits "
        f"(b < m + 1 + τ): in the upper {theory.BINADES} binades the share of lost noise is {_by_bits(beside)}",
        f"of DiffQ's noise of 16 bits, which is used in training here, the cast swallows {_by_bits(whole)} bits",
    )
    return Exact(not below.any() and not uniform.any() and agrees and all(one.any() for one in ends), what, notes)


def _swallowed_noise(widths: tuple[float, ...], magnitudes: tuple[float, ...]) -> Tensor:
    return torch.cat([theory.swallowed_noise(*case) for case in product(widths, magnitudes)])


def _by_bits(lost: dict[float, Tensor]) -> str:
    return ", ".join(f"{f'{_share(one):.2%}' if one.any() else 'none'} at {bits:g}" for bits, one in lost.items())


def _share(lost: Tensor) -> float:
    return float(lost.double().mean())


@exact("gaussws", "G3")
def g3() -> Exact:
    """Check Lemma 2 and Proposition 3, for noise whose smallest magnitude is 2^τ, and Table C.1."""
    below_nine = product((3, 4, 4.3, 5.7, 6, 9), (1.0, 2.0), TAUS)
    small = torch.cat([theory.swallowed_weights(bits, 0, magnitude, tau) for bits, magnitude, tau in below_nine])
    cases = list(product(theory.WIDTHS, TAUS))
    gone = sum(sum(theory.underflows(bits, tau)) for bits, tau in cases)
    fits = all(
        theory.least_exponent_bits(bits, after_noise=after, tau=tau)
        == theory.exponent_bits(bits, after_noise=after, tau=tau)
        for (bits, tau), after in product(cases, (False, True))
    )
    cells = [pair for row in theory.table_c1_rows().values() for pair in row]
    same = sum(ours == printed for ours, printed in cells)
    what = (
        f"for τ = {', '.join(map(str, TAUS))}: {int(small.sum()) or 'none'} of {len(small):,} small weights above the "
        f"cut-off are lost; with Proposition 3's exponent bits {gone or 'none'} of the kernel's values "
        f"become zero, and a search finds {'the same' if fits else 'other'} exponent bits; {same} of {len(cells)} "
        "entries of Table C.1 are the same"
    )
    lower = [_share(theory.swallowed_weights(5.7, -1, magnitude)) for magnitude in (1.0, 2.0)]
    uniform = _share(theory.swallowed_weights(5.7, 0, 8.0, -4))
    ties = [theory.least_mantissa_bits(bits, ties=True) for bits in (3, 8)]
    notes = (
        f"one binade below Lemma 2's cut-off {lower[0]:.0%} of the weights are lost for |R| = 1 and {lower[1]:.0%} for "
        "|R| = 2, which the lemma's proof leaves out. The lemma is about the smallest noise: the greatest 4-bit "
        f"uniform noise, eight times the smallest, swallows {uniform:.0%} of the weights just above its cut-off",
        "with Table C.1's mantissa bits, b − 2, the width is exactly the one that Lemma 1 excludes: if a block's "
        f"maximum is a power of two, ties swallow noise; keeping this noise, too, takes {ties[0]} bits instead of 1 at "
        f"b = 3 and {ties[1]} instead of 6 at b = 8",
    )
    return Exact(not small.any() and not gone and fits and same == len(cells), what, notes)


@exact("gaussws", "G4")
def g4() -> Exact:
    """Check Proposition 4, for noise whose smallest magnitude is 2^τ."""
    found = [theory.below_cutoff(bits, tau) for bits, tau in product((3, 4, 6, 9), TAUS)]
    unchanged = all(kept == weights - noisy for weights, noisy, _, _, kept in found)
    weights, noisy, gone, without, _ = map(sum, zip(*found, strict=True))
    bound = float(1 - theory.generated()[0])
    what = (
        f"for τ = {', '.join(map(str, TAUS))}: of {weights:,} weights below the cut-off {noisy / weights:.1%} have "
        f"noise and {gone / weights:.1%} are masked, {without or 'none'} of them without noise; weights without noise "
        f"are {'unchanged' if unchanged else 'changed, too'}"
    )
    notes = (f"generated noise is not zero with a probability of {bound:.4f}; for the ideal distribution it is 0.317",)
    return Exact(unchanged and gone <= noisy and not without and bound <= 0.317, what, notes)


# -------------------------------------------------------------------------------- G5: blocks and the transpose


def weights(seed: int = 0, shape: tuple[int, int] = SHAPE) -> Tensor:
    """Return a matrix of random FP32 values from the standard normal distribution."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def parted(w: Tensor, block: str) -> int:
    """Return in how many elements Q(w) and Q(wᵀ)ᵀ differ; Q quantizes to INT4 in blocks of this shape, such as 1x32."""
    there, back = (fake_quantize(x.contiguous(), f"{INT4}:{block}:amax") for x in (w, w.T))
    return int((there != back.T).sum())


@exact("gaussws", "G5")
def g5() -> Exact:
    w = weights()
    squares = {block: parted(w, block) for block in ("32x32", "16x16", "2x2")}
    vectors = {block: parted(w, block) for block in ("1x32", "1x16", "1x2")}
    what = "; ".join(
        f"{block}: {f'{count / w.numel():.1%} of values differ' if count else 'all values are the same'}"
        for block, count in (squares | vectors).items()
    )
    return Exact(not any(squares.values()) and all(vectors.values()), f"a weight and its transpose in INT4: {what}")


# -------------------------------------------------------------------------------- G6: gradients


def gradients(kind: Literal["gaussian", "uniform"], seed: int = 5) -> tuple[float, float]:
    """Compare the kernel's gradients with automatic differentiation of eq. 3 in float64, with the R of forward.

    Weights, bit widths and gradients of ŵ are random. Return the greatest |∂L/∂b of the kernel − ∂L/∂b in float64| /
    (ln 2 · s · Σ|g·R|), and the greatest difference between ∂L/∂w and ∂L/∂ŵ. The divisor is the largest possible
    |∂L/∂b|: s is the factor of the noise, g the gradient of ŵ, and Σ is over the weights of the square. Only if the
    backward pass draws the R of the forward pass is the first number small.
    """
    w, widths = weights(seed).requires_grad_(), torch.linspace(3, 9, math.prod(SQUARES)).view(SQUARES).requires_grad_()
    upstream, r = weights(seed + 1), noise(kind, w.numel(), seed).double().view(SHAPE)
    sample_weight(w, widths, seed, noise=kind, dtype=torch.float32).backward(upstream)
    bits = widths.detach().double().requires_grad_()
    step = _by_square(w.detach().double().abs(), torch.max) * torch.exp2(1 - bits)  # the maximum is a constant (eq. 4)
    each = step.repeat_interleave(SQUARE, 0)[: SHAPE[0]].repeat_interleave(SQUARE, 1)[:, : SHAPE[1]]
    ((w.detach().double() + r * each) * upstream.double()).sum().backward()
    assert w.grad is not None
    assert widths.grad is not None
    assert bits.grad is not None
    size = math.log(2) * step.detach() * _by_square((upstream * r).abs(), torch.sum)
    return float(((widths.grad - bits.grad).abs() / size).max()), float((w.grad - upstream).abs().max())


def _by_square(x: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    return torch.stack([torch.stack([reduce(part) for part in band.split(SQUARE, 1)]) for band in x.split(SQUARE)])


@exact("gaussws", "G6")
def g6() -> Exact:
    found = {"gaussws": gradients("gaussian"), "diffq": gradients("uniform")}
    what = "; ".join(
        f"{method}: ∂L/∂b is within {bits:.0e} of automatic differentiation, with the forward pass's noise, on "
        f"{math.prod(SQUARES)} blocks, some of them smaller than 32×32"
        for method, (bits, _) in found.items()
    )
    off = max(weights for _, weights in found.values())
    passed = f"∂L/∂w differs from ∂L/∂ŵ by up to {off:.1e}" if off else "∂L/∂w equals ∂L/∂ŵ to the bit"
    return Exact(not off and all(bits < ROUNDED for bits, _ in found.values()), f"{what}; {passed}")


# -------------------------------------------------------------------------------- G17: bytes


def bytes_each(side: int = 1024) -> dict[str, float]:
    """Return the bytes per weight: of ŵ, of the noise R of GaussWS and of DiffQ, and of the bit widths in float32."""
    widths = torch.full((side // SQUARE, side // SQUARE), 6.0)
    tensors = {
        "sampled": sample_weight(torch.zeros(side, side), widths, 0),
        "gaussws": gaussian_noise(side * side, 0),
        "diffq": uniform_noise(side * side, 0),
        "widths": widths,
    }
    return {name: tensor.nbytes / side**2 for name, tensor in tensors.items()}


@exact("gaussws", "G17")
def g17() -> Exact:
    each = bytes_each()
    what = (
        f"bytes per weight: {each['sampled']:g} for ŵ, {each['gaussws']:g} for GaussWS's noise, {each['diffq']:g} for "
        f"DiffQ's noise; bit widths take {each['widths']:.4f} more"
    )
    return Exact((each["sampled"], each["gaussws"], each["diffq"]) == (2, 0.5, 2), what)
