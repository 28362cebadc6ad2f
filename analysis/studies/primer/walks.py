"""Encode one number of a block in MXFP8, MXINT8 and NVFP4 step by step, with the bits of each step, and decode it."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import torch

from fewbits.kernels.formats import TABLE, Format
from fewbits.kernels.number import rounded

NUMBER, LARGEST, BEYOND = 0.3, 2.6, 6.5  # the number, and the largest magnitudes of its block and of the tensor


@dataclass(frozen=True)
class Walk:
    """The steps of encoding one number in one format, and the result."""

    steps: dict[str, str]  # the result of each step as text, by the step's name, in order
    value: float  # the decoded number


def tensor(size: int) -> torch.Tensor:
    """Return a tensor of one row with two blocks of `size` elements.

    The first block begins with NUMBER and ends with LARGEST, the largest magnitude of this block. The second block ends
    with BEYOND, the largest magnitude of the tensor.
    """
    x = torch.linspace(-1, 1, 2 * size)
    x[0], x[size - 1], x[-1] = NUMBER, LARGEST, BEYOND
    return x[None]


def walks() -> dict[str, Walk]:
    """Return the steps of encoding NUMBER in MXFP8, MXINT8 and NVFP4, by the encoding's name."""
    return {"MXFP8 (E4M3)": _mx("e4m3", 32), "MXINT8": _mx("mxint8", 32), "NVFP4": _nvfp4()}


def _mx(element: str, size: int) -> Walk:
    emax = 0 if element == "mxint8" else TABLE[element].emax
    exponent = math.frexp(LARGEST)[1] - 1 - emax
    scaled = _float32(NUMBER) * 2.0**-exponent
    code, bits, inner = _element(scaled, element)
    steps = {
        "the number in FP32": _float32_bits(NUMBER),
        "block": f"{size} elements, largest magnitude {LARGEST:g}",
        "scale": f"2^(⌊log2 {LARGEST:g}⌋ − {emax}) = 2^{exponent}",
        "code of the scale": f"{exponent} + 127 = {_code(2.0**exponent, 'e8m0')}",
        "second scale": "none",
        "number / scale": f"{scaled:.6g}",
        "nearest element": f"{inner:g}",
        "code of the element": f"{bits} = {code:#04x}",
    }
    return _decoded(steps, inner * 2.0**exponent, 8 + 8 / size)


def _nvfp4() -> Walk:
    e2m1, e4m3 = TABLE["e2m1"], TABLE["e4m3"]
    tensor = _float32(BEYOND / (e2m1.max * e4m3.max))
    wanted = _float32(LARGEST) / e2m1.max / tensor
    scale = e4m3.decode(e4m3.code_of(wanted))
    scaled = _float32(NUMBER) / (scale * tensor)
    code, bits, inner = _element(scaled, "e2m1")
    steps = {
        "the number in FP32": _float32_bits(NUMBER),
        "block": f"16 elements, largest magnitude {LARGEST:g}; of the tensor {BEYOND:g}",
        "scale": f"{LARGEST:g} / 6 / tensor scale = {wanted:.6g}, in E4M3 {scale:g}",
        "code of the scale": _code(scale, "e4m3"),
        "second scale": f"of the tensor, FP32: {BEYOND:g} / (6 · 448) = {tensor:.6g}",
        "number / scale": f"{scaled:.6g}",
        "nearest element": f"{inner:g}",
        "code of the element": f"{bits} = {code:#03x}",
    }
    return _decoded(steps, _float32(inner * scale) * tensor, 4 + 8 / 16)


def _decoded(steps: dict[str, str], value: float, bits: float) -> Walk:
    value = _float32(value)
    last = {
        "decoded": f"{value:.6g}",
        "relative error": f"{value / _float32(NUMBER) - 1:+.2%}".replace("-", "−"),
        "bits an element": f"{bits:g}",
    }
    return Walk(steps | last, value)


def _element(scaled: float, name: str) -> tuple[int, str, float]:
    found = next(row for row in rounded(scaled) if row.format == name)
    return found.code, found.bits, found.value


def _code(value: float, name: str) -> str:
    f = Format.parse(name)
    return f"{f.code_of(value):0{f.bits}b} = {f.code_of(value):#04x}"


def _float32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))


def _float32_bits(value: float) -> str:
    text = f"{struct.unpack('>I', struct.pack('>f', value))[0]:032b}"
    return f"{text[0]} {text[1:9]} {text[9:]}"
