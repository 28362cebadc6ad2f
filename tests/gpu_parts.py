"""Run one of the parts of `make measure-gpu` that no command of fewbits runs; with `--device cpu`, tests run them, too.

    python -m tests.gpu_parts smoke                   one case of each kernel class, and the self-test
    python -m tests.gpu_parts profile --recipes nvfp4 where a step's time goes: kernels, gaps, the host
    python -m tests.gpu_parts products                TFLOP/s of BF16 and FP8 products
    python -m tests.gpu_parts repeat FOLDER           two runs of a trial and a resumed one: the same bits?
    python -m tests.gpu_parts titan FOLDER            ten steps with torchtitan

The exit status is 1 if results differ or a part fails.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import pandas as pd
import torch
from torch import Tensor
from torch._C._autograd import DeviceType
from torch.utils._pytree import tree_leaves

from fewbits.common.terminal import print_table
from fewbits.experiments.bench.measure import seconds
from fewbits.experiments.bench.train import Step
from fewbits.experiments.config import load_recipe
from fewbits.kernels import selftest
from fewbits.kernels.backends import reference
from fewbits.kernels.backends.gpu import cuda, tiles
from fewbits.kernels.backends.gpu.device import Device
from fewbits.kernels.backends.gpu.warm import Recorder, compile_all
from fewbits.models.networks.registry import model as config_of
from tests.kernels.backends.gpu.emulated import emulated_device
from tests.kernels.backends.gpu.test_cuda_kernels_fit import CLASSES, input_of
from tests.kernels.inputs import assert_same

ROOT = Path(__file__).resolve().parents[1]
LONGEST = 12  # the number of kernels in the table of the longest
PRODUCTS = ((8192, 2048, 2048), (8192, 5632, 2048), (8192, 2048, 5632), (8192, 8192, 8192))  # M, N, K
TRIAL: tuple[str, ...] = (
    "model=gpt2-124m",
    "recipe=nvfp4",
    "data=synthetic",
    "training.batch=24",
    "training.micro_batch=12",
)
TRIAL += ("training.length=1024", "evaluation.windows=12")
STEPS = ("training.steps=8", "training.checkpoint_every=3", "evaluation.every=8")


def smoke(device: str, only: str = "") -> int:
    """Run the classes of kernels whose names contain `only`, and compare all results with the reference's."""
    tiles.FEWEST_STRIPS = 1  # so that narrow matrices are quantized in strips, too
    names = [name for name in CLASSES if only in name]
    if device == "cuda":
        recorder = Recorder()
        for name in names:
            CLASSES[name][0](Device(recorder), input_of(name, 264))
        count = compile_all(recorder.variants, cuda.architecture_of(torch.cuda.current_device()))
        print(f"{count} kernels are compiled", flush=True)
    backend = cuda.BACKEND if device == "cuda" else emulated_device()[0]
    differ = []
    for name in names:
        ask, x = CLASSES[name][0], input_of(name, 264)
        try:
            got, want = ask(backend, x.to(device)), ask(reference, x)  # type: ignore[arg-type]
            for a, b in zip(*map(tree_leaves, (got, want)), strict=True):
                assert_same(a.cpu(), b, name)
        except Exception as error:  # an error of the driver is a result, too
            differ.append(name)
            print(f"{name}: {' '.join(str(error).split())[:200]}", flush=True)
    failed = [rule for rule, passed, _ in selftest.run(device) if not passed]
    print(*failed, f"{len(names)} classes: {len(differ)} differ; self-test: {len(failed)} rules fail", sep="\n")
    return int(bool(differ or failed))


