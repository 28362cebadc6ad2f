"""Test `fewbits train`: its progress line and result, and the exit status and message of each way in which it ends."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from fewbits import cli
from fewbits.experiments.config import load_trial
from fewbits.experiments.storage.run_folder import plain, saved_trial
from fewbits.experiments.trial import Trial
from fewbits.kernels.backends.gpu import cuda
from tests.experiments.trial_inputs import (
    MOR,
    TINY,
    ended,
    ending,
    only_run,
    overrides,
    result_of,
    started,
    train_until,
)
from tests.messages import names


def test_a_trial_is_one_command(cache: Path, tmp_path: Path) -> None:
    """Check the output of `fewbits train` in a new process, and that it does not load torch's compiler."""
    python = [sys.executable, "-X", "importtime"]
    command = [*python, "-m", "fewbits.cli", "train", *MOR]
    tiny = [f"{key}={value}" for key, value in TINY.items() if key.startswith("model.")]
    tiny += ["training.steps=40", "training.batch=2", "training.micro_batch=2", "training.length=128"]
    rest = ["evaluation.every=20", "evaluation.windows=2", "data.size=65536", f"runtime.cache={cache}"]
    done = subprocess.run([*command, *tiny, *rest], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    folder = only_run(tmp_path / "runs")
    path, summary = done.stdout.splitlines()
    assert tmp_path / path == folder
    assert saved_trial(folder) == load_trial([*MOR, *tiny, *rest])[0]
    assert re.fullmatch(
        r"done at step 40, loss \d\.\d{4}, validation \d\.\d{4}, out of domain \d\.\d{4}, "
        r"BF16 in \d+\.\d % of decisions",
        summary,
    )
    lines = done.stderr.splitlines()
    loaded = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    assert "torch" in loaded
    assert not loaded & {"torch._dynamo", "torch._inductor", "sympy"}
    lines = [line for line in lines if not line.startswith("import time:")]
    assert 15 <= len(lines) <= 21
    pattern = r"step \d+/40  loss \d\.\d{4}(  validation \d\.\d{4})?  [\d,]+ tokens/s  \d+:\d\d left"
    assert all(re.fullmatch(pattern, line) for line in lines)
    assert lines[-1].startswith("step 40/40  loss ")
    assert "validation" in lines[-1]
    assert lines[-1].endswith("0:00 left")


def test_the_same_words_again_show_the_result(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["train", *overrides(cache, tmp_path, "training.steps=3")]
    assert cli.main(argv) == 0
    first = capsys.readouterr()
    assert cli.main(argv) == 0
    again = capsys.readouterr()
    assert again.out == first.out
    assert names(again.err, "done")
    assert "step" not in again.err


def test_a_trial_that_diverges_has_ended_well(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", *overrides(cache, tmp_path, "optimizer.lr=1e30", "optimizer.clip=null")]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == "diverged at step 1"
    assert "loss nan" in err
    assert result_of(only_run(tmp_path))["status"] == "diverged"


@pytest.mark.parametrize("size", ["model.vocab=1000000000000", "training.micro_batch=4000000000000"])
def test_too_little_memory_is_one_line(
    size: str, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", *overrides(cache, tmp_path, "training.batch=4000000000000", size)]) == 1
    output = capsys.readouterr().err
    assert output.startswith("fewbits: out of memory, reduce training.micro_batch or choose a smaller model: ")
    assert output.count("\n") == 1


def test_a_warning_is_one_line(cache: Path, tmp_path: Path) -> None:
    """The command runs in another process, because pytest captures the warnings of its own process."""
    train_until(8, cache, tmp_path / "runs")
    newest = only_run(tmp_path / "runs") / "checkpoints" / "step-00000006" / "state.json"
    newest.write_bytes(b"")
    output = tmp_path / "output"
    with ending(started(["train", *overrides(cache, tmp_path / "runs")], output)) as process:
        assert ended(process) == 0
    (message,) = (line for line in output.read_text().splitlines() if line.startswith("fewbits:"))
    assert "damaged checkpoint skipped" in message
    assert "step 3/12" not in output.read_text()
    assert "resuming from step 3\nstep 4/12" in output.read_text()


def test_config_prints_what_a_trial_resolves_to_and_trains_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    overrides = ["recipe=nvfp4", "recipe.sampler.parts=[od]", "model=hybrid-nano", "seed=3", "runtime.keep_every=7"]
    assert cli.main(["train", "--config", *overrides]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    trial, runtime = load_trial(overrides)
    assert printed.pop("runtime") == plain(dataclasses.asdict(runtime))
    assert Trial.from_dict(printed) == trial
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_cuda_device_the_reason_is_given(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", *overrides(cache, tmp_path, "runtime.device=cuda")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"fewbits: runtime.device cuda: {cuda.complaint()}; ")


def test_the_store_is_an_option_or_an_override(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = overrides(cache, tmp_path / "elsewhere", *MOR)
    store = [word for word in words if not word.startswith("runtime.runs=")]
    assert cli.main(["train", *store, "--runs", str(tmp_path / "it's here"), "--config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["runtime"]["runs"] == str(tmp_path / "it's here")


@pytest.mark.parametrize("scale", [5e-324, 2.0**127])
def test_a_loss_scale_without_a_float32_reciprocal_is_refused(
    scale: float, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = overrides(
        cache, tmp_path, "precision=fp16", "precision.loss_scaling=static", f"precision.loss_scale={scale}"
    )
    assert cli.main(["train", *words]) == 2
    assert "precision.loss_scale" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["model=moe-nano", "recipe=nvfp4"], "blocks.0.ffn.experts.0-3.up"),
        (["model=hybrid-nano", "recipe=nemotron-3"], "[2]: "),
        (["model=llama2-nano", "recipe=fp4-dge-occ"], "[1]: "),
    ],
)
def test_layers_are_shown_with_their_shares(words: list[str], shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", *words, "--layers"]) == 0
    out = capsys.readouterr().out
    assert shown in out
    shares = [int(share) for share in re.findall(r"^\S+: (\d+)% of the FLOPs", out, re.MULTILINE)]
    assert 98 <= sum(shares) <= 102
