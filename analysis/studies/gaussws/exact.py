"""Claims that arithmetic decides at any scale, asked of our own kernels whenever a report is made: G1 to G6, G17."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fewbits.analysis.engine.data import Exact
from fewbits.analysis.engine.hooks import exact
from fewbits.analysis.studies.gaussws import consistency, theory
from fewbits.analysis.studies.gaussws.consistency import KINDS
from fewbits.analysis.studies.gaussws.theory import Swallowed

ROUNDED = 1e-6  # of a gradient that is summed in float32, beside float64
CHANCE = 18.5  # χ² with four degrees of freedom is above it once in a thousand


@exact("gaussws", "G1")
def g1() -> Exact:
    found, said, drawn = theory.generated(), theory.equation_10(), theory.drawn()
    holds = found == said and not drawn.different and sum(r * p for r, p in found.items()) == 0
    counts = ", ".join(
        f"{r:+d}: {int(p * theory.PATTERNS):,}" if r else f"0: {int(p * theory.PATTERNS):,}" for r, p in found.items()
    )
    variance = float(sum(r * r * p for r, p in found.items()))
    agree = "eq. 10 to the last one" if found == said else "not eq. 10"
    what = (
        f"of all {theory.PATTERNS:,} patterns of the generator's bits {counts}; {agree}, "
        f"mean {float(sum(r * p for r, p in found.items())):g}; "
        f"of {drawn.elements:,} elements that the kernel drew {drawn.different or 'none'} is another"
    )
    notes = (
        f"their counts are {'within' if drawn.chi_square < CHANCE else 'beyond'} chance (χ² {drawn.chi_square:.1f}, "
        "4 degrees of freedom)",
        f"variance {variance:.4f}, where round(N(0, 1) / 2) has 0.3254; eq. 10 holds if Pr(±2), where Pr(±1) is "
        "computed, is of both signs together",
    )
    return Exact(holds, what, notes)


@exact("gaussws", "G2")
def g2() -> Exact:
    """Lemma 1 for BF16: what a cast swallows just below the widths it names, and at them."""
    below = [_lost(bits) for bits in (3, 4, 5, 6, 7, 8, 8.5, 8.99)]
    uniform = [_lost(bits, *theory.UNIFORM_4_BITS) for bits in (3, 4, 4.5, 4.99)]
    ends = _lost(9), _lost(5, *theory.UNIFORM_4_BITS)
    first, first_uniform = ("some at" if one.lost else "none at" for one in ends)
    drawn = {bits: theory.by_kernel(bits, "gaussian") for bits in (4, 6, 8, 8.99)}
    by_kernel = [one.defined and not one.swallowed.lost for one in drawn.values()]
    kept = not any(one.lost for one in (*below, *uniform))
    holds = kept and all(by_kernel) and all(one.lost for one in ends)
    what = (
        f"of {sum(one.cases for one in below):,} cases below 9 bits {_none(below)} lost, {first} 9; of 4-bit "
        f"uniform noise {_none(uniform)} of {sum(one.cases for one in uniform):,} below 5, {first_uniform} 5; "
        f"the kernel {'agrees' if all(by_kernel) else 'does not agree'}"
    )
    whole = {float(bits): theory.by_kernel(bits, "uniform").swallowed.share for bits in (4, 6, 8)}
    return Exact(holds, what, (*_boundaries(), _of_16_bits(whole)))


def _lost(bits: float, *magnitudes: float) -> Swallowed:
    found = [theory.swallowed(bits, magnitude) for magnitude in magnitudes or (1.0, 2.0)]
    return Swallowed(sum(one.lost for one in found), sum(one.cases for one in found))


def _none(found: Sequence[Swallowed]) -> str:
    lost = sum(one.lost for one in found)
    return f"{lost:,} are" if lost else "none is"


def _boundaries() -> tuple[str, ...]:
    """Both readings of Lemma 1, and what happens at the width it excludes."""
    at_nine, beside = theory.swallowed(9), {bits: theory.swallowed(bits, beside_grid=True) for bits in (8, 8.5, 8.99)}
    words = ", ".join(
        f"{one.share:.2%} at {bits:g}" if one.lost else f"none at {bits:g}" for bits, one in beside.items()
    )
    return (
        f"at 9 bits {at_nine.lost:,} of {at_nine.cases:,} is lost: noise of half a step on a maximum that is a "
        "power of two, a tie",
        f"weights beside BF16's grid, as FP32 masters are, keep all noise up to 8 bits only (b < m + 1 + τ): of those "
        f"in the upper {theory.BINADES} binades lost are {words}",
    )


def _of_16_bits(shares: Mapping[float, float]) -> str:
    words = ", ".join(f"{share:.1%} at {bits:g} bits" for bits, share in shares.items())
    return f"DiffQ's noise as it is trained with here, of 16 bits, loses {words}"


@exact("gaussws", "G3")
def g3() -> Exact:
    widths = theory.WIDTHS
    small = [theory.drowned(bits, 0, magnitude) for bits in (3, 4, 4.3, 5.7, 6, 9) for magnitude in (1.0, 2.0)]
    flows = [theory.underflows(bits) for bits in widths]
    fits = all(
        theory.least_exponent_bits(bits, after_noise=after) == theory.exponent_bits(bits, after_noise=after)
        for bits in widths
        for after in (False, True)
    )
    cells = [pair for row in theory.table_c1_rows().values() for pair in row]
    same = sum(ours == said for ours, said in cells)
    lost, gone = sum(one.lost for one in small), sum(one.weights + one.sampled for one in flows)
    what = (
        f"of {sum(one.cases for one in small):,} small weights above the cut-off {lost or 'none'} is lost; with "
        f"Proposition 3's exponents {gone or 'none'} of the kernel's {2 * sum(one.values for one in flows):,} values "
        f"becomes zero, and {'no' if fits else 'not all'} exponents need be wider; {same} of {len(cells)} entries of "
        "Table C.1 are the same"
    )
    lower = [theory.drowned(5.7, -1, magnitude).share for magnitude in (1.0, 2.0)]
    ties = [theory.least_mantissa_bits(bits, ties=True) for bits in (3, 8)]
    notes = (
        f"one binade below Lemma 2's cut-off {lower[0]:.0%} is lost for |R| = 1 and {lower[1]:.0%} for |R| = 2, which "
        "its proof leaves out",
        "Table C.1's mantissas, b − 2, are the very width that Lemma 1 excludes: noise is swallowed by ties where a "
        f"block's maximum is a power of two; keeping that, too, takes {ties[0]} bits instead of 1 at b = 3, {ties[1]} "
        "instead of 6 at b = 8",
    )
    return Exact(not lost and not gone and fits and same == len(cells), what, notes)


@exact("gaussws", "G4")
def g4() -> Exact:
    found = [theory.masked(bits) for bits in (3, 4, 6, 9)]
    weights, noisy = sum(one.weights for one in found), sum(one.noisy for one in found)
    gone, without = sum(one.masked for one in found), sum(one.masked_without_noise for one in found)
    kept = all(one.kept == one.weights - one.noisy for one in found)
    bound = 1 - theory.generated()[0]
    holds = kept and gone <= noisy and not without and float(bound) <= 0.317
    what = (
        f"of {weights:,} weights below the cut-off {gone / weights:.1%} are masked, {without or 'none'} of them "
        f"without noise, which {noisy / weights:.1%} have; the others "
        f"{'come out as they are' if kept else 'are changed, too'}"
    )
    notes = (
        f"noise is not zero with a probability of {float(bound):.4f} as generated; 0.317 is the ideal distribution's",
    )
    return Exact(holds, what, notes)


@exact("gaussws", "G5")
def g5() -> Exact:
    w = consistency.weights()
    squares = {block: consistency.parted(w, block) for block in ("32x32", "16x16", "2x2")}
    vectors = {block: consistency.parted(w, block) for block in ("1x32", "1x16", "1x2")}
    what = "; ".join(
        f"{block}: {f'{count / w.numel():.1%} of values differ' if count else 'the same both ways'}"
        for block, count in (squares | vectors).items()
    )
    return Exact(not any(squares.values()) and all(vectors.values()), f"in INT4, {what}")


@exact("gaussws", "G6")
def g6() -> Exact:
    found = {method: consistency.gradients(kind) for method, kind in KINDS.items()}
    holds = all(one.bits < ROUNDED and one.weights == 0 and one.redrawn for one in found.values())
    what = "; ".join(
        f"{method}: within {one.bits:.0e} of automatic differentiation on {one.squares} squares, ragged ones among them"
        for method, one in found.items()
    )
    off = max(one.weights for one in found.values())
    passed = f"∂L/∂w is up to {off:.1e} off ∂L/∂ŵ" if off else "∂L/∂w is ∂L/∂ŵ to the bit"
    drawn = (
        "the noise drawn again in backward is forward's"
        if all(one.redrawn for one in found.values())
        else ("the noise of backward is another")
    )
    return Exact(holds, f"{what}; {passed}; {drawn}")


@exact("gaussws", "G17")
def g17() -> Exact:
    each = consistency.bytes_each()
    holds = each.sampled == 2 and each.noise == {"gaussws": 0.5, "diffq": 2.0}
    what = (
        f"a weight: {each.sampled:g} bytes for ŵ, {each.noise['gaussws']:g} for GaussWS's noise, "
        f"{each.noise['diffq']:g} for DiffQ's; bit widths take {each.widths:.4f} more"
    )
    few, many = (consistency.added("llama2-nano", "gaussws", *size) for size in ((1, 8), (4, 256)))
    printed = ", ".join(f"{value:.2f} ({name.upper()})" for name, value in consistency.papers_bytes().items())
    notes = (
        f"the paper's own Table 1 adds, for each sampled weight, {printed}",
        f"counted in our training: {few:.3f} bytes a weight where the optimizer's step is the peak, {many:.3f} where "
        "the backward pass is, for which plain BF16 keeps copies of its FP32 weights, too",
    )
    return Exact(holds, what, notes)
