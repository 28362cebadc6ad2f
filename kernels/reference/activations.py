"""Define the activations of feed-forward layers and their gradients, in FP32 with one rounding at the end."""

import torch
from torch import Tensor

from fewbits.kernels.reference.functions import exponential

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
