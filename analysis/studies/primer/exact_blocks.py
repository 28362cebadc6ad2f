"""Check statements of the primer's texts on scales, blocks, the Hadamard transform and stochastic rounding (3 to 6)."""

from __future__ import annotations

import torch

from fewbits.analysis.engine.claims.hooks import exact
from fewbits.analysis.engine.results.data import Exact
from fewbits.analysis.studies.primer.samples import error, listed, outliers, relative_mse, rotated, scales, tensors
from fewbits.kernels.accumulators import product
from fewbits.kernels.api import fake_quantize
from fewbits.kernels.formats import TABLE
from fewbits.kernels.packed import encode
from fewbits.kernels.reference.rotation import hadamard


@exact("primer", "B5")
def b5() -> Exact:
    x = tensors()["normal"]
    gains = {f"{f:g}": error(x * f, "e4m3") / error(x * f, "e4m3:tensor:amax") for f in (1e-4, 1.0, 1e4)}
    parts = {block: error(outliers(1000), f"e4m3:{block}:amax") for block in ("tensor", "128x128", "1x128")}
    what = f"squared error of naive / scaled casts of normal numbers times {listed(gains, '.3g')}"
    holds = min(gains["0.0001"], gains["10000"]) > 100 and parts["tensor"] > parts["128x128"] > parts["1x128"]
    return Exact(holds, f"{what}; with outliers and a scale for each {listed(parts, '.2g')}")


@exact("primer", "C17")
def c17() -> Exact:
    largest = max(float((x * (1 / x.abs().max())).abs().max()) for x in tensors().values())
    x = tensors()["lognormal"] / tensors()["lognormal"].abs().max()
    zeros = {name: float((fake_quantize(x * n, "e4m3") == 0).float().mean()) for name, n in (("1", 1), ("448", 448))}
    what = f"the largest scaled magnitude of five tensors is {largest:g}"
    notes = (
        f"E4M3's whole range needs a scale to 448; lognormal numbers that become 0, by scale: {listed(zeros, '.1%')}",
    )
    return Exact(largest <= 1 + 2**-23, what, notes)


@exact("primer", "C23")
def c23() -> Exact:
    x, scale = tensors()["normal"], 1 / tensors()["normal"].abs().max()
    errors = {
        "scaling in FP32": relative_mse(x, x * scale * (1 / scale)) ** 0.5,
        "E4M3": error(x * scale, "e4m3") ** 0.5,
    }
    return Exact(errors["scaling in FP32"] < errors["E4M3"] / 1000, f"relative errors: {listed(errors, '.0e')}")


@exact("primer", "C12")
def c12() -> Exact:
    error = f"{abs(-0.46617451310157776 / -0.4669240713119507 - 1):.2%}"
    return Exact(error == "0.16%", f"the printed products differ by {error}")


@exact("primer", "C27")
def c27() -> Exact:
    w, errors = tensors()["normal"][64:128].T.half().float(), {}
    for factor in (2.0**-30, 1.0, 2.0**20):
        x = tensors()["normal"][:64] * factor
        s = 1 / x.abs().max()
        made = ((x * s).half().float() @ w) / s, x.half().float() @ w
        errors[f"{factor:.0e}"] = [relative_mse(x @ w, y) ** 0.5 for y in made]
    what = "; ".join(f"X · {name}: {scaled:.1e} and {plain:.1e}" for name, (scaled, plain) in errors.items())
    return Exact(max(scaled for scaled, _ in errors.values()) < 1e-3, f"relative errors with s and without, {what}")


@exact("primer", "C16")
def c16() -> Exact:
    x, y = tensors()["normal"][:16], tensors()["normal"][16:32].T
    (a, s), (b, t) = (((v * 127 / v.abs().max()).round().char(), v.abs().max() / 127) for v in (x, y))
    off = float((product(a, b, "int32", scales=(s, t)) / ((a.double() * s) @ (b.double() * t)) - 1).abs().max())
    return Exact(off < 1e-6, f"1,024 products: within {off:.0e}; INT32 holds any sum of {(2**31 - 1) // 128**2:,}")


@exact("primer", "B8")
def b8() -> Exact:
    w, quantizers = tensors()["normal"], ("e2m1:1x16:nvfp4", "e2m1:1x32:mx", "e4m3:1x128:amax", "e2m1:16x16:nvfp4")
    gaps = {
        q: float((fake_quantize(w, q) - fake_quantize(w.T.contiguous(), q).T).norm() / w.norm()) for q in quantizers
    }
    one, square = [*gaps.values()][:3], gaps["e2m1:16x16:nvfp4"]
    return Exact(min(one) > 0 == square, f"‖Q(w) − Q(wᵀ)ᵀ‖ / ‖w‖: {listed(gaps, '.3f')}")


@exact("primer", "A19")
def a19() -> Exact:
    pair, spread = (outliers(1000)[:16, :512], outliers(1000)[16:32, :512]), {}
    for block, size in (("tensor", 1), ("1x32", 32)):
        values = [fake_quantize(x, f"e4m3:{block}:e8m0").double() for x in pair]
        steps = [scales(x, f"e4m3:{block}:e8m0").repeat_interleave(size, -1) for x in pair]
        factors = (values[0] @ values[1].T) / ((values[0] / steps[0]) @ (values[1] / steps[1]).T)
        spread[block] = float(factors.max() - factors.min())
    what = f"{spread['tensor']:g} with one scale, {spread['1x32']:.2g} with a scale for each 32 elements"
    return Exact(spread["tensor"] == 0 < spread["1x32"], f"range of the factors that the results need: {what}")


