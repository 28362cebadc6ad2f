"""Define the interface of a backend: reference, cpu and cuda provide these functions and give the same bits."""

from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from fewbits.kernels.quantizer import Quantizer

Noise = Literal["gaussian", "uniform"]
Part = tuple[int, int]  # rows × columns
Stored = tuple[Tensor, Tensor, Tensor]  # packed codes, block scales and group scales, as packing.py lays them out

NOISES: tuple[Noise, ...] = get_args(Noise)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # the dtypes of matrices, in the order of the C++ interfaces
ABSENT = torch.empty(0)  # stands for a result that was not requested


class Backend(Protocol):
    """The functions of a backend. A matrix is 2-D, contiguous, of a dtype in DTYPES, and on the backend's device.

    A matrix may be empty. `axis` is -1 or 0, seeds are below 2^63, and quantizers never have `signs=each`. The callers
    (api.py, ops.py) check this; backends do not. Functions neither keep nor change their arguments, except `out`.
    """

    name: str
    # True: callers must not wait for results, which would stall the device and prevent the capture of CUDA graphs.
    never_waits: bool

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
        """Return the quantized x in its dtype; and the counts [parts down, parts across, 7] and the amax of each part.

        out: the tensor to write the values to; it may be x. want_values: False returns ABSENT for the values.
        want_stats: False returns ABSENT for counts and amax. partition: rows and columns of the parts of the matrix for
        which statistics are returned; None: the whole matrix is one part. skip: one bool per part; if True, the part's
        values in `out` stay unchanged and its elements are not counted.
        """

    def quantize_both(
        self,
        x: Tensor,
        row: Quantizer,
        column: Quantizer,
        row_seed: int,
        column_seed: int,
        *,
        out: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return x quantized along axis -1 by the quantizer `row`, and x quantized along axis 0 by `column`.

        out: the tensors to write the values to; they overlap neither x nor each other.
        """

    def encode(self, x: Tensor, q: Quantizer, axis: int, seed: int) -> Stored:
        """Return x in packed storage. If the format has no NaN and the scaling is `none`, x must be finite."""

    def decode(
        self,
        codes: Tensor,
        scales: Tensor,
        groups: Tensor,
        q: Quantizer,
        axis: int,
        cols: int,
        dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the values [rows, cols] of packed storage; after encode(), they equal the values of quantize()."""

    def rotate(self, x: Tensor, q: Quantizer, axis: int, inverse: bool = False) -> Tensor:
        """Return x rotated by the quantizer's Hadamard transform, or by its inverse, in the dtype of x."""

    def decide(
        self,
        index: int,
        last: int,
        counts: Tensor,
        choice: Tensor,
        decided: Tensor,
        *,
        limit: float = 0.0,
        other: Tensor = ABSENT,
        extent: tuple[Tensor, Tensor] = (ABSENT, ABSENT),
    ) -> bool:
        """Choose entry `index` of a mixture for the undecided decision blocks that pass its test.

        A block passes if its values are finite and its error is zero or below that of `other`; without `other`, below
        `limit` for each nonzero element. With `extent` it passes if its values are finite and the ratio of its largest
        and smallest magnitudes is below `limit`.

        counts, other: those of the entry's values and of the quantizer to compare with. choice (int8), decided (bool):
        one element per block, updated in place; entry 0 does not read them. The choice of an undecided block is the
        entry `last`. Return False if no block is undecided; a backend that never waits returns True for any blocks.
        """

    def extent(self, x: Tensor, partition: Part) -> tuple[Tensor, Tensor]:
        """Return the largest and the smallest non-zero magnitude of each part; for a part of zeros, 0 and inf."""

    def gaussian_noise(self, count: int, seed: int, device: torch.device) -> Tensor:
        """Return GaussWS noise for `count` elements, eight in each int32."""

    def uniform_noise(self, count: int, seed: int, device: torch.device) -> Tensor:
        """Return DiffQ's noise for `count` elements, in bf16."""

    def sample_weight(self, w: Tensor, bits: Tensor, seed: int, noise: Noise, block: int, dtype: torch.dtype) -> Tensor:
        """Return w plus noise; a square of `block` rows and columns has one bit width, which scales its noise."""

    def sample_weight_backward(
        self, grad: Tensor, w: Tensor, bits: Tensor, seed: int, noise: Noise, block: int
    ) -> Tensor:
        """Return the gradient of the bit widths."""

    def matmul_fp32(self, a: Tensor, b: Tensor) -> Tensor:
        """Return a · b of BF16 matrices with any strides, in float32."""
