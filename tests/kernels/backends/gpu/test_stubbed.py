"""Check the CUDA backend on real CuPy without a GPU: every class of kernels, and errors of loading and launching."""

import ctypes
import threading
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fewbits.kernels.backends import reference
from fewbits.kernels.backends.build import BuildError
from fewbits.kernels.backends.compiled import DecideCall
from fewbits.kernels.backends.gpu import cubins, cuda, tiles
from fewbits.kernels.backends.gpu.calls import Call, DecodeCall, ObserveCall, WeightCall
from fewbits.kernels.backends.gpu.device import Device
from fewbits.kernels.backends.gpu.layers import LayerCall
from fewbits.kernels.backends.gpu.variants import Kernel, Launcher, Variant
from fewbits.kernels.backends.gpu.warm import Recorder
from fewbits.kernels.mixing import mix_matrix
from fewbits.kernels.quantizer import Mixture, Quantizer
from fewbits.kernels.replays import CapturedSeeds, step_seed
from tests.kernels.backends.gpu import stubbed
from tests.kernels.backends.gpu.emulated import KERNELS
from tests.kernels.backends.gpu.stubbed import Stub
from tests.kernels.backends.gpu.test_cuda_kernels_fit import CLASSES, input_of
from tests.kernels.inputs import assert_same, make

reason = stubbed.unavailable()
pytestmark = pytest.mark.skipif(reason is not None, reason=str(reason))
SMALL = Quantizer.parse("e4m3:128x128:amax")
MIXTURE = Mixture.parse("e4m3:16x16:amax @ error<0.03 | e5m2:16x16:amax @ spread<normal | bf16 ; per=block")


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    with stubbed.stubbed(monkeypatch, tmp_path / "cache") as stub:
        yield stub


def small(q: Quantizer, stub: Stub) -> Tensor:
    """Quantize a small matrix; check that the result has the reference's bits, and return the matrix."""
    x = make("lognormal", (40, 72), torch.bfloat16)
    assert_same(stub.device.quantize(x, q, -1, 3)[0], reference.quantize(x, q, -1, 3)[0], str(q))
    return x


@pytest.mark.parametrize("name", CLASSES)
def test_each_class_gives_the_references_bits(stub: Stub, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "FEWEST_STRIPS", 1)
    ask, x = CLASSES[name][0], input_of(name, 264)
    got, want = ask(stub.device, x), ask(reference, x)  # type: ignore[arg-type]  # a module with the same functions
    for a, b in zip(*map(pytree.tree_leaves, (got, want)), strict=True):
        assert_same(a, b, name)
    structs = {
        "decide": DecideCall,
        "observe": ObserveCall,
        "decode": DecodeCall,
        "gaussian_noise": WeightCall,
        "uniform_noise": WeightCall,
    }
    structs |= {"sample_weight": WeightCall, "sample_weight_backward": WeightCall}
    structs |= dict.fromkeys(KERNELS["layers.cu"], LayerCall)
    assert stub.launches
    for launch in stub.launches:
        struct = structs.get(launch.kernel.decode(), Call)
        assert launch.bytes == ctypes.sizeof(struct)
        assert launch.grid[1] == launch.grid[2] == launch.threads[1] == launch.threads[2] == 1
        assert (launch.shared > 0) == (launch.kernel == b"quantize_strip")
    assert stub.driver.stub_loads() == len({launch.kernel for launch in stub.launches})


# The height of whole columns, their dtype, the number of threads of a CTA, and its dynamic shared memory in KiB, which
# holds all tiles but one, if they fit; that one is in registers. A tile has 1024 rows of 32 bytes (float32: 2048 rows),
# and twice as many rows if a CTA has 512 threads.
KEPT = (
    (2048, torch.bfloat16, 512, 0),
    (2049, torch.bfloat16, 256, 2 * 32),
    (4096, torch.float16, 256, 3 * 32),
    (4097, torch.bfloat16, 512, 2 * 64),
    (8192, torch.bfloat16, 512, 3 * 64),
    (20000, torch.bfloat16, 512, 3 * 64),
    (2049, torch.float32, 256, 64),
    (4096, torch.float32, 256, 64),
    (8192, torch.float32, 512, 128),
    (8193, torch.float32, 512, 128),
)


