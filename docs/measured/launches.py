"""Count what a GPU runs in a micro-batch of training, and estimate its time (results: docs/measured/cuda-kernels.md).

    python docs/measured/launches.py                                # the six recipes of RECIPES
    python docs/measured/launches.py --recipes bf16 nvfp4 --detail  # also the operators that take the most time

No GPU is needed: the model's forward and backward pass run on torch's meta device. The second micro-batch of a step is
counted, so casts and quantizations of weights, which happen once in a step, are not included; neither is the optimizer.

operators   calls of torch's operators that launch a kernel (views and allocations do not), and launches of our kernels
kernels     the launches of our kernels among them
ms          the sum over operators of max(bytes / 2.8 TB/s, FLOPs / 600 TFLOP/s, 2.5 µs). The bytes of an operator are
            those of its arguments and results; each further launch of ours reads the largest argument again, and
            cross entropy reads the logits twice. FP8 products run at 1,200 TFLOP/s, attention at 300. The kernels run
            one after the other, and arithmetic outside of products takes no time, so this is not a measurement.
"""

import argparse
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from operator import itemgetter
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from fewbits.experiments.config import load_recipe
from fewbits.kernels.backends.choice import replaced_by
from fewbits.kernels.backends.gpu.device import Device
from fewbits.kernels.backends.gpu.warm import Recorder
from fewbits.kernels.operators import _DIRECT
from fewbits.models.networks.decoder import Decoder
from fewbits.models.networks.registry import model
from fewbits.models.observer import Observer, ObserverConfig
from fewbits.models.quantize import quantize
from fewbits.models.recipe import Recipe

# A recipe's name in the table: its name and settings; None: no recipe.
RECIPES: Final[dict[str, tuple[str, dict[str, str]] | None]] = {
    "bf16": None,
    "nvfp4": ("nvfp4", {}),
    "mor/block": ("mor/block", {}),
    "mor/tensor": ("mor/tensor", {}),
    "gaussws": ("gaussws", {}),
    "fp8, executed": ("fp8", {"block": "channel", "weights": "channel", "execute": "fp8"}),
}
BYTES, FLOPS, LAUNCH = 2.8e12, 600e12, 2.5e-6  # bytes and FLOPs per second; seconds
FREE: Final = ("empty", "new_empty", "is_same_size", "_unsafe_view", "lift_fresh")  # also `empty_like` and so on


class Counts(TorchDispatchMode):
    """Count the operators on tensors of one kind of device inside a `with` block, and estimate their seconds."""

    def __init__(self, device: str = "meta") -> None:
        super().__init__()
        self.device = device
        self.operators: Counter[str] = Counter()
        self.kernels: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        space, name = func._schema.name.split("::")
        tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor)]
        if space == "fewbits":
            self._add_ours(func, name, args, tensors)
        elif any(x.device.type == self.device for x in tensors) and not (func.is_view or name.startswith(FREE)):
            self.add(name, tensors)
        return result

    def add(self, name: str, tensors: list[Tensor], seconds: float = 0.0) -> None:
        self.operators[name] += 1
        self.seconds[name] += max(size(tensors) / BYTES, flops(name, tensors) / FLOPS, seconds, LAUNCH)

    def _add_ours(self, func: Any, name: str, args: tuple[Any, ...], tensors: list[Tensor]) -> None:
        if name == "observe":
            kernels, others = ["observe"], Counts()
        else:
            kernels, others = launches(func, key_of(list(args)))
        largest = max(size([x]) for x in args if isinstance(x, Tensor))
        self.operators.update(others.operators)
        for other, seconds in others.seconds.items():
            self.seconds[other] += seconds
        self.operators[name] += len(kernels)
        self.kernels.update(kernels)
        reads = max(len(kernels) - kernels.count("decide") - 1, 0) + (name == "cross_entropy")
        self.seconds[name] += max((size(tensors) + reads * largest) / BYTES, len(kernels) * LAUNCH)


def key_of(x: Any) -> Any:
    """Return a hashable value from which `argument` makes an argument that leads to the same launches."""
    if isinstance(x, list):
        return tuple(map(key_of, x))
    if isinstance(x, Tensor):
        return torch.Size(x.shape), x.dtype
    return min(x, 9) if isinstance(x, int) and not isinstance(x, bool) else x  # launches do not depend on seeds


