"""Test the user's own configs: in ./conf, in folders on Hydra's search path, and in single files."""

from collections.abc import Callable
from pathlib import Path

import pytest

from fewbits import cli
from fewbits.experiments.config import load_recipe, load_trial
from fewbits.experiments.config_files import CONF, folders, names
from tests.messages import naming

RECIPE = "level: 4\nfprop: {{x: 'e4m3:1x128:amax'}}\nkeep: {{last: {last}}}\n"
Write = Callable[[str, str], Path]
MODEL = "defaults: [nemotron-nano, _self_]\nname: small\nwidth: 64\n"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Return a function that writes a text to a file in the working directory, which is empty at first."""
    monkeypatch.chdir(tmp_path)

    def write(name: str, text: str) -> Path:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    return write


@pytest.mark.parametrize(
    ("folder", "overrides"),
    [
        (CONF, []),
        ("mine", ["hydra.searchpath=[mine]"]),
        ("mine", ["hydra.searchpath=['file://mine']"]),
        ("mine", ["hydra.searchpath=[elsewhere,mine]"]),
    ],
)
def test_a_folder_offers_its_recipes_and_models(folder: str, overrides: list[str], write: Write) -> None:
    write(f"{folder}/recipe/ours/r.yaml", f"# @package recipe\n{RECIPE.format(last=1)}")
    write(f"{folder}/model/small.yaml", MODEL)
    write("elsewhere/data/unused.yaml", "kind: python\n")
    trial, _ = load_trial([*overrides, "recipe=ours/r", "model=small", "seed=3"])
    assert (trial.recipe.name, trial.recipe.keep.last) == ("ours/r", 1)
    assert (trial.model.name, trial.model.width, trial.seed) == ("small", 64, 3)
    assert "ours/r" in names("recipe", folders(overrides))
    assert "ours/r" not in names("recipe")


def test_an_edit_of_a_file_counts_at_once(write: Write) -> None:
    """After an edit of its file, a recipe is read again: neither memory nor the cache on disk gives the old recipe."""
    for last in (1, 2):
        write("conf/recipe/own.yaml", RECIPE.format(last=last))
        write("one.yaml", RECIPE.format(last=last))
        assert load_recipe("own").keep.last == last
        assert load_recipe("./one.yaml").keep.last == last


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["recipe=./none.yaml"], "none.yaml: No such file"),
        (["recipe=./list.yaml"], "./list.yaml: a mapping is expected"),
        (["recipe=./broken.yaml"], "./broken.yaml: "),
        (["hydra.searchpath=[none]"], "no such folder: "),
        (["hydra.searchpath=none"], "a list of folders is expected"),
        (["hydra.searchpath=['s3://a/b']"], "s3://a/b: valid items are"),
        (["recipe=nvfp4"], "rename the file"),
        (["model=gpt2-nano"], "rename the file"),
    ],
)
def test_a_mistake_in_ones_own_configs_is_one_line(overrides: list[str], message: str, write: Write) -> None:
    write("list.yaml", "[1, 2]\n")
    write("broken.yaml", "a: [\n")
    write("conf/recipe/nvfp4.yaml", RECIPE.format(last=1))  # Hydra would use fewbits' own recipe
    write("conf/model/gpt2-nano.yaml", MODEL)
    with pytest.raises(ValueError, match=naming(message)) as error:
        load_trial(overrides)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", ["one.yaml", "./one.yaml", "../here/one.yaml", "some where/one.yaml", "ABSOLUTE"])
def test_any_path_chooses_a_file(value: str, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write("here/one.yaml", f"defaults: [fp8, _self_]\n{RECIPE.format(last=5)}")
    write("here/some where/one.yaml", RECIPE.format(last=5))
    monkeypatch.chdir(file.parent)
    path = value.replace("ABSOLUTE", str(file))
    recipe, changed = load_recipe(path), load_recipe(path, {"keep": {"last": 2}})
    assert (recipe.name, recipe.keep.last, changed.keep.last) == ("one", 5, 2)
    assert load_trial([f"recipe='{path}'", "recipe.level=5"])[0].recipe.name == "one"


@pytest.mark.parametrize("choice", ["recipe=./nvfp4.yaml", "recipe=own.yaml", "model=gpt2-nano.yaml"])
def test_a_path_that_hydra_would_read_from_its_search_path_is_refused(choice: str, write: Write) -> None:
    group, _, value = choice.partition("=")
    write("conf/recipe/own.yaml", RECIPE.format(last=1))
    file = write(value, RECIPE.format(last=2) if group == "recipe" else MODEL)
    with pytest.raises(ValueError, match=naming(value, str(file))):
        load_trial([choice])
    trial, _ = load_trial([f"{group}={file}"])
    assert trial.recipe.keep.last == 2 if group == "recipe" else trial.model.name == "small"


def test_sweep_files_have_names(write: Write, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write("mine/sweep/rates.yaml", "overrides: [recipe=own, data=synthetic]\naxes: {optimizer.lr: [0.1, 0.2]}\n")
    write("mine/recipe/own.yaml", RECIPE.format(last=1))
    asked = ["--dry-run", "--config-dir", "mine", f"runtime.cache={cache}"]
    for name in ("sweep=rates", "rates.yaml"):
        assert cli.main(["sweep", name, *asked]) == 0
        assert "2 trials: 2 planned" in capsys.readouterr().out
    write("other.yaml", "seeds: [0]\n")
    for name, meant in (("rates", "sweep=rates"), ("mor", "study=mor"), ("other", "other.yaml")):
        assert cli.main(["sweep", name, *asked]) == 2
        assert f"did you mean {meant}?" in capsys.readouterr().err
    assert cli.main(["sweep", "sweep=rate", *asked]) == 2
    assert "rates" in capsys.readouterr().err
