"""Define causal attention with rotary positions, forward and backward.

The operands of matrix products are rounded to the dtype of q, BF16 or FP16; products, softmax and rotations are FP32.
Backends differ only in the order in which `product` adds. With the same order their results have the same bits.

Shape suffixes: B batch, T token, H query head, K key and value head, E dimension of a head.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fewbits.kernels.reference.functions import along_rows, exponential

BLOCK = 32  # backends divide tokens into blocks of this size, and pad the last block with zeros


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return the product of matrices of BF16 or FP16 values, with FP32 sums."""
    return a @ b


def rotate(x_BTHE: Tensor, turns: Tensor | None, direction: int = 1) -> Tensor:
    """Return x in FP32 with pairs of neighbouring dimensions rotated.

    turns: the (cosine, sine) of each angle, [T or more, rotated dimensions / 2, 2]; None: no rotation.
    direction: 1, or −1 for the inverse rotation.
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
    """Return softmax(q·kᵀ/√E)·v, [B, T, H, E], and log Σ e^score of each head and query, [B, H, T].

    Each token attends to itself and to earlier tokens.

    turns: the rotation of q and k, as in `rotate`.
    """
    q_BHTE, k_BHTE, v_BHTE = _operands(q, k, v, turns)
    scores = _scores(q_BHTE, k_BHTE)
    top = scores.amax(-1, keepdim=True)
    p = exponential(scores - top)
    total = along_rows(p)
    y_BHTE = product(_rounded(p, q.dtype), v_BHTE) * (1 / total)[..., None]
    log_sums = (top[..., 0].double() + total.double().log()).float()
    return y_BHTE.transpose(1, 2).to(q.dtype).contiguous(), log_sums


def attention_backward(
    q: Tensor, k: Tensor, v: Tensor, turns: Tensor | None, y: Tensor, log_sums: Tensor, dy: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; y and log_sums are the results of `attention`, dy is the gradient of y."""
    q_BHTE, k_BHTE, v_BHTE = _operands(q, k, v, turns)
    dy_BHTE = dy.transpose(1, 2).float()
    p = exponential(_scores(q_BHTE, k_BHTE) - log_sums[..., None])
    inner = along_rows(y.transpose(1, 2).float() * dy_BHTE)
    ds = _rounded(p * (product(dy_BHTE, v_BHTE.mT) - inner[..., None]), q.dtype)
    dq = product(ds, k_BHTE) * _scale(q)
    dk, dv = (_summed(x, y, k.shape[2]) for x, y in ((ds, q_BHTE), (_rounded(p, q.dtype), dy_BHTE)))
    dq, dk = (rotate(x.transpose(1, 2), turns, -1) for x in (dq, dk))
    return dq.to(q.dtype), dk.to(k.dtype), dv.transpose(1, 2).to(v.dtype)


def _operands(q: Tensor, k: Tensor, v: Tensor, turns: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return rotated queries divided by √E, rotated keys, and values, all as FP32 [B, H, T, E] rounded to q's dtype."""
    queries = _rounded(_rounded(rotate(q, turns), q.dtype) * _scale(q), q.dtype)
    shared = q.shape[2] // k.shape[2]
    keys, values = (_rounded(x, q.dtype).repeat_interleave(shared, 2) for x in (rotate(k, turns), v))
    return queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)


def _scale(q: Tensor) -> float:
    return 1 / math.sqrt(q.shape[-1])


def _scores(q_BHTE: Tensor, k_BHTE: Tensor) -> Tensor:
    scores = product(q_BHTE, k_BHTE.mT)
    return scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), -torch.inf)


def _summed(x_BHTT: Tensor, y_BHTE: Tensor, kv_heads: int) -> Tensor:
    """Return xᵀ · y [B, K, T, E], summed over all queries of the query heads that share a key and value head.

    The dimensions of x are batch, query head, query and key. kv_heads: K.
    """
    padding = (0, 0, 0, -x_BHTT.shape[2] % BLOCK)
    x, y = (F.pad(each, padding).unflatten(1, (kv_heads, -1)).flatten(2, 3) for each in (x_BHTT, y_BHTE))
    return product(x.mT, y)


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).float()
