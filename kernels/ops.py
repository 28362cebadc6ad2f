"""Register the torch operators, which `torch.compile` and autograd support; public functions are thin wrappers of them.

An operator takes a quantizer in its string form, views its tensor as a matrix, and calls the backend of the tensor's
device. Gradients pass straight through rounding; the gradient of a rotation is the inverse rotation.
"""

import math
from typing import Any

import torch
from torch import Tensor

from fewbits.kernels.backends.choice import backend_for
from fewbits.kernels.backends.protocol import COUNTS
from fewbits.kernels.mixing import mix_matrix
from fewbits.kernels.operators import LIBRARY, define, differentiate
from fewbits.kernels.packing import layout, operand_layout
from fewbits.kernels.quantizer import Block, Mixture, Quantizer, parts_of
from fewbits.kernels.reference.noise import Noise


def matrix(x: Tensor) -> Tensor:
    """Return x as a contiguous matrix (−1, last dim) that the backends accept; float64 is rounded to float32."""
    if x.dim() == 2 and x.dtype != torch.float64 and x.is_contiguous():
        return x
    return (x.to(torch.float32) if x.dtype == torch.float64 else x).reshape(_shape(x)).contiguous()


def like(values: Tensor, x: Tensor) -> Tensor:
    """Return a backend's result, a matrix, in x's shape and dtype."""
    if values.shape == x.shape and values.dtype == x.dtype:
        return values
    return values.to(x.dtype).view(x.shape)


def _shape(x: Tensor) -> tuple[int, int]:
    """Return the shape of `matrix(x)`."""
    return math.prod(x.shape[:-1]), x.shape[-1] if x.dim() else 1


# ------------------------------------------------------------------------------------------------ fake quantization


def _resolve_seed(spec: Quantizer | Mixture, seed: int) -> int:
    if spec.draws_signs:
        raise ValueError(
            f"{spec}: signs=each is only valid in recipes, which draw the signs for both operands of a GEMM; "
            "use signs=SEED here"
        )
    if seed < 0 and spec.needs_seed:
        raise ValueError(f"{spec} rounds stochastically and needs seed=, an integer from 0 to 2^63 - 1")
    return max(seed, 0)


def _quantize(x: Tensor, spec: str, axis: int, seed: int) -> Tensor:
    q = Quantizer.parse(spec)
    values, _, _ = backend_for(x.device.type, q).quantize(matrix(x), q, axis, _resolve_seed(q, seed))
    return like(values, x)


def receives(out: Tensor) -> bool:
    """Tell whether a backend can write its result into `out`, that is, whether `matrix(out)` is a view and no copy."""
    return out.dtype != torch.float64 and out.is_contiguous()


def _quantize_out(x: Tensor, spec: str, axis: int, seed: int, out: Tensor) -> None:
    if not receives(out):
        out.copy_(_quantize(x, spec, axis, seed))
        return
    q = Quantizer.parse(spec)
    backend_for(x.device.type, q).quantize(matrix(x), q, axis, _resolve_seed(q, seed), out=matrix(out))


def _quantize_stats(x: Tensor, spec: str, axis: int, seed: int, per_block: bool) -> tuple[Tensor, Tensor, Tensor]:
    q, m = Quantizer.parse(spec), matrix(x)
    partition = q.block.resolve(m.shape, axis) if per_block else None
    values, counts, amax = backend_for(x.device.type, q).quantize(
        m, q, axis, _resolve_seed(q, seed), want_stats=True, partition=partition
    )
    return like(values, x), counts, amax


def _quantize_stats_out(
    x: Tensor, spec: str, axis: int, seed: int, per_block: bool, out: Tensor
) -> tuple[Tensor, Tensor]:
    if not receives(out):
        values, counts, amax = _quantize_stats(x, spec, axis, seed, per_block)
        out.copy_(values)
        return counts, amax
    q, m = Quantizer.parse(spec), matrix(x)
    partition = q.block.resolve(m.shape, axis) if per_block else None
    _, counts, amax = backend_for(x.device.type, q).quantize(
        m, q, axis, _resolve_seed(q, seed), out=matrix(out), want_stats=True, partition=partition
    )
    return counts, amax


