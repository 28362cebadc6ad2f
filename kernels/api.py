"""Provide the public functions for fake quantization and mixtures."""

from dataclasses import dataclass
from typing import Literal, overload

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fewbits.kernels import ops  # noqa: F401, registers the operators
from fewbits.kernels.backends import protocol as backends
from fewbits.kernels.backends.protocol import CAPPED, ERROR, ERROR_ONE, FLUSHED, LOST, NONFINITE, NONZEROS, SATURATED
from fewbits.kernels.operators import call, refuse_distributed
from fewbits.kernels.quantizer import Mixture, Quantizer

DTYPES = (*backends.DTYPES, torch.float64)
_COUNTS = ("nonzeros", "flushed", "saturated", "capped", "nonfinite", "lost")


@dataclass(frozen=True, slots=True, repr=False)
class QuantStats:
    """The statistics of a quantization: 0-d tensors for the whole tensor, or a 2-d grid with one value per block.

    Errors and numbers of elements are computed from the exact integers in `counts`, so they do not depend on the number
    of threads or on the device. All attributes are tensors on the device of the input; nothing is copied to the host
    until the caller converts one to a Python number.
    """

    counts: Tensor  # int64 [..., 7]; protocol.py names the index of each statistic
    amax: Tensor  # float32 [...]: the largest magnitude of the input, after the Hadamard transform if there is one

    @property
    def error_sum(self) -> Tensor:
        """The sum of the relative errors of the non-zero elements; each error is limited to 1."""
        return self.counts[..., ERROR].double() / ERROR_ONE

    @property
    def error(self) -> Tensor:
        """The mean relative error of the non-zero elements (MoR eq. 1); 0 for an all-zero tensor or block."""
        return self.error_sum / self.nonzeros.clamp(min=1)

    @property
    def nonzeros(self) -> Tensor:
        return self.counts[..., NONZEROS]

    @property
    def flushed(self) -> Tensor:
        """The number of non-zero elements that became zero."""
        return self.counts[..., FLUSHED]

    @property
    def saturated(self) -> Tensor:
        """The number of elements that round beyond the format's maximum, and become what `Quantizer.overflow` says."""
        return self.counts[..., SATURATED]

    @property
    def capped(self) -> Tensor:
        """The number of elements whose relative error is above 1, for which `error` uses 1."""
        return self.counts[..., CAPPED]

    @property
    def nonfinite(self) -> Tensor:
        """The number of elements that were NaN or infinite in the input."""
        return self.counts[..., NONFINITE]

    @property
    def lost(self) -> Tensor:
        """The number of elements whose result is NaN or infinite, such as all elements of a block with a NaN input."""
        return self.counts[..., LOST]

    def __repr__(self) -> str:
        """Return the error, the amax and the counts in one line.

        For statistics per block, these are the mean and the largest error, the largest amax and the sums of the counts.
        """
        if self.counts.is_meta or isinstance(self.counts, FakeTensor):
            return f"QuantStats(counts={self.counts!r}, amax={self.amax!r})"
        if not self.error.numel():
            return f"QuantStats(blocks={tuple(self.error.shape)})"
        head = f"error={float(self.error.mean()):.6g}"
        if self.error.ndim:
            head = f"blocks={tuple(self.error.shape)}, {head}, largest_error={float(self.error.max()):.6g}"
        counted = (f"{name}={int(getattr(self, name).sum())}" for name in _COUNTS)
        return f"QuantStats({head}, amax={float(self.amax.max()):.6g}, {', '.join(counted)})"


@overload
def fake_quantize(
    x: Tensor,
    q: Quantizer | str,
    *,
    axis: int = -1,
    seed: int | None = None,
    out: Tensor | None = None,
    stats: Literal[False] = False,
) -> Tensor: ...


@overload
def fake_quantize(
    x: Tensor,
    q: Quantizer | str,
    *,
    axis: int = -1,
    seed: int | None = None,
    out: Tensor | None = None,
    stats: Literal[True, "block"],
) -> tuple[Tensor, QuantStats]: ...


