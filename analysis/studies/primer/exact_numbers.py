"""Check statements of the primer's texts on number formats, rounding, scales, blocks and rotations (1 to 6)."""

from __future__ import annotations

import math

import numpy as np
import torch

from fewbits.analysis.engine.claims.hooks import exact
from fewbits.analysis.engine.results.data import Exact
from fewbits.analysis.studies.primer.samples import (
    FORMATS,
    casts,
    error,
    listed,
    outliers,
    positive,
    relative_mse,
    rotated,
    scales,
    tensors,
)
from fewbits.kernels.accumulators import product
from fewbits.kernels.api import fake_quantize
from fewbits.kernels.formats import TABLE
from fewbits.kernels.packed import encode
from fewbits.kernels.reference.rotation import hadamard


@exact("primer", "A1")
def a1() -> Exact:
    nearest = down = 0.0
    for name in FORMATS:
        f, x = TABLE[name], positive(name)
        x = x[x >= f.min_normal]
        between = x[:-1, None] + np.diff(x)[:, None] * np.arange(8) / 8
        step = np.exp2(np.frexp(between)[1] - 1.0 - f.mantissa_bits)
        rounded = fake_quantize(torch.tensor(between, dtype=torch.float32), name).double().numpy()
        nearest = max(nearest, float((np.abs(rounded - between) / step).max()))
        down = max(down, float(((between - x[:-1, None]) / step).max()))
    what = f"seven formats, in steps: at most {nearest:g} to nearest; below 1 rounded down, as by halving intervals"
    return Exact(nearest <= 0.5 and down < 1, what)


@exact("primer", "A2")
def a2() -> Exact:
    values = {name: TABLE[name].values() for name in FORMATS[:5]}
    codes = {n: (v.count(0), sum(map(math.isinf, v)), sum(map(math.isnan, v))) for n, v in values.items()}
    holds = (codes["e4m3"], codes["e5m2"], codes["e2m3"]) == ((2, 0, 2), (2, 2, 6), (2, 0, 0))
    what = "; ".join(f"{name.upper()} {', '.join(map(str, counts))}" for name, counts in codes.items())
    return Exact(holds, f"codes of zero, infinity and NaN, both signs: {what}")


@exact("primer", "A11")
def a11() -> Exact:
    fields = {name: np.arange(1 << TABLE[name].exponent_bits) - TABLE[name].bias for name in FORMATS}
    shares = {name: float((exponents <= 0).mean()) for name, exponents in fields.items()}
    return Exact(set(shares.values()) == {0.5}, f"share of exponent fields for exponents up to 0: {listed(shares)}")


@exact("primer", "A13")
def a13() -> Exact:
    holds, worst = True, 0.0
    for name in FORMATS:
        f, x = TABLE[name], positive(name)
        holds &= bool((np.diff(x[x <= f.min_normal], prepend=0) == f.min_subnormal).all())
        below = torch.linspace(0, f.min_normal, 4097)
        worst = max(worst, float((fake_quantize(below, name) - below).abs().max()) / f.min_subnormal)
    what = f"from 0 to the smallest normal number all steps are 2^(emin − k); errors are at most {worst:g} steps"
    return Exact(holds and worst <= 0.5, what)


@exact("primer", "A14")
def a14() -> Exact:
    ratios = set()
    for name in FORMATS:
        steps = np.diff(positive(name)[positive(name) >= TABLE[name].min_normal])
        ratios |= set((steps[1:] / steps[:-1]).tolist())
    integers = set(np.diff(positive("int8")).tolist())
    what = f"steps of INT8: {integers}; ratios of neighbouring steps: {ratios}"
    return Exact(integers == {1} and ratios == {1, 2}, what)


@exact("primer", "A24")
def a24() -> Exact:
    """Check that a value v with s significant bits has a step to the next code in (2^−s·v, 2^(1 − s)·v].

    s is k + 1 for normal values, and the length of the mantissa without leading zeros for subnormals.
    """
    holds, bits = True, {}
    for f in (TABLE[name] for name in FORMATS):
        v, codes = positive(f.name), range(1, f.max_code + 1)
        s = np.array([min(code.bit_length(), f.mantissa_bits + 1) for code in codes])
        step = np.exp2(np.maximum(np.frexp(v)[1] - 1.0, f.emin) - f.mantissa_bits)
        holds &= bool(((step > v * 2.0**-s) & (step <= v * 2.0 ** (1 - s))).all())
        bits[f.name] = f"1 to {s[v < f.min_normal].max()} and {s[-1]}"
    return Exact(holds, f"significant bits of subnormals and of normal numbers: {listed(bits, '')}")


@exact("primer", "C1")
def c1() -> Exact:
    steps = {name: f"{2.0 ** -TABLE[name].mantissa_bits:.6g}" for name in ("e4m3", "fp16", "bf16")}
    holds = [*steps.values()] == ["0.125", "0.000976562", "0.0078125"]
    return Exact(holds, f"steps between 1 and 2: {listed(steps, '')}")


@exact("primer", "B1")
def b1() -> Exact:
    rows = [row for table in ("Table 1", "Table 2", "Table 3") for row in casts(table) if row[0] != "FP32"]
    pairs = [pair for _, ours, printed in rows for pair in zip(ours, printed, strict=True)]
    same = sum(ours == printed for ours, printed in pairs)
    return Exact(same == len(pairs), f"{same} of {len(pairs)} printed casts are equal to ours, with NaN for overflow")


@exact("primer", "C13")
def c13() -> Exact:
    dtypes = {"FP16": torch.float16, "E5M2": torch.float8_e5m2, "E4M3": torch.float8_e4m3fn}
    cast = {name: float(torch.tensor(1e6).to(dtype)) for name, dtype in dtypes.items()}
    holds = math.isinf(cast["FP16"]) and math.isinf(cast["E5M2"]) and (math.isnan(cast["E4M3"]) or cast["E4M3"] == 448)
    notes = ("E4M3 has no infinity; whether it gives NaN or 448, its largest number, depends on the library",)
    return Exact(holds, f"1,000,000 cast by this torch ({torch.__version__.partition('+')[0]}): {listed(cast)}", notes)


@exact("primer", "A4")
def a4() -> Exact:
    scaled = tensors()["normal"] * (127 / tensors()["normal"].abs().max())
    largest, error = float(scaled.round().abs().max()), float((scaled.round() - scaled).abs().max())
    what = f"INT8: the largest code is {largest:g}, errors are up to {error:.3f} steps"
    return Exact(largest == 127 and error <= 0.5, what)


# -------------------------------------------------------------------------------- scales, blocks, rotations


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
    squares = {"scaling in FP32": relative_mse(x, x * scale * (1 / scale)), "E4M3": error(x * scale, "e4m3")}
    errors = {name: square**0.5 for name, square in squares.items()}
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
    holds = all(b == 4.5 + 32 / int(n) for n, b in bits.items())
    return Exact(holds, f"stored bits, by elements: {listed(bits, '.6g')}")


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
    signs = {"without signs": "none", "with signs": "te"}
    made = {name: rotated(torch.ones(16, 16), chosen) for name, chosen in signs.items()}
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
