"""Check without a GPU that every class of CUDA kernel compiles for current GPUs and does not spill registers to memory.

A class is a call in CLASSES; its kernels are found by recording what the host code launches. `pytest -s` prints a table
of their resources. A deep run (FEWBITS_TESTS=deep) compiles all classes for Hopper (sm_90), and those of OF_EACH_KIND
for sm_80 and sm_100a; another run compiles only SHORT for Hopper. The compiler's logs are kept in the user's cache.
"""

import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple, cast

import pytest
import torch
from torch import Tensor

from fewbits.common.atomic import write_atomically
from fewbits.kernels.backends.build import BuildError
from fewbits.kernels.backends.choice import replaced_by
from fewbits.kernels.backends.gpu import cubins
from fewbits.kernels.backends.gpu.device import Device
from fewbits.kernels.backends.gpu.variants import Variant
from fewbits.kernels.backends.gpu.warm import Recorder
from fewbits.kernels.backends.protocol import ABSENT, ERROR_ONE, OBSERVED
from fewbits.kernels.layers import activations, attention, cross_entropy, norms  # noqa: F401, they register operators
from fewbits.kernels.quantizer import Quantizer
from tests.kernels.backends.gpu.device_checks import any_bytes
from tests.kernels.inputs import make

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


Ask = Callable[[Device, Tensor], object]


def quantize(text: str, axis: int = -1, **how: object) -> Ask:
    return lambda device, x: device.quantize(x, Quantizer.parse(text), axis, 1, **how)  # type: ignore[arg-type]


def both(text: str) -> Ask:
    return lambda device, x: device.quantize_both(x, Quantizer.parse(text), Quantizer.parse(text), 1, 1)


def encode(text: str) -> Ask:
    return lambda device, x: device.encode(x, Quantizer.parse(text), -1, 1)


def operands(*of: tuple[str, int]) -> Ask:
    jobs = [(Quantizer.parse(text), axis, 1) for text, axis in of]
    return lambda device, x: tuple(tensor for stored in device.encode_operands(x, *jobs) for tensor in stored)


def decode(text: str, axis: int = -1) -> Ask:
    q = Quantizer.parse(text)

    def ask(device: Device, x: Tensor) -> Tensor:
        codes, scales, groups = (t.to(x.device) for t in any_bytes(q, axis, (x.shape[0], x.shape[1]), 0))
        return device.decode(codes, scales, groups, q, axis, x.shape[1], x.dtype)

    return ask


def decide(device: Device, x: Tensor) -> tuple[Tensor, Tensor]:
    """Apply the tests of three entries: by a limit of the error, by the error of another quantizer, and by spread."""
    part = (16, 8)
    q = Quantizer("e4m3")
    first, second = (
        device.quantize(source, q, -1, 1, want_values=False, want_stats=True, partition=part)[1]
        for source in (x, x.flip(0))
    )
    choice, decided = (torch.empty(first.shape[:2], dtype=d, device=x.device) for d in (torch.int8, torch.bool))
    device.decide(0, 3, first, choice, decided, limit=0.022 * ERROR_ONE)
    device.decide(1, 3, first, choice, decided, other=second)
    device.decide(2, 3, second, choice, decided, limit=200.0, extent=device.extent(x, part))
    return choice, decided


def observe(device: Device, x: Tensor) -> Tensor:
    """Observe twice a mixture of five quantizers and once a plain quantizer, in two rows of the table."""
    counts = device.quantize(x, Quantizer("e4m3"), -1, 1, want_values=False, want_stats=True, partition=(16, 8))[1]
    choice = (torch.arange(counts.shape[0] * counts.shape[1]) % 5).to(x.device, torch.int8)
    table = torch.zeros(3, OBSERVED, dtype=torch.int64, device=x.device)
    for _ in range(2):
        device.observe(table, [counts, counts[:1], counts * 2], [choice, choice[: counts.shape[1]], ABSENT], [2, 2, 0])
    return table


def layer(name: str, inputs: int, *others: object) -> Ask:
    """Call the operator `name` of a layer on copies of x and further arguments."""

    def ask(device: Device, x: Tensor) -> object:
        operands = [x, *(x.roll(shift, -1) for shift in range(1, inputs))]
        with replaced_by(device):
            return getattr(torch.ops.fewbits, name)(*operands, *others)

    return ask


