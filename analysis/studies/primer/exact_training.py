"""Check claims of the primer's second text (002) about overflow, sums, memory and its code examples.

The claims are in analysis/studies/primer/claims.yaml.
"""

from __future__ import annotations

import math
import warnings

import torch

from fewbits.analysis.engine.claims.hooks import exact
from fewbits.analysis.engine.results.data import Exact
from fewbits.analysis.studies.primer import grids, sums, training
from fewbits.kernels.formats import TABLE

PLAIN = "training.dtype=fp32"


@exact("primer", "C13")
def c13() -> Exact:
    """Check that the installed torch casts 1,000,000 to NaN or infinity in each of FP16, E5M2 and E4M3."""
    dtypes = {"FP16": torch.float16, "E5M2": torch.float8_e5m2, "E4M3": torch.float8_e4m3fn}
    found = {name: float(torch.tensor(1e6).to(dtype)) for name, dtype in dtypes.items()}
    what = ", ".join(f"{name} {value:g}" for name, value in found.items())
    notes = (
        "Table L compares libraries: E4M3 has no infinity, and whether it gives NaN or 448 depends on the library",
    )
    version = torch.__version__.partition("+")[0]
    return Exact(not any(map(math.isfinite, found.values())), f"a million, cast by torch {version}: {what}", notes)


@exact("primer", "C14")
def c14() -> Exact:
    """Check that partial sums in E4M3 give a matrix product more than ten times the error of partial sums in FP16.

    The operands are E4M3 numbers, and each sum has 512 products.
    """
    fp16, fp8 = (sums.in_format(name, 512) for name in ("fp16", "e4m3"))
    what = f"relative error of 512 products of E4M3 numbers from 0 to 1: {fp16:.2%} in FP16 and {fp8:.0%} in E4M3"
    return Exact(fp8 > 10 * fp16, what, ("a sum in E4M3 stops where a product is below half a step",))


@exact("primer", "C15")
def c15() -> Exact:
    width = 4096
    one, layer = width, width * 4 * width
    what = (
        f"vectors of {width:,} elements: {one:,} multiply-adds for one output; a layer from {width:,} to {4 * width:,} "
        f"has {layer:,} for each token"
    )
    return Exact(layer < 10_000, what, ("several thousand is right for each element of the layer's result",))


@exact("primer", "C16")
def c16() -> Exact:
    limit = (2**31 - 1) // (128 * 128)
    return Exact(limit > 4096, f"INT32 holds any sum of {limit:,} products of INT8 numbers exactly")


@exact("primer", "C18")
def c18() -> Exact:
    layer = torch.nn.Linear(16, 16)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(1, 16)).sum().backward()
    optimizer.step()
    shapes = [
        state.shape == p.shape for p in layer.parameters() for n, state in optimizer.state[p].items() if n != "step"
    ]
    ours = training.memory("gpt2-124m").states / training.size("gpt2-124m")
    what = f"torch's Adam keeps two numbers for each parameter; ours have {ours:g} bytes a parameter in FP32"
    return Exact(len(shapes) == 4 and all(shapes) and ours == 8, what)


@exact("primer", "C19")
def c19() -> dict[str, Exact]:
    """Check that training in BF16 with FP32 master weights needs less memory than training in FP32.

    Return two checks by name: one of activations, the other of parameters with gradients, optimizer states and
    low-precision copies.
    """
    model = "gpt2-124m"
    bf16, fp32, size = training.memory(model), training.memory(model, PLAIN), training.size(model)
    own = [(m.weights + m.gradients + m.states) / size for m in (fp32, bf16)]
    copies = bf16.quantized / size
    activations = [m.activations / 1e9 for m in (fp32, bf16)]
    return {
        "activations": Exact(
            activations[1] < activations[0],
            f"{model}, {training.TOKENS:,} tokens: {activations[0]:.2f} GB in FP32 and {activations[1]:.2f} GB in BF16",
        ),
        "parameters with gradients and states": Exact(
            own[1] + copies < own[0],
            f"{own[0]:g} bytes a parameter in FP32; mixed precision has the same {own[1]:g} bytes of master weights, "
            f"gradients and states, and {copies:.2f} bytes of BF16 copies of the linear layers' weights, one copy for "
            "each pass. Without master weights it would need fewer bytes",
        ),
    }


@exact("primer", "C20")
def c20() -> Exact:
    """Check that the code for casts in the primer's text 002 runs: casts of FP32 numbers to BF16, FP16 and E4M3.

    The code's calls of the package `tabulate`, which only print, are left out.
    """
    x = torch.tensor(grids.LOSS_OF_PRECISION["fp32"])[:, None]
    rows = [x.to(dtype).cpu().flatten().tolist() for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn)]
    holds = [len(row) for row in rows] == [4, 4, 4]
    notes = (
        "the code needs the package tabulate, and its random inputs have no seed; examples/casts_and_sums.py uses the "
        "inputs that the text prints",
    )
    return Exact(holds, "casts to BF16, FP16 and E4M3 run and give four numbers each", notes)


@exact("primer", "C21")
def c21() -> Exact:
    """Check that torch's product of two FP16 matrices is as exact as FP32 sums that are rounded to FP16 once.

    The check passes if the largest error is at most 0.51 · 2^-10 times the largest exact element. Also report whether
    the product has the same bits when it is computed inside torch's autocast context.
    """
    drawn = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=drawn).half() for shape in ((128, 512), (512, 64)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the printed import is deprecated
        from torch.cuda.amp import autocast

        with autocast(dtype=torch.float16):
            inside = a @ b
    exact = a.double() @ b.double()
    steps = float(((a @ b).double() - exact).abs().max() / exact.abs().max() * 2 ** TABLE["fp16"].mantissa_bits)
    what = (
        f"the context changes {'no bit' if torch.equal(inside, a @ b) else 'bits'}, because both inputs are FP16 "
        f"already; the largest elements are within {steps:.2f} steps of the exact ones, like a sum in FP32 that is "
        "rounded once"
    )
    return Exact(steps <= 0.51, what)


@exact("primer", "C22")
def c22() -> Exact:
    largest = {name: TABLE[name].max for name in ("fp16", "e4m3")}
    what = ", ".join(f"{name.upper()} {value:,.0f}" for name, value in largest.items())
    return Exact(largest["fp16"] > largest["e4m3"], f"largest numbers: {what}")
