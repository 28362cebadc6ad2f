"""Known answers, worked by hand, for block scales that are NVFP4's but for one thing."""

from __future__ import annotations

import torch

from fewbits import encode, fake_quantize
from fewbits.kernels.formats import TABLE

# UE5M3 (arXiv 2609.02846): a wider range under the same tensor scale


def test_ue5m3_is_unsigned_with_one_nan_and_no_infinity() -> None:
    ue5m3 = TABLE["ue5m3"]
    assert (ue5m3.bits, ue5m3.max, ue5m3.min_normal, ue5m3.min_subnormal) == (8, 114688, 2**-14, 2**-17)
    values = ue5m3.values()
    assert all(a < b for a, b in zip(values[:-2], values[1:-1], strict=True))
    assert values[0] == 0
    assert values[0xFF] != values[0xFF]


def test_ue5m3_keeps_blocks_that_e4m3_scales_lose() -> None:
    """The tensor's 2688 = 6 · 448 makes its scale 1, so a block's is amax / 6."""
    x = torch.zeros(6, 16)
    x[:, 0] = 6 * torch.tensor([448, 1.125, 2**-14, 3 * 2**-17, 2**-17, 2**-19])
    x[:, 1] = -x[:, 0] / 12  # E2M1's smallest, where the block's maximum is 6
    packed = encode(x, "e2m1:1x16:ue5m3")
    assert packed.scales is not None
    assert packed.group_scales is not None
    # fields of exponent (biased by 15) and mantissa; the last is less than half the smallest scale
    assert packed.scales.flatten().tolist() == [23 << 3 | 6, 15 << 3 | 1, 1 << 3, 3, 1, 0]
    assert packed.group_scales.tolist() == [1]
    y = fake_quantize(x, "e2m1:1x16:ue5m3")
    assert torch.equal(y[:5], x[:5])
    assert not y[5].any()
    assert fake_quantize(x, "e2m1:1x16:nvfp4")[:, 0].bool().tolist() == [True, True, False, False, False, False]
