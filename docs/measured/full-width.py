"""Train two steps of every published model with each paper's recipe, and check that a resumed step gives the same bits.

    python docs/measured/full-width.py RUNS [MODEL ...] > full-width.txt

The second step is trained again from the checkpoint of the first step, in a new process. The script prints a row for
each model and recipe. It needs up to 20 GiB of memory, and disk space for two checkpoints of a model (twelve bytes per
parameter each). RUNS: a folder, which is deleted before each run. The models have their full width but fewer blocks.
"""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

RECIPES = ("mor/block", "nvfp4", "gaussws")
ONE_OF_EACH = ("model.layers=3", "model.pattern=M*-")  # one block of each type: Mamba, attention, MLP
BYTES = "model.vocab=256"
MODELS = {  # model → overrides that make it small enough
    "gpt2-124m": (),
    "llama2-134m": (),
    "llama2-1b": ("model.layers=2",),
    "llama2-3b": ("model.layers=2", BYTES),
    "nvfp4-1.2b": ("model.layers=2", BYTES),
    "nemotron3-8b": ("model.layers=2", BYTES),
    "hybrid-8b": (*ONE_OF_EACH, BYTES),
    "hybrid-12b": (*ONE_OF_EACH, BYTES),
    "llama2-70b-4l": ("model.layers=1", BYTES),  # one block only, since two blocks with AdamW's states take 27 GB
}
SIZE = (
    "training.steps=2",
    "training.batch=4",
    "training.micro_batch=2",
    "training.length=128",
    "schedule=constant",
    "optimizer.lr=1e-5",
)
REST = ("training.checkpoint_every=1", "evaluation.windows=2", "observer.enabled=false", "runtime.keep_checkpoints=2")


def command(model: str, changes: tuple[str, ...], recipe: str, runs: Path) -> list[str]:
    overrides = (
        f"model={model}",
        *changes,
        f"recipe={recipe}",
        *SIZE,
        *REST,
        "runtime.threads=2",
        f"runtime.runs={runs}",
    )
    # With at most three blocks, a model is too small to keep blocks in high precision, as the recipe does by default.
    kept = ("recipe.keep.last=0",) if recipe == "nvfp4" and changes else ()
    return [sys.executable, "-m", "fewbits.cli", "train", *overrides, *kept, "schedule.warmup_fraction=0"]


def outcome(run: Path) -> tuple[str, bytes, dict[str, object]]:
    state = json.loads((run / "checkpoints" / "step-00000002" / "state.json").read_text())
    return state["sha256"], (run / "metrics.parquet").read_bytes(), json.loads((run / "result.json").read_text())


def forget_the_second_step(run: Path) -> None:
    shutil.rmtree(run / "checkpoints" / "step-00000002")
    for name in ("result.json", "metrics.parquet", "numerics.parquet", "timing.parquet"):
        (run / name).unlink()


def main() -> None:
    runs, chosen = Path(sys.argv[1]), sys.argv[2:] or MODELS
    print(f"{'model':16}{'changed':34}{'recipe':12}{'loss':>9}{'seconds':>9}  second step resumed")
    for model in chosen:
        changes = MODELS[model]
        for recipe in RECIPES:
            shutil.rmtree(runs, ignore_errors=True)
            arguments = command(model, changes, recipe, runs)
            began = time.monotonic()
            subprocess.run(arguments, check=True, capture_output=True)
            seconds = time.monotonic() - began
            (run,) = runs.iterdir()
            straight = outcome(run)
            forget_the_second_step(run)
            subprocess.run(arguments, check=True, capture_output=True)
            bits = "the same bits" if outcome(run) == straight else "DIFFERS"
            changed = ", ".join(change.partition(".")[2] for change in changes) or "-"
            print(f"{model:16}{changed:34}{recipe:12}{straight[2]['loss']:9.4f}{seconds:9.0f}  {bits}", flush=True)
    shutil.rmtree(runs, ignore_errors=True)


main()
