"""Test the torch operators: opcheck, compilation without graph breaks, gradients, and tensors of any kind."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from fewbits import (
    Mixture,
    Quantizer,
    QuantStats,
    decode,
    encode,
    fake_quantize,
    fake_quantize_both,
    mix,
    sample_weight,
)
from fewbits.kernels.backends.protocol import COUNTS, OBSERVED
from fewbits.kernels.layers import activations, attention, cross_entropy, norms  # noqa: F401, registers their operators
from tests.effort import DEEP
from tests.kernels.inputs import DTYPES, EMPTY, assert_same, generator, grad_of, make

FP4 = "e2m1:1x16:nvfp4:stochastic:rht16"
GAM = Quantizer("e4m3", "16x16", "gam")
ROTATED_MIX = "e4m3:16x16:gam:rht16 @ error<0.02 | bf16:rht16 ; per=block"
THREE_WAY = Mixture.parse("e4m3:16x16:gam @ error<e5m2:16x16:gam | e5m2:16x16:gam @ spread<normal | bf16 ; per=block")
X = torch.randn(33, 50, generator=generator(0))
W = X[0].clone()  # a weight for norms of the rows of X
TARGETS = torch.arange(33)
Q = torch.randn(2, 5, 3, 16, generator=generator(4)).bfloat16()
TURNS = torch.randn(7, 4, 2, generator=generator(5))
BITS = torch.full((2, 2), 5.0)

OPERATORS: dict[str, list[tuple[Any, ...]]] = {
    "quantize": [(X, FP4, -1, 3), (X, "e4m3:128x128:gam", 0, 0), (X.bfloat16(), "fp16", -1, 0)],
    "quantize_out": [(X, "e4m3:16x16:gam", -1, 0, torch.empty(33, 50)), (X.t(), FP4, 0, 1, torch.empty(33, 50).t())],
    "quantize_stats": [
        (X, "e4m3:16x16:gam", 0, 0, True),
        (X, FP4, -1, 2, False),
        (X.half(), "e5m2", -1, 0, True),
    ],
    "quantize_stats_out": [
        (X, "e4m3:16x16:gam", 0, 0, True, torch.empty(33, 50)),
        (X.t(), FP4, 0, 1, False, torch.empty(33, 50).t()),
    ],
    "quantize_both_out": [
        (X, "e2m1:1x16:nvfp4", FP4, 0, 4, torch.empty(33, 50), torch.empty(33, 50)),
        (X, "e4m3", FP4, 0, 4, torch.empty(50, 33).t(), torch.empty(33, 50)),
    ],
    "mix_out": [
        (X, "e4m3:16x16:gam @ error<0.02 | bf16 ; per=block", 0, 0, torch.empty(33, 50)),
        (X, THREE_WAY.spelling, -1, 0, torch.empty(50, 33).t()),
    ],
    "decode_out": [(*torch.ops.fewbits.encode(X, FP4, -1, 5), FP4, -1, torch.empty(33, 50))],
    "quantize_both": [(X, "e2m1:1x16:nvfp4", FP4, 0, 4)],
    "mix": [(X, "e4m3:16x16:gam @ error<0.02 | bf16 ; per=block", 0, 0), (X, ROTATED_MIX, -1, 0)],
    "observe": [(torch.zeros(2, OBSERVED).long(), [torch.ones(3, COUNTS).long()], [torch.ones(3).char()], [1])],
    "unrotate": [(X, "e4m3:rht16", 0), (X.bfloat16(), "e4m3:rht4", -1)],
    "encode_operands": [(X, ["e4m3:128x128:amax"], [0], [0]), (X, ["e2m1:1x16:nvfp4", FP4], [-1, 0], [0, 5])],
    "encode": [(X, "e4m3:16x16:gam:group=row", 0, 0), (X, FP4, -1, 5), (X.bfloat16(), "e2m1", -1, 0)],
    "decode": [
        (*torch.ops.fewbits.encode(X, FP4, -1, 5), FP4, -1, 50, torch.bfloat16),
        (*torch.ops.fewbits.encode(X, "e3m2", 0, 0), "e3m2", 0, 50, torch.float32),
    ],
    "sample_weight": [(X, BITS, 3, "gaussian", 32, torch.bfloat16), (X.half(), BITS, 3, "uniform", 32, torch.float32)],
    "sample_weight_backward": [(X, X, BITS, 3, "uniform", 32), (X.bfloat16(), X.half(), BITS, 3, "gaussian", 32)],
    "norm": [(X, W, None, 0.0, 1e-5, False, torch.bfloat16), (X.bfloat16(), W, X[1], 1.0, 1e-5, True, torch.bfloat16)],
    "add_norm": [(X, X.t().reshape(33, 50), W, X[1], 1.0, 1e-5, True), (X, X, W, None, 0.0, 1e-5, False)],
    "norm_backward": [
        (X, None, X, W, True, X[:, 0], X[:, 1], 0.0, True),
        (X.bfloat16(), X.bfloat16(), X.bfloat16(), W, False, torch.empty(0), X[:, 1], 1.0, False),
    ],
    "squared_relu": [(X,), (X.bfloat16().t(),)],
    "squared_relu_backward": [(X, X), (X.bfloat16().t(), X.bfloat16().t())],
    "gelu": [(X,), (X.bfloat16().t(),)],
    "gelu_backward": [(X, X), (X.bfloat16().t(), X.bfloat16().t())],
    "swiglu": [(X, X), (X.bfloat16().t(), X.bfloat16().t())],
    "swiglu_backward": [(X, X, X), (X.bfloat16().t(), X.bfloat16().t(), X.bfloat16().t())],
    "attention": [(Q, Q, Q, None), (Q, Q[:, :, :1], Q[:, :, 1:2], TURNS)],
    "attention_backward": [(Q, Q, Q, TURNS, *torch.ops.fewbits.attention(Q, Q, Q, TURNS), Q)],
    "fused_attention": [(Q, 1, None), (torch.cat((Q, Q), 2), 2, TURNS)],
    "fused_attention_backward": [(Q, 1, TURNS, *torch.ops.fewbits.fused_attention(Q, 1, TURNS), Q[:, :, :1])],
    "rotated": [(Q, 2, 0, TURNS), (torch.cat((Q, Q), 2).transpose(1, 2).contiguous().transpose(1, 2), 2, 2, TURNS)],
    "rotated_backward": [(Q, Q[:, :, :2], Q[:, :, :1], TURNS)],
    "cross_entropy": [(X, TARGETS, -100, False), (X.bfloat16(), TARGETS, 3, False)],
    "cross_entropy_backward": [(X, TARGETS, X[:, 0], X[:, 1], -100), (X.bfloat16(), TARGETS, X[:, 0], X[:, 1], -100)],
    "cross_entropy_backward_": [(X.clone(), TARGETS, X[:, 0], X[:, 1], -100)],
    "matmul_fp32": [(X.bfloat16(), X.bfloat16().t()), (X.bfloat16().t(), X.bfloat16()[:, :7])],
}
UTILS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
DIFFERENTIABLE = (
    *("quantize", "quantize_stats", "quantize_both", "mix", "sample_weight", "matmul_fp32"),
    *("norm", "add_norm", "squared_relu", "gelu", "swiglu", "cross_entropy"),
    *("attention", "fused_attention", "rotated"),
)


def test_every_operator_is_checked() -> None:
    named = {name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names() if "fewbits::" in name}
    assert named == set(OPERATORS)


@pytest.mark.parametrize(("name", "i"), [(name, i) for name, cases in OPERATORS.items() for i in range(len(cases))])
def test_opcheck_accepts_the_operator(name: str, i: int) -> None:
    """Run torch's opcheck: schema, fake tensors, autograd registration, ahead-of-time dispatch with dynamic shapes.

    Without FEWBITS_TESTS=deep, the last check, which is slow, is made for the first arguments of an operator only.
    """
    arguments = list(OPERATORS[name][i])
    if name in DIFFERENTIABLE:
        arguments[0] = arguments[0].detach().requires_grad_()
    if name == "sample_weight":
        arguments[1] = arguments[1].detach().requires_grad_()
    checks = UTILS if DEEP or i == 0 else UTILS[:-1]
    torch.library.opcheck(getattr(torch.ops.fewbits, name).default, tuple(arguments), test_utils=checks)


# torch.compile


def stats_of(values: Tensor, stats: Any) -> list[Tensor]:
    return [values, stats.error, stats.counts, stats.amax]


# Functions in which compiled code may call an operator in another way than opcheck.
COMPILED: dict[str, Callable[[Tensor, int], Any]] = {
    "between others": lambda x, seed: fake_quantize(x * 2, "e4m3:1x128:amax:stochastic", seed=seed) + 1,
    "statistics": lambda x, seed: stats_of(*fake_quantize(x, GAM, stats=True)),
    "both axes into out": lambda x, seed: fake_quantize_both(
        x, "e2m1:1x16:nvfp4", FP4, column_seed=seed, out=(torch.empty_like(x), torch.empty_like(x))
    ),
    "packed and read back": lambda x, seed: torch.ops.fewbits.decode(
        *torch.ops.fewbits.encode(x, FP4, -1, seed), FP4, -1, x.shape[1], x.dtype
    ),
    "mixture by object": lambda x, seed: mix(x, THREE_WAY),
}


def flat(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


@pytest.mark.parametrize("name", COMPILED)
def test_compiling_breaks_no_graph_and_changes_no_bit(name: str) -> None:
    """Compare compiled functions with eager ones, and count compilations: a new seed must not cause another one.

    At most two graphs are compiled for all seeds, and at most two more for other shapes.
    """
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter, run = CompileCounterWithBackend("aot_eager"), COMPILED[name]
    compiled = torch.compile(run, backend=counter, fullgraph=True)
    for seed in (1, 2, 3, 1 << 40, (1 << 63) - 1, 0):
        for got, want in zip(flat(compiled(X, seed)), flat(run(X, seed)), strict=True):
            assert_same(got, want, f"{name}, {seed=}")
    assert counter.frame_count <= 2
    for rows in (40, 41, 64, 1):
        x = make("lognormal", (rows, 50), seed=rows)
        for got, want in zip(flat(compiled(x, 7)), flat(run(x, 7)), strict=True):
            assert_same(got, want, f"{name}, {rows} rows")
    assert counter.frame_count <= 4  # one row is a separate case


def test_a_compiled_training_step_has_the_gradients_of_an_eager_one() -> None:
    w = torch.randn(48, 50, generator=generator(1))

    def step(x: Tensor, w: Tensor, seed: int) -> Tensor:
        noisy = sample_weight(w, w.new_full((2, 2), 6.0), seed, dtype=torch.float32)
        return (fake_quantize(x, FP4, seed=seed) @ fake_quantize(noisy, "e2m1:1x16:nvfp4:rht16").t()).square().sum()

    grads = []
    for run in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        x, leaf = X.clone().requires_grad_(), w.clone().requires_grad_()
        run(x, leaf, 9).backward()
        grads.append((grad_of(x), grad_of(leaf)))
    assert_same(grads[1][0], grads[0][0])
    assert_same(grads[1][1], grads[0][1])


# Gradients


def gradient(run: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> Tensor:
    leaf = x.detach().clone().requires_grad_()
    run(leaf).backward(grad)
    return grad_of(leaf)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_a_gradient_passes_straight_through_rounding(dtype: torch.dtype) -> None:
    x, grad = X.to(dtype), torch.randn(33, 50, generator=generator(2)).to(dtype)
    for run in (
        lambda t: fake_quantize(t, "e4m3:16x16:gam"),
        lambda t: fake_quantize(t, "e2m1:1x16:nvfp4:stochastic", axis=0, seed=1),
        lambda t: fake_quantize(t, "e2m1", stats=True)[0],
        lambda t: mix(t, THREE_WAY)[0],
        lambda t: fake_quantize_both(t, "e4m3:1x16:amax", "e4m3")[1],
    ):
        assert_same(gradient(run, x, grad), grad)


@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize(
    "text", ["fp32:rht16", "e2m1:1x16:nvfp4:rht16", "e4m3:rht128:signs=7", "e5m2:8x8:mx:rht4:signs=none"]
)
def test_a_gradient_is_rotated_back(text: str, axis: int) -> None:
    """Check that the gradient of a rotated input is multiplied by the transposed rotation matrix, its inverse."""
    rotation = "fp32:rht" + text.split(":rht")[1]
    length = X.shape[axis]
    unit = torch.eye(length)
    matrix = fake_quantize(unit, rotation)  # row i is the rotated i-th unit vector
    grad = torch.randn(33, 50, generator=generator(3))
    got = gradient(lambda t: fake_quantize(t, text, axis=axis), X, grad)
    want = grad.double() @ matrix.double().t() if axis == -1 else matrix.double() @ grad.double()
    torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-6)
    assert_same(gradient(lambda t: fake_quantize_both(t, text, text)[axis + 1], X, grad), got)


def test_the_gradient_of_both_axes_is_the_sum() -> None:
    a, b = (torch.randn(33, 50, generator=generator(s)) for s in (4, 5))
    row, column = "e2m1:1x16:nvfp4", "e2m1:1x16:nvfp4:rht16"
    x = X.clone().requires_grad_()
    along, down = fake_quantize_both(x, row, column)
    torch.autograd.backward([along, down], [a, b])
    want = a + gradient(lambda t: fake_quantize(t, column, axis=0), X, b)
    torch.testing.assert_close(grad_of(x), want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("text", [ROTATED_MIX, "e4m3:16x16:gam:rht16", "e4m3:16x16:gam:rht16 ; per=block"])
def test_the_gradient_of_a_mixture_is_rotated_back(text: str) -> None:
    grad = torch.randn(33, 50, generator=generator(6))
    want = gradient(lambda t: fake_quantize(t, "e4m3:16x16:gam:rht16"), X, grad)
    assert_same(gradient(lambda t: mix(t, text)[0], X, grad), want)


def test_statistics_and_choices_have_no_gradient() -> None:
    x = X.clone().requires_grad_()
    values, stats = fake_quantize(x, GAM, stats="block")
    _, choice, of_mix = mix(x, THREE_WAY, stats=True)
    assert values.requires_grad
    for t in (stats.counts, stats.amax, stats.error, choice, of_mix.counts, of_mix.amax):
        assert not t.requires_grad


# Kinds of tensors


def test_views_give_what_copies_give() -> None:
    whole = make("lognormal", (64, 96), torch.bfloat16)
    views = (
        whole.t(),
        whole[::2, 1::3],
        whole[:, 5:70],
        whole[3:4].expand(40, 96),
        whole.view(4, 16, 96).transpose(0, 1),
    )
    for view, text, axis in product(views, ("e4m3:16x16:gam", FP4), (-1, 0)):
        assert not view.is_contiguous()
        copy = fake_quantize(view.contiguous(), text, axis=axis, seed=1)
        assert_same(fake_quantize(view, text, axis=axis, seed=1), copy)


@pytest.mark.parametrize("shape", [*EMPTY, (2, 0, 3), (0,)])
def test_nothing_becomes_nothing(shape: tuple[int, ...]) -> None:
    x = torch.zeros(shape)
    for axis, text in product((-1, 0), ("e4m3:16x16:gam", FP4, "bf16", "e2m1:channel:mx")):
        values, stats = fake_quantize(x, text, axis=axis, seed=1, stats=True)
        assert_same(values, x)
        assert not stats.counts.any()
        assert float(stats.amax) == float(stats.error) == 0
        _, of_blocks = fake_quantize(x, text, axis=axis, seed=1, stats="block")
        assert of_blocks.amax.numel() == 0
        assert_same(fake_quantize(x, text, axis=axis, seed=1, out=torch.zeros(shape)), x)
        assert_same(fake_quantize_both(x, "e4m3", "e2m1:1x16:nvfp4")[1], x)


@pytest.mark.parametrize("text", ["e4m3:16x16:gam", FP4, "bf16"])
def test_float64_is_rounded_to_float32_first(text: str) -> None:
    x = X.double() * (1 + 2.0**-40)
    y = fake_quantize(x, text, seed=1)
    assert y.dtype == torch.float64
    assert_same(y, fake_quantize(x.float(), text, seed=1).double())


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_out_receives_the_result_whatever_its_layout(dtype: torch.dtype) -> None:
    x = X.to(dtype)
    want = fake_quantize(x, FP4, seed=1)
    empty = torch.empty(66, 100, dtype=dtype)
    outs = empty[:33, :50].contiguous(), empty.t()[:50, :33].contiguous().t(), empty[::2, ::2]
    for out in outs:
        assert fake_quantize(x, FP4, seed=1, out=out) is out
        assert_same(out, want)
    for source in (x.clone(), x.t().contiguous().t()):
        assert fake_quantize(source, FP4, seed=1, out=source) is source
        assert_same(source, want)


def tensors_of(result: Any) -> list[Tensor]:
    """Return the tensors in the result of a public function, as a list; of statistics, these are counts and amax."""
    parts = result if isinstance(result, tuple) else (result,)
    return [t for part in parts for t in ((part.counts, part.amax) if isinstance(part, QuantStats) else (part,))]


INTO: dict[str, Callable[..., Any]] = {
    "statistics": lambda x, **out: fake_quantize(x, FP4, seed=1, stats=True, **out),
    "statistics of blocks": lambda x, **out: fake_quantize(x, GAM, stats="block", **out),
    "mixture": lambda x, **out: mix(x, THREE_WAY, **out),
    "mixture of blocks": lambda x, **out: mix(x, "e4m3:4x4:e8m0 @ error<0.03 | bf16 ; per=block", stats=True, **out),
    "decoded": lambda x, **out: decode(encode(x, FP4, seed=1), **out),
}


@pytest.mark.parametrize("name", INTO)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_out_receives_the_values_beside_other_results(name: str, dtype: torch.dtype) -> None:
    x, run = X.to(dtype), INTO[name]
    want = tensors_of(run(x))
    for out in (torch.empty(33, 50, dtype=dtype), torch.empty(50, 33, dtype=dtype).t()):
        got = tensors_of(run(x, out=out))
        assert got[0] is out
        for one, other in zip(got, want, strict=True):
            assert_same(one, other)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_two_outs_receive_both_axes(dtype: torch.dtype) -> None:
    x = X.to(dtype)
    want = fake_quantize_both(x, FP4, GAM, row_seed=1)
    along, down = torch.empty(33, 50, dtype=dtype), torch.empty(50, 33, dtype=dtype).t()
    for out in ((along, along.clone()), (along, down)):
        got = fake_quantize_both(x, FP4, GAM, row_seed=1, out=out)
        for one, other, result in zip(got, want, out, strict=True):
            assert one is result
            assert_same(one, other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("text", ["e4m3:1x16:amax", "e4m3:16x16:gam", "e4m3:tensor:amax", FP4, "e5m2"])
def test_nothing_is_written_beyond_out(text: str, dtype: torch.dtype) -> None:
    """Check for every width up to 70, since vector loops have ends of their own for rows that are no multiple."""
    for width in range(1, 71):
        x, memory = make("normal", (2, width), dtype, width), torch.full((2 * width + 64,), 7.0, dtype=dtype)
        out = memory[32 : 32 + 2 * width].view(2, width)
        fake_quantize(x, text, seed=1 if "stochastic" in text else None, out=out)
        assert_same(out, fake_quantize(x, text, seed=1 if "stochastic" in text else None))
        assert torch.all(memory[:32] == 7), width
        assert torch.all(memory[32 + 2 * width :] == 7), width
