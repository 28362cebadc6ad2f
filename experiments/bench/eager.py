"""Implement quantizers, mixtures and samplers in plain torch, as users without custom kernels would write them.

The functions are vectorised, compute in float32, and cast to torch's float8 dtypes where torch has the format. They use
torch's random numbers, and the only statistic that they compute is the mean relative error. So they never do more work
than our kernels.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fewbits.kernels.quantizer import ErrorBelow, Mixture, Quantizer
from fewbits.kernels.reference.rotation import hadamard, hadamard_signs

EXPONENT, MANTISSA = 0x7F800000, 0x007FFFFF
TORCH_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def _blocks(x: Tensor, q: Quantizer, axis: int) -> Tensor:
    rows, cols = x.shape
    r, c = q.block.resolve((rows, cols), axis)
    return x.view(rows // r, r, cols // c, c)


def _bits(x: Tensor, mask: int) -> Tensor:
    return x.view(torch.int32) & mask


def _factors(amax: Tensor, q: Quantizer) -> tuple[Tensor, Tensor]:
    """Return (before, after): the factors by which each block is multiplied before and after rounding.

    amax: the largest magnitude of each block. Both results have the shape of `amax`.
    """
    top = q.format.max
    s = top / amax
    match q.scaling:
        case "gam":
            group = top / amax.amax()
            less = _bits(s, MANTISSA) < _bits(group, MANTISSA)
            s = (_bits(s, EXPONENT) - (less.to(torch.int32) << 23) | _bits(group, MANTISSA)).view(torch.float32)
        case "e8m0":
            s = _bits(s, EXPONENT).view(torch.float32)
        case "mx":
            ours = (127 + math.frexp(top)[1] - 1) << 23
            s = (ours - _bits(amax, EXPONENT) + (127 << 23)).view(torch.float32)
        case "nvfp4":
            g = top * 448 / amax.amax()
            s8 = (amax * (g / top)).clamp(max=448).to(torch.float8_e4m3fn).float()
            return g / s8, s8 / g
    return s, 1 / s


def _round(v: Tensor, q: Quantizer) -> Tensor:
    f = q.format
    if not q.needs_seed and f.name in TORCH_DTYPES:
        return v.clamp(-f.max, f.max).to(TORCH_DTYPES[f.name]).float()
    step = _bits(v, EXPONENT).view(torch.float32).clamp(min=2.0**f.emin) * 2.0**-f.mantissa_bits
    steps = v / step
    steps = (steps + torch.rand_like(steps)).floor() if q.needs_seed else steps.round()
    return (steps * step).clamp(-f.max, f.max)


def _better_of_two(v: Tensor, amax: Tensor, q: Quantizer) -> Tensor:
    """Quantize each block with both scales of Four Over Six, and return the values with the smaller squared error."""
    top = q.format.max
    g = amax.new_tensor(top * q.traits.target) / amax.amax()  # number / tensor would round twice
    candidates = []
    for expansion in (1.0, q.traits.expansion):
        s8 = (amax * (g / top) * expansion).clamp(max=448).to(torch.float8_e4m3fn).float()
        y = _round(v * (g / s8), q) * s8 * (1 / g)
        candidates.append((y, (y - v).square().sum((1, 3), keepdim=True)))
    (six, error_of_six), (four, error_of_four) = candidates
    return torch.where(error_of_four < error_of_six, four, six)


def _rotate(x: Tensor, q: Quantizer, axis: int) -> Tensor:
    if not q.hadamard:
        return x
    signs = hadamard_signs(q, x.device)
    matrix = (signs[:, None] * hadamard(torch.eye(q.hadamard, device=x.device))).to(x.dtype)
    if axis == 0:
        return (matrix.T @ x.view(-1, q.hadamard, x.shape[1])).view(x.shape)
    return (x.view(-1, q.hadamard) @ matrix).view(x.shape)


def fake_quantize(x: Tensor, q: Quantizer, axis: int) -> Tensor:
    # BF16 with stochastic rounding: the lower 16 bits are the probability of rounding up.
    if q.scaling == "none" and q.format.name == "bf16" and q.needs_seed:
        odds = torch.randint(0, 1 << 16, x.shape, dtype=torch.int32, device=x.device)
        return (x.view(torch.int32) + odds & ~0xFFFF).view(torch.float32)
    if q.scaling == "none":
        return _round(x.float(), q).to(x.dtype)
    v = _blocks(_rotate(x, q, axis).float(), q, axis)
    amax = v.abs().amax((1, 3), keepdim=True)
    if q.scaling == "fouroversix":
        return _better_of_two(v, amax, q).view(x.shape).to(x.dtype)
    encode, decode = _factors(amax, q)
    return (_round(v * encode, q) * decode).view(x.shape).to(x.dtype)


def _errors(x: Tensor, y: Tensor) -> Tensor:
    """Return the relative errors |x − y| / |x|, element by element; zero where x is zero."""
    x, y = x.float(), y.float()
    return torch.where(x == 0, 0, (x - y).abs() / x.abs())


def with_error(x: Tensor, q: Quantizer, axis: int) -> tuple[Tensor, Tensor]:
    y = fake_quantize(x, q, axis)
    return y, _errors(_rotate(x, q, axis), y).sum() / (x != 0).sum()


def mix_tensor(x: Tensor, mixture: Mixture) -> Tensor:
    first = mixture.entries[0]
    assert isinstance(first.test, ErrorBelow)
    y, error = with_error(x, first.quantizer, -1)
    return y if bool(error < first.test.threshold) else x.clone()


def mix_blocks(x: Tensor, mixture: Mixture) -> Tensor:
    first, second = mixture.entries[0].quantizer, mixture.entries[1].quantizer
    blocks, values, errors = _blocks(x, first, -1), [], []
    for q in (first, second):
        y = fake_quantize(x, q, -1)
        values.append(_blocks(y, first, -1))
        errors.append(_blocks(_errors(x, y), first, -1).sum((1, 3), keepdim=True))
    size = blocks.abs()
    smallest = torch.where(size == 0, math.inf, size).amin((1, 3), keepdim=True)
    narrow = size.amax((1, 3), keepdim=True) / smallest < second.format.spread
    return torch.where(errors[0] < errors[1], values[0], torch.where(narrow, values[1], blocks)).view(x.shape)


def sample(w: Tensor, draw: Callable[[Tensor], Tensor], bits: float, square: int) -> Tensor:
    """Return the weights sampled by GaussWS eq. 3, with the same bit width `bits` for all squares of w.

    draw: a function that returns noise in the shape of its argument. square: the rows, and the columns, of a square.
    """
    squares = w.float().unflatten(0, (-1, square)).unflatten(2, (-1, square))
    scale = squares.abs().amax((1, 3), keepdim=True) * 2.0 ** (1 - bits)
    return (squares + draw(squares) * scale).view(w.shape).to(w.dtype)


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "gaussian": lambda like: (torch.randn_like(like) / 2).round(),
    "uniform": lambda like: torch.rand_like(like) - 0.5,
}
