"""Check claims of the primer's two texts (001, 002) about formats, casts and code, each time a report is made.

The claims are in analysis/studies/primer/claims.yaml.
"""

from __future__ import annotations

import torch

from fewbits.analysis.engine.claims.hooks import exact
from fewbits.analysis.engine.results.data import Exact
from fewbits.analysis.studies.primer import blocks, grids
from fewbits.kernels.api import fake_quantize
from fewbits.kernels.formats import TABLE


@exact("primer", "B1")
def b1() -> Exact:
    rows = grids.compared()
    other = [row for row in rows if row[2] != row[3]]
    now = torch.tensor(grids.OVERFLOW["fp32"]).to(torch.float8_e4m3fn).float().tolist()
    notes = (
        f"NaN beyond 464 is a choice: this torch ({torch.__version__.partition('+')[0]}) returns "
        f"{', '.join(f'{v:g}' for v in now)} for the four values of the overflow table, our kernels saturate at 448 "
        "unless overflow=nan is set, and ml_dtypes returns NaN; E4M3 has no infinity, so no version returns inf",
    )
    return Exact(not other, f"{len(rows) - len(other)} of {len(rows)} printed entries are the same", notes)


@exact("primer", "C1")
def c1() -> Exact:
    steps = {name: 2.0 ** -TABLE[name].mantissa_bits for name in ("e4m3", "fp16", "bf16")}
    holds = steps["e4m3"] == 0.125 and steps["bf16"] == 0.0078125 and abs(steps["fp16"] - 0.000976562) < 1e-9
    what = ", ".join(f"{name.upper()} {step:.10g}" for name, step in steps.items())
    return Exact(holds, f"steps between 1 and 2: {what}", ("0.0009765625 is printed without its last digit",))


@exact("primer", "A1")
def a1() -> Exact:
    formats = ("e4m3", "e5m2", "e2m1", "e2m3", "e3m2", "fp16", "bf16")
    nearest = [grids.largest_rounding_error(name, "nearest") for name in formats]
    truncated = [grids.largest_rounding_error(name, "truncated") for name in formats]
    holds = max(nearest) <= 0.5 and max(truncated) < 1
    what = (
        f"over {len(formats)} formats the error is up to {max(nearest):g} steps of the value's binade with rounding to "
        "nearest; halving intervals, as the text does, truncates the value, with an error below one step"
    )
    return Exact(holds, what)


