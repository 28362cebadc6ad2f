"""Check claims of the primer's two texts (001, 002) about scales: where they apply, their cost, what they preserve.

The claims are in analysis/studies/primer/claims.yaml.
"""

from __future__ import annotations

import math

import torch

from fewbits.analysis.engine.claims.hooks import exact
from fewbits.analysis.engine.results.data import Exact
from fewbits.analysis.studies.primer import blocks
from fewbits.kernels.api import fake_quantize
from fewbits.kernels.formats import TABLE
from fewbits.kernels.packed import encode


@exact("primer", "A19")
def a19() -> Exact:
    """Check that a single factor descales a product if each tensor has one scale, but not if each block has its own.

    Descaling corrects a product that was computed from elements without their scales. A single factor suffices if (true
    result) / (result without scales) is the same for all results.
    """
    a, b = (blocks.samples()["outliers"][i * 16 : i * 16 + 16, :512] for i in (0, 1))
    spread = {}
    for block in ("tensor", "1x32"):
        quantizer = f"e4m3:{block}:e8m0"
        values = [fake_quantize(x, quantizer).double() for x in (a, b)]
        elements = [value / _power(x, block) for value, x in zip(values, (a, b), strict=True)]
        factors = (values[0] @ values[1].T) / (elements[0] @ elements[1].T)
        spread[block] = float(factors.max() / factors.min()) if bool((factors > 0).all()) else math.inf
    what = (
        "with one scale for each tensor, a single factor after the sum gives every result; with blocks along the sum, "
        f"the factors that results would need differ {_times(spread['1x32'])}, so each block is scaled inside the sum"
    )
    return Exact(spread["tensor"] == 1 and spread["1x32"] > 1, what)


def _power(x: torch.Tensor, block: str) -> torch.Tensor:
    """Return for each element of x the E8M0 scale of its block: the least power of two with which nothing saturates.

    block: tensor or 1x32.
    """
    groups = x.reshape(1, -1) if block == "tensor" else x.reshape(-1, 32)
    exponents = [math.frexp(amax / TABLE["e4m3"].max) for amax in groups.abs().amax(1).tolist()]
    scales = torch.tensor([2.0 ** (e - (m == 0.5)) for m, e in exponents], dtype=torch.float64)
    return scales[:, None].expand_as(groups).reshape(x.shape)


def _times(spread: float) -> str:
    return "even in sign" if math.isinf(spread) else f"up to {spread:.2g} times"


@exact("primer", "A20")
def a20() -> Exact:
    """Check that NVFP4's block scales stay in E4M3's range for tensors multiplied by 2^-30, 1 and 2^30."""
    largest, saturated = 0.0, 0
    for x in blocks.samples().values():
        for factor in (2.0**-30, 1.0, 2.0**30):
            packed = encode(x * factor, "e2m1:1x16:nvfp4")
            assert packed.scales is not None
            scales = packed.scales.view(torch.float8_e4m3fn).float()
            largest, saturated = max(largest, float(scales.max())), saturated + int(scales.isnan().sum())
    x = blocks.samples()["normal"] * 2.0**30
    lost = float((x.view(-1, 16).abs().amax(1) / 6 > TABLE["e4m3"].max).float().mean())
    what = (
        f"the largest block scale of 18 tensors is {largest:g}, E4M3's largest number, and no scale is beyond it; "
        f"without the tensor's scale {lost:.0%} of the blocks of normal numbers × 2^30 would need a larger block scale"
    )
    return Exact(largest == TABLE["e4m3"].max and not saturated, what)


@exact("primer", "A21")
def a21() -> Exact:
    same = {name: blocks.bits_per_element(f"e2m1:1x16:{name}", 1024) for name in ("nvfp4", "e8m0")}
    mx = blocks.bits_per_element("e2m1:1x32:mx", 1024)
    what = (
        f"both scales have 8 bits: {same['nvfp4']:g} bits an element with E4M3 and {same['e8m0']:g} with E8M0 in "
        f"blocks of 16; MXFP4's {mx:g} bits come from its blocks of 32, and NVFP4's FP32 number for a tensor costs "
        "32 / N bits"
    )
    return Exact(same["e8m0"] < same["nvfp4"], what)


