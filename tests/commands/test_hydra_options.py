"""Test Hydra's own options in `fewbits train`: an option prints what Hydra prints, or names what to use instead."""

from pathlib import Path

import pytest
import yaml

from fewbits import cli
from tests.messages import names

RECIPE = "defaults: [fp8, _self_]\nkeep: {first: 0, last: 1}\n"


@pytest.fixture(autouse=True)
def _own_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mine/recipe/one.yaml", "two.yaml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(RECIPE)


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    capsys.readouterr()
    assert cli.main(["train", *argv]) == 0
    assert not (Path.cwd() / "runs").exists()
    return capsys.readouterr().out


def test_cfg_prints_the_composed_config(capsys: pytest.CaptureFixture[str]) -> None:
    config = yaml.safe_load(shown(capsys, "--cfg", "job", "recipe=nvfp4", "seed=3"))
    assert (config["recipe"]["name"], config["seed"]) == ("nvfp4", 3)
    assert config["recipe"]["operand"] == "${.element}:${.block}:${.scaling}"
    resolved = yaml.safe_load(shown(capsys, "recipe=nvfp4", "-c", "job", "--resolve", "-p", "recipe"))
    assert resolved["operand"] == "e2m1:1x16:nvfp4"
    assert yaml.safe_load(shown(capsys, "--cfg", "hydra"))["hydra"]["runtime"]["choices"]["recipe"] == "bf16"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--resolve",), "--cfg"),
        (("--cfg", "job", "recipe=nvfp5"), "nvfp4"),
        (("--config-name", "other"), "--config-name"),
        (("study=mor",), "fewbits sweep study=mor"),
        (("hydra/launcher=basic",), "runtime.runs=DIR"),
        (("hydra/sweeper=optuna",), "--multirun"),
        (("+hydra.job.mine=1",), "runtime.runs=DIR"),
    ],
)
def test_what_is_refused_is_one_line(argv: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", *argv]) == 2
    told = capsys.readouterr()
    assert names(told.err, message)
    assert told.err.count("\n") == 1
    assert told.out == ""
