"""Check GaussWS's exact claims (G1 to G6 and G17) with our kernels, each time a report is made.

The claims are about noise, casts, gradients and memory. The checks need no trials.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fewbits.analysis.engine.claims.hooks import exact
from fewbits.analysis.engine.results.data import Exact
from fewbits.analysis.studies.gaussws import consistency, theory
from fewbits.analysis.studies.gaussws.consistency import KINDS
from fewbits.analysis.studies.gaussws.theory import Swallowed

ROUNDED = 1e-6  # the greatest error of ∂L/∂b, relative to its largest possible value, that sums in float32 may cause
CHANCE = 18.5  # χ² with four degrees of freedom exceeds this with a probability of 0.001


@exact("gaussws", "G1")
def g1() -> Exact:
    found, stated, drawn = theory.generated(), theory.equation_10(), theory.drawn()
    holds = found == stated and not drawn.different and sum(r * p for r, p in found.items()) == 0
    counts = ", ".join(
        f"{r:+d}: {int(p * theory.PATTERNS):,}" if r else f"0: {int(p * theory.PATTERNS):,}" for r, p in found.items()
    )
    variance = float(sum(r * r * p for r, p in found.items()))
    agree = "exactly the probabilities of eq. 10" if found == stated else "not the probabilities of eq. 10"
    what = (
        f"counts of R over all {theory.PATTERNS:,} patterns of the generator's bits: {counts}; {agree}, "
        f"mean {float(sum(r * p for r, p in found.items())):g}; "
        f"{drawn.different or 'none'} of {drawn.elements:,} elements that the kernel drew differ from the reference's"
    )
    notes = (
        f"the counts of drawn elements are {'consistent' if drawn.chi_square < CHANCE else 'not consistent'} with eq. "
        f"10 (χ² {drawn.chi_square:.1f}, 4 degrees of freedom)",
        f"the variance is {variance:.4f}; that of round(N(0, 1) / 2) is 0.3254. Eq. 10 holds if the Pr(±2) in the "
        "formula of Pr(±1) is the probability of both signs together",
    )
    return Exact(holds, what, notes)


@exact("gaussws", "G2")
def g2() -> Exact:
    """Check GaussWS's Lemma 1 for BF16: casts swallow no noise at bit widths below 9, but swallow some noise at 9.

    The cast rounds a weight plus noise; it swallows the noise if it returns the weight. The claim also says that casts
    swallow no uniform noise of 4 bits at bit widths below 5, but swallow some at 5.
    """
    below = [_swallowed_noise(bits) for bits in (3, 4, 5, 6, 7, 8, 8.5, 8.99)]
    uniform = [_swallowed_noise(bits, *theory.UNIFORM_4_BITS) for bits in (3, 4, 4.5, 4.99)]
    ends = _swallowed_noise(9), _swallowed_noise(5, *theory.UNIFORM_4_BITS)
    first, first_uniform = ("some at" if one.count else "none at" for one in ends)
    drawn = {bits: theory.by_kernel(bits, "gaussian") for bits in (4, 6, 8, 8.99)}
    by_kernel = [one.defined and not one.swallowed.count for one in drawn.values()]
    kept = not any(one.count for one in (*below, *uniform))
    holds = kept and all(by_kernel) and all(one.count for one in ends)
    what = (
        f"of {sum(one.cases for one in below):,} cases below 9 bits {_none(below)} lost, and {first} 9 bits; of "
        f"{sum(one.cases for one in uniform):,} cases of 4-bit uniform noise below 5 bits {_none(uniform)} lost, and "
        f"{first_uniform} 5 bits; the kernel {'agrees' if all(by_kernel) else 'does not agree'}"
    )
    whole = {float(bits): theory.by_kernel(bits, "uniform").swallowed.share for bits in (4, 6, 8)}
    return Exact(holds, what, (*_boundaries(), _of_16_bits(whole)))


def _swallowed_noise(bits: float, *magnitudes: float) -> Swallowed:
    """Count the cases in which a cast swallows the noise R, for each of these magnitudes of R, and add the counts.

    bits: the bit width. magnitudes: 1 and 2 if none is given. `theory.swallowed_noise` describes the cases.
    """
    found = [theory.swallowed_noise(bits, magnitude) for magnitude in magnitudes or (1.0, 2.0)]
    return Swallowed(sum(one.count for one in found), sum(one.cases for one in found))


def _none(found: Sequence[Swallowed]) -> str:
    count = sum(one.count for one in found)
    return f"{count:,} are" if count else "none is"


def _boundaries() -> tuple[str, ...]:
    """Return two notes on noise that casts swallow: at a bit width of 9, and below 9 if weights are not BF16 values."""
    at_nine = theory.swallowed_noise(9)
    beside = {bits: theory.swallowed_noise(bits, beside_grid=True) for bits in (8, 8.5, 8.99)}
    words = ", ".join(
        f"{one.share:.2%} at {bits:g}" if one.count else f"none at {bits:g}" for bits, one in beside.items()
    )
    return (
        f"at 9 bits noise is lost in {at_nine.count:,} of {at_nine.cases:,} cases. They are ties: the maximum is a "
        "power of two, so the noise is half a step",
        "weights between the points of BF16's grid, such as FP32 master weights, keep all noise only up to 8 bits "
        f"(b < m + 1 + τ): in the upper {theory.BINADES} binades the share of lost noise is {words}",
    )


def _of_16_bits(shares: Mapping[float, float]) -> str:
    words = ", ".join(f"{share:.1%} at {bits:g} bits" for bits, share in shares.items())
    return f"of DiffQ's noise of 16 bits, which is used in training here, the cast swallows {words}"


@exact("gaussws", "G3")
def g3() -> Exact:
    widths = theory.WIDTHS
    small = [
        theory.swallowed_weights(bits, 0, magnitude) for bits in (3, 4, 4.3, 5.7, 6, 9) for magnitude in (1.0, 2.0)
    ]
    flows = [theory.underflows(bits) for bits in widths]
    fits = all(
        theory.least_exponent_bits(bits, after_noise=after) == theory.exponent_bits(bits, after_noise=after)
        for bits in widths
        for after in (False, True)
    )
    cells = [pair for row in theory.table_c1_rows().values() for pair in row]
    same = sum(ours == printed for ours, printed in cells)
    swallowed, gone = sum(one.count for one in small), sum(one.weights + one.sampled for one in flows)
    what = (
        f"{swallowed or 'none'} of {sum(one.cases for one in small):,} small weights above the cut-off are lost; with "
        f"Proposition 3's exponent bits {gone or 'none'} of the kernel's {2 * sum(one.values for one in flows):,} "
        f"values become zero, and a search finds {'the same' if fits else 'other'} exponent bits; {same} of "
        f"{len(cells)} entries of Table C.1 are the same"
    )
    lower = [theory.swallowed_weights(5.7, -1, magnitude).share for magnitude in (1.0, 2.0)]
    ties = [theory.least_mantissa_bits(bits, ties=True) for bits in (3, 8)]
    notes = (
        f"one binade below Lemma 2's cut-off {lower[0]:.0%} of the weights are lost for |R| = 1 and {lower[1]:.0%} for "
        "|R| = 2, which the lemma's proof leaves out",
        "with Table C.1's mantissa bits, b − 2, the width is exactly the one that Lemma 1 excludes: if a block's "
        f"maximum is a power of two, ties swallow noise; keeping this noise, too, takes {ties[0]} bits instead of 1 at "
        f"b = 3 and {ties[1]} instead of 6 at b = 8",
    )
    return Exact(not swallowed and not gone and fits and same == len(cells), what, notes)


@exact("gaussws", "G4")
def g4() -> Exact:
    found = [theory.swallowed_below_cutoff(bits) for bits in (3, 4, 6, 9)]
    weights, noisy = sum(one.weights for one in found), sum(one.noisy for one in found)
    gone, without = sum(one.swallowed for one in found), sum(one.swallowed_without_noise for one in found)
    kept = all(one.kept == one.weights - one.noisy for one in found)
    bound = 1 - theory.generated()[0]
    holds = kept and gone <= noisy and not without and float(bound) <= 0.317
    what = (
        f"of {weights:,} weights below the cut-off {noisy / weights:.1%} have noise and {gone / weights:.1%} are "
        f"masked, {without or 'none'} of them without noise; weights without noise are "
        f"{'unchanged' if kept else 'changed, too'}"
    )
    notes = (
        f"generated noise is not zero with a probability of {float(bound):.4f}; for the ideal distribution it is 0.317",
    )
    return Exact(holds, what, notes)


@exact("gaussws", "G5")
def g5() -> Exact:
    w = consistency.weights()
    squares = {block: consistency.parted(w, block) for block in ("32x32", "16x16", "2x2")}
    vectors = {block: consistency.parted(w, block) for block in ("1x32", "1x16", "1x2")}
    what = "; ".join(
        f"{block}: {f'{count / w.numel():.1%} of values differ' if count else 'all values are the same'}"
        for block, count in (squares | vectors).items()
    )
    return Exact(not any(squares.values()) and all(vectors.values()), f"a weight and its transpose in INT4: {what}")


@exact("gaussws", "G6")
def g6() -> Exact:
    found = {method: consistency.gradients(kind) for method, kind in KINDS.items()}
    holds = all(one.bits < ROUNDED and one.weights == 0 and one.redrawn for one in found.values())
    what = "; ".join(
        f"{method}: ∂L/∂b is within {one.bits:.0e} of automatic differentiation on {one.squares} blocks, some of them "
        "smaller than 32×32"
        for method, one in found.items()
    )
    off = max(one.weights for one in found.values())
    passed = f"∂L/∂w differs from ∂L/∂ŵ by up to {off:.1e}" if off else "∂L/∂w equals ∂L/∂ŵ to the bit"
    drawn = (
        "the backward pass draws the same noise as the forward pass"
        if all(one.redrawn for one in found.values())
        else "the backward pass draws other noise than the forward pass"
    )
    return Exact(holds, f"{what}; {passed}; {drawn}")


@exact("gaussws", "G17")
def g17() -> Exact:
    each = consistency.bytes_each()
    holds = each.sampled == 2 and each.noise == {"gaussws": 0.5, "diffq": 2.0}
    what = (
        f"bytes per weight: {each.sampled:g} for ŵ, {each.noise['gaussws']:g} for GaussWS's noise, "
        f"{each.noise['diffq']:g} for DiffQ's noise; bit widths take {each.widths:.4f} more"
    )
    few, many = (consistency.added("llama2-nano", "gaussws", *size) for size in ((1, 8), (4, 256)))
    printed = ", ".join(f"{value:.2f} ({name.upper()})" for name, value in consistency.papers_bytes().items())
    notes = (
        f"bytes per sampled weight that GaussWS adds in Table 1 of the paper: {printed}",
        f"counted in our training: {few:.3f} bytes per weight if memory peaks in the optimizer's step, and {many:.3f} "
        "if it peaks in the backward pass, for which plain BF16, too, keeps BF16 copies of its FP32 weights",
    )
    return Exact(holds, what, notes)
