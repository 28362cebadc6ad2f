"""Decode tensors of GGUF's types to FP32.

The quantized types store blocks of 32 values: first an FP16 scale d, in Q4_1 then an FP16 minimum m, and then 32 whole
numbers q_0 … q_31. In the 4-bit types these numbers take 16 bytes: byte i stores q_i in its low four bits and q_(i+16)
in its high four bits. A value is computed from its q:

    Q8_0   q·d            Q4_0   (q − 8)·d            Q4_1   q·d + m
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor


@dataclass(frozen=True)
class GgufType:
    """A type of GGUF's tensors, which stores values in blocks of a fixed number of bytes."""

    name: str
    values: int  # per block
    size: int  # bytes per block
    decode: Callable[[Tensor], Tensor]  # from uint8 [blocks, bytes] to FP32 [blocks, values]

    def read(self, packed: bytes) -> Tensor:
        """Decode the bytes of whole blocks and return their values in FP32, one-dimensional."""
        if not packed:
            return torch.empty(0)
        blocks = torch.frombuffer(bytearray(packed), dtype=torch.uint8).view(-1, self.size)
        return self.decode(blocks).flatten()


def _cast(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda blocks: blocks.view(dtype).float()


def _half(blocks: Tensor, at: int) -> Tensor:
    """Return the FP16 number that starts at byte `at` of each block, as FP32 [blocks, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """Return the four-bit numbers in [blocks, bytes], as FP32 [blocks, 2 · bytes].

    A row of the result has first the low four bits of each byte, then the high four bits of each byte.
    """
    return torch.cat((packed & 15, packed >> 4), 1).float()


def _q4_0(blocks: Tensor) -> Tensor:
    return (_nibbles(blocks[:, 2:]) - 8) * _half(blocks, 0)


def _q4_1(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 4:]) * _half(blocks, 0) + _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float() * _half(blocks, 0)


TYPES: Final = {  # by GGUF's number of the type
    0: GgufType("F32", 1, 4, _cast(torch.float32)),
    1: GgufType("F16", 1, 2, _cast(torch.float16)),
    2: GgufType("Q4_0", 32, 18, _q4_0),
    3: GgufType("Q4_1", 32, 20, _q4_1),
    8: GgufType("Q8_0", 32, 34, _q8_0),
    30: GgufType("BF16", 1, 2, _cast(torch.bfloat16)),
}

# Further types, which are not supported; their names are for messages.
TYPE_NAMES: Final = {6: "Q5_0", 7: "Q5_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K"}
