"""Check on a GPU that the CUDA backend equals the reference, and that it works with streams, graphs and torch.compile.

Run with `pytest -m gpu`; FEWBITS_TESTS=deep runs more cases, which need about twice as many kernels. Most of the time
is spent on compiling kernels.
"""

import threading
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fewbits import fake_quantize, mix
from fewbits.kernels.backends.gpu import cuda
from fewbits.kernels.quantizer import HADAMARD_SIZES, Mixture, Quantizer
from tests.effort import DEEP, examples
from tests.kernels.backends.gpu.device_checks import CONVERTED, DRAWN, Checks, any_bytes, every_pattern, undecided
from tests.kernels.backends.gpu.test_cuda_emulated import CLASSES
from tests.kernels.backends.test_parity import FAMILIES, STORED, VARIANTS, matrices, parts, quantizers
from tests.kernels.inputs import DTYPES, EMPTY, KINDS, ODD, assert_same, generator, make
from tests.kernels.test_mix import MIXTURES

complaint = cuda.complaint()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(complaint is not None, reason=f"no CUDA kernels here: {complaint}")]

SHAPES = ((7, 33), (129, 127), (256, 384))  # few: a kernel takes a second to compile
SPECS = (
    "e4m3",
    "e4m3:128x128:gam",
    "e4m3:channel:amax",
    "e4m3:3x5:amax",
    "e2m1:1x16:nvfp4:stochastic:rht16",
    "e4m3:tensor:amax:overflow=nan",
)


@pytest.fixture(scope="module")
def checks() -> Checks:
    return Checks(cuda.BACKEND, lambda t: t.cuda())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_families_give_the_references_bits(checks: Checks, family: str, dtype: torch.dtype) -> None:
    """Check each pair of shape and axis with each dtype; without FEWBITS_TESTS=deep, with one dtype only."""
    start = FAMILIES.index(family) * 7 + DTYPES.index(dtype) * 3
    names, share = list(KINDS), 1 if DEEP else 3
    cases = list(enumerate(product(SHAPES, (-1, 0)), start=start))
    for i, (shape, axis) in cases[(FAMILIES.index(family) + DTYPES.index(dtype)) % share :: share]:
        q = Quantizer.parse(family + VARIANTS[i % len(VARIANTS)])
        checks.quantizer(make(names[i % len(names)], shape, dtype, seed=i), q, axis, seed=i)


@pytest.mark.parametrize("name", KINDS)
def test_inputs_give_the_references_bits(checks: Checks, name: str) -> None:
    texts = ("e4m3:1x16:amax", "e4m3:32x32:gam", "e2m1:1x32:e8m0", "e2m1:1x32:mx", "e2m1:1x16:nvfp4", "e5m2", "bf16")
    for text, rounding, dtype, cols in product(texts, ("", ":stochastic"), DTYPES, (48, 50)):
        checks.quantizer(make(name, (34, cols), dtype), Quantizer.parse(text + rounding), -1)


@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("text", DRAWN)
def test_the_last_bits_of_a_draw_decide_where_its_first_do_not(checks: Checks, text: str, axis: int) -> None:
    q = Quantizer.parse(f"{text}:stochastic")
    checks.quantizer(undecided(q, axis, seed=3), q, axis, seed=3)


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_gives_nothing(checks: Checks, family: str) -> None:
    """Check matrices without elements."""
    for shape, axis in product(EMPTY, (-1, 0)):
        checks.quantizer(torch.zeros(shape, dtype=torch.bfloat16), Quantizer.parse(family), axis)


@examples(100)
@given(x=matrices(), q=quantizers(), axis=st.sampled_from([-1, 0]), seed=st.integers(0, 2**63 - 1))
def test_any_quantizer_of_any_matrix(checks: Checks, x: Tensor, q: Quantizer, axis: int, seed: int) -> None:
    checks.quantizer(x, q, axis, seed)