@exact("primer", "A17")
def a17() -> Exact:
    wrong = count = 0
    for x in tensors().values():
        for element in ("e2m1", "e4m3"):
            ours = scales(x, f"{element}:1x32:mx").flatten()
            rule = torch.frexp(x.view(-1, 32).abs().amax(1))[1] - 1 - TABLE[element].emax
            wrong, count = wrong + int((ours != torch.exp2(rule.double())).sum()), count + ours.numel()
    return Exact(wrong == 0, f"{count - wrong:,} of {count:,} scales of MXFP4 and MXFP8")


@exact("primer", "A16")
def a16() -> Exact:
    x = torch.nn.functional.pad(tensors()["normal"][:2, :100], (0, 28))
    a, b = (fake_quantize(v[None], "e4m3:1x32:mx").double().view(-1, 32) for v in x)
    s, t = (scales(v[None], "e4m3:1x32:mx").view(-1, 1) for v in x)
    whole = fake_quantize(x[:, :100], "e4m3:1x32:mx").double().prod(0).sum()
    blocks = (s * t * ((a / s) * (b / t)).sum(1, True)).sum()
    return Exact(bool(blocks == whole), f"100 elements of MXFP8: {whole:.9g}; as four padded blocks: {blocks:.9g}")


@exact("primer", "A20")
def a20() -> Exact:
    largest, wrong = 0.0, 0
    for x in (x * factor for x in tensors().values() for factor in (2.0**-30, 1.0, 2.0**30)):
        stored = encode(x, "e2m1:1x16:nvfp4").scales
        assert stored is not None
        values = stored.view(torch.float8_e4m3fn).float()
        largest, wrong = max(largest, float(values.max())), wrong + int(values.isnan().sum())
    what = f"of 15 tensors the largest block scale is {largest:g}, E4M3's largest number; beyond it: {wrong}"
    return Exact(largest == TABLE["e4m3"].max and wrong == 0, what)


@exact("primer", "B7")
def b7() -> Exact:
    bits = {str(n): encode(torch.ones(n // 64, 64), "e2m1:1x16:nvfp4").bits_per_element for n in (1024, 1 << 20)}
    return Exact(
        all(b == 4.5 + 32 / int(n) for n, b in bits.items()), f"stored bits, by elements: {listed(bits, '.6g')}"
    )


@exact("primer", "A21")
def a21() -> Exact:
    bits = {q: encode(torch.ones(16, 1024), q).bits_per_element for q in ("e2m1:1x32:mx", "e2m1:1x16:nvfp4")}
    notes = ("a scale has 8 bits in both; MX's blocks are twice as long, and its tensors have no scale",)
    return Exact(bits["e2m1:1x32:mx"] == 4.25 < bits["e2m1:1x16:nvfp4"], f"stored bits: {listed(bits, '.6g')}", notes)


@exact("primer", "B6")
def b6() -> Exact:
    errors = {name: [error(x, f"e2m1:1x16:{s}") for s in ("nvfp4", "e8m0")] for name, x in tensors().items()}
    what = "; ".join(f"{name} {e4m3:.4f} and {e8m0:.4f}" for name, (e4m3, e8m0) in errors.items())
    holds = all(e4m3 < e8m0 for name, (e4m3, e8m0) in errors.items() if name != "uniform")
    return Exact(holds, f"relative squared errors with E4M3 and E8M0 scales, blocks of 16: {what}")


@exact("primer", "A9")
def a9() -> Exact:
    x = {"before": outliers(1000), "after": rotated(outliers(1000)), "normal numbers": tensors()["normal"]}
    kurtosis = {n: float(v.double().pow(4).mean() / v.double().square().mean() ** 2) for n, v in x.items()}
    return Exact(kurtosis["after"] < kurtosis["before"] / 2, f"kurtosis: {listed(kurtosis, '.0f')}")


@exact("primer", "A22")
def a22() -> Exact:
    matrices = [hadamard(torch.eye(2**k, dtype=torch.float64)) * 2 ** (k / 2) for k in range(9)]
    off = max(float((h @ h.T - len(h) * torch.eye(len(h))).abs().max()) for h in matrices)
    a, b = tensors()["normal"][:16], tensors()["normal"][16:32]
    changed = relative_mse(a @ b.T, rotated(a) @ rotated(b).T) ** 0.5
    what = f"H·Hᵀ differs from n·I by at most {off:.0e}, a product of transformed operands by {changed:.0e}"
    return Exact(off < 1e-9 and changed < 1e-6, what)


@exact("primer", "F2")
def f2() -> Exact:
    made = {
        name: rotated(torch.ones(16, 16), signs) for name, signs in (("without signs", "none"), ("with signs", "te"))
    }
    crest = {name: float(y.abs().max() / y.norm() * 16) for name, y in made.items()}
    what = f"largest / root mean square of 16 equal numbers, transformed: {listed(crest, '.3g')}"
    return Exact(crest["with signs"] < crest["without signs"] == 4, what)


@exact("primer", "A8")
def a8() -> Exact:
    x = tensors()["normal"][:64]
    draws = torch.stack([fake_quantize(x, "e2m1:1x16:e8m0:stochastic", seed=seed) for seed in range(64)]).double()
    nearest, deviation = error(x, "e2m1:1x16:e8m0") ** 0.5, float(draws.var(0).mean().sqrt())
    bias = max(relative_mse(x, draws.mean(0)) - deviation**2 / 64, 0) ** 0.5  # less the noise of a mean of 64 draws
    what = f"nearest: bias {nearest:.3f}, no deviation; stochastic: bias {bias:.4f}, deviation {deviation:.3f}"
    return Exact(bias < nearest / 20 and deviation > nearest, what)