def _quantize_stats_fake(x: Tensor, spec: str, axis: int, seed: int, per_block: bool) -> tuple[Tensor, Tensor, Tensor]:
    return _empty(x), *_empty_stats(x, Quantizer.parse(spec).block if per_block else Block(), axis)


def _empty_stats(x: Tensor, part: Block, axis: int) -> tuple[Tensor, Tensor]:
    shape = _shape(x)
    grid = parts_of(shape, part.resolve(shape, axis))
    return x.new_empty((*grid, COUNTS), dtype=torch.int64), x.new_empty(grid, dtype=torch.float32)


def _quantize_both(x: Tensor, row: str, column: str, row_seed: int, column_seed: int) -> tuple[Tensor, Tensor]:
    r, c = Quantizer.parse(row), Quantizer.parse(column)
    along, down = backend_for(x.device.type, r, c).quantize_both(
        matrix(x), r, c, _resolve_seed(r, row_seed), _resolve_seed(c, column_seed)
    )
    return like(along, x), like(down, x)


def _quantize_both_out(
    x: Tensor, row: str, column: str, row_seed: int, column_seed: int, along: Tensor, down: Tensor
) -> None:
    if not (receives(along) and receives(down)):
        for out, values in zip((along, down), _quantize_both(x, row, column, row_seed, column_seed), strict=True):
            out.copy_(values)
        return
    r, c = Quantizer.parse(row), Quantizer.parse(column)
    backend_for(x.device.type, r, c).quantize_both(
        *(matrix(x), r, c, _resolve_seed(r, row_seed), _resolve_seed(c, column_seed)), out=(matrix(along), matrix(down))
    )


