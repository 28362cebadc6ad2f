"""Check claims of the primer's two texts (001, 002) about scales, blocks, rounding and sums.

They are checked each time a report is made. The claims are in analysis/studies/primer/claims.yaml.
"""

from __future__ import annotations

from itertools import pairwise

from fewbits.analysis.engine.claims.hooks import exact
from fewbits.analysis.engine.results.data import Exact
from fewbits.analysis.studies.primer import blocks, sums
from fewbits.kernels.api import fake_quantize

ACCUMULATED = ("fp16", "bf16", "hopper-fp8")


@exact("primer", "B4")
def b4() -> Exact:
    """Check that errors of low-precision sums of K products grow with K, and that FP32 sums have negligible errors.

    The 95 % intervals of the errors at neighbouring values of K must not overlap.
    """
    grows = True
    for name in ACCUMULATED:
        found = [sums.errors(name, "uniform", k) for k in sums.LENGTHS]
        grows &= all(b[0] - b[1] > a[0] + a[1] for a, b in pairwise(found))
    exact_enough = max(sums.errors("fp32", d, k)[0] for d in ("uniform", "normal") for k in sums.LENGTHS)
    last = sums.LENGTHS[-1]
    shown = {
        f"{name} {distribution}": sums.errors(name, distribution, last)
        for name in ACCUMULATED
        for distribution in ("uniform", "normal")
    }
    what = "; ".join(f"{name}: {mean:.2%} ± {half:.2%}" for name, (mean, half) in shown.items())
    promoted = sums.errors("hopper-fp8-promoted", "uniform", last)[0]
    notes = (
        f"FP32 sums err by at most {exact_enough:.1e}; Hopper's FP8 sums that are added in FP32 every 128 products by "
        f"{promoted:.2%} at K = {last}",
        "errors are root mean squares of a row of the product, relative to the exact row; uniform numbers are "
        "positive, so their sums grow, and bits of small products are lost when they are added to large sums",
    )
    return Exact(grows and exact_enough < 1e-5, f"relative error at K = {last}, {what}", notes)


@exact("primer", "C8")
def c8() -> Exact:
    """Check that the largest relative error of FP16 sums of 4096 products is at least 2 %.

    The primer's text 002 says that errors can reach 2 %.
    """
    k = sums.LENGTHS[-1]
    fp16 = {d: sums.largest("fp16", d, k) for d in ("uniform", "normal")}
    fp8 = {d: sums.largest("hopper-fp8", d, k) for d in ("uniform", "normal")}
    what = (
        f"largest error of an element at K = {k}, relative to the root mean square of the exact ones: FP16 sums "
        f"{fp16['uniform']:.1%} of uniform and {fp16['normal']:.1%} of normal numbers, Hopper's FP8 sums "
        f"{fp8['uniform']:.1%} and {fp8['normal']:.1%}"
    )
    notes = (
        "DeepSeek-V3 reports a largest relative error near 2 % for Hopper's FP8 sums, which keep about 14 bits; the "
        "text calls it an absolute error of FP16 buffers. How large it is depends on the distribution",
    )
    return Exact(max(fp16.values()) >= 0.02, what, notes)


@exact("primer", "B5")
def b5() -> Exact:
    scaled = {}
    for factor in (1e-4, 1e4):
        x = blocks.samples()["normal"] * factor
        naive, fitted = (blocks.relative_mse(x, fake_quantize(x, f"e4m3{scale}")) for scale in ("", ":tensor:amax"))
        scaled[factor] = naive, fitted
    parts = {q: blocks.error_of("outliers", f"e4m3:{q}:amax") for q in ("tensor", "128x128", "1x128")}
    integer = {q: blocks.error_of_small("outliers", f"e1m6finite:{q}:amax") for q in ("tensor", "1x128")}
    holds = all(naive > 100 * fitted for naive, fitted in scaled.values())
    holds &= parts["tensor"] > parts["128x128"] > parts["1x128"] and integer["tensor"] > 2 * integer["1x128"]
    what = (
        "relative MSE of E4M3, naive and scaled: "
        + "; ".join(f"{naive:.2g} and {fitted:.2g} at {factor:g}" for factor, (naive, fitted) in scaled.items())
        + ". With outliers: "
        + ", ".join(f"{error:.2g} ({block})" for block, error in parts.items())
    )
    naive, fitted = blocks.error_of("normal", "e4m3"), blocks.error_of("normal", "e4m3:tensor:amax")
    notes = (
        f"within E4M3's normal range the scale gains little: {naive:.2e} without and {fitted:.2e} with a scale",
        f"relative MSE of the values that are no outliers, as INT8: {integer['tensor']:.2g} (tensor), "
        f"{integer['1x128']:.2g} (1x128)",
    )
    return Exact(holds, what, notes)


