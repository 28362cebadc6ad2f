"""Define layer norms and RMS norms, forward and backward, in FP32; sums.py defines the order of sums."""

import torch
from torch import Tensor

from fewbits.kernels.reference.sums import along_rows, over_rows


def norm(
    s: Tensor, weight: Tensor, bias: Tensor | None, offset: float, eps: float, centered: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return n = (s − mean)/deviation·(weight + offset) + bias, and the mean and 1/deviation of each row.

    deviation = √(variance + eps). centered: False computes an RMS norm, whose mean is 0 (returned as an empty tensor).
    weight: of the shape of the last dimension of s, or of the last two dimensions.
    """
    v, mean = s.float(), s.new_empty(0, dtype=torch.float32)
    count = v.new_tensor(v.shape[-1])
    if centered:
        mean = along_rows(v) / count
        v = v - mean[..., None]
    variance = along_rows(v * v) / count + eps
    inverse = variance.double().sqrt().float().reciprocal()  # torch's square root in FP32 may be one unit off
    n = (v * inverse[..., None]) * (weight + offset)
    return (n if bias is None else n + bias).to(dtype), mean, inverse


def norm_backward(
    s: Tensor,
    ds: Tensor | None,
    dn: Tensor,
    weight: Tensor,
    biased: bool,
    mean: Tensor,
    inverse: Tensor,
    offset: float,
    centered: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of s, weight and bias.

    ds: the gradient of s from uses of s other than the norm, or None. dn: the gradient of the result n of `norm`.
    biased: False returns an empty tensor as the gradient of the bias. mean, inverse: the results of `norm`.
    """
    hat, d = s.float(), dn.float()
    count = hat.new_tensor(hat.shape[-1])
    if centered:
        hat = hat - mean[..., None]
    hat = hat * inverse[..., None]
    product = d * (weight + offset)
    moment = along_rows(product * hat) / count
    dx = product
    if centered:
        dx = dx - (along_rows(product) / count)[..., None]
    dx = (dx - hat * moment[..., None]) * inverse[..., None]
    if ds is not None:
        dx = dx + ds.float()
    rows = (-1, *weight.shape)
    dweight = over_rows((hat * d).reshape(rows))
    dbias = over_rows(d.reshape(rows)) if biased else weight.new_empty(0)
    return dx.to(s.dtype), dweight, dbias