@exact("primer", "A22")
def a22() -> Exact:
    """Check that H·Hᵀ = n·I for Hadamard matrices H of size n = 1 to 256, and that transforms do not change products.

    n is a power of two. Both operands of a product are transformed, with the same random signs.
    """
    orthogonal = True
    for k in range(9):
        h = blocks.hadamard(k)
        orthogonal &= torch.equal(h @ h.T, 2.0**k * torch.eye(1 << k, dtype=torch.float64))
    drawn = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (16,), generator=drawn).double() * 2 - 1
    a, b = (blocks.samples()["normal"][i : i + 8, :16].double() for i in (0, 8))
    h = blocks.hadamard(4) / 4
    off = float(((a * signs) @ h @ ((b * signs) @ h).T - a @ b.T).abs().max())
    what = (
        f"H·Hᵀ = n·I for n = 1 to 256; a product of two operands that are both transformed differs by {off:.0e}, which "
        "is FP64's rounding"
    )
    return Exact(orthogonal and off < 1e-13, what)


# -------------------------------------------------------------------------------- claims of the second text (002)


@exact("primer", "C12")
def c12() -> Exact:
    """Check that the FP32 and BF16 dot products that the primer's text 002 prints differ by 0.16 %, as it says.

    Report quantiles of this difference for 2,000 random inputs.
    """
    fp32, bf16 = -0.4669240713119507, -0.46617451310157776
    printed = abs(fp32 - bf16) / abs(fp32)
    drawn = torch.Generator().manual_seed(0)
    errors = []
    for _ in range(2000):
        x, w = torch.randn(1, 4, generator=drawn), torch.randn(1, 4, generator=drawn)
        sx, sw = 1 / x.abs().max(), 1 / w.abs().max()
        product = torch.sum((x * sx).bfloat16() * (w * sw).bfloat16()) / (sx * sw)
        errors.append(float(abs(product / (x * w).sum() - 1)))
    low, middle, high = torch.tensor(errors).quantile(torch.tensor([0.05, 0.5, 0.95])).tolist()
    what = (
        f"the printed products differ by {printed:.2%}; of 2,000 other draws the median error is {middle:.2%}, and "
        f"nine in ten are between {low:.2%} and {high:.2%}"
    )
    notes = (
        "the text's formula writes the product as FP16 where its sentence says FP32; the text's code multiplies and "
        "adds in BF16",
    )
    return Exact(f"{printed:.2%}" == "0.16%", what, notes)


@exact("primer", "C17")
def c17() -> Exact:
    """Check that multiplying a tensor x by 1 / max|x| before a cast to E4M3 prevents saturation.

    Also report, for six random tensors, the relative squared errors of casts with this factor and with 448 / max|x|.
    """
    largest, errors = 0.0, {}
    for name, x in blocks.samples().items():
        scale = 1 / x.abs().max()
        largest = max(largest, float((x * scale).abs().max()))
        errors[name] = (
            blocks.relative_mse(x, fake_quantize(x * scale, "e4m3") / scale),
            blocks.error(x, "e4m3:tensor:amax"),
        )
    x = blocks.samples()["lognormal"]
    scaled = x / x.abs().max()
    zeros = [float((fake_quantize(y, "e4m3") == 0).float().mean()) for y in (scaled, scaled * TABLE["e4m3"].max)]
    what = (
        f"the largest scaled magnitude of six tensors is {largest:.7g}, so nothing saturates. With this scale, only "
        f"E4M3's range up to 1 is used: {zeros[0]:.1%} of lognormal numbers become 0, and {zeros[1]:.1%} with a scale "
        "to 448"
    )
    return Exact(largest <= 1 + 2**-23, what, (_listed(errors),))


def _listed(errors: dict[str, tuple[float, float]]) -> str:
    shown = "; ".join(f"{name} {one:.2e} and {full:.2e}" for name, (one, full) in errors.items())
    return f"relative MSE with a scale to 1 and to 448: {shown}"


@exact("primer", "C23")
def c23() -> Exact:
    x = blocks.samples()["normal"]
    scale = 1 / x.abs().max()
    power = torch.exp2(torch.floor(torch.log2(scale)))
    off = [float(((x * s) * (1 / s) / x - 1).abs().max()) for s in (scale, power)]
    rounded = float(blocks.error(x, "e4m3:tensor:amax")) ** 0.5
    what = (
        f"scaling and descaling in FP32 changes a number by up to {off[0]:.1e} of itself, and by {off[1]:g} if the "
        f"scale is a power of two; the cast to E4M3 between them errs by {rounded:.1e}"
    )
    return Exact(off[0] < 1e-6 and off[1] == 0, what)
