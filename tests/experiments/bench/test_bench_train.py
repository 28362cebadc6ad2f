"""Test `fewbits bench train`: it trains and measures every variant, and writes all results into the store.

No test here asserts a speed.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fewbits import cli
from fewbits.experiments.bench.train import LinearProducts, Step, peak_bytes
from fewbits.experiments.config import load_recipe
from fewbits.models.networks.registry import linear_parameters, model, parameters

SMALL = "--layers 1 --batch 1 --length 8 --steps 1 --device cpu"


def bench(arguments: str) -> int:
    return cli.main(["bench", "train", *arguments.split()])


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    runs = tmp_path_factory.mktemp("store") / "runs"
    arguments = (
        f"{SMALL} --model gpt2-nano,llama2-nano --recipes gaussws,diffq --optimizers adamw,adam-mini --store {runs}"
    )
    assert bench(arguments) == 0
    assert [path.name for path in (runs / "bench").iterdir()] == ["train-cpu.json"]
    found: dict[str, Any] = json.loads((runs / "bench" / "train-cpu.json").read_text())
    return found


def test_what_is_kept_has_every_model_optimizer_and_recipe_with_each_turn(kept: dict[str, Any]) -> None:
    assert [one["model"] for one in kept["models"]] == ["gpt2-nano", "llama2-nano"]
    for one in kept["models"]:
        places = [(row["optimizer"], row["variant"]) for row in one["rows"]]
        assert places == [(o, r) for o in ("adamw", "adam-mini") for r in ("bf16", "gaussws", "diffq")]
        assert all(len(row["seconds"]) == 1 and row["memory"] > 0 for row in one["rows"])
    assert {"git", "processor", "device", "load", "time", "command"} <= set(kept["machine"])


def test_adam_mini_takes_less_memory_and_a_sampled_weight_at_most_two_bytes_more(kept: dict[str, Any]) -> None:
    """Compare the peak memory of Adam-mini with that of AdamW, and of GaussWS and DiffQ with that of plain BF16.

    A sampler keeps a sampled weight in BF16. Plain BF16 keeps a BF16 cast of every weight, too; if these casts are part
    of its peak, samplers add less than two bytes per element.
    """
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


def test_memory_that_is_let_go_of_is_counted_no_longer() -> None:
    def work() -> None:
        for _ in range(5):
            torch.ones(1000)
        x = torch.ones(500)
        x.view(10, 50).add_(1)

    assert peak_bytes(work, [torch.ones(10)], torch.device("cpu")) == 4 * 1010


def test_once_measures_what_a_store_has_not_and_leaves_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = f"{SMALL} --model gpt2-nano --recipes gaussws --store {tmp_path} --once"
    assert bench(arguments) == 0
    file = tmp_path / "bench" / "train-cpu.json"
    first = file.read_bytes()
    assert bench(arguments) == 0
    assert f"{file} exists" in capsys.readouterr().out
    assert file.read_bytes() == first
    assert bench(arguments.replace(" --once", "")) == 0
    assert file.read_bytes() != first, "without --once it is measured again"
    assert bench(f"{SMALL} --once") == 2


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--optimizers sgd", "adamw"),
        ("--model gpt2-nano --layers 7", "gpt2-nano has only 6 blocks"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(f"{SMALL} {arguments}") == 2
    assert named in capsys.readouterr().err.splitlines()[-1]


def test_products_of_the_linear_layers_are_timed_beside_the_steps(kept: dict[str, Any]) -> None:
    assert all(one["gemm_milliseconds"] > 0 for one in kept["models"])


def test_the_products_are_three_of_every_linear_layer() -> None:
    config = model("llama2-nano")
    products = LinearProducts(config, 4, torch.device("cpu"))
    with FlopCounterMode(display=False) as counter:
        products()
    weights = linear_parameters(config) + config.vocab * config.width
    assert counter.get_total_flops() == 3 * 2 * 4 * weights
