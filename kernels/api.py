"""Fake quantization and mixtures: the functions that users call."""

from dataclasses import dataclass
from typing import Literal, overload

import torch
from torch import Tensor

from fewbits.kernels import ops
from fewbits.kernels.quantizer import Mixture, Quantizer

ERROR_ONE = 1 << 23


@dataclass(frozen=True, slots=True)
class QuantStats:
    """What quantization did: of the whole tensor (0-d tensors), or of each block (a grid of blocks).

    `counts` holds exact integers, so statistics do not depend on threads or devices; nothing is read back to the host
    until a number is asked for.
    """

    counts: Tensor  # [..., 7]: error in units of 2^-23, non-zeros, flushed, saturated, capped, non-finite, lost
    amax: Tensor

    @property
    def error_sum(self) -> Tensor:
        """Sum of relative errors over non-zeros, each at most 1."""
        return self.counts[..., 0].double() / ERROR_ONE

    @property
    def error(self) -> Tensor:
        """Mean relative error over non-zeros (MoR eq. 1); 0 where all is zero."""
        return self.error_sum / self.nonzeros.clamp(min=1)

    @property
    def nonzeros(self) -> Tensor:
        return self.counts[..., 1]

    @property
    def flushed(self) -> Tensor:
        """Non-zeros that came back as zero."""
        return self.counts[..., 2]

    @property
    def saturated(self) -> Tensor:
        """Elements whose rounded value lay beyond the format's maximum."""
        return self.counts[..., 3]

    @property
    def capped(self) -> Tensor:
        """Elements whose relative error was above 1 and counted as 1 (stochastic rounding does that)."""
        return self.counts[..., 4]

    @property
    def nonfinite(self) -> Tensor:
        """Elements that were NaN or infinite before."""
        return self.counts[..., 5]

    @property
    def lost(self) -> Tensor:
        """Elements that came back as NaN or infinity: those, and what shared a block with them."""
        return self.counts[..., 6]


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
    out: None = None,
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
    """Quantize and de-quantize: values of q's grid, in x's dtype and shape; a Hadamard rotation is kept.

    axis: -1, blocks along the last dimension, or 0, down the rows of x seen as (−1, last dim).
    seed: for stochastic rounding, from 0 to 2^63 − 1; element i, row-major, always gets the same bits of it.
    out: receives the result (may be x) instead of a new tensor.
    stats: True also returns QuantStats of the tensor, "block" those of each block.

    >>> y = fake_quantize(x, Quantizer.parse("e4m3:128x128:gam"))
    >>> y, stats = fake_quantize(x, "e2m1:1x16:nvfp4:stochastic", axis=0, seed=7, stats=True)
    """
    spec, seed = spelling(q, Quantizer), given(seed)
    check_tensor(x, axis)
    if stats not in (False, True, "block"):
        raise ValueError(f"stats={stats!r}: valid are False, True and 'block'")
    if out is not None:
        if stats:
            raise ValueError("out= together with stats=: take the statistics without out")
        _check_out(x, out)
        torch.ops.fewbits.quantize_out(x, spec, axis, seed, out)
        return out
    if not stats:
        return torch.ops.fewbits.quantize(x, spec, axis, seed)
    values, counts, amax = torch.ops.fewbits.quantize_stats(x, spec, axis, seed, stats == "block")
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
) -> tuple[Tensor, Tensor]:
    """x quantized along the last dimension by `row` and down the rows by `column`, reading it once.

    What a linear layer needs of an operand that two GEMMs contract along different axes.
    """
    check_tensor(x, -1)
    return torch.ops.fewbits.quantize_both(
        x, spelling(row, Quantizer), spelling(column, Quantizer), given(row_seed), given(column_seed)
    )


@overload
def mix(
    x: Tensor, mixture: Mixture | str, *, axis: int = -1, seed: int | None = None, stats: Literal[False] = False
) -> tuple[Tensor, Tensor]: ...


@overload
def mix(
    x: Tensor, mixture: Mixture | str, *, axis: int = -1, seed: int | None = None, stats: Literal[True]
) -> tuple[Tensor, Tensor, QuantStats]: ...


