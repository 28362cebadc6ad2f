"""Define causal attention with rotary positions, forward and backward.

The operands of matrix products are BF16 values; products, softmax and rotations are FP32. Backends compute the sums of
products in another order, so their results differ in the last bits.

Shape suffixes: B batch, T token, H head, K key and value head, E head's dimension.
"""

import torch
from torch import Tensor


def rotate(x_BTHE: Tensor, turns: Tensor | None, direction: int = 1) -> Tensor:
    """Return x in FP32 with pairs of neighbouring dimensions rotated; turns: cosines and sines, [T, rotated / 2, 2].

    direction: −1 rotates back.
    """
    x = x_BTHE.float()
    if turns is None:
        return x
    cosine, sine = turns[: x.shape[1], None].float().unbind(-1)
    turned, kept = x.split((2 * turns.shape[1], x.shape[-1] - 2 * turns.shape[1]), -1)
    even, odd = turned.unflatten(-1, (-1, 2)).unbind(-1)
    sine = sine * direction
    turned = torch.stack((even * cosine - odd * sine, odd * cosine + even * sine), -1).flatten(-2)
    return torch.cat((turned, kept), -1)


def attention(q: Tensor, k: Tensor, v: Tensor, turns: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return softmax(q·kᵀ/√E)·v over earlier tokens, [B, T, H, E], and log Σ e^score, [B, H, T]."""
    q_BHTE, k_BHTE, v_BHTE = _operands(q, k, v, turns)
    scores = _scores(q_BHTE, k_BHTE)
    top = scores.amax(-1, keepdim=True)
    p = (scores - top).exp()
    total = p.sum(-1, keepdim=True)
    y_BHTE = _rounded(p) @ v_BHTE / total
    return y_BHTE.transpose(1, 2).to(q.dtype).contiguous(), (top + total.log())[..., 0]


def attention_backward(
    q: Tensor, k: Tensor, v: Tensor, turns: Tensor | None, y: Tensor, log_sums: Tensor, dy: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    q_BHTE, k_BHTE, v_BHTE = _operands(q, k, v, turns)
    dy_BHTE = dy.transpose(1, 2).float()
    p = (_scores(q_BHTE, k_BHTE) - log_sums[..., None]).exp()
    inner = (y.transpose(1, 2).float() * dy_BHTE).sum(-1, keepdim=True)
    ds = _rounded(p * (dy_BHTE @ v_BHTE.mT - inner))
    dq = ds @ k_BHTE * q.shape[-1] ** -0.5
    dk, dv = (_summed(x, k.shape[2]) for x in (ds.mT @ q_BHTE, _rounded(p).mT @ dy_BHTE))
    dq, dk = (rotate(x.transpose(1, 2), turns, -1) for x in (dq, dk))
    return dq.to(q.dtype), dk.to(k.dtype), dv.transpose(1, 2).to(v.dtype)


def _operands(q: Tensor, k: Tensor, v: Tensor, turns: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scaled queries, the keys and the values, [B, H, T, E], with BF16 values in FP32."""
    queries = _rounded(_rounded(rotate(q, turns)) * q.shape[-1] ** -0.5)
    shared = q.shape[2] // k.shape[2]
    keys, values = (_rounded(x).repeat_interleave(shared, 2) for x in (rotate(k, turns), v))
    return queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)


def _scores(q_BHTE: Tensor, k_BHTE: Tensor) -> Tensor:
    scores = q_BHTE @ k_BHTE.mT
    return scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), -torch.inf)


def _summed(x_BHTE: Tensor, kv_heads: int) -> Tensor:
    return x_BHTE.unflatten(1, (kv_heads, -1)).sum(2)


def _rounded(x: Tensor) -> Tensor:
    return x.bfloat16().float()