@pytest.mark.parametrize(("height", "dtype", "threads", "kept"), KEPT, ids=str)
def test_a_strip_asks_for_the_shared_memory_of_its_tiles(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, height: int, dtype: torch.dtype, threads: int, kept: int
) -> None:
    """Check shared memory up to the device's limit; beyond 48 KiB, a kernel's attribute must be set before a launch."""
    monkeypatch.setattr(tiles, "FEWEST_STRIPS", 1)
    stub.driver.stub_set_executes(0)
    stub.device.quantize(torch.zeros(height, 40, dtype=dtype), Quantizer.parse("e4m3:channel:amax"), 0, 0)
    (launch,) = stub.launches
    strip_columns = 32 // dtype.itemsize
    assert launch.kernel == (b"quantize_strip" if kept else b"quantize")
    assert launch.grid[0] == -(-40 // strip_columns)
    assert launch.threads[0] == threads
    assert launch.shared == kept << 10


def test_a_kernel_is_compiled_and_loaded_once(stub: Stub) -> None:
    before = stub.nvrtc.stub_compiled()
    for seed in range(3):
        stub.device.quantize(torch.zeros(128, 128, dtype=torch.bfloat16), SMALL, -1, seed)
    assert stub.driver.stub_loads() == stub.nvrtc.stub_compiled() - before == 1
    other = cuda.CupyLauncher()  # stands for another process, which finds the cubin in the cache
    stub.device.__init__(other)  # type: ignore[misc]
    stub.device.quantize(torch.zeros(128, 128, dtype=torch.bfloat16), SMALL, -1, 0)
    assert stub.driver.stub_loads() == 2
    assert stub.nvrtc.stub_compiled() - before == 1


def test_a_repeated_call_with_other_memory_seed_and_signs(stub: Stub) -> None:
    """Check that a plan, which is made in the first of several equal calls, keeps no address, seed or signs."""
    for seed in (1, 2, 2**62):
        for text in ("e2m1:1x16:nvfp4:stochastic", f"e2m1:1x16:nvfp4:stochastic:rht16:signs={seed}"):
            q = Quantizer.parse(text)
            for start in (0, 1):  # x begins at a multiple of 16 bytes, or one element after it
                x = make("lognormal", (1, 40 * 72 + 1), torch.bfloat16, seed=seed % 7)[0, start : start + 40 * 72]
                x = x.view(40, 72)
                want = reference.quantize(x, q, -1, seed, want_stats=True)
                got = stub.device.quantize(x, q, -1, seed, want_stats=True)
                for a, b in zip(got, want, strict=True):
                    assert_same(a, b, f"{q}, {seed=}, {start=}")


def beside_16_bytes(t: Tensor) -> Tensor:
    """Return a copy of a matrix that begins one element after a multiple of 16 bytes."""
    copy = torch.empty(t.numel() + 1, dtype=t.dtype)[1:].view(t.shape).copy_(t)
    assert t.data_ptr() % 16 == 0 != copy.data_ptr() % 16
    return copy


@pytest.mark.parametrize("text", ["e4m3:128x128:amax", "e2m1:1x16:nvfp4:stochastic"])
def test_a_result_that_begins_between_16_bytes_beside_an_input_that_does_not(stub: Stub, text: str) -> None:
    """Check that kernels access whole vectors only if all matrices are aligned; misaligned accesses are errors."""
    x, q = make("lognormal", (40, 72), torch.bfloat16), Quantizer.parse(text)
    want = reference.quantize(x, q, -1, 3)[0]
    for out in (torch.empty_like(x), beside_16_bytes(x), torch.empty_like(x)):
        assert_same(stub.device.quantize(x, q, -1, 3, out=out)[0], want, text)
    down = reference.quantize(x, q, 0, 4)[0]
    for outs in ((torch.empty_like(x), beside_16_bytes(x)), (beside_16_bytes(x), torch.empty_like(x))):
        for got, expected in zip(stub.device.quantize_both(x, q, q, 3, 4, out=outs), (want, down), strict=True):
            assert_same(got, expected, f"both axes of {text}")


def test_codes_extents_and_weights_that_begin_between_16_bytes(stub: Stub) -> None:
    x, q = make("lognormal", (40, 64), torch.bfloat16), Quantizer.parse("e2m1:1x16:nvfp4")
    codes, scales, groups = reference.encode(x, q, -1, 0)
    want = reference.decode(codes, scales, groups, q, -1, 64, x.dtype)
    for stored, out in ((beside_16_bytes(codes), torch.empty_like(x)), (codes, beside_16_bytes(x))):
        assert_same(stub.device.decode(stored, scales, groups, q, -1, 64, x.dtype, out=out), want, "values")
    moved = beside_16_bytes(x)
    for got, expected in zip(stub.device.extent(moved, (16, 16)), reference.extent(x, (16, 16)), strict=True):
        assert_same(got, expected, "extent")
    bits = torch.full((2, 2), 4.0)
    got = stub.device.sample_weight(moved, bits, 5, "uniform", 32, x.dtype)
    assert_same(got, reference.sample_weight(x, bits, 5, "uniform", 32, x.dtype), "sampled weight")


def test_the_same_call_on_another_device_launches_there(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a plan is used only on its device, where its kernels are loaded."""
    stub.driver.stub_set_executes(0)
    x = torch.zeros(40, 72, dtype=torch.bfloat16)
    for index in (0, 1, 0):
        monkeypatch.setattr(Tensor, "get_device", lambda _, index=index: index)
        stub.driver.stub_make_current(index)
        stub.device.quantize(x, SMALL, -1, 0)
    assert [launch.device for launch in stub.launches] == [0, 1, 0]


def test_a_mixture_is_captured_after_its_first_use(stub: Stub) -> None:
    x = make("lognormal", (40, 72), torch.bfloat16)
    mix_matrix(stub.device, x, MIXTURE, -1, 0)
    count = len(stub.launches)
    with stub.capture():
        mix_matrix(stub.device, x, MIXTURE, -1, 0)
    assert [launch.captured for launch in stub.launches[count:]] == [True] * count


def quantize_by(text: str, axis: int) -> Callable[[Any, Tensor, int], object]:
    def ask(backend: Any, x: Tensor, seed: int) -> object:
        return backend.quantize(x, Quantizer.parse(text.replace("each", str(seed))), axis, seed, want_stats=True)

    return ask


REPLAYED = {
    text: quantize_by(text, axis)
    for text, axis in (
        ("e2m1:1x16:nvfp4:stochastic", -1),
        ("e4m3:channel:amax:stochastic:rht128:signs=each", 0),
        ("e2m1:1x16:fouroversix:stochastic:rht16:signs=each", -1),
        ("e2m1:64x64:fouroversix:stochastic", -1),
        ("e2m1:1x16:eden:rht16:signs=each", 0),
        ("e4m3:1x16:amax:rht4:signs=each", -1),
        ("bf16:stochastic", -1),
    )
}
REPLAYED["weights"] = lambda backend, x, seed: backend.sample_weight(x, torch.ones(2, 3), seed, "gaussian", 32, x.dtype)
REPLAYED["uniform"] = lambda backend, x, seed: backend.uniform_noise(99, seed, x.device)


@pytest.mark.parametrize("name", REPLAYED)
def test_a_replay_has_the_seed_and_the_signs_of_its_step(stub: Stub, name: str) -> None:
    ask, x = REPLAYED[name], make("lognormal", (40, 72), torch.bfloat16)

    def results(backend: Any, step: int) -> list[Tensor]:
        return pytree.tree_leaves(ask(backend, x, step_seed(7, step, 2, 1)))

    earlier = CapturedSeeds(x.device)
    with earlier.captured():  # loads the kernels
        early = results(stub.device, 1)
    seeds = CapturedSeeds(x.device, earlier)
    with seeds.captured(), stub.capture() as graph:
        captured = results(stub.device, 2)
    for step in (1, 2, 9):
        seeds.set_step(step)
        graph.replay()
        for got, want in zip(captured, results(reference, step), strict=True):
            assert_same(got, want, f"step {step}")
    for got, want in zip(early, results(reference, 1), strict=True):
        assert_same(got, want, "before the capture")


class Interrupted:
    """A launcher that calls `meanwhile` just before its second launch."""

    def __init__(self, launcher: Launcher, meanwhile: Callable[[], None]) -> None:
        self._launcher, self._meanwhile, self._launches = launcher, meanwhile, 0

    def kernel(self, variant: Variant, device: torch.device) -> Kernel:
        kernel = self._launcher.kernel(variant, device)

        def run(blocks: int, shared: int, arguments: int) -> None:
            self._launches += 1
            if self._launches == 2:
                self._meanwhile()
            kernel(blocks, shared, arguments)

        return run

    def shared_memory(self, device: torch.device) -> int:
        return self._launcher.shared_memory(device)


def test_two_threads_make_the_same_call_with_other_matrices(stub: Stub) -> None:
    """Check two threads' calls with one plan: the second call runs between the two launches of the first."""
    q, results = Quantizer.parse("e2m1:1x16:nvfp4:stochastic"), list[Tensor]()
    first, second = (make("lognormal", (40, 72), torch.bfloat16, seed=seed) for seed in (1, 2))

    def meanwhile() -> None:
        thread = threading.Thread(target=lambda: results.append(shared.quantize(second, q, -1, 2)[0]))
        thread.start()
        thread.join()

    shared = Device(Interrupted(stub.device._launcher, meanwhile))
    results.append(shared.quantize(first, q, -1, 1)[0])
    for got, x, seed in zip(results, (second, first), (2, 1), strict=True):
        assert_same(got, reference.quantize(x, q, -1, seed)[0], f"thread with seed {seed}")
    assert len(shared._plans) == 1


def run_in_thread(stub: Stub, device: int) -> list[BaseException]:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            if device >= 0:
                stub.driver.stub_make_current(device)
            small(SMALL, stub)
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return failures


@pytest.mark.parametrize("known", [False, True])
def test_a_thread_without_a_context(stub: Stub, known: bool) -> None:
    """Check a thread without a current CUDA context, such as autograd's; known: the kernel is already loaded."""
    if known:
        small(SMALL, stub)
    assert not run_in_thread(stub, -1)
    assert len({launch.thread for launch in stub.launches}) == 1 + known


def test_the_tensors_device_is_used_not_the_current_one(stub: Stub) -> None:
    """Check that a launch uses the tensor's device and this device's stream, whichever device is current."""
    stub.torch.streams = {0: 5, 1: 256 + 6}
    recorder = Recorder()
    Device(recorder).quantize(torch.zeros(40, 72, dtype=torch.bfloat16), SMALL, -1, 0)
    stub.driver.stub_set_executes(0)
    launcher = stub.device._launcher
    for current in (0, 1):
        stub.driver.stub_make_current(current)
        for index in (0, 1):
            arguments = ctypes.c_void_p(ctypes.addressof(Call()))
            launcher.kernel(recorder.variants[0], torch.device("cuda", index))(1, 0, ctypes.addressof(arguments))
            assert stub.driver.stub_current_device() == current
    assert [(launch.device, launch.stream) for launch in stub.launches] == [(0, 5), (1, 262)] * 2
    assert stub.driver.stub_loads() == 2


def test_a_first_use_inside_a_capture_says_what_to_do(stub: Stub) -> None:
    with stub.capture(), pytest.raises(RuntimeError, match="call the function once before the capture"):
        small(SMALL, stub)
    small(SMALL, stub)
    x = torch.zeros(40, 72, dtype=torch.bfloat16)
    with stub.capture():
        stub.device.quantize(x, SMALL, -1, 0)
    assert stub.launches[-1].captured


def test_a_driver_error_while_another_thread_captures_is_raised(stub: Stub) -> None:
    """Check that error 900 is raised if the driver loads no kernel because of a capture that torch does not know of."""
    stub.driver.stub_set_capturing(1)
    with pytest.raises(Exception, match="900"):
        small(SMALL, stub)
    stub.driver.stub_set_capturing(0)
    small(SMALL, stub)


def test_a_driver_that_is_older_than_nvrtc(stub: Stub) -> None:
    assert cuda.complaint() is None
    stub.nvrtc.stub_set_major(14)
    cubins.version.cache_clear()
    assert str(cuda.complaint()).endswith("update the driver, or pip install nvidia-cuda-nvrtc==13.*")
    stub.nvrtc.stub_set_major(12)
    cubins.version.cache_clear()
    assert cuda.complaint() is None


def test_a_gpu_that_nvrtc_does_not_know_gets_ptx_of_the_newest_older_architecture(stub: Stub) -> None:
    stub.torch.capability = (13, 0)  # the stand-in for NVRTC knows 9.0 and 10.0
    assert cuda.architecture_of(0) == "compute_100"
    assert cuda.complaint() is None
    small(SMALL, stub)
    stub.torch.capability = (8, 0)
    assert "as old as sm_80" in str(cuda.complaint())


def test_a_gpu_that_does_not_run_an_empty_kernel(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cubins, "compile_now", lambda *_: (b"\x7fELF of another world\0", ""))
    assert "an empty kernel does not run on stand-in (CUDA_ERROR_200" in str(cuda.complaint())


def test_a_cache_that_cannot_be_written(stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("FEWBITS_CACHE", str(file / "cache"))
    assert "FEWBITS_CACHE" in str(cuda.complaint())
    with pytest.raises(BuildError, match="FEWBITS_CACHE"):
        small(SMALL, stub)


def cached_cubin(tmp_path: Path) -> Path:
    (file,) = (tmp_path / "cache").glob("cuda-*.cubin")
    return file


@pytest.mark.parametrize("whole", [False, True])
def test_a_poisoned_cubin_is_compiled_again(stub: Stub, tmp_path: Path, whole: bool) -> None:
    """Check a cached file with a wrong checksum; whole: one with a valid checksum, whose content the driver rejects."""
    small(SMALL, stub)
    good, content = cached_cubin(tmp_path).read_bytes(), b"\x7fELF of another world"
    cached_cubin(tmp_path).write_bytes(content + (sha256(content).digest() if whole else b""))
    stub.device.__init__(cuda.CupyLauncher())  # type: ignore[misc]
    small(SMALL, stub)
    assert cached_cubin(tmp_path).read_bytes() == good