def argument(key: Any) -> Any:
    if not isinstance(key, tuple):
        return key
    return torch.empty(key[0], dtype=key[1]) if key and isinstance(key[0], torch.Size) else list(map(argument, key))


def size(tensors: list[Tensor]) -> int:
    return sum(x.numel() * x.itemsize for x in tensors)


def flops(name: str, tensors: list[Tensor]) -> float:
    """Return FLOPs, scaled to the rate of BF16 products; 0 for operators that memory limits."""
    if name in ("mm", "addmm", "_scaled_mm"):
        *_, a, b = (x for x in tensors[: 3 if name == "addmm" else 2])
        return 2.0 * a.shape[0] * a.shape[1] * b.shape[1] * (0.5 if name == "_scaled_mm" else 1)
    if name.startswith("_scaled_dot_product_flash_attention"):
        batch, heads, length, width = tensors[0].shape
        passes = 2.5 if name.endswith("backward") else 1.0
        return 2 * passes * 2.0 * batch * heads * length**2 * width  # the first 2: half the rate of other products
    return 0.0


@cache
def launches(func: Any, key: tuple[Any, ...]) -> tuple[list[str], Counts]:
    """Return the kernels that one of our operators launches, and the counts of torch's operators that it calls.

    The kernels are recorded and not run, on tensors of the CPU.
    """
    with _disable_current_modes():
        arguments = argument(key)
        recorder, inner = Recorder(), Counts("cpu")
        with replaced_by(Device(recorder)), inner, torch.no_grad():
            _DIRECT[func.overloadpacket](*arguments)  # a call of `func` would not be seen below the first dispatch
    return [variant.kernel for variant in recorder.variants], inner


@contextmanager
def as_on_a_gpu(counts: Counts) -> Iterator[None]:
    """Replace what torch computes otherwise on the meta device than on a GPU: attention and products with FP32 sums."""

    def attention(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        result: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]
        return result

    def product(a: Tensor, b: Tensor) -> Tensor:
        y = torch.empty(a.shape[0], b.shape[1], device="meta")
        counts.add("mm", [a, b, y])
        return y

    with (
        patch("torch.nn.functional.scaled_dot_product_attention", attention),
        patch("fewbits.models.quantized_linear.matmul_fp32", product),
        patch("torch.is_autocast_enabled", lambda *_: False),  # it refuses the meta device
    ):
        yield


def count(name: str, recipe: Recipe | None, batch: int, length: int) -> Counts:
    with torch.device("meta"):
        network = Decoder(model(name))
        tokens = torch.zeros(batch, length, dtype=torch.int64)
    quantization, observer = None, Observer(ObserverConfig(every=0, gradients_every=0))
    if recipe is not None:
        quantization = quantize(network, recipe, observer=observer)
    network.train()
    for micro_batch in range(2):
        with as_on_a_gpu(counts := Counts()), counts:
            if quantization is not None:
                quantization.begin(1, micro_batch)
            loss = network.loss(tokens, tokens)
            (loss / 40).backward()  # the penalty of samplers is computed once in a step
            if quantization is not None:
                observer.flush()
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description="Count the operators and kernels of a micro-batch on a GPU.")
    parser.add_argument("--model", default="gpt2-124m")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES), metavar="NAME")
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--detail", action="store_true", help="also list the operators that take the most time")
    options = parser.parse_args()
    print(f"{options.model}, {options.batch} x {options.length} tokens\n\n| recipe | operators | kernels | ms |")
    print("|---|---|---|---|")
    for name in options.recipes:
        entry = RECIPES[name]
        counts = count(options.model, entry and load_recipe(*entry), options.batch, options.length)
        print(f"| {name} | {counts.operators.total():,} | {counts.kernels.total():,} |", end=" ")
        print(f"{1e3 * sum(counts.seconds.values()):.1f} |", flush=True)
        if options.detail:
            for operator, seconds in sorted(counts.seconds.items(), key=itemgetter(1), reverse=True)[:24]:
                print(f"    {operator:48} {counts.operators[operator]:5} {1e3 * seconds:7.2f} ms")
            print(f"    {dict(counts.kernels)}")


if __name__ == "__main__":
    main()