@exact("primer", "A2")
def a2() -> Exact:
    codes = {name: grids.special_codes(name) for name in ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1")}
    holds = codes["e4m3"] == (0, 2) and codes["e5m2"] == (2, 6) and codes["e2m3"] == (0, 0)
    what = "; ".join(f"{name.upper()}: {inf} infinities, {nan} NaN" for name, (inf, nan) in codes.items())
    return Exact(holds, f"codes, both signs counted: {what}")


@exact("primer", "A3")
def a3() -> Exact:
    names = ("fp32", "fp16", "bf16", "e4m3", "e5m2", "e2m1")
    bits = {name: 1 + TABLE[name].exponent_bits + TABLE[name].mantissa_bits for name in names}
    holds = all(bits[name] == TABLE[name].bits for name in names) and (bits["fp32"], bits["bf16"]) == (32, 16)
    return Exact(holds, ", ".join(f"{name.upper()} {count}" for name, count in bits.items()))


@exact("primer", "A4")
def a4() -> Exact:
    x = blocks.samples()["normal"][0]
    codes, values, scale = grids.integers(x, 8)
    largest, error = int(codes.abs().max()), float((values - x).abs().max()) * scale
    what = f"INT8: the largest code is {largest}, and the error is up to {error:.3f} steps"
    return Exact(largest == 127 and error <= 0.5 + 1e-4, what)


@exact("primer", "C2")
def c2() -> Exact:
    updates = torch.arange(1, 100, dtype=torch.float32) / 100 * 0.5
    lost = grids.lost_updates(5.0, "e4m3", updates)
    share, largest = float(lost.float().mean()), float(updates[lost].max())
    what = (
        f"at a weight of 5 E4M3's step is 0.5; of 99 updates below this step {share:.0%} leave the weight as it is, "
        f"the largest of which is {largest:g}: only updates up to half a step are lost, larger ones become a whole step"
    )
    return Exact(bool(lost.all()), what)


@exact("primer", "C3")
def c3() -> Exact:
    named = ("weights", "gradients", "optimizer states", "activations")
    return Exact(
        len(named) == 5,
        f"the list has {len(named)} entries: {', '.join(named)}",
        ("the text does not say what the fifth component is; in Table M it is low-precision copies of the weights",),
    )


@exact("primer", "C4")
def c4() -> Exact:
    """Check whether the training code in the primer's text 002 can be run without errors.

    Each part of the code is tried on its own, so that a failure does not hide later ones.
    """
    model = torch.nn.Sequential(torch.nn.Linear(10, 20), torch.nn.ReLU(), torch.nn.Linear(20, 5)).half()
    master = [p.detach().clone().float().requires_grad_() for p in model.parameters()]
    failed = []
    try:
        model(torch.randn(10))
    except RuntimeError:
        failed.append("the FP16 model refuses FP32 input")
    loss = torch.nn.MSELoss()(model(torch.randn(10).half()), torch.randn(5).half())
    try:
        loss.backward(64)
    except TypeError:
        failed.append("backward(64) needs a tensor, or the loss has to be multiplied")
    if master[0].grad is None:
        failed.append("the master weights have no .grad to copy into")
    what = "; ".join(failed) or "the code runs"
    notes = ("its loop variable `model` also overwrites the model; examples/loss_scaling.py is code that runs",)
    return Exact(not failed, what, notes)


@exact("primer", "C5")
def c5() -> Exact:
    """Check that gradients scaled by a power of two before their cast to FP16 are rounded to 0 less often.

    The largest factor is 2^15, and each larger factor must give fewer zeros. Values in FP16's normal range, scaled by
    64 for the cast and unscaled after it, must be the same as after a cast without scaling. This is the arithmetic of
    loss scaling, which claim B3 is about.
    """
    drawn = torch.Generator().manual_seed(0)
    gradients = torch.randn(1 << 16, generator=drawn) * torch.exp2(-torch.rand(1 << 16, generator=drawn) * 40)
    flushed = {}
    for k in (0, 6, 10, 15):
        back = fake_quantize(gradients * 2.0**k, "fp16:overflow=inf") / 2.0**k
        flushed[k] = float((back == 0).float().mean())
    inside = gradients.abs() > TABLE["fp16"].min_normal
    plain = fake_quantize(gradients, "fp16")
    same = torch.equal(fake_quantize(gradients * 64, "fp16")[inside] / 64, plain[inside])
    fewer = all(flushed[a] > flushed[b] for a, b in ((0, 6), (6, 10), (10, 15)))
    shares = ", ".join(f"{share:.1%} with 2^{k}" for k, share in flushed.items())
    unit = "the others are the same after unscaling" if same else "others change, too"
    return Exact(fewer and same, f"values that FP16 flushes to zero, of gradients over 40 binades: {shares}; {unit}")


@exact("primer", "C6")
def c6() -> Exact:
    spans = {bits: (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 4)}
    holds = spans[8] == (-128, 127) and spans[4] == (-8, 7)
    return Exact(holds, ", ".join(f"INT{bits}: {low} to {high}" for bits, (low, high) in spans.items()))


@exact("primer", "C7")
def c7() -> Exact:
    a, b = torch.randn(64, 32).half(), torch.randn(32, 16).half()
    out = torch.matmul(a, b).dtype
    return Exact(out == torch.float16, f"the product of two FP16 matrices is {str(out).removeprefix('torch.')}")
