"""Define activations, norms and cross entropy with their gradients, in FP32; functions.py defines the order of sums."""

import torch
from torch import Tensor

from fewbits.kernels.reference.functions import along_rows, exponential, over_rows

Q = (  # the coefficients of the polynomial q of `_normal`, from t⁸ down to the constant
    *(-2.914613938e-02, 1.439727070e-01, -2.557163190e-01, 1.591764911e-01, -2.311141730e-02),
    *(1.055086629e-01, 1.198327039e-01, 1.398618918e-01, 1.396214031e-01),
)


def squared_relu(x: Tensor) -> Tensor:
    r = _relu(x)
    return (r * r).to(x.dtype)


def squared_relu_backward(x: Tensor, dy: Tensor) -> Tensor:
    r = _relu(x)
    return (dy.float() * (r + r)).to(x.dtype)


def gelu(x: Tensor) -> Tensor:
    v = x.float()
    return (v * _normal(v)[1]).to(x.dtype)


def gelu_backward(x: Tensor, dy: Tensor) -> Tensor:
    v = x.float()
    density, below = _normal(v)
    return (dy.float() * ((v * density) * 0.3989422804 + below)).to(x.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    g = gate.float()
    return ((g * _sigmoid(g)) * up.float()).to(gate.dtype)


def swiglu_backward(gate: Tensor, up: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up; dy is the gradient of swiglu(gate, up)."""
    g, d = gate.float(), dy.float()
    s = _sigmoid(g)
    silu = g * s
    dgate = (d * up.float()) * (s + silu * (1.0 - s))
    return dgate.to(gate.dtype), (d * silu).to(up.dtype)


def _relu(x: Tensor) -> Tensor:
    wide = x.float()
    return torch.where(wide < 0, 0.0, wide)


def _normal(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return e^(−x²/2), and the probability that a standard normal variate is below x.

    The probability of a value above |x| is e^(−x²/2)·t·q(t) with t = 1/(1 + 0.35·|x|). The polynomial q was fitted to
    erfcx(|x|/√2)/(2t) for |x| ≤ 14 with relative errors up to 3.2e-8, so small probabilities are accurate too.
    """
    size = torch.where(x < 0, -x, x)
    density = exponential((size * size) * -0.5)
    t = (size * 0.35 + 1.0).reciprocal()
    total = t * Q[0] + Q[1]
    for coefficient in Q[2:]:
        total = total * t + coefficient
    beyond = density * (t * total)
    return density, torch.where(x < 0, beyond, 1.0 - beyond)


def _sigmoid(x: Tensor) -> Tensor:
    return (1.0 + exponential(-x)).reciprocal()


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


def cross_entropy(logits: Tensor, targets: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    """Return −log softmax(logits)[target] and log Σ e^logits of each row; both are 0 if the target is `ignored`."""
    x, counted = logits.float(), targets != ignored
    top = x.amax(-1)
    logarithm = along_rows(exponential(x - top[:, None])).double().log()
    right = x.gather(-1, targets.where(counted, 0)[:, None])[:, 0]
    losses = (top.double() - right.double() + logarithm).float()
    log_sums = (top.double() + logarithm).float()
    return losses.where(counted, 0.0), log_sums.where(counted, 0.0)


def cross_entropy_backward(logits: Tensor, targets: Tensor, log_sums: Tensor, grad: Tensor, ignored: int) -> Tensor:
    """Return (softmax(logits) − one hot)·grad of each row, 0 for rows whose target is `ignored`.

    log_sums: the second result of `cross_entropy`. grad: the gradient of the first result, one number for each row.
    """
    counted = targets != ignored
    columns = targets.where(counted, 0)[:, None]
    p = exponential(logits.float() - log_sums[:, None])
    p = p.scatter(-1, columns, p.gather(-1, columns) - 1.0) * grad[:, None]
    return p.to(logits.dtype).where(counted[:, None], torch.zeros((), dtype=logits.dtype))
