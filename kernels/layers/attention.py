"""Compute causal attention with rotary positions, for training.

For BF16 on a CPU, one operator rotates, multiplies and normalises one block of tokens at a time. To save memory it does
not store the scores, but computes them again in the backward pass. If q, k and v are parts of one fused tensor, their
gradient is one tensor, too. FP16 on a CPU uses the operator's definition in plain torch (reference/attention.py),
because torch's own products may sum in FP16. For all other tensors, torch computes attention; on
NVIDIA's GPUs one operator rotates q and k before.

Shape suffixes: B batch, T token, H query head, K key and value head, E dimension of a head.
"""

import ctypes
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fewbits.kernels.backends.cpu import threads
from fewbits.kernels.layers.library import DTYPES, address, gpu_layers, is_compiled, library
from fewbits.kernels.operators import define, differentiate
from fewbits.kernels.reference import attention as reference


def causal_attention(q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, turns: Tensor | None = None) -> Tensor:
    """Return softmax(q·kᵀ/√E)·v, in which each token attends to itself and to earlier tokens, as [B, T, H, E].

    H/K query heads share one key and value head.

    turns: the (cosine, sine) of the angles by which pairs of neighbouring dimensions of q and k are rotated first,
        [T or more, rotated dimensions / 2, 2]; None: no rotation.
    """
    if _takes(q_BTHE, k_BTKE, v_BTKE):
        return _attention_of(q_BTHE, k_BTKE, v_BTKE, turns)[0]
    if turns is not None:
        q_BTHE, k_BTKE = rotate(q_BTHE, turns), rotate(k_BTKE, turns)
    shared = q_BTHE.shape[2] // k_BTKE.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q_BTHE, k_BTKE, v_BTKE))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared > 1).transpose(1, 2)


def fused_causal_attention(x_BTHE: Tensor, heads: int, turns: Tensor | None = None) -> Tensor:
    """Return `causal_attention` of a fused tensor: its first `heads` heads are q's, and then come k's and v's heads.

    k and v have the same number of heads. turns: as in `causal_attention`.
    """
    kv_heads = (x_BTHE.shape[2] - heads) // 2
    if _takes(x_BTHE):
        return _fused_attention_of(x_BTHE, heads, turns)[0]
    if turns is not None and _rotates(x_BTHE):
        return causal_attention(*_rotated_of(x_BTHE, heads, kv_heads, turns))
    if turns is None:
        return causal_attention(*_split(x_BTHE, heads))
    qk, v = x_BTHE.split((heads + kv_heads, kv_heads), 2)
    q, k = rotate(qk, turns).split((heads, kv_heads), 2)  # one rotation for both
    return causal_attention(q, k, v)


def rotate(x_BTHE: Tensor, turns: Tensor) -> Tensor:
    """Rotate pairs of neighbouring dimensions in FP32; dimensions for which `turns` has no angle stay unchanged.

    turns: the cosines and sines of the angles, as in `causal_attention`.
    """
    if _rotates(x_BTHE):
        return _rotated_of(x_BTHE, x_BTHE.shape[2], 0, turns)[0]
    rotated = 2 * turns.shape[1]
    turned, kept = x_BTHE.split((rotated, x_BTHE.shape[-1] - rotated), -1)
    angles = torch.view_as_complex(turns[: x_BTHE.shape[1], None].float())
    pairs = torch.view_as_complex(turned.float().unflatten(-1, (-1, 2)))
    turned = torch.view_as_real(pairs * angles).flatten(-2).to(x_BTHE.dtype)
    return torch.cat((turned, kept), -1) if kept.shape[-1] else turned


def _takes(*tensors: Tensor) -> bool:
    return all(x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16) for x in tensors)


def _rotates(x: Tensor) -> bool:
    return x.device.type in ("cuda", "meta") and x.dtype in DTYPES


def _in_library(q: Tensor) -> bool:
    return q.dtype == torch.bfloat16 and is_compiled()


# ------------------------------------------------------------------------------------------------ calls of the library


class _View(ctypes.Structure):  # View of csrc/cpu_attention.cpp
    _fields_ = [("data", ctypes.c_void_p), *[(name, ctypes.c_int64) for name in ("batch", "token", "head")]]


_TENSORS = ("q", "k", "v", "out", "d_out", "dq", "dk", "dv")


class _Call(ctypes.Structure):  # AttentionCall
    _fields_ = [
        *[(name, ctypes.c_int64) for name in ("batch", "tokens", "heads", "kv_heads", "size", "rotated")],
        ("turns", ctypes.c_void_p),
        ("threads", ctypes.c_int64),
        *[(name, _View) for name in _TENSORS],
        ("log_sums", ctypes.c_void_p),
    ]


