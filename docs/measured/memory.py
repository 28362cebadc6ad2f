"""Measure the peak memory of `fewbits train`, and print it beside the estimate (results: docs/measured/memory.md).

    python docs/measured/memory.py 1 2                     # trials with 1 and with 2 ranks, of the nano models
    python docs/measured/memory.py 1 2 --models gpt2-124m  # another model

The peak of a process also contains the interpreter, torch and the data. Therefore the same is measured for a tiny model
with the same number of ranks, and the columns `measured`, `estimate` and `activations` are differences between the two
models. With several ranks, the largest peak of a rank counts.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from fewbits.experiments.config import load_trial
from fewbits.experiments.distributed.memory import Memory, estimate
from fewbits.sweeps.running.local import environments_at, meeting_place

MODELS = ("gpt2-nano", "llama2-nano", "nemotron-nano", "hybrid-nano")
RECIPES = ("bf16", "nvfp4")
COMMON = (
    *("training.steps=2", "training.batch=8", "training.micro_batch=4", "training.length=256", "data=synthetic"),
    *("data.size=65536", "data.repeat=1000", "evaluation.windows=4", "runtime.device=cpu"),
)
TINY = ("model=gpt2-nano", "model.layers=2", "model.width=64", "model.heads=2", "model.kv_heads=2", "model.ffn=64")
MB = 1e6


def peak(ranks: int, overrides: tuple[str, ...]) -> int:
    """Train a trial, and return the peak resident memory, in bytes, of the rank with the largest peak."""
    store = meeting_place()  # the TCP store where the ranks meet; it is closed when this reference is gone
    environments = environments_at(store, ranks) if ranks > 1 else [{}]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "fewbits.cli", "train", *overrides, f"runtime.runs={Path(folder) / 'runs'}"]
        ranks_of_trial = [
            subprocess.Popen(
                command,
                env=os.environ | environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for environment in environments
        ]
        ended = [os.wait4(process.pid, 0) for process in ranks_of_trial]
    if any(status for _, status, _ in ended):
        raise RuntimeError(f"training failed; to see the error, run {' '.join(command)}")
    return max(usage.ru_maxrss for _, _, usage in ended) * 1024  # Linux reports ru_maxrss in KiB


def estimated(ranks: int, overrides: tuple[str, ...]) -> Memory:
    return estimate(load_trial(overrides)[0], ranks, "cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the peak memory of training.")
    parser.add_argument("ranks", type=int, nargs="+")
    parser.add_argument("--models", nargs="+", default=MODELS)
    arguments = parser.parse_args()
    print(f"{'model':14} {'recipe':6} ranks  peak MB  measured MB  estimate MB  of which activations")
    for ranks in arguments.ranks:
        for recipe in RECIPES:
            tiny = (*TINY, *COMMON, f"recipe={recipe}")
            tiny_peak, tiny_estimate = peak(ranks, tiny), estimated(ranks, tiny)
            for model in arguments.models:
                overrides = (f"model={model}", *COMMON, f"recipe={recipe}")
                whole, memory = peak(ranks, overrides), estimated(ranks, overrides)
                more, expected = whole - tiny_peak, memory.total - tiny_estimate.total
                activations = memory.activations - tiny_estimate.activations
                print(
                    f"{model:14} {recipe:6} {ranks:5} {whole / MB:8,.0f} {more / MB:12,.0f} {expected / MB:12,.0f} "
                    f"{activations / MB:21,.0f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