def _mix(x: Tensor, spec: str, axis: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mixture = Mixture.parse(spec)
    values, choice, counts, amax = mix_matrix(
        backend_for(x.device.type, *mixture.quantizers), matrix(x), mixture, axis, _resolve_seed(mixture, seed)
    )
    return like(values, x), choice, counts, amax


def _mix_out(x: Tensor, spec: str, axis: int, seed: int, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if not receives(out):
        values, *others = _mix(x, spec, axis, seed)
        out.copy_(values)
        return others[0], others[1], others[2]
    mixture = Mixture.parse(spec)
    backend, seed = backend_for(x.device.type, *mixture.quantizers), _resolve_seed(mixture, seed)
    return mix_matrix(backend, matrix(x), mixture, axis, seed, out=matrix(out))[1:]


def _mix_fake(x: Tensor, spec: str, axis: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    counts, amax = _empty_stats(x, Mixture.parse(spec).decision_block, axis)
    return _empty(x), torch.empty_like(amax, dtype=torch.int8), counts, amax


def _observe(table: Tensor, counts: list[Tensor], choices: list[Tensor], rows: list[int]) -> None:
    backend_for(table.device.type).observe(table, counts, choices, rows)


def _unrotate(grad: Tensor, spec: str, axis: int) -> Tensor:
    return like(backend_for(grad.device.type).rotate(matrix(grad), Quantizer.parse(spec), axis, inverse=True), grad)


def _empty(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


define("quantize(Tensor x, str spec, int axis, SymInt seed) -> Tensor", _quantize, lambda x, *_: _empty(x))
define("quantize_out(Tensor x, str spec, int axis, SymInt seed, Tensor(a!) out) -> ()", _quantize_out, lambda *_: None)
define(
    "quantize_stats(Tensor x, str spec, int axis, SymInt seed, bool per_block) -> (Tensor, Tensor, Tensor)",
    _quantize_stats,
    _quantize_stats_fake,
)
define(
    "quantize_both(Tensor x, str row, str column, SymInt row_seed, SymInt column_seed) -> (Tensor, Tensor)",
    _quantize_both,
    lambda x, *_: (_empty(x), _empty(x)),
)
define(
    "quantize_stats_out(Tensor x, str spec, int axis, SymInt seed, bool per_block, Tensor(a!) out) -> (Tensor, Tensor)",
    _quantize_stats_out,
    lambda *arguments: _quantize_stats_fake(*arguments[:-1])[1:],
)
define(
    "quantize_both_out(Tensor x, str row, str column, SymInt row_seed, SymInt column_seed, "
    "Tensor(a!) along, Tensor(b!) down) -> ()",
    _quantize_both_out,
    lambda *_: None,
)
define(
    "mix_out(Tensor x, str spec, int axis, SymInt seed, Tensor(a!) out) -> (Tensor, Tensor, Tensor)",
    _mix_out,
    lambda *arguments: _mix_fake(*arguments[:-1])[1:],
)
define("mix(Tensor x, str spec, int axis, SymInt seed) -> (Tensor, Tensor, Tensor, Tensor)", _mix, _mix_fake)
define("observe(Tensor(a!) table, Tensor[] counts, Tensor[] choices, int[] rows) -> ()", _observe, lambda *_: None)
define("unrotate(Tensor grad, str spec, int axis) -> Tensor", _unrotate, lambda grad, *_: _empty(grad))


def _rotate_back(grad: Tensor | None, spec: str, axis: int) -> Tensor | None:
    """Return the gradient of a tensor x, where `grad` is the gradient of x quantized along `axis` by `spec`.

    spec: the string form of a quantizer or mixture. Gradients pass through the rounding unchanged, so the result is
    `grad`, to which the inverse Hadamard transform is applied if `spec` has a transform. None gives None.
    """
    if grad is None or "rht" not in spec:
        return grad
    q = Mixture.parse(spec).quantizers[0] if "|" in spec or ";" in spec else Quantizer.parse(spec)
    return torch.ops.fewbits.unrotate(grad, q.spelling, axis)


def _keep_spec(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, ctx.spec, ctx.axis, *_ = inputs
    if isinstance(output, tuple):
        ctx.mark_non_differentiable(*output[1:])


def _keep_specs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, ctx.row, ctx.column, *_ = inputs


def _both_backward(ctx: Any, along: Tensor | None, down: Tensor | None) -> tuple[Tensor | None, ...]:
    parts = [g for g in (_rotate_back(along, ctx.row, -1), _rotate_back(down, ctx.column, 0)) if g is not None]
    return (sum(parts[1:], parts[0]) if parts else None, None, None, None, None)


for _name, _others in (("quantize", 3), ("quantize_stats", 4), ("mix", 3)):
    torch.library.register_autograd(
        f"fewbits::{_name}",
        lambda ctx, grad, *_, others=_others: (_rotate_back(grad, ctx.spec, ctx.axis), *[None] * others),
        setup_context=_keep_spec,
        lib=LIBRARY,
    )
torch.library.register_autograd("fewbits::quantize_both", _both_backward, setup_context=_keep_specs, lib=LIBRARY)


# ------------------------------------------------------------------------------------------------ packed storage


def _encode(x: Tensor, spec: str, axis: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    q = Quantizer.parse(spec)
    layout(q, axis, *_shape(x))  # raises ValueError if there is no packed storage
    return backend_for(x.device.type, q).encode(matrix(x), q, axis, _resolve_seed(q, seed))


def _encode_fake(x: Tensor, spec: str, axis: int, seed: int) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(size, dtype=dtype) for size, dtype in layout(Quantizer.parse(spec), axis, *_shape(x)))


def _encode_operands(x: Tensor, specs: list[str], axes: list[int], seeds: list[int]) -> list[Tensor]:
    quantizers = [Quantizer.parse(spec) for spec in specs]
    of = [(q, axis, _resolve_seed(q, seed)) for q, axis, seed in zip(quantizers, axes, seeds, strict=True)]
    operands = backend_for(x.device.type, *quantizers).encode_operands(matrix(x), *of)
    return [tensor for operand in operands for tensor in operand]


def _encode_operands_fake(x: Tensor, specs: list[str], axes: list[int], seeds: list[int]) -> list[Tensor]:
    layouts = [operand_layout(Quantizer.parse(spec), axis, *_shape(x)) for spec, axis in zip(specs, axes, strict=True)]
    return [x.new_empty(size, dtype=dtype) for places in layouts for size, dtype in places.stored]


def _decode(
    codes: Tensor, scales: Tensor, groups: Tensor, spec: str, axis: int, cols: int, dtype: torch.dtype
) -> Tensor:
    out = _decode_fake(codes, scales, groups, spec, axis, cols, dtype)
    _decode_out(codes, scales, groups, spec, axis, out)
    return out


def _decode_out(codes: Tensor, scales: Tensor, groups: Tensor, spec: str, axis: int, out: Tensor) -> None:
    """Decode into `out`. First check shapes, dtypes and devices of the packed tensors, which may come from a file."""
    q, tensors, cols = Quantizer.parse(spec), (codes, scales, groups), out.shape[1]
    expected = layout(q, axis, codes.shape[0] if codes.dim() else 0, cols)
    for what, t, (size, kind) in zip(("codes", "scales", "group scales"), tensors, expected, strict=True):
        if tuple(t.shape) != size or t.dtype != kind or t.device != codes.device:
            raise ValueError(
                f"{what} are {tuple(t.shape)} {t.dtype} on {t.device}: {q} with {cols} columns needs {size} {kind}"
                " on the device of the codes"
            )
    codes, scales, groups = (t.contiguous() for t in tensors)
    backend_for(codes.device.type, q).decode(codes, scales, groups, q, axis, cols, out.dtype, out=out)


def _decode_fake(
    codes: Tensor, scales: Tensor, groups: Tensor, spec: str, axis: int, cols: int, dtype: torch.dtype
) -> Tensor:
    return codes.new_empty((codes.shape[0] if codes.dim() else 0, cols), dtype=dtype)


define("encode(Tensor x, str spec, int axis, SymInt seed) -> (Tensor, Tensor, Tensor)", _encode, _encode_fake)
define(
    "encode_operands(Tensor x, str[] specs, int[] axes, SymInt[] seeds) -> Tensor[]",
    _encode_operands,
    _encode_operands_fake,
)
define(
    "decode(Tensor codes, Tensor scales, Tensor groups, str spec, int axis, SymInt cols, ScalarType dtype) -> Tensor",
    _decode,
    _decode_fake,
)
define(
    "decode_out(Tensor codes, Tensor scales, Tensor groups, str spec, int axis, Tensor(a!) out) -> ()",
    _decode_out,
    lambda *_: None,
)


# ------------------------------------------------------------------------------------------------ noise


def _sample_weight(w: Tensor, bits: Tensor, seed: int, noise: Noise, block: int, dtype: torch.dtype) -> Tensor:
    m = matrix(w)
    return backend_for(w.device.type).sample_weight(m, bits.contiguous(), seed, noise, block, dtype).view(w.shape)


def _sample_weight_backward(grad: Tensor, w: Tensor, bits: Tensor, seed: int, noise: Noise, block: int) -> Tensor:
    backend = backend_for(w.device.type)
    return backend.sample_weight_backward(matrix(grad), matrix(w), bits.contiguous(), seed, noise, block)


define(
    "sample_weight(Tensor w, Tensor bits, SymInt seed, str noise, int block, ScalarType dtype) -> Tensor",
    _sample_weight,
    lambda w, bits, seed, noise, block, dtype: _empty(w).to(dtype),
)
sample_weight_backward = define(
    "sample_weight_backward(Tensor grad, Tensor w, Tensor bits, SymInt seed, str noise, int block) -> Tensor",
    _sample_weight_backward,
    lambda grad, w, bits, *_: _empty(bits),
)


def _keep_weight(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    w, bits, ctx.seed, ctx.noise, ctx.block, _ = inputs
    ctx.save_for_backward(w, bits)


def _weight_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    w, bits = ctx.saved_tensors
    to_w, to_bits, *_ = ctx.needs_input_grad
    for_bits = sample_weight_backward(grad, w, bits, ctx.seed, ctx.noise, ctx.block) if to_bits else None
    return grad.to(w.dtype) if to_w else None, for_bits, None, None, None, None


sample_weight = differentiate("sample_weight", _keep_weight, _weight_backward)


# ------------------------------------------------------------------------------------------------ products


def _keep_operands(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _matmul_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    a, b = ctx.saved_tensors
    for_a, for_b = ctx.needs_input_grad
    return (grad @ b.t().float()).to(a.dtype) if for_a else None, (a.t().float() @ grad).to(b.dtype) if for_b else None


define(
    "matmul_fp32(Tensor a, Tensor b) -> Tensor",
    lambda a, b: backend_for(a.device.type).matmul_fp32(a, b),
    lambda a, b: a.new_empty((a.shape[0], b.shape[1]), dtype=torch.float32),
)
matmul_fp32 = differentiate("matmul_fp32", _keep_operands, _matmul_backward)