def norm_backward(device: Device, x: Tensor) -> object:
    weight, means, inverses = x[0].float(), x[:, 0].float(), x[:, 1].float()
    return layer("norm_backward", 3, weight, True, means, inverses, 1.0, True)(device, x)


def entropy(device: Device, x: Tensor) -> object:
    targets = torch.arange(len(x), device=x.device) % x.shape[1]
    losses, log_sums = cast(tuple[Tensor, Tensor], layer("cross_entropy", 1, targets, 7, False)(device, x))
    return losses, layer("cross_entropy_backward", 1, targets, log_sums, losses, 7)(device, x)


def rotated(device: Device, x: Tensor) -> object:
    heads, turns = x[None].unflatten(-1, (-1, 8)), x[:, :4].float().reshape(-1, 2, 2)
    parts = cast(tuple[Tensor, ...], layer("rotated", 1, heads.shape[2] - 2, 1, turns)(device, heads))
    with replaced_by(device):
        return parts, torch.ops.fewbits.rotated_backward(*parts, turns)


def bits(x: Tensor, block: int = 32) -> Tensor:
    return torch.ones(-(-x.shape[0] // block), -(-x.shape[1] // block), device=x.device)


def skip(x: Tensor, part: tuple[int, int]) -> Tensor:
    return torch.zeros(-(-x.shape[0] // part[0]), -(-x.shape[1] // part[1]), dtype=torch.bool, device=x.device)


USUAL = (512, 512)
CLASSES: dict[str, tuple[Ask, torch.dtype, tuple[int, int]]] = {
    "128x128, amax": (quantize("e4m3:128x128:amax"), BF16, USUAL),
    "128x128, gam, with statistics": (quantize("e4m3:128x128:gam", want_stats=True), BF16, USUAL),
    "128x128, both axes": (both("e4m3:128x128:amax"), BF16, USUAL),
    "128x128, statistics of blocks": (
        quantize("e5m2:128x128:amax", want_stats=True, partition=(128, 128)),
        BF16,
        USUAL,
    ),
    "1x16, statistics of blocks": (quantize("e4m3:1x16:e8m0", want_stats=True, partition=(1, 16)), BF16, USUAL),
    "1x32, mx": (quantize("e2m1:1x32:mx"), BF16, USUAL),
    "32x1, e8m0, fp32": (quantize("e4m3:1x32:e8m0", axis=0), FP32, USUAL),
    "1x1, amax, fp16": (quantize("e4m3:1x1:amax"), FP16, USUAL),
    "nvfp4": (quantize("e2m1:1x16:nvfp4"), BF16, USUAL),
    "nvfp4 down": (quantize("e2m1:1x16:nvfp4", axis=0), BF16, USUAL),
    "nvfp4, stochastic": (quantize("e2m1:1x16:nvfp4:stochastic"), BF16, USUAL),
    "nvfp4, stochastic, rht16": (quantize("e2m1:1x16:nvfp4:stochastic:rht16"), BF16, USUAL),
    "nvfp4, stochastic, ragged rht16": (quantize("e2m1:1x16:nvfp4:stochastic:rht16"), FP16, (129, 127)),
    "nvfp4, stochastic, rht16 down": (quantize("e2m1:1x16:nvfp4:stochastic:rht16", axis=0), BF16, USUAL),
    "nvfp4, stochastic, rht128 down": (quantize("e2m1:1x16:nvfp4:stochastic:rht128", axis=0), BF16, USUAL),
    "nvfp4 16x16, both axes": (both("e2m1:16x16:nvfp4"), BF16, USUAL),
    "nvfp4, stochastic, rht16, both axes": (both("e2m1:1x16:nvfp4:stochastic:rht16"), BF16, USUAL),
    "fouroversix, stochastic, rht16": (quantize("e2m1:1x16:fouroversix:stochastic:rht16"), BF16, USUAL),
    "fouroversix down": (quantize("e2m1:1x16:fouroversix", axis=0), BF16, USUAL),
    "fouroversix 64x64": (quantize("e2m1:64x64:fouroversix"), BF16, USUAL),
    "fouroversix 16x16, both axes": (both("e2m1:16x16:fouroversix"), FP32, USUAL),
    "eden, rht128": (quantize("e2m1:1x16:eden:rht128"), BF16, USUAL),
    "eden, rht128 down": (quantize("e2m1:1x16:eden:rht128", axis=0), BF16, USUAL),
    "eden, rht16, both axes, fp32": (both("e2m1:1x16:eden:rht16"), FP32, USUAL),
    "fouroversix by row, mae": (quantize("e2m1:1x16:fouroversix:group=row:select=mae"), BF16, USUAL),
    "fouroversix 16x16, max": (quantize("e2m1:16x16:fouroversix:select=max:group=64"), BF16, USUAL),
    "nvfp4 by row": (quantize("e2m1:1x16:nvfp4:group=row"), BF16, USUAL),
    "nvfp4 by 128, down": (quantize("e2m1:1x16:nvfp4:group=128", axis=0), BF16, USUAL),
    "mx by 3/4": (quantize("e2m1:1x32:mx:stochastic:factor=3/4"), BF16, USUAL),
    "gam by row": (quantize("e4m3:1x16:gam:group=row"), BF16, USUAL),
    "tensor, amax": (quantize("e4m3:tensor:amax"), BF16, USUAL),
    "tensor, amax, with statistics": (quantize("e4m3:tensor:amax", want_stats=True), FP32, USUAL),
    "channel": (quantize("e4m3:channel:amax"), BF16, (16, 8192)),
    "channel down": (quantize("e4m3:channel:amax", axis=0), BF16, (2048, 64)),
    "channel down, many rows": (quantize("e4m3:channel:amax", axis=0), BF16, (4096, 1024)),
    "channel down, 8192 rows": (quantize("e4m3:channel:amax", axis=0), BF16, (8192, 1024)),
    "channel down, many rows, stochastic, with statistics": (
        quantize("e4m3:channel:amax:stochastic", axis=0, want_stats=True),
        BF16,
        (4096, 1024),
    ),
    "channel down, many rows, fp32": (quantize("e4m3:channel:e8m0", axis=0), FP32, (4096, 1024)),
    "channel down, many rows, gam": (quantize("e4m3:channel:gam", axis=0), BF16, (4096, 64)),
    "odd blocks": (quantize("e4m3:3x5:amax"), BF16, USUAL),
    "odd partition, parts left out": (
        lambda device, x: quantize("e4m3", want_stats=True, partition=(7, 40), skip=skip(x, (7, 40)))(device, x),
        BF16,
        USUAL,
    ),
    "naive cast": (quantize("e4m3"), BF16, USUAL),
    "naive cast, wide, stochastic": (quantize("bf16:stochastic"), FP32, USUAL),
    "overflow to inf": (quantize("e5m2:tensor:amax:overflow=inf"), BF16, USUAL),
    "encode, nvfp4": (encode("e2m1:1x16:nvfp4"), BF16, USUAL),
    "encode, nvfp4, stochastic, rht16": (encode("e2m1:1x16:nvfp4:stochastic:rht16"), BF16, USUAL),
    "encode, e4m3, 128x128, gam": (encode("e4m3:128x128:gam"), BF16, USUAL),
    "encode, e5m2, channel, fp32": (encode("e5m2:channel:amax"), FP32, (16, 8192)),
    "encode, e2m3, 1x32, mx": (encode("e2m3:1x32:mx"), BF16, USUAL),
    "encode, e3m2, 1x32, mx": (encode("e3m2:1x32:mx"), FP16, USUAL),
    "encode, bf16": (encode("bf16:stochastic"), FP32, USUAL),
    "encode, overflow to inf": (encode("e5m2:tensor:amax:overflow=inf"), BF16, USUAL),
    "operands, nvfp4, both axes": (
        operands(("e2m1:1x16:nvfp4", -1), ("e2m1:1x16:nvfp4:stochastic:rht16", 0)),
        BF16,
        USUAL,
    ),
    "operands, nvfp4 16x16, both axes": (operands(("e2m1:16x16:nvfp4", -1), ("e2m1:16x16:nvfp4", 0)), BF16, USUAL),
    "operands, mxfp8, both axes": (operands(("e4m3:1x32:e8m0", -1), ("e4m3:1x32:e8m0", 0)), BF16, (200, 136)),
    "operands, 1x128 down": (operands(("e4m3:1x128:amax", 0)), BF16, USUAL),
    "operands, both axes, 128x128": (operands(("e4m3:128x128:amax", -1), ("e4m3:128x128:amax", 0)), FP32, USUAL),
    "operands, channels, both axes": (operands(("e4m3:channel:amax", -1), ("e4m3:channel:amax", 0)), BF16, USUAL),
    "operands, channel down, many rows": (operands(("e4m3:channel:amax:stochastic", 0)), BF16, (4096, 1024)),
    "operands, eden, both axes": (operands(("e2m1:1x16:eden:rht128", -1), ("e2m1:1x16:eden:rht128", 0)), FP32, USUAL),
    "decode, nvfp4": (decode("e2m1:1x16:nvfp4"), BF16, USUAL),
    "decode, nvfp4 down, fp32": (decode("e2m1:1x16:nvfp4", axis=0), FP32, USUAL),
    "decode, e4m3, 128x128, gam": (decode("e4m3:128x128:gam"), BF16, USUAL),
    "decode, e4m3, odd blocks": (decode("e4m3:3x5:amax"), BF16, USUAL),
    "decode, e3m2, 1x32, mx": (decode("e3m2:1x32:mx"), FP16, USUAL),
    "decode, fp16": (decode("fp16"), FP32, USUAL),
    "rotate": (lambda device, x: device.rotate(x, Quantizer("fp32", hadamard=16), -1, inverse=True), BF16, USUAL),
    "extent": (lambda device, x: device.extent(x, (128, 128)), BF16, USUAL),
    "decide": (decide, BF16, USUAL),
    "observe": (observe, BF16, USUAL),
    "norm of a sum": (
        lambda device, x: layer("add_norm", 2, x[0].float(), x[1].float(), 1.0, 1e-5, True)(device, x),
        BF16,
        USUAL,
    ),
    "norm, backward": (norm_backward, BF16, USUAL),
    "norm, backward, fp32": (norm_backward, FP32, USUAL),
    "cross entropy": (entropy, BF16, USUAL),
    "rotation": (rotated, BF16, USUAL),
    "squared ReLU": (layer("squared_relu", 1), BF16, USUAL),
    "squared ReLU, backward": (layer("squared_relu_backward", 2), BF16, USUAL),
    "GELU": (layer("gelu", 1), BF16, USUAL),
    "GELU, backward": (layer("gelu_backward", 2), BF16, USUAL),
    "SwiGLU": (layer("swiglu", 2), FP32, USUAL),
    "SwiGLU, backward": (layer("swiglu_backward", 3), BF16, USUAL),
    "sampled weight": (
        lambda device, x: device.sample_weight(x, bits(x), 1, "gaussian", 32, BF16),
        FP32,
        USUAL,
    ),
    "sampled weight, uniform": (
        lambda device, x: device.sample_weight(x, bits(x), 1, "uniform", 32, BF16),
        BF16,
        USUAL,
    ),
    "gradient of bits": (
        lambda device, x: device.sample_weight_backward(x, x, bits(x), 1, "gaussian", 32),
        BF16,
        USUAL,
    ),
    "gradient of bits, 128x128": (
        lambda device, x: device.sample_weight_backward(x, x, bits(x, 128), 1, "gaussian", 128),
        BF16,
        USUAL,
    ),
}
SIZES = {"channel": (3, 2056), "encode, e5m2, channel, fp32": (3, 2056), "channel down": (2048, 24)}
SIZES |= {name: (2056, 24) for name in CLASSES if name.startswith("channel down, many rows")}
SIZES["channel down, 8192 rows"] = (4104, 24)


def input_of(name: str, columns: int) -> Tensor:
    """Return a small matrix for the class `name`, of the size in SIZES, or of 136 rows."""
    _, dtype, shape = CLASSES[name]
    rows, columns = SIZES.get(name, (136, columns))
    return make("lognormal", (rows, columns - shape[1] % 2), dtype)


LAYERS = (
    *("norm of a sum", "norm, backward", "norm, backward, fp32", "cross entropy", "rotation", "squared ReLU"),
    *("squared ReLU, backward", "GELU", "GELU, backward", "SwiGLU", "SwiGLU, backward"),
)
SHORT = (  # compiled in every run: each file of kernels, and the largest of quantize.cu
    "nvfp4, stochastic, rht16",
    "tensor, amax",
    "encode, e4m3, 128x128, gam",
    "decode, nvfp4 down, fp32",
    "decide",
    "observe",
    "sampled weight",
    "gradient of bits",
    "norm, backward",
)
OF_EACH_KIND = (
    *SHORT,
    "128x128, statistics of blocks",
    "nvfp4 16x16, both axes",
    "fouroversix, stochastic, rht16",
    "eden, rht128 down",
    "encode, nvfp4, stochastic, rht16",
    "operands, nvfp4, both axes",
    "operands, eden, both axes",
    "encode, e5m2, channel, fp32",
    "encode, e2m3, 1x32, mx",
    "encode, e3m2, 1x32, mx",
    "decode, e4m3, odd blocks",
    *LAYERS,
)


class Usage(NamedTuple):
    """The resources that a kernel uses: registers, spilled and stack bytes of a thread, shared memory of a CTA."""

    registers: int
    spilled_bytes: int
    stack_bytes: int
    shared_bytes: int


@cache
def usage(variant: Variant, architecture: str) -> Usage:
    log = log_of(variant.source(), architecture)
    assert "warning" not in log, log
    return reported(log)


def reported(log: str) -> Usage:
    """Return the resources in the ptxas log of a single kernel; a number that the log does not state is 0."""

    def number(pattern: str) -> int:
        match = re.search(pattern, log)
        return int(match[1]) if match else 0

    spilled = number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads")
    return Usage(number(r"Used (\d+) registers"), spilled, number(r"(\d+) bytes stack"), number(r"(\d+) bytes smem"))


def test_resources_are_read_from_ptxas_log() -> None:
    log = "8 bytes stack frame, 12 bytes spill stores, 4 bytes spill loads\nUsed 80 registers, 2048 bytes smem"
    assert reported(log) == Usage(registers=80, spilled_bytes=16, stack_bytes=8, shared_bytes=2048)


def log_of(source: str, architecture: str) -> str:
    """Return the log of NVRTC and ptxas; it is kept in the user's cache beside the cubin, to compile only once."""
    kept = cubins._path(source, architecture).with_suffix(".log")
    if not kept.exists():
        write_atomically(kept, cubins.compile_now(source, architecture)[1].encode())
    return kept.read_text()


def runs() -> Iterator[object]:
    """Yield (class, architecture) to compile; all but SHORT for sm_90 are marked to run only in deep runs."""
    for architecture, names in (
        *(("sm_90", tuple(CLASSES)), ("sm_80", OF_EACH_KIND), ("sm_100a", OF_EACH_KIND), ("sm_120", LAYERS)),
    ):
        for name in names:
            always = architecture == "sm_90" and name in SHORT
            yield pytest.param(name, architecture, marks=() if always else pytest.mark.deep)


@pytest.mark.parametrize(("name", "architecture"), list(runs()))
def test_kernels_compile_and_spill_nothing(name: str, architecture: str) -> None:
    try:
        cubins.nvrtc()
    except BuildError as missing:
        pytest.skip(str(missing))
    ask, dtype, shape = CLASSES[name]
    recorder = Recorder()
    ask(Device(recorder), torch.empty(shape, dtype=dtype))
    assert recorder.variants
    for variant in recorder.variants:
        used = usage(variant, architecture)
        print(
            f"\n{name:36} {variant.kernel:22} {architecture:8} {variant.shape.threads:4} threads "
            f"{used.registers:4} registers {used.spilled_bytes:4} spilled {used.shared_bytes:6} shared",
            end="",
        )
        assert used.registers > 0, "ptxas reported no registers"
        assert used.spilled_bytes == 0
        assert used.stack_bytes == 0, "something is indexed where registers have no addresses"
