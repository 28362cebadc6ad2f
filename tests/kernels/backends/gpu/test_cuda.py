"""Check behaviour that only a GPU has: asynchronous execution, streams, graphs, and torch.compile for its kernels.

Run with `pytest -m gpu`, which also runs test_cuda_emulated.py on the GPU.
"""

import os
import threading

import pytest
import torch
from torch import Tensor

from fewbits import fake_quantize, mix
from fewbits.kernels.backends.gpu import cuda
from tests.kernels.inputs import assert_same, make
from tests.kernels.test_mix import MIXTURES

complaint = cuda.complaint()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(complaint is not None, reason=f"no CUDA kernels here: {complaint}")]

SPECS = (
    "e4m3",
    "e4m3:128x128:gam",
    "e4m3:channel:amax",
    "e4m3:3x5:amax",
    "e2m1:1x16:nvfp4:stochastic:rht16",
    "e4m3:tensor:amax:overflow=nan",
)


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


@pytest.mark.parametrize("text", ["e4m3:128x128:amax", "e2m1:1x16:nvfp4:stochastic"])
def test_a_tensor_of_more_than_two_to_the_31_elements(text: str) -> None:
    """Compare all of a BF16 tensor of 4.3 GB with the CPU backend."""
    rows, cols = 65_600, 32_776
    if torch.cuda.mem_get_info()[0] < 20 << 30 or os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < 16 << 30:
        pytest.skip("needs 20 GiB of the GPU's free memory and 16 GiB of the machine's")
    x = torch.empty(rows, cols, dtype=torch.bfloat16, device="cuda").normal_(generator=torch.Generator("cuda"))
    got = fake_quantize(x, text, seed=1)
    want = fake_quantize(x.cpu(), text, seed=1).cuda()
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_tensors_device_is_used_not_the_current_one() -> None:
    x = given_matrix("cuda:1")
    for text in SPECS:
        assert_same(fake_quantize(x, text, seed=1).cpu(), fake_quantize(x.cpu(), text, seed=1))
