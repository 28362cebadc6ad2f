"""Test `fewbits bench train` and `fewbits bench kernels --generators`: all variants are measured and stored.

No test here asserts a speed.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fewbits import cli
from fewbits.experiments.bench.train import Step
from fewbits.experiments.config import load_recipe
from fewbits.kernels.backends import build
from fewbits.models.networks.registry import model, parameters

SMALL = "train --layers 1 --batch 1 --length 8 --steps 1 --device cpu"
GENERATORS = "kernels --generators --shapes 64x96,32x32 --runs 2"


def bench(arguments: str) -> int:
    return cli.main(["bench", *arguments.split()])


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    runs = tmp_path_factory.mktemp("store") / "runs"
    variants = "--model gpt2-nano,llama2-nano --recipes gaussws,diffq --optimizers adamw,adam-mini"
    assert bench(f"{SMALL} {variants} --store {runs}") == 0
    assert [path.name for path in (runs / "bench").iterdir()] == ["train-cpu.json"]
    found: dict[str, Any] = json.loads((runs / "bench" / "train-cpu.json").read_text())
    return found


def test_what_is_kept_has_every_model_optimizer_and_recipe_with_each_turn(kept: dict[str, Any]) -> None:
    assert [one["model"] for one in kept["models"]] == ["gpt2-nano", "llama2-nano"]
    for one in kept["models"]:
        places = [(row["optimizer"], row["variant"]) for row in one["rows"]]
        assert places == [(o, r) for o in ("adamw", "adam-mini") for r in ("bf16", "gaussws", "diffq")]
        assert all(len(row["seconds"]) == 1 and row["memory"] > 0 for row in one["rows"])
        assert one["gemm_milliseconds"] > 0
    assert {"git", "processor", "device", "load", "time", "command"} <= set(kept["machine"])


def test_adam_mini_takes_less_memory_and_a_sampled_weight_at_most_two_bytes_more(kept: dict[str, Any]) -> None:
    # Bytes per element: the sampled weight in BF16, and 1/1024 of a bit width with its gradient and moments in FP32.
    sampled = 2 + 16 / 1024
    for one in kept["models"]:
        memory = {(row["optimizer"], row["variant"]): row["memory"] for row in one["rows"]}
        for variant in ("bf16", "gaussws", "diffq"):
            assert memory["adam-mini", variant] < memory["adamw", variant]
        for optimizer in ("adamw", "adam-mini"):
            more = (memory[optimizer, "gaussws"] - memory[optimizer, "bf16"]) / one["linear_parameters"]
            assert more < sampled + 0.005
            assert memory[optimizer, "diffq"] == pytest.approx(memory[optimizer, "gaussws"], rel=0.01)


def test_memory_is_exact_and_the_same_every_time() -> None:
    config = model("gpt2-nano")
    step = Step(config, load_recipe("gaussws"), "adamw", torch.zeros(1, 9, dtype=torch.long))
    step()
    first, second = step.memory(), step.memory()
    assert first == second > 4 * 4 * parameters(config), "weights, gradients and both moments in FP32"


def test_generators_are_measured_over_shapes_and_stored(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert bench(f"{GENERATORS} --store {tmp_path}") == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[-2:]] == ["64x96", "32x32"]
    answer = json.loads((tmp_path / "bench" / "generators-cpu.json").read_text())
    places = {(one["rows"], one["cols"], one["what"], one["arm"]) for one in answer["timed"]}
    arms = {"bitwise", "torch"} | ({"box-muller"} if build.compiler() else set())
    assert {arm for rows, _, what, arm in places if (rows, what) == (64, "generator")} == arms
    assert {arm for rows, _, what, arm in places if (rows, what) == (32, "forward")} == {"bitwise", "torch"}
    assert all(len(one["seconds"]) == 2 and min(one["seconds"]) > 0 for one in answer["timed"])
    assert {"git", "processor", "device", "load", "time", "command"} <= set(answer["machine"])


@pytest.mark.parametrize(
    ("command", "name"),
    [(f"{SMALL} --model gpt2-nano --recipes gaussws", "train-cpu.json"), (GENERATORS, "generators-cpu.json")],
)
def test_once_measures_what_a_store_has_not_and_leaves_the_rest(
    command: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bench" / name
    assert bench(f"{command} --store {tmp_path} --once") == 0
    first = file.read_bytes()
    assert bench(f"{command} --store {tmp_path} --once") == 0
    assert f"{file} exists" in capsys.readouterr().out
    assert file.read_bytes() == first
    assert bench(f"{command} --store {tmp_path}") == 0
    assert file.read_bytes() != first, "without --once it is measured again"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (f"{SMALL} --once", "--once requires --store"),
        (f"{SMALL} --model gpt2-nano --layers 7", "gpt2-nano has only 6 blocks"),
        (f"{SMALL} --model gpt2-nano --batch 1,2", "--batch has 2 numbers; expected 1"),
        ("kernels --generators --shapes 64", "shapes such as 2048x512"),
        ("kernels --generators --shapes 33x64", "multiples of 32"),
        ("kernels --generators --once", "--once requires --store"),
        ("kernels --generators --device cuda", "--device cuda"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(arguments) == 2
    *before, error = capsys.readouterr().err.splitlines()
    assert named in error
    assert not before or arguments.startswith("train")  # which reports its progress
