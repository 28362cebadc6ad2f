"""Implement Mamba-2, a state-space mixer whose recurrence is computed as matrix products, chunk by chunk.

Each head has a state S [N, P], a decay a = −exp(A_log) and, for token t, a step size Δ_t = softplus(dt_t + dt_bias):

    S_t = exp(Δ_t·a)·S_{t−1} + Δ_t·B_t x_tᵀ        y_t = S_tᵀ C_t + D·x_t

The heads of a group share B and C. One linear layer produces z, x, B, C and dt. x, B and C pass through a causal
depthwise convolution and SiLU. y is multiplied by SiLU(z) and then RMS-normalised within each group (the gate before
the norm, as in the published code and Nemotron-H). The output projection, another linear layer, follows. Everything
except the two linear layers computes in FP32.

A suffix of a tensor's name lists its dimensions: B batch, T token, C chunk, Q token within a chunk, G group, R head
within a group, H head (H = G·R), N state, P dimension of a head, I all channels of x (H·P).
"""

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fewbits.kernels.layers.norms import norm
from fewbits.models.networks.layers import Linear

CHUNK: Final = 64  # tokens per chunk; affects speed and the order of sums, not the function


class Mamba2(nn.Module):
    """The Mamba-2 mixer, which maps [B, T, width] to [B, T, width].

    inner: the number of channels of x and of z, which is heads · P. state: N, the first dimension of a head's state.
    conv: the number of taps of the convolution. eps: the ε of the RMS norm. bias: whether the two linear layers have a
    bias.
    """

    def __init__(
        self, *, width: int, inner: int, heads: int, groups: int, state: int, conv: int, eps: float, bias: bool
    ) -> None:
        super().__init__()
        self.inner, self.heads, self.groups, self.state, self.eps = inner, heads, groups, state, eps
        self.mixed = inner + 2 * groups * state  # channels of x, B and C
        self.in_proj = Linear(width, inner + self.mixed + heads, part="in", bias=bias)
        self.conv_weight = nn.Parameter(torch.empty(conv, self.mixed))  # the last row: tap of the current token
        self.conv_bias = nn.Parameter(torch.empty(self.mixed))
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.D = nn.Parameter(torch.empty(heads))
        self.norm_weight = nn.Parameter(torch.empty(inner))
        self.out_proj = Linear(inner, width, part="out", bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        z, xbc, dt = self.in_proj(x).split((self.inner, self.mixed, self.heads), -1)
        xbc = F.silu(causal_conv(xbc, self.conv_weight, self.conv_bias))
        x_BTI, b_BTGN, c_BTGN = xbc.split((self.inner, *(self.groups * self.state,) * 2), -1)
        x_BTHP = x_BTI.unflatten(-1, (self.heads, -1))
        b_BTGN, c_BTGN = (y.unflatten(-1, (self.groups, -1)) for y in (b_BTGN, c_BTGN))

        dt_BTH = F.softplus(dt.float() + self.dt_bias)
        y_BTHP = ssd(x_BTHP, dt_BTH, -self.A_log.exp(), b_BTGN, c_BTGN) + self.D[:, None] * x_BTHP

        gated = (y_BTHP.flatten(2) * F.silu(z.float())).unflatten(-1, (self.groups, -1))
        weight = self.norm_weight.view(self.groups, -1)
        normed = norm(gated, weight, eps=self.eps, centered=False, dtype=x.dtype)
        return self.out_proj(normed.flatten(2))


def ssd(x_BTHP: Tensor, dt_BTH: Tensor, a_H: Tensor, b_BTGN: Tensor, c_BTGN: Tensor, chunk: int = CHUNK) -> Tensor:
    """Return y [B, T, H, P] of Mamba-2's recurrence (see the module) from the state 0, without the term D·x, in FP32.

    dt_BTH: the step sizes Δ. a_H: the decays a, which are negative. b_BTGN, c_BTGN: B and C. chunk: tokens per chunk.

    The algorithm is Mamba-2's state-space duality. Within a chunk, y_i = Σ_{j≤i} exp(s_i − s_j)·(C_i·B_j)·Δ_j x_j,
    where s is the running sum of Δ·a. This is attention with a decay instead of the softmax. Earlier chunks affect a
    chunk only through the state. No exponent is positive, so nothing overflows.
    """
    tokens, groups = x_BTHP.shape[1], b_BTGN.shape[2]
    size = min(chunk, tokens)
    padding = -tokens % size  # padded tokens have Δ = 0, which leaves the state unchanged
    if padding:
        x_BTHP, dt_BTH, b_BTGN, c_BTGN = (
            F.pad(y, (0, 0) * (y.ndim - 2) + (0, padding)) for y in (x_BTHP, dt_BTH, b_BTGN, c_BTGN)
        )
    # Chunks and groups come first, so that matrix products treat them as batches.
    b_BCGQN, c_BCGQN = (y.unflatten(1, (-1, size)).transpose(2, 3) for y in (b_BTGN, c_BTGN))
    dt_BCGRQ = dt_BTH.unflatten(-1, (groups, -1)).unflatten(1, (-1, size)).permute(0, 1, 3, 4, 2)
    x_BCGRQP = x_BTHP.unflatten(2, (groups, -1)).unflatten(1, (-1, size)).permute(0, 1, 3, 4, 2, 5)
    x_BCGRQP = x_BCGRQP * dt_BCGRQ[..., None]

    sums_BCGRQ = running_sum(dt_BCGRQ * a_H.view(groups, -1, 1))
    y_BCGRQP = _Decayed.apply(c_BCGQN @ b_BCGQN.mT, sums_BCGRQ) @ x_BCGRQP

    if x_BCGRQP.shape[1] > 1:
        to_end = (sums_BCGRQ[..., -1:] - sums_BCGRQ).exp()[..., None]
        added_BCGRNP = torch.einsum("bcgqn,bcgrqp->bcgrnp", b_BCGQN[:, :-1], (x_BCGRQP * to_end)[:, :-1])
        carried = [added_BCGRNP[:, 0]]
        for added, whole in zip(added_BCGRNP[:, 1:].unbind(1), sums_BCGRQ[:, 1:-1, ..., -1].unbind(1), strict=True):
            carried.append(torch.addcmul(added, carried[-1], whole.exp()[..., None, None]))
        before_BCGRQP = torch.einsum("bcgqn,bcgrnp->bcgrqp", c_BCGQN[:, 1:], torch.stack(carried, 1))
        before_BCGRQP = before_BCGRQP * sums_BCGRQ[:, 1:].exp()[..., None]
        y_BCGRQP = torch.cat((y_BCGRQP[:, :1], y_BCGRQP[:, 1:] + before_BCGRQP), 1)
    return y_BCGRQP.permute(0, 1, 4, 2, 3, 5).flatten(3, 4).flatten(1, 2)[:, :tokens]


def running_sum(x: Tensor) -> Tensor:
    """Return the cumulative sums along the last dimension.

    torch's cumulative sum of floats is not deterministic on CUDA, so `sum_by_doubling` replaces it there if
    deterministic algorithms are requested.
    """
    if not (x.is_cuda and torch.are_deterministic_algorithms_enabled()):
        return x.cumsum(-1)
    return sum_by_doubling(x)


def sum_by_doubling(x: Tensor) -> Tensor:
    """Return the cumulative sums along the last dimension: x_i ← x_i + x_{i−d} for d = 1, 2, 4, … (deterministic)."""
    size, distance = x.shape[-1], 1
    while distance < size:
        rest = size - distance
        x = torch.cat((x.narrow(-1, 0, distance), x.narrow(-1, distance, rest) + x.narrow(-1, 0, rest)), -1)
        distance *= 2
    return x


class _Decayed(Function):
    """Computes the decayed scores from the scores C_i·B_j: scores_ij·exp(s_i − s_j) for j ≤ i, and 0 for j > i.

    s (`sums_BCGRQ`) is the running sum of Δ·a within a chunk. The scores are the largest tensors of the model, so the
    code avoids every unnecessary pass over them.
    """

    @staticmethod
    def forward(ctx: Any, scores_BCGQQ: Tensor, sums_BCGRQ: Tensor) -> Tensor:
        # For j > i the exponents are positive and exp could overflow, so exponents are limited to 0; tril_ then sets
        # these elements to 0. Setting the exponents to −∞ instead would be three times slower.
        decay = (sums_BCGRQ[..., :, None] - sums_BCGRQ[..., None, :]).clamp_(max=0).exp_().tril_()
        decayed = decay * scores_BCGQQ[:, :, :, None]
        ctx.save_for_backward(decay, decayed)
        return decayed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        decay, decayed = ctx.saved_tensors
        dexponent = grad * decayed
        dsums = dexponent.sum(-1).sub_(dexponent.sum(-2))
        return torch.mul(grad, decay, out=dexponent).sum(3), dsums


def causal_conv(x_BTC: Tensor, weight_WC: Tensor, bias_C: Tensor) -> Tensor:
    """Return y_t = Σ_{w<W} weight_w·x_{t−W+1+w} + bias for each channel, in FP32; x is 0 before the first token.

    weight_WC: one row for each of W taps, one column for each channel.
    """
    return _CausalConv.apply(x_BTC, weight_WC, bias_C)


class _CausalConv(Function):
    """Computes a convolution with few taps as a sum of shifted inputs.

    On a CPU this is a third faster than torch's conv1d, for which x must be transposed to [B, C, T].
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        x = x.float()
        y = torch.addcmul(bias, x, weight[-1])
        for shift, tap in _shifted(weight, x.shape[1]):
            y[:, shift:].addcmul_(x[:, :-shift], tap)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        x_FP32 = x.float()
        dx = dy * weight[-1]
        dweight = torch.zeros_like(weight)
        dweight[-1] = (dy * x_FP32).sum((0, 1))
        for shift, tap in _shifted(weight, x.shape[1]):
            dx[:, :-shift].addcmul_(dy[:, shift:], tap)
            dweight[-1 - shift] = (dy[:, shift:] * x_FP32[:, :-shift]).sum((0, 1))
        return dx.to(x.dtype), dweight, dy.sum((0, 1))


def _shifted(weight_WC: Tensor, tokens: int) -> list[tuple[int, Tensor]]:
    """Return (d, weights [C]) for each tap of a causal convolution except the last one, which has d = 0.

    For token t, a tap reads token t − d. weight_WC: as in `causal_conv`. tokens: the sequence length; taps with
    d ≥ tokens are omitted, because they read only zeros.
    """
    return [(shift, weight_WC[-1 - shift]) for shift in range(1, min(len(weight_WC), tokens))]
