"""Store a tensor as packed codes and scales, and restore exactly the values of fake quantization."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fewbits.kernels.api import check_out, check_tensor, check_written, fake_quantize, seed_or_unset, spelling
from fewbits.kernels.formats import Format
from fewbits.kernels.ops import matrix, receives
from fewbits.kernels.quantizer import Block, Quantizer


@dataclass(frozen=True, slots=True)
class Packed:
    """A quantized tensor in packed storage, which torch.save can write and torch.load can read with weights_only=True.

    codes: uint8 [rows, bytes]; a row's codes are stored one after the other from the lowest bit up, so in E2M1 the low
        nibble of a byte is the code of an even column. Formats of 9 to 16 bits take two bytes per code.
    scales: one per block: float32 (amax), or uint8 codes of E8M0 (gam, e8m0, mx), E4M3 (nvfp4, fouroversix, eden) or
        UE5M3 (ue5m3); None if the quantizer has no scaling.
    group_scales: one float32 for each group of blocks (see `Quantizer.group`): gam's mantissa, or the tensor scale of
        nvfp4, ue5m3, fouroversix and eden; None for the other scalings.
    """

    codes: Tensor
    scales: Tensor | None
    group_scales: Tensor | None
    quantizer: Quantizer
    shape: torch.Size
    dtype: torch.dtype
    axis: int

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.codes, self.scales, self.group_scales) if t is not None)

    @property
    def bits_per_element(self) -> float:
        """The number of stored bits per element, scales included: 4.5 + 32/N for NVFP4 on N elements."""
        return 8 * self.nbytes / max(1, self.shape.numel())

    def to(self, device: torch.device | str) -> "Packed":
        """Return a copy with the same bits on the given device."""
        scales, groups = (None if t is None else t.to(device) for t in (self.scales, self.group_scales))
        return replace(self, codes=self.codes.to(device), scales=scales, group_scales=groups)


torch.serialization.add_safe_globals([Packed, Quantizer, Format, Block])


def encode(x: Tensor, q: Quantizer | str, *, axis: int = -1, seed: int | None = None) -> Packed:
    """Return x quantized by q, as packed codes and scales.

    `decode` restores, bit for bit, the values that `fake_quantize` returns for x, q, axis and seed.

    >>> packed = encode(x, "e2m1:1x16:nvfp4")
    >>> packed.codes.shape, packed.bits_per_element
    """
    spec = spelling(q, Quantizer)
    q = Quantizer.parse(spec)
    check_tensor(x, axis)
    if q.format.bits > 16:
        raise ValueError(f"{q.format} has {q.format.bits} bits: encode supports formats of at most 16 bits")
    if q.scaling == "none" and not q.format.has_nan:
        rotated = fake_quantize(x, q, axis=axis, seed=seed) if q.hadamard else matrix(x)  # a rotation may overflow
        if not bool(rotated.isfinite().all()):
            raise ValueError(
                f"{q} gives NaN, and {q.format} has no code for NaN: pass smaller, finite values, or add a scaling, "
                "whose scales can store NaN"
            )
    codes, scales, groups = torch.ops.fewbits.encode(x.detach(), spec, axis, seed_or_unset(seed))
    return Packed(
        codes=codes,
        scales=None if q.scaling == "none" else scales,
        group_scales=groups if groups.numel() else None,
        quantizer=q,
        shape=x.shape,
        dtype=x.dtype,
        axis=axis,
    )


def decode(packed: Packed, *, out: Tensor | None = None) -> Tensor:
    """Return the values that `fake_quantize` gives for the encoded tensor, in the dtype and shape of that tensor.

    out: a tensor that receives the result instead of a new one; it has the encoded tensor's dtype and shape, and is on
        the device of the codes.
    """
    if not isinstance(packed, Packed):
        raise ValueError(f"decode expects the Packed that encode returns, not {type(packed).__name__}")
    codes, absent = packed.codes, packed.codes.new_empty
    scales = absent((0, 0)) if packed.scales is None else packed.scales
    groups = absent(0, dtype=torch.float32) if packed.group_scales is None else packed.group_scales
    stored = (codes, scales, groups, packed.quantizer.spelling, packed.axis)
    if out is not None:
        check_out(out, packed.shape, packed.dtype, codes.device)
        check_written(out)
        if receives(out):
            torch.ops.fewbits.decode_out(*stored, matrix(out))
            return out
    cols = packed.shape[-1] if packed.shape else 1
    dtype = torch.float32 if packed.dtype == torch.float64 else packed.dtype
    values = torch.ops.fewbits.decode(*stored, cols, dtype).to(packed.dtype).view(packed.shape)
    return values if out is None else out.copy_(values)