def profile(device: str, model: str, recipes: Sequence[str], batch: int, length: int) -> int:
    """Print where the time of a training step goes.

    step: the median of five steps. busy: at least one kernel runs. gaps: step − busy. host: until all work is queued.
    On a CPU, operators are counted in place of kernels.
    """
    config = config_of(model)
    tokens = torch.randint(0, config.vocab, (batch, length + 1), generator=torch.Generator().manual_seed(0)).to(device)
    rows, longest = [], []
    for name in recipes:
        step = Step(config, None if name == "bf16" else load_recipe(name), "adamw", tokens)
        for _ in range(3):
            step()
        times = [_queued(step, device) for _ in range(5)]
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities[: 1 + (device == "cuda")]) as profiler:
            _queued(step, device)
        events = [e for e in profiler.events() if _runs_on(e, device)]
        busy = _covered([(e.time_range.start, e.time_range.end) for e in events]) / 1e3
        host, whole = (1e3 * median(kind) for kind in zip(*times, strict=True))
        numbers = (whole, busy, whole - busy, host)
        rows.append((name, str(len(events)), *(f"{number:.1f}" for number in numbers)))
        spent: dict[str, list[float]] = {}
        for e in events:
            spent.setdefault(e.name, []).append((e.time_range.end - e.time_range.start) / 1e3)
        largest = sorted(spent.items(), key=lambda pair: -sum(pair[1]))[:LONGEST]
        longest += [(name, kernel[:70], str(len(ms)), f"{sum(ms):.2f}") for kernel, ms in largest]
        del step
    print(f"{model}, {batch} x {length} tokens; kernels named `run` are ours")
    print_table(
        ("recipe", "kernels", "ms", "busy", "gaps", "host"), rows, right=("kernels", "ms", "busy", "gaps", "host")
    )
    print_table(("recipe", "kernel", "calls", "ms"), longest, right=("calls", "ms"))
    return 0


def _queued(step: Callable[[], object], device: str) -> tuple[float, float]:
    """Run a step; return the seconds until the host has queued all work, and until the work is done."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    queued = time.perf_counter() - start
    if device == "cuda":
        torch.cuda.synchronize()
    return queued, time.perf_counter() - start


def _runs_on(event: torch.autograd.profiler_util.FunctionEvent, device: str) -> bool:
    if device == "cuda":
        return event.device_type == DeviceType.CUDA
    return event.cpu_parent is None and event.name.startswith(("aten::", "fewbits::"))


def _covered(intervals: list[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def products(device: str, scale: int = 1) -> int:
    """Print TFLOP/s of products in BF16 and, with one scale or one per row and column, in FP8; scale: divides sizes."""
    rows, wrong = [], 0
    for sizes in PRODUCTS:
        m, n, k = (size // scale for size in sizes)
        a, b = (torch.randn(size, k, device=device).bfloat16() for size in (m, n))
        codes, one = (a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()), torch.ones((), device=device)
        of_rows, of_columns = torch.ones(m, 1, device=device), torch.ones(1, n, device=device)
        calls: dict[str, Callable[[], Tensor]] = {
            "bf16": partial(torch.matmul, a, b.t()),
            "fp8": partial(_fp8, codes[0], codes[1], one, one),
            "fp8, rows": partial(_fp8, codes[0], codes[1], of_rows, of_columns),
        }
        want, cells = codes[0].float() @ codes[1].float(), []
        for name, call in calls.items():
            try:
                error = float((call().float() - want).abs().max() / want.abs().max())
                times = [seconds(call, device) for _ in range(10)]
                cells.append(f"{2 * m * n * k / median(times) / 1e12:.1f}")
                wrong += name != "bf16" and error > 0.01
            except RuntimeError as missing:
                cells.append(f"none ({str(missing).splitlines()[0][:40]})")
        rows.append((f"{m} x {n} x {k}", *cells))
    print_table(("TFLOP/s of M x N x K", *calls), rows, right=tuple(calls))
    return int(wrong > 0)


def _fp8(a: Tensor, b: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return torch._scaled_mm(a, b, left, right, out_dtype=torch.bfloat16, use_fast_accum=False)


def repeat(device: str, folder: Path, overrides: Sequence[str]) -> int:
    """Train a trial twice, and a third time with an interruption after its first checkpoint; compare all numbers."""
    commands = {}
    for name in ("first", "second", "resumed"):
        store = [f"runtime.device={device}", f"runtime.runs={folder / name}"]
        commands[name] = [sys.executable, "-m", "fewbits.cli", "train", *overrides, *STEPS, *store]
    stopped = subprocess.Popen(commands["resumed"], cwd=ROOT, stdout=subprocess.DEVNULL)
    while stopped.poll() is None and not list(folder.glob("resumed/*/checkpoints/*")):
        time.sleep(0.02)
    stopped.send_signal(signal.SIGINT)
    stopped.wait()
    if list(folder.glob("resumed/*/result.json")):
        print("the trial ended before it could be interrupted")
        return 1
    for command in commands.values():
        subprocess.run(command, cwd=ROOT, check=True)
    first, *others = (next(folder.glob(f"{name}/*/result.json")).parent for name in commands)
    differ = [f"{run.parent.name}: {what}" for run in others for what in _differences(first, run)]
    print(*differ, f"two runs and a resumed one: {'other' if differ else 'the same'} numbers and weights", sep="\n")
    return int(bool(differ))


def _differences(first: Path, other: Path) -> list[str]:
    """Return which of the numbers and of the last checkpoint's tensors differ between two finished runs of a trial."""
    files = ("metrics.parquet", "numerics.parquet")
    differ = [file for file in files if not pd.read_parquet(first / file).equals(pd.read_parquet(other / file))]
    tensors = sorted(path.relative_to(first) for path in first.rglob("checkpoints/**/*.safetensors"))
    changed = [str(path) for path in tensors if (first / path).read_bytes() != (other / path).read_bytes()]
    return [*differ, *changed, *([] if tensors else ["no checkpoint"])]


