"""Measure the host's time for calls of the CUDA backend, and how often the observer makes the host wait; no GPU needed.

The calls run on real CuPy and on a replacement for NVIDIA's driver (stubbed.py), whose launches return at once. So the
times include our code, torch and CuPy, but not the driver. The tensors are on the CPU, but operators go through torch's
dispatcher, as they do for CUDA tensors. The time of a call is the mean in the fastest of many short bursts of calls,
which other programs change little. It is also printed relative to the time of `torch.empty_like` of the same matrix.
Bursts of the different calls take turns, on one thread.

    python -m tests.kernels.backends.gpu.host_times
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from torch import nn

from fewbits import fake_quantize, mix
from fewbits.kernels import operators
from fewbits.kernels.backends.choice import replaced_by
from fewbits.kernels.backends.processor import processor_name
from fewbits.kernels.quantizer import Mixture, Quantizer
from fewbits.models.observer import ObserverConfig
from fewbits.models.quantize import quantize
from tests.kernels.backends.gpu import stubbed
from tests.models.copies import CountedObserver
from tests.models.quantized import linear, noisy, recipe

SQUARE, NVFP4 = "e4m3:128x128:amax", "e2m1:1x16:nvfp4:stochastic:rht16"
MIXTURE = "e4m3:128x128:gam @ error<0.045 | bf16"
REFERENCE = "`torch.empty_like`"
BURST, BURSTS = 20, 500
LAYERS, MICRO_BATCHES = 24, 4
BY_ROW = "e4m3:1x16:amax @ error<0.06 | bf16 ; per=1x16"  # the mixture of each of the six operands of a layer

Calls = Mapping[str, Callable[[], object]]


@contextmanager
def calls() -> Iterator[Calls]:
    """Return the measured calls by their names in the table; they can be called while the `with` block runs."""
    square, nvfp4, mixture = Quantizer.parse(SQUARE), Quantizer.parse(NVFP4), Mixture.parse(MIXTURE)
    x = torch.randn(256, 384, generator=torch.Generator().manual_seed(0)).bfloat16()
    leaf = x.clone().requires_grad_()
    with (
        TemporaryDirectory() as folder,
        pytest.MonkeyPatch.context() as patch,
        stubbed.stubbed(patch, Path(folder, "cache")) as stub,
        replaced_by(stub.device),
    ):
        stub.driver.stub_set_executes(0)
        patch.setattr(operators, "can_skip_dispatcher", lambda arguments: False)
        yield {
            REFERENCE: lambda: torch.empty_like(x),
            f"`Device.quantize`, {SQUARE}": lambda: stub.device.quantize(x, square, -1, 0),
            f"`Device.quantize`, {NVFP4}": lambda: stub.device.quantize(x, nvfp4, -1, 1),
            "`fake_quantize`": lambda: fake_quantize(x, square),
            "`fake_quantize(stats=True)`": lambda: fake_quantize(x, square, stats=True),
            "`fake_quantize` with a gradient": lambda: fake_quantize(leaf, square),
            "`mix`, E4M3 or BF16 by error": lambda: mix(x, mixture),
        }


def seconds(measured: Calls, bursts: int = BURSTS) -> dict[str, float]:
    """Return the seconds of each call: the mean over the BURST calls of its fastest burst."""
    best = dict.fromkeys(measured, float("inf"))
    for _ in range(bursts):
        for name, call in measured.items():
            start = time.perf_counter()
            for _ in range(BURST):
                call()
            best[name] = min(best[name], (time.perf_counter() - start) / BURST)
    return best


def waits(layers: int = LAYERS, micro_batches: int = MICRO_BATCHES, config: ObserverConfig | None = None) -> list[int]:
    """Return how often the observer makes the host wait in each step of a window, and last, at the end of the window.

    The layers are small and run on the CPU, because these numbers do not depend on their sizes.
    """
    config = config or ObserverConfig()
    observer = CountedObserver(config)
    model = nn.Sequential(*(linear(32, 32, draw=noisy, seed=i) for i in range(layers)))
    quantization = quantize(model, recipe(BY_ROW), observer=observer)
    x, dy = (noisy(32, 32, seed=i, dtype=torch.bfloat16) for i in range(2))
    counts = [0]
    for step in range(config.window):
        for micro_batch in range(micro_batches):
            quantization.begin(step, micro_batch)
            for layer in quantization.layers:
                layer(x.clone().requires_grad_()).backward(dy)
        counts.append(observer.copies.count)
    observer.rows(config.window - 1, quantization.layers)
    counts.append(observer.copies.count)
    return [after - before for before, after in pairwise(counts)]


def main() -> int:
    if reason := stubbed.unavailable():
        print(f"host_times: nothing was measured: {reason}", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    with calls() as measured:
        times = seconds(measured)
    print(f"{processor_name()}; torch {torch.__version__}, Python {sys.version.split()[0]}\n")
    print(f"| call | µs | relative to {REFERENCE} |\n|---|---|---|")
    for name, each in times.items():
        print(f"| {name} | {1e6 * each:.1f} | {each / times[REFERENCE]:.1f} |")
    *steps, end = waits()
    print(
        f"\nWaits for the device by the observer of {LAYERS} layers with a mixture and {MICRO_BATCHES} micro-batches: "
        f"at most {max(steps)} in a step, and {end} at the end of a window of {len(steps)} steps."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
