"""Packed storage: codes and scales as they would lie in memory, and back to the very values of the fake path."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fewbits.kernels import reference
from fewbits.kernels.api import check_tensor, fake_quantize, given, spelling
from fewbits.kernels.formats import Format
from fewbits.kernels.quantizer import Block, Quantizer


@dataclass(frozen=True, slots=True)
class Packed:
    """A quantized tensor in its own bits. torch.save keeps it, and torch.load, which runs no code, brings it back.

    codes: uint8 [rows, bytes]; a row's codes lie one after the other from the lowest bit up, so that E2M1 has the even
        column in the low nibble. Formats of 9 to 16 bits take two bytes.
    scales: one for each block: float32 (amax), uint8 E8M0 (gam, e8m0, mx), uint8 E4M3 (nvfp4,
        fouroversix, eden) or uint8 UE5M3 (ue5m3); None for a naive cast.
    group_scales: float32; gam's mantissas, or the tensor scale of nvfp4, ue5m3, fouroversix and eden; None for
        the others.
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
        """All that is stored, scales included: 4.5 + 32/N for NVFP4 on N elements."""
        return 8 * self.nbytes / max(1, self.shape.numel())

    def to(self, device: torch.device | str) -> "Packed":
        """The same bits on that device."""
        scales, groups = (None if t is None else t.to(device) for t in (self.scales, self.group_scales))
        return replace(self, codes=self.codes.to(device), scales=scales, group_scales=groups)


torch.serialization.add_safe_globals([Packed, Quantizer, Format, Block])


def encode(x: Tensor, q: Quantizer | str, *, axis: int = -1, seed: int | None = None) -> Packed:
    """x in the bits of q's format. `decode` of it equals `fake_quantize(x, q)` bit for bit.

    >>> packed = encode(x, "e2m1:1x16:nvfp4")
    >>> packed.codes.shape, packed.bits_per_element
    """
    spec = spelling(q, Quantizer)
    q = Quantizer.parse(spec)
    check_tensor(x, axis)
    if q.format.bits > 16:
        raise ValueError(f"{q.format} has {q.format.bits} bits: encode stores formats of at most 16")
    if (
        q.scaling == "none"
        and not q.format.has_nan
        and not bool(fake_quantize(x, q, axis=axis, seed=seed).isfinite().all())
    ):
        raise ValueError(f"{q.format} has no code for NaN: encode finite values, or give {q} a scaling")
    codes, scales, groups = torch.ops.fewbits.encode(x.detach(), spec, axis, given(seed))
    stored = (
        None if q.scaling == "none" else scales.view(torch.float32) if q.scaling == "amax" else scales.to(torch.uint8)
    )
    return Packed(
        codes=pack(codes, q.format.bits),
        scales=stored,
        group_scales=groups if groups.numel() else None,
        quantizer=q,
        shape=x.shape,
        dtype=x.dtype,
        axis=axis,
    )


def decode(packed: Packed) -> Tensor:
    """The values that `fake_quantize` gives, in the dtype and shape of the tensor that was encoded."""
    if not isinstance(packed, Packed):
        raise ValueError(f"decode takes what encode returns, a Packed, not {type(packed).__name__}")
    q, scales, groups = packed.quantizer, packed.scales, packed.group_scales
    cols = packed.shape[-1] if packed.shape else 1
    codes = unpack(packed.codes, q.format.bits, cols)
    if scales is None:
        scales = codes.new_zeros(1, 1)
    scales = scales.view(torch.int32) if scales.dtype == torch.float32 else scales.to(torch.int32)
    groups = groups if groups is not None else codes.new_zeros(0, dtype=torch.float32)
    dtype = torch.float32 if packed.dtype == torch.float64 else packed.dtype
    every = torch.arange(1 << q.format.bits, device=codes.device)
    values = reference.values_of(every, q.format)[codes]  # looked up: many times faster than made for each element
    y = reference.restore(values, reference.Scales(scales, groups), q, packed.axis, dtype)
    return y.to(packed.dtype).view(packed.shape)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes [rows, cols] of `bits` bits each as bytes: eight codes make `bits` bytes, least significant bit first."""
    rows, cols = codes.shape
    if bits > 8:
        return codes.to(torch.int16).view(torch.uint8).view(rows, 2 * cols)
    padded = torch.nn.functional.pad(codes, (0, -cols % 8)).view(rows, (cols + 7) // 8, 8).long()
    words = (padded << torch.arange(8, device=codes.device) * bits).sum(-1)
    return (
        (words[..., None] >> torch.arange(bits, device=codes.device) * 8 & 0xFF)
        .to(torch.uint8)
        .flatten(1)[:, : (cols * bits + 7) // 8]
    )


def unpack(data: Tensor, bits: int, cols: int) -> Tensor:
    """The int32 codes that `pack` put into bytes."""
    rows = data.shape[0]
    if bits > 8:
        return data.contiguous().view(torch.int16).view(rows, cols).to(torch.int32) & 0xFFFF
    padded = torch.nn.functional.pad(data, (0, -data.shape[1] % bits)).view(rows, (cols + 7) // 8, bits).long()
    words = (padded << torch.arange(bits, device=data.device) * 8).sum(-1)
    codes = words[..., None] >> torch.arange(8, device=data.device) * bits & (1 << bits) - 1
    return codes.to(torch.int32).flatten(1)[:, :cols]