def fake_quantize(
    x: Tensor,
    q: Quantizer | str,
    *,
    axis: int = -1,
    seed: int | None = None,
    out: Tensor | None = None,
    stats: bool | Literal["block"] = False,
) -> Tensor | tuple[Tensor, QuantStats]:
    """Quantize and de-quantize a tensor: return the rounded values in x's dtype and shape.

    If q has a Hadamard transform, the returned values stay rotated: the inverse transform is not applied.

    axis: -1 for blocks along the last dimension; 0 for blocks down the columns of x.view(-1, x.shape[-1]).
    seed: an integer from 0 to 2^63 − 1, required for stochastic rounding. The random bits of an element depend only on
        the seed and on the element's row-major index.
    out: a tensor that receives the result instead of a new one; it may be x.
    stats: True also returns the QuantStats of the tensor; "block" also returns the QuantStats with one value per block.

    >>> y = fake_quantize(x, Quantizer.parse("e4m3:128x128:gam"))
    >>> y, stats = fake_quantize(x, "e2m1:1x16:nvfp4:stochastic", axis=0, seed=7, stats=True)
    """
    spec, seed = spelling(q, Quantizer), seed_or_unset(seed)
    check_tensor(x, axis)
    if stats not in (False, True, "block"):
        raise ValueError(f"stats={stats!r}: valid values are False, True and 'block'")
    if out is not None:
        _check_result(x, out)
    if not stats:
        if out is None:
            return call(torch.ops.fewbits.quantize, x, spec, axis, seed)
        torch.ops.fewbits.quantize_out(x, spec, axis, seed, out)
        return out
    if out is None:
        values, counts, amax = call(torch.ops.fewbits.quantize_stats, x, spec, axis, seed, stats == "block")
    else:
        values = out
        counts, amax = torch.ops.fewbits.quantize_stats_out(x, spec, axis, seed, stats == "block", out)
    if stats == "block":
        return values, QuantStats(counts, amax)
    return values, QuantStats(counts.sum((0, 1)), amax.amax() if amax.numel() else amax.new_zeros(()))


