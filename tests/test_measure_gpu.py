"""Test `make measure-gpu`: its parts are understood and run on a CPU, and passed parts are not run again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fewbits.commands import bench
from fewbits.experiments.config import load_trial
from tests import gpu_parts, measure_gpu
from tests.measure_gpu import FAILED, PAGE, PASSED, Part, measure

GPU, COMMIT = "NVIDIA Test", "c0ffee" * 7


def python(name: str, code: str, seconds: int = 60, lacks: str = "") -> Part:
    return Part(name, (sys.executable, "-c", code), seconds, lacks)


def run(folder: Path, *parts: Part, gpu: str = GPU, **how: float) -> list[str]:
    return [result.status for result in measure(parts, folder, gpu, COMMIT, **how)]  # type: ignore[arg-type]


def page(folder: Path) -> str:
    return (folder / PAGE).read_text()


def test_only_what_has_not_passed_on_this_gpu_runs_again(tmp_path: Path) -> None:
    folder, runs = tmp_path / "results", tmp_path / "runs"
    good = python("good", f"open({str(runs)!r}, 'a').write('g')")
    bad = python("bad", f"open({str(runs)!r}, 'a').write('b'); raise SystemExit(1)")
    assert run(folder, good, bad) == run(folder, good, bad) == [PASSED, FAILED]
    assert runs.read_text() == "gbb"
    run(folder, good, again=True)
    run(folder, good, gpu="another GPU")
    assert runs.read_text() == "gbbgg"
    rows = {line.split("|")[1].strip(): line for line in page(folder).splitlines() if line.startswith("|")}
    assert GPU in rows["bad"]
    assert "another GPU" in rows["good"]


def test_the_commands_of_all_parts_are_understood(tmp_path: Path) -> None:
    """Parse the arguments of fewbits and of gpu_parts.py; check that the files of tests exist."""
    for part in measure_gpu.parts(tmp_path, sanitizer="compute-sanitizer"):
        words = list(part.command)
        if "fewbits.cli" in words:
            command, *rest = words[words.index("fewbits.cli") + 1 :]
            if command == "train":
                load_trial(rest)
            elif rest[0] == "train":
                bench._train_options(rest[1:])
            elif not torch.cuda.is_available():
                with pytest.raises(ValueError, match="bench kernels: --device cuda"):
                    bench.kernels(rest[1:])
        elif "tests.gpu_parts" in words:
            gpu_parts.options_of(words[words.index("tests.gpu_parts") + 1 :])
        else:
            assert all((measure_gpu.ROOT / word).exists() for word in words if word.startswith("tests/")), words


TINY = (
    *("model.layers=2", "model.width=64", "model.heads=2", "model.kv_heads=2", "model.head_dim=32", "model.ffn=128"),
    *("data=synthetic", "data.size=65536", "training.batch=4", "training.micro_batch=2", "training.length=128"),
)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (("smoke", "--only", "128x128, both"), "1 classes: 0 differ; self-test: 0 rules fail"),
        (("profile", "--model", "gpt2-nano", "--recipes", "bf16,nvfp4", "--batch", "1", "--length", "32"), "gaps"),
        (("products",), "fp8, rows"),
        (("repeat", "{folder}", *TINY, "evaluation.windows=4", "recipe=nvfp4"), "resumed one: the same numbers"),
    ],
)
def test_parts_run_on_a_cpu(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], words: tuple[str, ...], shown: str
) -> None:
    part, *rest = (word.format(folder=tmp_path) for word in words)
    assert gpu_parts.main([part, *rest, "--device", "cpu"]) == 0
    assert shown in capfd.readouterr().out


@pytest.mark.skipif(bool(gpu_parts.lacks_titan()), reason="torchtitan is not installed")
def test_torchtitan_understands_the_arguments(tmp_path: Path) -> None:
    script = (
        "import sys; from tests.experiments.titan_on_cpu import ConfigManager; "
        "c = ConfigManager().parse_args(sys.argv[1:]); print(c.training.steps, c.checkpoint.enable, c.fewbits.recipe)"
    )
    command = [sys.executable, "-c", script, *gpu_parts.titan_arguments(tmp_path)]
    done = subprocess.run(command, cwd=measure_gpu.ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["10 False gaussws"], done.stderr[-2000:]