def mix(
    x: Tensor, mixture: Mixture | str, *, axis: int = -1, seed: int | None = None, stats: bool = False
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, QuantStats]:
    """Each decision block by the first entry of the mixture whose test it passes -> values and choices.

    choice: int8 index of the entry, a grid of decision blocks; 0-d where one decision covers the tensor. A block with a
    non-finite value takes the last entry, one that the first entry represents exactly takes the first.
    stats: also QuantStats of the first entry for each decision block: the error that its test saw.

    >>> y, choice = mix(x, Mixture.parse("e4m3:128x128:gam @ error<0.045 | bf16 ; per=tensor"))
    """
    spec, seed = spelling(mixture, Mixture), given(seed)
    check_tensor(x, axis)
    if stats not in (False, True):
        raise ValueError(f"stats={stats!r}: valid are False and True, whose statistics are of decision blocks")
    values, choice, counts, amax = torch.ops.fewbits.mix(x, spec, axis, seed)
    if "per=" not in spec:  # one decision for the tensor
        choice = choice.flatten()[0] if choice.numel() else choice.new_zeros(())
        counts, amax = counts.sum((0, 1)), amax.sum()
    return (values, choice, QuantStats(counts, amax)) if stats else (values, choice)


def spelling(spec: Quantizer | Mixture | str, kind: type[Quantizer] | type[Mixture]) -> str:
    """How operators are told what to do. A spelling is checked here, but under torch.compile only when it runs."""
    if isinstance(spec, kind):
        return spec.spelling
    if not isinstance(spec, str):
        raise ValueError(f"expected a {kind.__name__} or its spelling, not {type(spec).__name__}")
    return spec if torch.compiler.is_compiling() else kind.parse(spec).spelling


def given(seed: int | None) -> int:
    """-1 stands for a seed not given, which is right where nothing is rounded stochastically."""
    return -1 if seed is None else check_seed(seed)


def check_seed(seed: int) -> int:
    if isinstance(seed, bool) or not (isinstance(seed, (int, torch.SymInt)) or hasattr(seed, "__index__")):
        raise ValueError(f"seed={seed!r}: an integer from 0 to 2^63 - 1")
    if not 0 <= seed < 1 << 63:
        raise ValueError(f"seed={seed!r}: an integer from 0 to 2^63 - 1")
    return seed if isinstance(seed, (int, torch.SymInt)) else int(seed)


def check_tensor(x: Tensor, axis: int) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(f"expected a tensor, not {type(x).__name__}")
    if x.dtype not in ops.DTYPES:
        raise ValueError(f"dtype {x.dtype}: valid are {', '.join(map(str, ops.DTYPES))}")
    if isinstance(axis, (bool, float)) or axis not in (-1, 0):
        raise ValueError(f"axis {axis!r}: valid are -1 (along the last dimension) and 0 (down the flattened rows)")


def _check_out(x: Tensor, out: Tensor) -> None:
    if not isinstance(out, Tensor) or out.shape != x.shape or out.dtype != x.dtype or out.device != x.device:
        found = f"{tuple(out.shape)} {out.dtype} on {out.device}" if isinstance(out, Tensor) else type(out).__name__
        raise ValueError(f"out is {found}: it must be {tuple(x.shape)} {x.dtype} on {x.device}, like x")
    if torch.is_grad_enabled() and (x.requires_grad or out.requires_grad):
        raise ValueError("out= with a tensor that requires grad: a result written in place has no gradient")
    if any(stride == 0 and size > 1 for size, stride in zip(out.shape, out.stride(), strict=True)):
        raise ValueError("out overlaps itself (an expanded tensor): give one with memory for every element")
    if torch.compiler.is_compiling() or x is out:  # the compiler knows its own buffers
        return
    if torch._C._overlaps(x, out) and (x.data_ptr(), x.stride()) != (out.data_ptr(), out.stride()):
        raise ValueError("out overlaps x without being x: give x itself, or another tensor")


def _last(x: Tensor) -> int:
    return x.shape[-1] if x.dim() else 1
