"""Check statements of the primer's texts on sums, master weights, memory and loss scaling (sections 7 to 9)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from itertools import pairwise

import numpy as np
import pandas as pd
import torch

from fewbits.analysis.engine.claims.hooks import exact, metric
from fewbits.analysis.engine.results.data import Exact
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.figures.theme import Array
from fewbits.analysis.studies.primer.samples import E4M3, FP16, LENGTHS, SUMS, listed, mean_error, sum_errors, tensors
from fewbits.experiments.config import load_trial
from fewbits.experiments.distributed.memory import estimate
from fewbits.experiments.optimization.precision import LOWEST
from fewbits.kernels.api import fake_quantize
from fewbits.kernels.formats import TABLE
from fewbits.kernels.packed import encode
from fewbits.kernels.reference.accumulators import sum_in_format

LAST = LENGTHS[-1]


@exact("primer", "B4")
def b4() -> Exact:
    errors = {name: [mean_error(name, "uniform", k) for k in LENGTHS] for name in SUMS}
    pairs = [pair for name in ("fp16", "bf16", "hopper-fp8") for pair in pairwise(errors[name])]
    grows = all(b[0] - b[1] > a[0] + a[1] for a, b in pairs)
    what = {name: f"{found[-1][0]:.2g}" for name, found in errors.items()}
    return Exact(grows and errors["fp32"][-1][0] < 1e-5, f"relative errors of sums of {LAST:,}: {listed(what, '')}")


@exact("primer", "C8")
def c8() -> Exact:
    largest = {name: float(sum_errors(name, "uniform", LAST).abs().max()) for name in ("fp16", "hopper-fp8")}
    what = f"largest relative errors of sums of {LAST:,}: {listed(largest, '.1%')}"
    notes = ("DeepSeek-V3 reports 2 % for Hopper's FP8 sums, which keep about 14 bits",)
    return Exact(largest["fp16"] >= 0.02, what, notes)


@exact("primer", "C14")
def c14() -> Exact:
    drawn = torch.Generator().manual_seed(0)
    a, b = (torch.rand(shape, generator=drawn).to(E4M3).float() for shape in ((16, 512), (512, 16)))
    exact = a.double() @ b.double()
    sums = {name: sum_in_format(a, b, TABLE[name]) for name in ("fp16", "e4m3")}
    errors = {name: float((found - exact).norm() / exact.norm()) for name, found in sums.items()}
    return Exact(errors["e4m3"] > 10 * errors["fp16"], f"relative errors of sums of 512: {listed(errors, '.2%')}")


@exact("primer", "C21")
def c21() -> Exact:
    a, b = tensors()["normal"][:128].to(FP16), tensors()["normal"][128:192].T.to(FP16)
    exact, c = a.double() @ b.double(), a @ b
    steps = float((c.double() - exact).abs().max() / exact.abs().max() * 2 ** TABLE["fp16"].mantissa_bits)
    what = f"errors are at most {steps:.2f} steps of the largest element, as of an FP32 sum that is rounded once"
    return Exact(c.dtype == FP16 and steps <= 0.51, what)


@exact("primer", "C2")
def c2() -> Exact:
    updates = torch.arange(1, 100) / 200
    lost = fake_quantize(5 + updates, "e4m3") == 5
    what = f"{int(lost.sum())} of 99 updates below the step leave a weight of 5, up to {float(updates[lost].max()):g}"
    return Exact(bool(lost.all()), what, ("only updates up to half a step are lost; larger ones become a whole step",))


@exact("primer", "C26")
def c26() -> Exact:
    g = tensors()["normal"] * torch.exp2(-24 * tensors()["uniform"].abs())
    rates = {"gradients": 1, "updates": 0.01}
    zeros = {name: float(((rate * g).to(FP16) == 0).float().mean()) for name, rate in rates.items()}
    return Exact(zeros["updates"] > zeros["gradients"], f"shares that FP16 turns into 0: {listed(zeros, '.1%')}")


@exact("primer", "C19")
def c19() -> Exact:
    sizes = ("training.batch=1", "training.micro_batch=1", "training.length=1024")
    overrides = ("model=gpt2-124m", "recipe=bf16", *sizes)
    fp32, mixed = (estimate(load_trial([*overrides, f"precision={policy}"])[0]) for policy in ("fp32", "mixed"))
    what = f"gpt2-124m, 1,024 tokens: {fp32.total / 1e9:.2f} GB in FP32, {mixed.total / 1e9:.2f} GB in mixed precision"
    parts = {name: size / 1e9 for name, size in asdict(mixed).items() if size}
    notes = (f"the parts in mixed precision, where BF16 copies of the weights are a fifth: {listed(parts, '.2f')}",)
    return Exact(mixed.total < fp32.total, what, notes)


@exact("primer", "C24")
def c24() -> Exact:
    x = tensors()["normal"]
    sizes = {"FP32": x.nbytes, "BF16": x.bfloat16().nbytes}
    sizes |= {q: encode(x, q).nbytes for q in ("e4m3:1x32:mx", "e2m1:1x16:nvfp4")}
    falling = all(a > b for a, b in pairwise(sizes.values()))
    return Exact(falling, f"bytes of {x.numel():,} numbers with their scales: {listed(sizes, ',')}")


@exact("primer", "C4")
def c4() -> Exact:
    model = torch.nn.Sequential(torch.nn.Linear(10, 20), torch.nn.ReLU(), torch.nn.Linear(20, 5)).half()
    master, failed = [p.detach().clone().float().requires_grad_() for p in model.parameters()], []
    try:
        model(torch.randn(10))
    except RuntimeError:
        failed.append("the FP16 model refuses FP32 input")
    try:
        model(torch.randn(10).half()).sum().backward(64)
    except TypeError:
        failed.append("backward(64) needs a tensor")
    if master[0].grad is None:
        failed.append("the master weights have no .grad to copy into")
    return Exact(not failed, "; ".join(failed) or "the code runs", ("examples/loss_scaling.py is code that runs",))


@exact("primer", "C5")
def c5() -> Exact:
    g = tensors()["normal"] * torch.exp2(-40 * tensors()["uniform"].abs())
    zeros = {f"2^{k}": float(((g * 2.0**k).to(FP16) == 0).float().mean()) for k in (0, 6, 10, 15)}
    normal = g[(g.abs() > TABLE["fp16"].min_normal) & (g.abs() < 64)]
    same = torch.equal((normal * 64).to(FP16).float() / 64, normal.to(FP16).float())
    fewer = all(a > b for a, b in pairwise(zeros.values()))
    what = f"shares of gradients over 40 binades that become 0, by loss scale: {listed(zeros, '.1%')}"
    return Exact(fewer and same, what, (f"after unscaling, normal numbers are {'the same' if same else 'changed'}",))


# ------------------------------------------------------------------------------------------------ metrics of trials

# Counts of precision.parquet are added over all measured updates of a trial. Rows with the slot `dy` count gradients of
# linear layers' results, rows with the slot `parameter` updates of weights (precision.py defines lost updates).
SHARE = (0.0, 1.0)
SMALLEST = -24  # the exponent of FP16's smallest number

Numbers = Mapping[str, float]


def _counts(results: Results, slot: str) -> dict[str, pd.DataFrame]:
    rows = results.table_of("precision.parquet")
    if rows.empty:
        return {}
    rows = rows[rows["slot"] == slot].drop_duplicates(["id", "step", "layer"])
    return {str(trial): group for trial, group in rows.groupby("id")}


@metric("primer", "lost_updates", SHARE)
def lost_updates(results: Results) -> Numbers:
    """Return the share of nonzero updates that left the trial's stored weight unchanged."""
    sums = {trial: rows[["lost", "updates"]].sum() for trial, rows in _counts(results, "parameter").items()}
    return {trial: float(s["lost"] / s["updates"]) for trial, s in sums.items() if s["updates"]}