def fake_quantize_both(
    x: Tensor,
    row: Quantizer | str,
    column: Quantizer | str,
    *,
    row_seed: int | None = None,
    column_seed: int | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return x quantized along the last dimension by `row`, and x quantized along axis 0 by `column`.

    Both results come from the same reads of x, which saves memory traffic. A linear layer needs both results if two of
    its GEMMs sum over different axes of the operand.

    row_seed, column_seed: the seeds of stochastic rounding, required as in `fake_quantize`.
    out: two tensors that receive the results instead of new ones. They must overlap neither x nor each other.
    """
    check_tensor(x, -1)
    arguments = (
        *(x, spelling(row, Quantizer), spelling(column, Quantizer)),
        *(seed_or_unset(row_seed), seed_or_unset(column_seed)),
    )
    if out is None:
        return call(torch.ops.fewbits.quantize_both, *arguments)
    along, down = out
    _check_result(x, along, apart=True)
    _check_result(x, down, apart=True)
    _check_apart(along, down)
    torch.ops.fewbits.quantize_both_out(*arguments, along, down)
    return along, down


@overload
def mix(
    x: Tensor,
    mixture: Mixture | str,
    *,
    axis: int = -1,
    seed: int | None = None,
    out: Tensor | None = None,
    stats: Literal[False] = False,
) -> tuple[Tensor, Tensor]: ...


@overload
def mix(
    x: Tensor,
    mixture: Mixture | str,
    *,
    axis: int = -1,
    seed: int | None = None,
    out: Tensor | None = None,
    stats: Literal[True],
) -> tuple[Tensor, Tensor, QuantStats]: ...


def mix(
    x: Tensor,
    mixture: Mixture | str,
    *,
    axis: int = -1,
    seed: int | None = None,
    out: Tensor | None = None,
    stats: bool = False,
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, QuantStats]:
    """Quantize each decision block by the first mixture entry whose test it passes; return (values, choices).

    A decision block is the part of x for which one entry is chosen (the mixture's `per`). The choices are the int8
    indices of the chosen entries: 0-d if one decision covers the tensor, else [decision blocks down, blocks across].
    A decision block with a non-finite value gets the last entry. A decision block that the first entry represents
    exactly gets the first entry, if that entry has an error test.

    axis, seed: as in `fake_quantize`.
    out: a tensor that receives the values instead of a new one; it must not overlap x, which is read several times.
    stats: True also returns the QuantStats of each decision block. They describe the values of the first entry, even if
        another entry was chosen for the decision block.

    >>> y, choice = mix(x, Mixture.parse("e4m3:128x128:gam @ error<0.045 | bf16 ; per=tensor"))
    """
    spec, seed = spelling(mixture, Mixture), seed_or_unset(seed)
    check_tensor(x, axis)
    if stats not in (False, True):
        raise ValueError(
            f"stats={stats!r}: valid values are False and True (True returns statistics of each decision block)"
        )
    if out is None:
        values, choice, counts, amax = call(torch.ops.fewbits.mix, x, spec, axis, seed)
    else:
        _check_result(x, out, apart=True)
        values = out
        choice, counts, amax = torch.ops.fewbits.mix_out(x, spec, axis, seed, out)
    _, semicolon, option = spec.rpartition(";")
    if not semicolon or option.replace(" ", "") == "per=tensor":  # one decision for the tensor
        choice = choice.view(()) if choice.numel() else choice.new_zeros(())
        if stats:
            counts, amax = counts.sum((0, 1)), amax.sum()
    return (values, choice, QuantStats(counts, amax)) if stats else (values, choice)


def spelling(spec: Quantizer | Mixture | str, kind: type[Quantizer] | type[Mixture]) -> str:
    """Return the string form of a quantizer or mixture, which the operators of `torch.ops.fewbits` take.

    A string is validated here, except under torch.compile, where the operator validates it at run time.

    kind: the class that is expected, Quantizer or Mixture.
    """
    if isinstance(spec, kind):
        return spec.spelling
    if not isinstance(spec, str):
        raise ValueError(f"expected a {kind.__name__} or its string form, not {type(spec).__name__}")
    return spec if torch.compiler.is_compiling() else kind.parse(spec).spelling


def seed_or_unset(seed: int | None) -> int:
    """Check the seed and return it, or -1 for None.

    The operators of `torch.ops.fewbits` refuse -1 if the quantizer or mixture needs a seed (`needs_seed`).
    """
    return -1 if seed is None else check_seed(seed)


def check_seed(seed: int) -> int:
    if isinstance(seed, bool) or not (isinstance(seed, (int, torch.SymInt)) or hasattr(seed, "__index__")):
        raise ValueError(f"seed={seed!r}: expected an integer from 0 to 2^63 - 1")
    if not 0 <= seed < 1 << 63:
        raise ValueError(f"seed={seed!r}: expected an integer from 0 to 2^63 - 1")
    return seed if isinstance(seed, (int, torch.SymInt)) else int(seed)


def check_tensor(x: Tensor, axis: int) -> None:
    if not isinstance(x, Tensor):
        hint = ": convert it by torch.from_numpy" if type(x).__module__ == "numpy" else ""
        raise ValueError(f"expected a tensor, not {type(x).__name__}{hint}")
    refuse_distributed(x)
    if x.dtype not in DTYPES:
        raise ValueError(f"the tensor has dtype {x.dtype}: valid dtypes are {', '.join(map(str, DTYPES))}")
    if isinstance(axis, (bool, float)) or axis not in (-1, 0):
        raise ValueError(
            f"axis {axis!r}: valid values are -1 (blocks along the last dimension) and 0 (blocks down the columns of "
            "the tensor viewed as a matrix)"
        )


def _check_result(x: Tensor, out: Tensor, *, apart: bool = False) -> None:
    """Raise ValueError if `out` cannot receive a result with the shape, dtype and device of x.

    apart: True forbids any overlap of `out` and x in memory; False allows `out` to be x itself, but no other overlap.
    """
    check_out(out, x.shape, x.dtype, x.device)
    check_written(out, x)
    if apart:
        _check_apart(out, x)
        return
    if torch.compiler.is_compiling() or x is out:  # the compiler knows its own buffers
        return
    if torch._C._overlaps(x, out) and (x.data_ptr(), x.stride()) != (out.data_ptr(), out.stride()):
        raise ValueError("out overlaps x in memory: pass x itself or a separate tensor")


def check_out(out: Tensor, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
    if not isinstance(out, Tensor) or out.shape != shape or out.dtype != dtype or out.device != device:
        actual = f"{tuple(out.shape)} {out.dtype} on {out.device}" if isinstance(out, Tensor) else type(out).__name__
        raise ValueError(f"out is {actual}: expected {tuple(shape)} {dtype} on {device}")


def check_written(out: Tensor, *inputs: Tensor) -> None:
    """Raise ValueError if autograd would need a gradient of `out` or an input, or if elements of `out` share memory."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in (out, *inputs)):
        raise ValueError(
            "out= cannot be used when x or out requires grad, because a result written in place has no gradient: omit "
            "out=, or call under torch.no_grad()"
        )
    if any(stride == 0 and size > 1 for size, stride in zip(out.shape, out.stride(), strict=True)):
        raise ValueError("out overlaps itself (an expanded tensor): pass a tensor that has memory for every element")


def _check_apart(out: Tensor, other: Tensor) -> None:
    if torch.compiler.is_compiling():
        return
    if out is other or torch._C._overlaps(out, other):
        raise ValueError("out overlaps x or the other result in memory: pass a separate tensor")
