"""Define the interface of a backend: reference, cpu and cuda provide these functions and give the same bits."""

from typing import Protocol

import torch
from torch import Tensor

from fewbits.kernels.quantizer import Quantizer
from fewbits.kernels.reference.noise import Noise
from fewbits.kernels.scalings import Select

Part = tuple[int, int]  # rows × columns
Stored = tuple[Tensor, Tensor, Tensor]  # packed codes, block scales and group scales, as packing.py lays them out
OperandOf = tuple[Quantizer, int, int]  # the quantizer, axis and seed of an operand

DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # the dtypes of matrices, in the order of the C++ interfaces
ABSENT = torch.empty(0)  # the value of a result that was not requested, and of an argument that is not used

# The index of each statistic in the counts that backends return (arithmetic.md, "Statistics").
ERROR, NONZEROS, FLUSHED, SATURATED, CAPPED, NONFINITE, LOST = range(7)
COUNTS = 7  # the number of statistics
OBSERVED_AT_ONCE = 96  # the most operands that a call of Backend.observe adds to a table
# The columns of this table: the counts above; how often a mixture chose each of its first three quantizers, and any
# further one; the sum of the mean errors as integers, MEAN_ONE for an error of 1; the bits of the largest mean error as
# a double; the histogram of the mean errors, with 20 bins of 0.005 and one for larger errors.
CHOICES, ERRORS, LARGEST, BINS = slice(7, 11), 11, 12, slice(13, 34)
OBSERVED = 34  # the number of columns
MEAN_ONE = 1 << 40
ERROR_ONE = 1 << 23  # what a relative error of 1 adds to the statistic ERROR, which is an integer


class Backend(Protocol):
    """The functions of a backend. A matrix is 2-D, contiguous, of a dtype in DTYPES, and on the backend's device.

    A matrix may be empty. `axis` is -1 or 0, seeds are below 2^63, and quantizers never have `signs=each`. The callers
    (api.py, ops.py) check this; backends do not. Functions keep no reference to their arguments. They change only
    the argument `out`; `decide` changes only `choice` and `decided`, `observe` only `table`.
    """

    name: str
    # True: callers must not read results on the host, because waiting for the device would stall it and would make the
    # capture of CUDA graphs impossible.
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
        """Return (values, counts, amax): the quantized x in x's dtype, and the statistics of each part of the matrix.

        The counts are int64 [parts down, parts across, 7]; named above. The amaxes are float32
        [parts down, parts across]: the largest magnitude in each part of x (after the Hadamard transform, if any).

        axis: -1 for blocks along the rows, 0 for blocks down the columns. seed: the seed of the random numbers.
        out: the tensor to write the values to; it may be x. want_values: False returns ABSENT for the values.
        want_stats: False returns ABSENT for counts and amax. partition: (rows, columns) of a part; None: the whole
        matrix is one part. skip: one bool per part; if True, the values of the part in `out` stay unchanged, and its
        elements are not counted.
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
        """Return x in packed storage: the codes, block scales and group scales, as packing.py lays them out.

        If the scaling is `none` and the format has no NaN, x must be finite.
        """

    def encode_operands(self, x: Tensor, *of: OperandOf) -> tuple[Stored, ...]:
        """Return one or two operands of scaled products, quantized from x in one pass, as packing.py lays them out.

        The quantizers are those that `form_of` of scaled_products.py names.
        """

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
        """Return the values [rows, cols] of packed storage in `dtype`; they equal those that quantize() returns.

        codes, scales, groups: as packing.py lays them out. q, axis: the arguments of encode(). out: the tensor to write
        the values to.
        """

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
        """Choose entry `index` of a mixture for the undecided decision blocks that pass the test of this entry.

        A block fails if the entry returns a non-finite value in it. Otherwise the arguments determine the test, where E
        is the sum of the block's relative errors in units of 2^-23 (`counts[..., ERROR]`):
        - if `extent` is passed, the block passes if largest / smallest < limit;
        - if `other` is passed, it passes if E = 0 or E < `other[..., ERROR]`;
        - if neither is passed, it passes if E = 0 or E < limit · (number of non-zero elements).

        last: the index of the mixture's last entry; it is the choice of each block that is still undecided. counts: the
        statistics of each block, as `quantize` returns them for the entry's quantizer. other: the same statistics for
        the quantizer to compare with. extent: (largest, smallest) as `extent` returns them. choice (int8), decided
        (bool): one element per block, updated in place; for index 0 they are initialised first.

        Return whether any block is still undecided. A backend that never waits for its device cannot know this, and
        returns True if there are any blocks.
        """

    def compare(self, source: Tensor, mine: Tensor, other: Tensor, partition: Part, by: Select) -> Tensor:
        """Tell for each part whether the error of the values `mine` is at least that of `other` (arithmetic.md).

        The result is bool [parts down, parts across]; `reference.rounding.measured_error` defines the errors.
        """

    def observe(self, table: Tensor, counts: list[Tensor], choices: list[Tensor], rows: list[int]) -> None:
        """Add the statistics of quantized operands to rows of a table, int64 [rows, OBSERVED], in place.

        counts: for each operand, the counts of its decision blocks, as `quantize` returns them. choices: for each
        operand, the choices of its mixture, or ABSENT if its quantizer is no mixture. rows: the row of each operand.
        """

    def extent(self, x: Tensor, partition: Part) -> tuple[Tensor, Tensor]:
        """Return (largest, smallest non-zero) magnitude of each part of the matrix; for a part of zeros, 0 and inf."""

    def gaussian_noise(self, count: int, seed: int, device: torch.device) -> Tensor:
        """Return GaussWS noise for `count` elements, packed as eight elements in each int32 (noise.py)."""

    def uniform_noise(self, count: int, seed: int, device: torch.device) -> Tensor:
        """Return DiffQ's noise for `count` elements, in bf16."""

    def sample_weight(self, w: Tensor, bits: Tensor, seed: int, noise: Noise, block: int, dtype: torch.dtype) -> Tensor:
        """Return w + R · max|w| · 2^(1 − bits) in `dtype`, with noise R (GaussWS eq. 3).

        bits: one bit width for each square of `block` rows and columns; max|w| is the maximum over the same square.
        seed: the seed of R. noise: the distribution of R, `gaussian` (GaussWS) or `uniform` (DiffQ).
        """

    def sample_weight_backward(
        self, grad: Tensor, w: Tensor, bits: Tensor, seed: int, noise: Noise, block: int
    ) -> Tensor:
        """Return the gradient of `bits`; grad: the gradient of the result of `sample_weight` with these arguments."""

    def matmul_fp32(self, a: Tensor, b: Tensor) -> Tensor:
        """Return a · b of BF16 matrices with any strides, in float32."""