def _call(turns: Tensor | None, log_sums: Tensor, **tensors: Tensor) -> _Call:
    """Return the argument structure of the library's attention functions.

    turns: as in `causal_attention`. log_sums: log Σ e^score for each head and query [B, H, T].
    tensors: q, k, v, results and gradients by the names of the structure's fields, each with a contiguous last
        dimension.
    """
    (batch, tokens, heads, size), k = tensors["q"].shape, tensors["k"]
    views = {name: _View(x.data_ptr(), *x.stride()[:3]) for name, x in tensors.items()}
    return _Call(
        *(batch, tokens, heads, k.shape[2], size, 0 if turns is None else 2 * turns.shape[1], address(turns)),
        threads(8 * tokens * log_sums.numel()),
        **views,
        log_sums=log_sums.data_ptr(),
    )


def _readable(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _checked(turns: Tensor | None, q: Tensor) -> Tensor | None:
    """Return `turns` as contiguous float32, or None for None; raise ValueError if its shape does not fit that of q.

    turns: as in `causal_attention`.
    """
    if turns is None:
        return None
    tokens, size = q.shape[1], q.shape[-1]
    if turns.dim() != 3 or turns.shape[0] < tokens or 2 * turns.shape[1] > size or turns.shape[2] != 2:
        raise ValueError(
            f"turns are of shape {list(turns.shape)}: expected [{tokens} or more, at most {size // 2}, 2], which are "
            "tokens, rotated pairs of dimensions, and (cosine, sine)"
        )
    return turns.float().contiguous()


def _run(q: Tensor, k: Tensor, v: Tensor, turns: Tensor | None) -> tuple[Tensor, Tensor]:
    out, log_sums = _fake(q)
    q, k, v = _readable(q), _readable(k), _readable(v)
    library().fb_attention(ctypes.byref(_call(turns, log_sums, q=q, k=k, v=v, out=out)))
    return out, log_sums


def _run_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    turns: Tensor | None,
    saved: tuple[Tensor, Tensor, Tensor],
    grads: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Write the gradients of q, k and v into `grads`.

    turns: as in `causal_attention`. saved: the result of attention, log Σ e^score for each head and query
        [B, H, T], and the gradient of the result.
    """
    out, log_sums, d_out = saved
    q, k, v, d_out = (_readable(x) for x in (q, k, v, d_out))
    tensors = dict(zip(_TENSORS, (q, k, v, out, d_out, *grads), strict=True))
    library().fb_attention_backward(ctypes.byref(_call(turns, log_sums, **tensors)))


# ------------------------------------------------------------------------------------------------ operators


def _attention(q: Tensor, k: Tensor, v: Tensor, turns: Tensor | None) -> tuple[Tensor, Tensor]:
    turns = _checked(turns, q)
    if not q.numel():
        return _fake(q)
    return _run(q, k, v, turns) if _in_library(q) else reference.attention(q, k, v, turns)


def _attention_backward(
    q: Tensor, k: Tensor, v: Tensor, turns: Tensor | None, out: Tensor, log_sums: Tensor, d_out: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    turns, grads = _checked(turns, q), (_empty(q), _empty(k), _empty(v))
    if not q.numel():
        return grads
    if not _in_library(q):
        return reference.attention_backward(q, k, v, turns, out, log_sums, d_out)
    _run_backward(q, k, v, turns, (out, log_sums, d_out), grads)
    return grads


def _fused_attention(x: Tensor, heads: int, turns: Tensor | None) -> tuple[Tensor, Tensor]:
    return _attention(*_split(x, heads), turns)


def _fused_attention_backward(
    x: Tensor, heads: int, turns: Tensor | None, out: Tensor, log_sums: Tensor, d_out: Tensor
) -> Tensor:
    turns, dx = _checked(turns, x), _empty(x)
    if not x.numel():
        return dx
    if not _in_library(x):
        return torch.cat(reference.attention_backward(*_split(x, heads), turns, out, log_sums, d_out), 2)
    _run_backward(*_split(x, heads), turns, (out, log_sums, d_out), _split(dx, heads))
    return dx


def _split(x: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    kv_heads = (x.shape[2] - heads) // 2
    q, k, v = x.split((heads, kv_heads, kv_heads), 2)
    return q, k, v


def _empty(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _fake(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, tokens, heads = q.shape[:3]
    return _empty(q), q.new_empty((batch, heads, tokens), dtype=torch.float32)


def _fused_fake(x: Tensor, heads: int, turns: Tensor | None) -> tuple[Tensor, Tensor]:
    batch, tokens, size = *x.shape[:2], x.shape[-1]
    return x.new_empty((batch, tokens, heads, size)), x.new_empty((batch, heads, tokens), dtype=torch.float32)


_SAVED = "Tensor? turns, Tensor out, Tensor log_sums, Tensor d_out"
define("attention(Tensor q, Tensor k, Tensor v, Tensor? turns) -> (Tensor, Tensor)", _attention, _fake, ("CPU",))
_gradients = define(
    f"attention_backward(Tensor q, Tensor k, Tensor v, {_SAVED}) -> (Tensor, Tensor, Tensor)",
    _attention_backward,
    lambda q, k, v, *_: (_empty(q), _empty(k), _empty(v)),
    ("CPU",),
)
define(
    "fused_attention(Tensor x, int heads, Tensor? turns) -> (Tensor, Tensor)", _fused_attention, _fused_fake, ("CPU",)
)
_fused_gradient = define(
    f"fused_attention_backward(Tensor x, int heads, {_SAVED}) -> Tensor",
    _fused_attention_backward,
    lambda x, *_: _empty(x),
    ("CPU",),
)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs, *output)


def _backward(ctx: Any, d_out: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    return *_gradients(*ctx.saved_tensors, d_out), None


def _keep_fused(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, ctx.heads, turns = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, turns, *output)


def _fused_backward(ctx: Any, d_out: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    x, turns, out, log_sums = ctx.saved_tensors
    return _fused_gradient(x, ctx.heads, turns, out, log_sums, d_out), None, None


_attention_of = differentiate("attention", _keep, _backward)
_fused_attention_of = differentiate("fused_attention", _keep_fused, _fused_backward)


# ------------------------------------------------------------------------------------------------ rotation alone


def _rotated(x: Tensor, heads: int, kv_heads: int, turns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q and k, rotated, and v; x contains first the heads of q, then kv_heads heads of k, and the rest is v."""
    angles, results = _checked(turns, x), _rotated_fake(x, heads, kv_heads, turns)
    assert angles is not None
    parts = _readable(x).split([y.shape[2] for y in results], 2)
    if (gpu := gpu_layers(x)) is not None:
        gpu.rotate(parts, results, angles)
    else:
        for y, part, own in zip(results, parts, (angles, angles, None), strict=True):
            y.copy_(reference.rotate(part, own))
    return results


def _rotated_backward(dq: Tensor, dk: Tensor, dv: Tensor, turns: Tensor) -> Tensor:
    angles, dx = _checked(turns, dq), _rotated_backward_fake(dq, dk, dv, turns)
    assert angles is not None
    parts = dx.split([y.shape[2] for y in (dq, dk, dv)], 2)
    if (gpu := gpu_layers(dq)) is not None:
        gpu.rotate((_readable(dq), _readable(dk), _readable(dv)), parts, angles, inverse=True)
    else:
        for part, y, own in zip(parts, (dq, dk, dv), (angles, angles, None), strict=True):
            part.copy_(reference.rotate(y, own, -1))
    return dx


def _rotated_fake(x: Tensor, heads: int, kv_heads: int, turns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    batch, tokens, every, size = x.shape
    q, k, v = (x.new_empty((batch, tokens, n, size)) for n in (heads, kv_heads, every - heads - kv_heads))
    return q, k, v


def _rotated_backward_fake(dq: Tensor, dk: Tensor, dv: Tensor, turns: Tensor) -> Tensor:
    batch, tokens, _, size = dq.shape
    return dq.new_empty((batch, tokens, sum(y.shape[2] for y in (dq, dk, dv)), size))


define("rotated(Tensor x, int heads, int kv_heads, Tensor turns) -> (Tensor, Tensor, Tensor)", _rotated, _rotated_fake)
_unrotated = define(
    "rotated_backward(Tensor dq, Tensor dk, Tensor dv, Tensor turns) -> Tensor",
    _rotated_backward,
    _rotated_backward_fake,
)


def _keep_turns(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.heads = [y.shape[2] for y in output]
    ctx.set_materialize_grads(False)  # else torch fills a tensor with zeros for a v without heads
    ctx.save_for_backward(inputs[3])


def _backward_of_rotated(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    present = next((dy for dy in gradients if dy is not None), None)
    if present is None:
        return None, None, None, None
    batch, tokens, _, size = present.shape
    every = [
        dy if dy is not None else (present.new_zeros if n else present.new_empty)((batch, tokens, n, size))
        for dy, n in zip(gradients, ctx.heads, strict=True)
    ]
    return _unrotated(*every, *ctx.saved_tensors), None, None, None


_rotated_of = differentiate("rotated", _keep_turns, _backward_of_rotated)