def titan_arguments(folder: Path) -> list[str]:
    """Return torchtitan's arguments for ten steps of GaussWS on Llama 2 134M; write tokenizer and data into `folder`.

    The data are texts of this repository, one token per byte.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    for name in ("tokenizer", "data"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    alphabet = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    texts = [(ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md", "LICENSE", "Makefile")]
    (folder / "data" / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    settings = {
        "job.config_file": "infra/torchtitan/llama2-134m-gaussws.toml",
        "job.dump_folder": folder / "out",
        "model.hf_assets_path": folder / "tokenizer",
        "training.dataset": "c4_test",
        "training.dataset_path": folder / "data",
        "training.steps": 10,
        "training.global_batch_size": -1,
        "metrics.log_freq": 1,
    }
    words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    return [*words, "--checkpoint.no-enable"]


def titan(folder: Path) -> int:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=1", "-m", "torchtitan.train"]
    return subprocess.run([*command, *titan_arguments(folder)], cwd=ROOT).returncode


def lacks_titan() -> str:
    return "" if importlib.util.find_spec("torchtitan") else "torchtitan is not installed: pip install 'fewbits[titan]'"


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_parts", description=__doc__)
    parser.add_argument("part", choices=("smoke", "profile", "products", "repeat", "titan"))
    parser.add_argument("folder", nargs="?", type=Path, help="repeat and titan: the folder to write into")
    parser.add_argument("overrides", nargs="*", help="repeat: the overrides of the trial")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--only", default="", help="smoke: only classes whose names contain this text")
    parser.add_argument("--model", default="gpt2-124m")
    parser.add_argument("--recipes", default="bf16,nvfp4,mor/block,gaussws")
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--length", type=int, default=1024)
    options = parser.parse_args(arguments)
    if options.folder is None and options.part in ("repeat", "titan"):
        parser.error(f"{options.part} needs a folder")
    return options


def main(arguments: Sequence[str]) -> int:
    options = options_of(arguments)
    device = options.device
    runs: dict[str, Callable[[], int]] = {
        "smoke": lambda: smoke(device, options.only),
        "profile": lambda: profile(device, options.model, options.recipes.split(","), options.batch, options.length),
        "products": lambda: products(device, 1 if device == "cuda" else 64),
        "repeat": lambda: repeat(device, options.folder.resolve(), options.overrides or TRIAL),
        "titan": lambda: titan(options.folder.resolve()),
    }
    return runs[options.part]()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
