"""Test the single-file training script: the bits of `fewbits train`, two ranks, and a killed run that is resumed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import torch

from fewbits.experiments import training
from fewbits.experiments.config import load_trial
from fewbits.experiments.nano import train

ROOT = Path(train.__file__).parents[2]
SIZES = ("--steps", "4", "--batch", "4", "--micro_batch", "2", "--length", "32", "--windows", "4", "--warmup", "1")
MODELS = {
    "gpt2": (
        ["--model", "gpt2-nano", "--recipe", "nvfp4"],
        ["model=gpt2-nano", "recipe=nvfp4", "schedule=cosine", "schedule.final_ratio=0.1"],
    ),
    "llama2": (
        ["--model", "llama2-nano"],
        ["model=llama2-nano", "recipe=gaussws", "schedule=linear", "optimizer.decay_vectors=true"],
    ),
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"{number} squared is {number * number}.\n" for number in range(3000)))
    return path


@pytest.mark.parametrize("name", MODELS)
def test_the_script_has_the_bits_of_fewbits_train(name: str, text: Path, tmp_path: Path) -> None:
    arguments, overrides = MODELS[name]
    losses = train.main([*arguments, *SIZES, "--data", str(text), "--out", str(tmp_path / "out")])
    trial, runtime = load_trial(
        [
            *overrides,
            *("training.steps=4", "training.batch=4", "training.micro_batch=2", "training.length=32", "seed=1"),
            *("optimizer.lr=6e-4", "schedule.warmup_steps=1", "schedule.warmup_fraction=0", "evaluation.windows=4"),
            *("data=text", f"data.path={text}", "evaluation.every=4", f"runtime.runs={tmp_path / 'runs'}"),
        ]
    )
    folder, _ = training.run(trial, runtime)
    assert losses == pd.read_parquet(folder.path / "metrics.parquet")["loss"].tolist()
    weights = torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)["model"]
    saved = dict(folder.checkpoint().tensors())
    assert len(saved) > len(weights)
    for key, weight in weights.items():
        tied = key == "head.weight" and f"model.{key}" not in saved
        assert torch.equal(weight, saved["model.embed.weight" if tied else f"model.{key}"])


def test_the_script_that_is_killed_resumes_to_the_same_losses_on_two_ranks(text: Path, tmp_path: Path) -> None:
    main = ROOT / "experiments" / "nano" / "train.py"
    arguments = [*MODELS["gpt2"][0], *SIZES, "--data", str(text), "--steps", "40", "--save_every", "1"]

    def launch(out: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [*command, str(main), *arguments, "--out", str(tmp_path / out)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )

    def losses(output: str) -> list[str]:
        return [line.split("  validation")[0] for line in output.splitlines() if line.startswith("step ")]

    whole = launch("whole")
    expected = losses(whole.communicate(timeout=240)[0])
    assert len(expected) == 40
    killed = launch("killed")
    while not (tmp_path / "killed" / "checkpoint.pt").exists():
        assert killed.poll() is None
        time.sleep(0.02)
    subprocess.run(["pkill", "-KILL", "-f", str(tmp_path / "killed")], check=True)  # torchrun and both ranks
    killed.communicate()
    resumed = losses(launch("killed").communicate(timeout=240)[0])
    assert 0 < len(resumed) < 40
    assert resumed == expected[-len(resumed) :]