@metric("primer", "zero_gradients", SHARE)
def zero_gradients(results: Results) -> Numbers:
    """Return the share of zeros among the gradients of linear layers' results."""
    return {trial: zeros for trial, (_, zeros) in exponents(results).items()}


@metric("primer", "below_fp16", SHARE)
def below_fp16(results: Results) -> Numbers:
    """Return the share of these gradients that are 0 or, unscaled, smaller than FP16's smallest number."""
    return {t: float(shares[: SMALLEST - LOWEST].sum()) + zeros for t, (shares, zeros) in exponents(results).items()}


def exponents(results: Results) -> dict[str, tuple[Array, float]]:
    """Return {trial id: (shares by exponent, share of zeros)} of the gradients of linear layers' results.

    Element i of the first is the share with the exponent LOWEST + i; the first and the last include all beyond.
    """
    shares = {}
    for trial, rows in _counts(results, "dy").items():
        total = float(rows["values"].sum())
        shares[trial] = np.stack([*rows["histogram"]]).sum(0) / total, float(rows["zeros"].sum()) / total
    return shares


@metric("primer", "flushed_beyond_activations", (-1.0, 1.0))
def flushed_beyond_activations(results: Results) -> Numbers:
    """Return the share of gradients (dgrad.dy) that casts turn into 0, minus that of activations (fprop.x)."""
    rows = results.numerics()
    if "flushed" not in rows:  # no trial with casts has written statistics yet
        return {}
    shares = rows.groupby(["slot", "id"])["flushed"].mean()
    gap = (shares["dgrad.dy"] - shares["fprop.x"]).dropna()
    return {str(trial): float(share) for trial, share in gap.items()}
