"""Check statements of the primer's texts on number formats and rounding (sections 1 and 2), over all codes."""

from __future__ import annotations

import math

import numpy as np
import torch

from fewbits.analysis.engine.claims.hooks import exact
from fewbits.analysis.engine.results.data import Exact
from fewbits.analysis.studies.primer.samples import FORMATS, casts, listed, positive, tensors
from fewbits.kernels.api import fake_quantize
from fewbits.kernels.formats import TABLE


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
    return Exact(
        integers == {1} and ratios == {1, 2}, f"steps of INT8: {integers}; ratios of neighbouring steps: {ratios}"
    )


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
    return Exact(
        [*steps.values()] == ["0.125", "0.000976562", "0.0078125"], f"steps between 1 and 2: {listed(steps, '')}"
    )


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
    return Exact(
        largest == 127 and error <= 0.5, f"INT8: the largest code is {largest:g}, errors are up to {error:.3f} steps"
    )
