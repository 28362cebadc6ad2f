"""Define what a backend is: the functions that reference, cpu and cuda provide, with the same bits."""

from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from fewbits.kernels.quantizer import Quantizer

Noise = Literal["gaussian", "uniform"]
Part = tuple[int, int]  # rows × columns
Stored = tuple[Tensor, Tensor, Tensor]  # packed codes, block scales and group scales, as packing.py lays them out

NOISES: tuple[Noise, ...] = get_args(Noise)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # of matrices, in the order of the C++ interfaces
ABSENT = torch.empty(0)  # the place of a result that was not requested


class Backend(Protocol):
    """The functions that compute on matrices: 2-D, contiguous, of a dtype in DTYPES, on the backend's device.

    A matrix may be empty. Seeds are below 2^63 and signs are drawn. Callers (api.py, ops.py) check that; backends do
    not. `axis` is -1 or 0. No function keeps or changes its arguments, except `out`.
    """

    name: str
    never_waits: bool  # callers must not wait either: that would stall the device and prevent CUDA graph capture

    def quantize(
        self,
        x: Tensor,
        q: Quantizer,
        axis: int,
        seed: int,
        *,
        out: Tensor | None = None,
        want_values: bool = True,
        want_stats: bool = False,
        partition: Part | None = None,
        skip: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the quantized x in its dtype, and counts [parts down, parts across, 7] and amax of each part.

        out: where to write the values; it may be x. want_values, want_stats: False leaves these results out (ABSENT).
        partition: the size of a part; None: the whole matrix is one part.
        skip: True for the parts of `out` that stay unchanged and are not counted.
        """

    def quantize_both(
        self, x: Tensor, row: Quantizer, column: Quantizer, row_seed: int, column_seed: int
    ) -> tuple[Tensor, Tensor]:
        """Quantize x along its rows (axis -1) by one quantizer, and down its columns (axis 0) by another."""

    def encode(self, x: Tensor, q: Quantizer, axis: int, seed: int) -> Stored:
        """Return x in packed storage; NaN blocks have codes 0. A format without NaN and scales needs finite values."""

    def decode(
        self, codes: Tensor, scales: Tensor, groups: Tensor, q: Quantizer, axis: int, cols: int, dtype: torch.dtype
    ) -> Tensor:
        """Return the values [rows, cols] that quantize() returns, from what encode() returned or any other bytes."""

    def rotate(self, x: Tensor, q: Quantizer, axis: int, inverse: bool = False) -> Tensor:
        """Rotate x as before its quantization, in its dtype; `inverse` rotates back."""

    def extent(self, x: Tensor, partition: Part) -> tuple[Tensor, Tensor]:
        """Return the largest and the smallest non-zero magnitude of each part; inf if a part has no non-zero."""

    def gaussian_noise(self, count: int, seed: int, device: torch.device) -> Tensor:
        """Return GaussWS noise for `count` elements, eight to an int32."""

    def uniform_noise(self, count: int, seed: int, device: torch.device) -> Tensor:
        """Return DiffQ's noise for `count` elements, in bf16."""

    def sample_weight(self, w: Tensor, bits: Tensor, seed: int, noise: Noise, block: int, dtype: torch.dtype) -> Tensor:
        """Return w with noise whose size in each square of `block` rows and columns depends on its bit width."""

    def sample_weight_backward(
        self, grad: Tensor, w: Tensor, bits: Tensor, seed: int, noise: Noise, block: int
    ) -> Tensor:
        """Return the gradient of the bit widths."""

    def matmul_fp32(self, a: Tensor, b: Tensor) -> Tensor:
        """Return a · b of BF16 matrices, whatever their strides, in float32."""