@examples(60)
@given(x=matrices(), q=quantizers(), axis=st.sampled_from([-1, 0]), part=parts, share=st.floats(0, 1))
def test_any_partition_with_any_parts_left_out(
    checks: Checks, x: Tensor, q: Quantizer, axis: int, part: tuple[int, int] | None, share: float
) -> None:
    part = part or q.block.resolve(x.shape, axis)
    grid = [-(-n // size) for n, size in zip(x.shape, part, strict=True)]
    skip: dict[str, Any] = {"skip": torch.rand(grid, generator=generator(x.numel())) < share} if share else {}
    checks.quantizer(x, q, axis, partition=part, **skip)


@examples(40)
@given(x=matrices(), row=quantizers(), column=quantizers(), seed=st.integers(0, 2**63 - 1))
def test_both_axes_in_one_reading_are_two_calls(
    checks: Checks, x: Tensor, row: Quantizer, column: Quantizer, seed: int
) -> None:
    """Compare quantization along both axes in one call with two calls of the reference."""
    checks.both(x, row, column, seed)


@pytest.mark.parametrize(("text", "shape"), CLASSES)
@pytest.mark.parametrize("axis", [-1, 0])
def test_classes_of_blocks(checks: Checks, text: str, shape: tuple[int, int], axis: int) -> None:
    q = Quantizer.parse(text)
    checks.quantizer(make("lognormal", shape, torch.bfloat16), q, axis, partition=q.block.resolve(shape, axis))
    checks.values(make("one bad", shape, torch.float32), q, axis)


@pytest.mark.parametrize("text", STORED)
def test_any_bytes_are_read_as_the_reference_reads_them(checks: Checks, text: str) -> None:
    """Decode random bytes for all shapes along both axes; without FEWBITS_TESTS=deep, a third of these cases."""
    q, share = Quantizer.parse(text), 1 if DEEP else 3
    cases = list(enumerate(product((*ODD, (34, 48), (130, 136)), (-1, 0)), start=STORED.index(text)))
    for i, (shape, axis) in cases[STORED.index(text) % share :: share]:
        checks.decoding(any_bytes(q, axis, shape, seed=i), q, axis, shape[1], DTYPES[i % 3])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("text", CONVERTED)
def test_every_pattern_is_converted_as_the_reference_does(checks: Checks, text: str, dtype: torch.dtype) -> None:
    checks.quantizer(every_pattern(dtype), Quantizer.parse(text), -1)


@pytest.mark.parametrize("name", ["e1m1", "e2m1", "e2m3", "e3m2", "e2m4", "e4m3", "e5m2", "e4m7", "bf16"])
def test_codes_of_every_width_and_those_that_the_processor_makes(checks: Checks, name: str) -> None:
    """Check four quantizers with each number of columns; without FEWBITS_TESTS=deep, every second pair."""
    texts = (name, f"{name}:1x8:e8m0:stochastic", f"{name}:1x16:nvfp4", f"{name}:5x3:amax")
    for (i, cols), (j, text) in product(enumerate((128, 24, 131)), enumerate(texts)):
        if DEEP or (i + j + len(name)) % 2:
            checks.quantizer(make("lognormal", (11, cols), DTYPES[i % 3], seed=i), Quantizer.parse(text), -1)


@pytest.mark.parametrize("size", HADAMARD_SIZES)
def test_rotations_and_their_inverses(checks: Checks, size: int) -> None:
    for i, (shape, axis) in enumerate(product((*ODD, (136, 264)), (-1, 0))):
        x = make("lognormal", shape, DTYPES[i % 3], seed=i)
        checks.rotation(x, Quantizer("fp32", hadamard=size, signs=i), axis)


def test_a_rotation_beyond_the_dtype_is_a_nan_block_whatever_bits_the_device_gives_nan(checks: Checks) -> None:
    """Check that inf − inf in a rotation makes the block NaN, although the NaNs of GPUs and CPUs have other bits."""
    for dtype, axis in product(DTYPES, (-1, 0)):
        checks.quantizer(make("huge", (64, 64), dtype), Quantizer.parse("e4m3:1x16:amax:rht16"), axis)


@pytest.mark.parametrize("text", MIXTURES)
def test_mixtures_decide_as_the_reference_does(checks: Checks, text: str) -> None:
    for i, name in enumerate(KINDS):
        shape = ((40, 70), (66, 150), (33, 16))[i % 3]
        checks.mixture(make(name, shape, DTYPES[i % 3], seed=i), Mixture.parse(text), -(i % 2))


def test_extents_and_noise(checks: Checks) -> None:
    for i, name in enumerate(KINDS):
        checks.extent(make(name, ((40, 72), (130, 33))[i % 2], DTYPES[i % 3], seed=i), ((16, 16), (3, 5))[i % 2])
    for count in (0, 1, 9, 8192, 20001):
        checks.noise(count, 2**63 - 1)


@pytest.mark.parametrize("noise", ["gaussian", "uniform"])
@pytest.mark.parametrize("block", [1, 8, 32, 128])
def test_sampled_weights_and_the_gradient_of_their_bits(checks: Checks, block: int, noise: str) -> None:
    for i, shape in enumerate(((64, 128), (33, 130), (1, 17), (130, 264))):
        w, grad = make("lognormal", shape, DTYPES[i % 3], seed=i), make("normal", shape, DTYPES[(i + 1) % 3], seed=i)
        bits = torch.rand(*(-(-n // block) for n in shape), generator=generator(i)) * 8 + 1
        checks.sampled_weight(w, grad, bits, noise, block, DTYPES[(i + 2) % 3])


# Behaviour that only a GPU has: asynchronous execution, streams, graphs


def given_matrix(device: str = "cuda") -> Tensor:
    return make("lognormal", (512, 1024), torch.bfloat16).to(device)


@pytest.mark.parametrize("text", SPECS)
def test_nothing_waits_for_the_device(text: str) -> None:
    x = given_matrix()
    fake_quantize(x, text, seed=1, stats=True)  # compiles and loads the kernels
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        fake_quantize(x, text, seed=1, stats=True)
        fake_quantize(x, text, seed=1)
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("text", MIXTURES)
def test_mixtures_are_decided_on_the_device(text: str) -> None:
    x = given_matrix()
    mix(x, text, seed=1)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        mix(x, text, seed=1)
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("text", SPECS)
def test_kernels_run_on_the_current_stream(text: str) -> None:
    """Write the input late, on a busy stream: a kernel on another stream would read the old values."""
    x, want = torch.zeros_like(given_matrix()), fake_quantize(given_matrix(), text, seed=1)
    source = given_matrix()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.copy_(source)
        got = fake_quantize(x, text, seed=1)
    stream.synchronize()
    assert_same(got, want)


@pytest.mark.parametrize("text", SPECS)
def test_calls_can_be_captured_in_a_graph(text: str) -> None:
    x = given_matrix()
    want = fake_quantize(x, text, seed=1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    captured = torch.zeros_like(x)
    with torch.cuda.graph(graph):
        got = fake_quantize(captured, text, seed=1)
    captured.copy_(x)
    graph.replay()
    assert_same(got, want)


@pytest.mark.parametrize("text", SPECS)
def test_compiled_functions_call_the_kernels(text: str) -> None:
    x = given_matrix()
    compiled = torch.compile(lambda t: fake_quantize(t * 2, text, seed=1) + 1, fullgraph=True)
    assert_same(compiled(x), fake_quantize(x * 2, text, seed=1) + 1)


def test_a_thread_whose_first_work_on_the_device_is_ours() -> None:
    """Check a thread in which torch has not yet made a CUDA context current, as in autograd's threads."""
    x = given_matrix().requires_grad_()
    y, g = fake_quantize(x, "e2m1:1x16:nvfp4:rht16", seed=1), torch.ones(512, 1024, dtype=torch.bfloat16, device="cuda")
    fake_quantize(given_matrix(), "e2m1:1x16:nvfp4:rht16", seed=1)
    failed: list[BaseException] = []

    def backward() -> None:
        try:
            y.backward(g)
            fake_quantize(g, "e4m3:1x16:amax")
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    assert not failed, failed[0]
    assert x.grad is not None


def test_a_view_that_begins_between_16_bytes() -> None:
    x = torch.randn(8 * 64 + 1).bfloat16()
    want = fake_quantize(x[1:].view(8, 64), "e4m3:1x16:amax")
    assert_same(fake_quantize(x.cuda()[1:].view(8, 64), "e4m3:1x16:amax").cpu(), want)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_tensors_device_is_used_not_the_current_one() -> None:
    x = given_matrix("cuda:1")
    for text in SPECS:
        assert_same(fake_quantize(x, text, seed=1).cpu(), fake_quantize(x.cpu(), text, seed=1))
