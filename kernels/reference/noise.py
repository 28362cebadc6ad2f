"""Define random numbers: the generator Philox4x32-10, and the noise that is computed from its output words.

The bits of element i come from a counter that depends only on i, so neither the order of work nor the number of threads
affects a result. One word of the counter is the stream, which makes the uses of one seed independent: 0 and 1 are for
stochastic rounding, 2 for noise, 3 for Hadamard signs. arithmetic.md states the rules. A word has 32
bits; its dtype here is int64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

Device = torch.device | str
Noise = Literal["gaussian", "uniform"]
NOISES: tuple[Noise, ...] = get_args(Noise)

_WORD = 0xFFFFFFFF


def philox4x32(counter: Sequence[Tensor], key: tuple[int | Tensor, int | Tensor]) -> Tensor:
    """Return the four output words [..., 4] of Philox4x32-10 for a counter of four words and a key of two words.

    Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # int64 wraps around, which keeps all 64 bits right
        high0, high1 = product0 >> 32 & _WORD, product1 >> 32 & _WORD
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, product1 & _WORD, high0 ^ c3 ^ k1, product0 & _WORD
        k0, k1 = k0 + 0x9E3779B9 & _WORD, k1 + 0xBB67AE85 & _WORD
    return torch.stack((c0, c1, c2, c3), dim=-1)


def philox(index: Tensor, stream: int, seed: int) -> Tensor:
    """Return Philox's four output words [..., 4] for each counter (index, stream), with the seed as the key.

    stream: identifies what the seed is used for, such as 2 for noise; different streams give independent bits.
    """
    counter = (index & _WORD, index >> 32 & _WORD, torch.full_like(index, stream), torch.zeros_like(index))
    return philox4x32(counter, (seed & _WORD, seed >> 32 & _WORD))


def words(count: int, stream: int, seed: int, device: Device) -> Tensor:
    """Return 32 random bits for each of `count` elements.

    Element i gets word i mod 4 of Philox's output for the counter (i div 4, stream), with the seed as the key.
    """
    return philox(torch.arange(-(-count // 4), device=device), stream, seed).flatten()[:count]


def halves(count: int, stream: int, seed: int, device: Device) -> Tensor:
    """Return 16 random bits for each of `count` elements.

    Element i gets a half of word (i div 2) mod 4 of Philox's output for the counter (i div 8, stream), with the seed as
    the key: the low half if i is even, the high half if i is odd.
    """
    word = philox(torch.arange(-(-count // 8), device=device), stream, seed)
    return torch.stack((word & 0xFFFF, word >> 16), dim=-1).flatten()[:count]


def uniform(count: int, seed: int, device: Device) -> Tensor:
    """Return U in [0, 1) for stochastic rounding: multiples of 2^-48 in float64, one for each of `count` elements."""
    bits = halves(count, 0, seed, device) << 32 | words(count, 1, seed, device)
    return bits.double() * 2.0**-48


def gaussian_nibbles(planes: Sequence[Tensor]) -> Tensor:
    """Return approximately round(N(0, 1) / 2) from 16 independent bits (GaussWS eq. 10), for eight elements at once.

    A word of 32 bits has eight nibbles (4 bits), one for each element. The magnitude of an element is 2 with the
    probability p = 2^-8 · 3/4, and 1 with the probability (3/4)² · 1/2 · (1 − p); both signs are equally likely. In the
    returned words, the highest bit of a nibble is the sign, the others are the magnitude.

    planes: 16 tensors of words. The lowest bit of each nibble is a random bit, the other bits are 0.
    """
    p = planes
    two = p[0] & p[1] & p[2] & p[3] & p[4] & p[5] & p[6] & p[7] & (p[8] | p[9])
    one = (p[10] | p[11]) & (p[12] | p[13]) & p[14] & ~two
    sign = p[15] & (one | two)
    return sign << 3 | two << 1 | one


def gaussian_noise(count: int, seed: int, device: Device) -> Tensor:
    """Return GaussWS noise for `count` elements, eight in each int32: element 8j + n is nibble n of int32 j."""
    four = philox(torch.arange(-(-count // 8), device=device), 2, seed)
    planes = [four[:, k] >> b & 0x11111111 for k in range(4) for b in range(4)]
    return gaussian_nibbles(planes).to(torch.int32)


def unpack_noise(packed: Tensor, count: int) -> Tensor:
    """Return the first `count` values of the result of `gaussian_noise`, as int8 from −2 to 2."""
    nibbles = packed.long()[:, None] >> torch.arange(0, 32, 4, device=packed.device) & 0xF
    magnitude, negative = nibbles & 7, nibbles >> 3
    return (magnitude * (1 - 2 * negative)).flatten()[:count].to(torch.int8)


def uniform_noise(count: int, seed: int, device: Device) -> Tensor:
    """Return DiffQ's noise: uniform in (−½, ½), 2^16 equally likely values rounded to bf16."""
    return ((halves(count, 2, seed, device) + 0.5) / 65536 - 0.5).to(torch.bfloat16)