@exact("primer", "B6")
def b6() -> Exact:
    found = {
        name: (blocks.error_of(name, "e2m1:1x16:nvfp4"), blocks.error_of(name, "e2m1:1x16:e8m0"))
        for name in blocks.samples()
    }
    other = [name for name, (e4m3, e8m0) in found.items() if e4m3 >= e8m0]
    what = "; ".join(f"{name} {e4m3:.5f} and {e8m0:.5f}" for name, (e4m3, e8m0) in found.items())
    bell = all(found[name][0] < found[name][1] for name in ("normal", "Laplace", "t(4)", "lognormal", "outliers"))
    notes = (
        f"not for every distribution: the power of two is better for {', '.join(other)}"
        if other
        else "for all of these",
    )
    return Exact(bell, f"relative MSE with E4M3 and with E8M0 scales, blocks of 16: {what}", notes)


@exact("primer", "B7")
def b7() -> Exact:
    found = {n: blocks.bits_per_element("e2m1:1x16:nvfp4", n // 16, 32) for n in (1024, 16384, 1 << 20)}
    holds = all(bits == 4.5 + 32 / n for n, bits in found.items())
    others = {q: blocks.bits_per_element(q, 1024) for q in ("e2m1:1x32:mx", "e2m3:1x32:mx", "e4m3:1x32:mx")}
    shown = ", ".join(f"{bits:.6g} for {n:,} elements" for n, bits in found.items())
    stored = ", ".join(f"{q} {bits:g}" for q, bits in others.items())
    return Exact(holds, f"stored bits of an element of NVFP4: {shown}", (f"MX formats: {stored}",))


@exact("primer", "B8")
def b8() -> Exact:
    names = ("e2m1:1x16:nvfp4", "e2m1:1x32:mx", "e4m3:1x128:amax", "e2m1:16x16:nvfp4")
    found = {q: blocks.transpose_difference(q) for q in names}
    holds = found[names[-1]] == 0 and all(found[q] > 0 for q in names[:-1])
    what = ", ".join(f"{q} {difference:.3f}" for q, difference in found.items())
    return Exact(holds, f"‖Q(w) − Q(wᵀ)ᵀ‖ / ‖w‖: {what}")


@exact("primer", "A5")
def a5() -> Exact:
    dots = {n: blocks.padded_dot(n) for n in (1, 31, 32, 33, 100)}
    return Exact(
        all(a == b for a, b in dots.values()),
        f"dot products of MXFP8 vectors of {', '.join(map(str, dots))} elements equal those of the padded vectors",
    )


@exact("primer", "A6")
def a6() -> Exact:
    found = {name: blocks.mx_rules(name) for name in blocks.samples()}
    differ = all(rules["floor"] != rules["nearest"] for rules in found.values())
    what = "; ".join(
        f"{name} {rules['floor'][0]:.4f} ({rules['floor'][1]:.1%} saturate) and {rules['nearest'][0]:.4f}"
        for name, rules in found.items()
    )
    notes = (
        "the first statement is OCP's rule, which lets the largest elements of a block saturate; the second is another "
        "rule with other scales. Which of the two errs less depends on the distribution",
    )
    return Exact(
        not differ, f"relative MSE of MXFP4 by the first statement (floor) and by the second (nearest): {what}", notes
    )


@exact("primer", "A7")
def a7() -> Exact:
    kept, flushed = blocks.flushed_subnormals("e2m1:1x32:mx")
    wide = blocks.flushed_subnormals("e4m3:1x32:mx")
    what = (
        f"OCP's formats keep subnormals: relative MSE of MXFP4 {kept:.4f} with them and {flushed:.4f} without; of "
        f"MXFP8 {wide[0]:.6f} and {wide[1]:.6f}"
    )
    return Exact(flushed <= kept, what)


@exact("primer", "A8")
def a8() -> Exact:
    found = blocks.stochastic()
    (bias, _), (none, noise) = found["nearest"], found["stochastic"]
    what = (
        f"in root mean squares of x, E2M1 in blocks of 16: nearest has a bias of {bias:.3f} and no variance; "
        f"stochastic rounding has a bias of {none:.4f} and a standard deviation of {noise:.3f}"
    )
    return Exact(none < bias / 20 and noise > bias, what)


@exact("primer", "A9")
def a9() -> Exact:
    before, after = blocks.kurtosis(False), blocks.kurtosis(True)
    what = (
        f"kurtosis of normal numbers with 0.1 % outliers: {before:.0f}, rotated {after:.0f} (normal numbers alone: 3)"
    )
    return Exact(after < before / 2, what)
