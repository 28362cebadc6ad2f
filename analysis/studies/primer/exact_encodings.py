"""Check claims of the primer's first text (001) about exponents, subnormals, steps and encodings.

Claims about formats are checked over all codes. The claims are in analysis/studies/primer/claims.yaml.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from fewbits.analysis.engine.claims.hooks import exact
from fewbits.analysis.engine.results.data import Exact
from fewbits.analysis.studies.primer import blocks, grids
from fewbits.kernels.api import fake_quantize
from fewbits.kernels.formats import TABLE
from fewbits.kernels.packed import encode

SMALL = ("e2m1", "e2m3", "e3m2", "e4m3", "e5m2")


@exact("primer", "A11")
def a11() -> Exact:
    """Check that half of the values of the exponent field stand for exponents up to 0, and half for greater exponents.

    The field's lowest and highest value are counted like all others, although they have special meanings.
    """
    found = {}
    for name in (*SMALL, "fp16", "bf16"):
        f = TABLE[name]
        exponents = [field - f.bias for field in range(1 << f.exponent_bits)]
        found[name] = sum(e <= 0 for e in exponents), sum(e > 0 for e in exponents)
    what = ", ".join(f"{name.upper()} {low} and {high}" for name, (low, high) in found.items())
    notes = ("the lowest field is for subnormals, and in IEEE formats the highest is for infinities and NaN",)
    return Exact(
        all(low == high for low, high in found.values()),
        f"fields for exponents up to 0, and for greater ones: {what}",
        notes,
    )


@exact("primer", "A12")
def a12() -> Exact:
    zeros = {name: sum(value == 0 for value in TABLE[name].values()) for name in (*SMALL, "fp16", "bf16")}
    what = ", ".join(f"{name.upper()} {count}" for name, count in zeros.items())
    return Exact(set(zeros.values()) == {2}, f"codes of zero: {what}", ("E8M0, the format of scales, has no zero",))


@exact("primer", "A13")
def a13() -> Exact:
    holds = True
    for name in (*SMALL, "fp16", "bf16"):
        f, found = TABLE[name], grids.grid(name).subnormal
        step = 2.0 ** (f.emin - f.mantissa_bits)
        holds &= bool(found[0] == step == f.min_subnormal and found[-1] == f.min_normal - step)
        holds &= bool((np.diff(found) == step).all())
    f = TABLE["e4m3"]
    between = torch.linspace(0, f.min_normal, 4097, dtype=torch.float64).float()
    error = float((fake_quantize(between, "e4m3") - between).abs().max()) / f.min_subnormal
    what = (
        "the smallest subnormal is one step, 2^(emin − k); neighbours differ by this step, and so do the largest "
        f"subnormal and the smallest normal number; below it, E4M3's error is up to {error:g} steps with rounding to "
        "nearest"
    )
    return Exact(holds and error <= 0.5, what)


@exact("primer", "A14")
def a14() -> Exact:
    integers = set(np.diff(grids.grid("int8").normal) / np.diff(grids.grid("int8").normal)[0])
    ratios = set()
    for name in (*SMALL, "fp16", "bf16"):
        values = grids.grid(name).normal
        steps = np.diff(values)
        whole = np.isin(np.frexp(values)[0], 0.5)[:-1]  # the first step of each binade
        firsts = steps[whole]
        ratios |= set(firsts[1:] / firsts[:-1])
    what = "INT8's steps are equal; a float's step in each binade is twice that of the binade below"
    return Exact(integers == {1.0} and ratios == {2.0}, what)


@exact("primer", "A15")
def a15() -> Exact:
    """Check that every code stands for an integer times a power of two, and that 32 elements of MXFP4 share a scale."""
    wrong = count = 0
    for name in SMALL:
        f = TABLE[name]
        for code in range(f.max_code + 1):
            field, mantissa = code >> f.mantissa_bits, code & ((1 << f.mantissa_bits) - 1)
            whole = mantissa if field == 0 else (1 << f.mantissa_bits) + mantissa
            value = math.ldexp(whole, max(field, 1) - f.bias - f.mantissa_bits)
            wrong += value != f.decode(code)
            count += 1
    packed = encode(torch.ones(1, 64), "e2m1:1x32:mx")
    assert packed.scales is not None
    sizes = packed.codes.numel() * packed.codes.element_size(), packed.scales.numel()
    what = (
        f"{count - wrong} of {count} codes of {', '.join(map(str.upper, SMALL))} are an integer of k + 1 bits times a "
        f"power of two; 64 elements of MXFP4 are {sizes[0]} bytes of E2M1 codes and {sizes[1]} scales"
    )
    return Exact(wrong == 0 and sizes == (32, 2), what)


@exact("primer", "A16")
def a16() -> Exact:
    """Check that the sum of s·t·Σ a·b over all blocks is exactly the dot product of the decoded vectors.

    a and b are the elements of a block of two MX vectors, s and t the scales of the block in the two vectors.
    """
    x, y = (blocks.samples()["normal"][i][None] for i in (0, 1))
    decoded = [fake_quantize(v, "e4m3:1x32:mx").double().view(-1, 32) for v in (x, y)]
    scales = [_scales(v, "e4m3") for v in (x, y)]
    elements = [d / s for d, s in zip(decoded, scales, strict=True)]
    by_block = float(((elements[0] * elements[1]).sum(1, keepdim=True) * scales[0] * scales[1]).sum())
    plain = float((decoded[0] * decoded[1]).sum())
    return Exact(by_block == plain, f"1,024 elements of MXFP8: {by_block:.9g} by blocks, {plain:.9g} as vectors")


@exact("primer", "A17")
def a17() -> Exact:
    """Check that the kernels' MX scales are 2^(⌊log2 max|x|⌋ − ⌊log2 max of the format⌋), as 001 states."""
    wrong = count = 0
    for x in blocks.samples().values():
        for element in ("e2m1", "e4m3"):
            packed = encode(x, f"{element}:1x32:mx")
            assert packed.scales is not None
            ours = torch.exp2(packed.scales.view(torch.uint8).double() - TABLE["e8m0"].bias).flatten()
            wrong += int((ours != _scales(x, element).flatten()).sum())
            count += ours.numel()
    what = f"{count - wrong:,} of {count:,} scales of MXFP4 and MXFP8 are 2^(⌊log2 max|x|⌋ − ⌊log2 max of the format⌋)"
    return Exact(wrong == 0, what)


def _scales(x: torch.Tensor, element: str) -> torch.Tensor:
    """Return the MX scale of each block of 32 elements by the floor rule, as a column; element: the format's name."""
    amax = x.reshape(-1, 32).abs().amax(1).tolist()
    exponents = [blocks.mx_scale(a, TABLE[element].emax, "floor") for a in amax]
    return torch.tensor(exponents, dtype=torch.float64).exp2()[:, None]


@exact("primer", "A18")
def a18() -> Exact:
    block = torch.zeros(1, 32)
    found = {}
    for element in ("e2m1", "e4m3", "e5m2"):
        f = TABLE[element]
        block[0, 0] = 2.0 ** (f.emax + 1) * (1 - 2.0**-12)  # the largest element for which the scale is 1 and not 2
        found[element] = float(fake_quantize(block, f"{element}:1x32:mx")[0, 0]), f.max
    what = ", ".join(
        f"{name.upper()} {most:g} of values up to {2.0 ** (TABLE[name].emax + 1):g}"
        for name, (_, most) in found.items()
    )
    return Exact(all(ours == most for ours, most in found.values()), f"scale 1: {what}")
