"""Test `fewbits list`: every recipe with the quantizers of its six operands and its settings, and every model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fewbits.commands.list import main
from fewbits.experiments.config import load_recipe
from fewbits.experiments.config_files import names
from fewbits.models.networks.presets import MODELS
from fewbits.models.recipe import SLOTS


def listed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert main(["recipes", *arguments, "--json"]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return rows


def entry(capsys: pytest.CaptureFixture[str], name: str) -> list[str]:
    assert main(["recipes", name]) == 0
    return capsys.readouterr().out.splitlines()


def test_programs_get_every_recipe_with_what_it_is_about(capsys: pytest.CaptureFixture[str]) -> None:
    rows = listed(capsys)
    assert [row["name"] for row in rows] == names("recipe")
    assert all(row["about"] and tuple(row["operands"]) == SLOTS for row in rows)


@pytest.mark.parametrize("name", ["bf16", "mor/three-way", "nvfp4", "mxfp8"])
def test_operands_are_those_that_the_layers_get(capsys: pytest.CaptureFixture[str], name: str) -> None:
    ((row,), recipe) = (listed(capsys, name), load_recipe(name))
    assert row["operands"] == {slot: str(given.spec or "high") for slot, given in recipe.operands.items()}
    assert row["output"] == recipe.wgrad.output
    assert row["keep"]["last"] == recipe.keep.last


def test_settings_are_what_a_recipe_can_be_changed_by(capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = listed(capsys, "mor/block")
    assert row["settings"]["threshold"] == 0.045
    assert row["settings"]["block"] == "128x128"
    changed = load_recipe("mor/block", {"block": "64x64"})
    assert changed.operands["fprop.x"] == load_recipe("mor/block-64").operands["fprop.x"]
    assert "    threshold  0.045" in entry(capsys, "mor/block")
    (plain,) = listed(capsys, "bf16")
    assert plain["settings"] == {}


def test_an_unknown_recipe_is_told_with_the_nearest_first() -> None:
    with pytest.raises(ValueError, match=r"^no recipe 'nvfp'.*nvfp4, "):
        main(["recipes", "nvfp"])


@pytest.fixture
def write_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Return a function that adds a recipe to the user's own config folder, `./conf`."""
    folder = tmp_path / "conf" / "recipe"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)

    def write(name: str, text: str) -> None:
        (folder / f"{name}.yaml").write_text(text)

    return write


def test_a_recipe_that_includes_another_has_the_name_of_its_file(write_recipe: Callable[[str, str], None]) -> None:
    write_recipe("heir", "defaults: [fp8, _self_]\nkeep: {parts: [down]}\n")
    recipe = load_recipe("heir")
    assert (recipe.name, recipe.keep.parts) == ("heir", ("down",))
    assert load_recipe("heir", {"name": "other"}).name == "other"


def test_a_wrong_recipe_is_named_after_the_others(
    write_recipe: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    write_recipe("broken", "defaults: [fp8, _self_]\nkeep: {parts: [down, qk]}\n")
    with pytest.raises(ValueError, match=r"recipe broken: .*'qk'"):
        main(["recipes"])
    assert "nvfp4" in capsys.readouterr().out.splitlines()


def test_json_lists_every_model_with_its_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == list(MODELS)
    assert all(row.keys() == {"name", "parameters", "linear_parameters", "description"} for row in rows)
    nvfp4 = next(row for row in rows if row["name"] == "nvfp4-1.2b")
    assert (nvfp4["parameters"], nvfp4["linear_parameters"]) == (1_291_929_600, 754_974_720)


def test_it_lists_the_models_of_the_users_config_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf" / "model").mkdir(parents=True)
    mine = tmp_path / "conf" / "model" / "mine.yaml"
    mine.write_text("defaults: [gpt2-nano, _self_]\nname: mine\nlayers: 2\n")
    assert main(["models", "--json"]) == 0
    *known, own = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in known] == list(MODELS)
    assert own["name"] == "mine"
    assert own["description"].startswith("2 blocks of width 256")
    assert main(["models", str(mine)]) == 0
    assert "2 blocks of width 256" in capsys.readouterr().out
    mine.write_text("name: mine\nlayers: two\n")
    with pytest.raises(ValueError, match="model mine"):
        main(["models"])
    assert next(iter(MODELS)) in capsys.readouterr().out
