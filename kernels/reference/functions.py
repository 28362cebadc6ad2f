"""Define float32 functions whose bits do not depend on a mathematical library."""

import torch
from torch import Tensor

MAGIC = 12582912.0  # 1.5 · 2^23: adding it to a small float32 number rounds the number to an integer


def exponential(x: Tensor) -> Tensor:
    """Return e^x to about 2 units in the last place, as 2^n · e^r with x = n·ln 2 + r; csrc/vector.h does the same.

    ln 2 is split into two constants, so that n times the first constant is exact. 2^n is applied as two factors, so
    that subnormal and infinite results are right; only the multiplication by the second factor can round.
    """
    x = torch.where(x < -104, -104.0, x)
    x = torch.where(x > 89, 89.0, x)
    shifted = x * 1.44269504 + MAGIC
    n = shifted - MAGIC
    r = (x - n * 0.693359375) + n * 2.12194440e-4
    p = r * 1.9875691500e-4 + 1.3981999507e-3
    for coefficient in (8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = p * r + coefficient
    p = (p * (r * r) + r) + 1.0
    exponent = shifted.view(torch.int32) - 0x4B400000
    first = exponent >> 1
    return (p * _power_of_two(first)) * _power_of_two(exponent - first)


def _power_of_two(exponent: Tensor) -> Tensor:
    return ((exponent + 127) << 23).view(torch.float32)
