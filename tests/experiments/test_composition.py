"""Test that `resolved`, which sets values in a copy of a cached config, gives the config that Hydra itself composes.

The expected config is composed by Hydra from all overrides at once, without any code of ours. Then test the cache on
disk: its configs equal those that Hydra composes, and are composed again after changes.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from fewbits.experiments.composition import cached, compose, compose_file, spelled
from fewbits.experiments.config import load_trial, prepare, resolved
from fewbits.experiments.config_files import FOLDER, ROOT, folders
from tests.effort import examples


def composed(overrides: list[str]) -> Any:
    prepare(folders())
    with hydra.initialize_config_dir(str(FOLDER), version_base=None):
        return OmegaConf.to_container(hydra.compose(ROOT, overrides=overrides), resolve=True, throw_on_missing=True)


@pytest.mark.parametrize(
    "overrides",
    [
        "training.steps=7 seed=3",
        "recipe.threshold=0.03 recipe=mor/block",
        "recipe=mor/block recipe.threshold=0.03 recipe.threshold=0.02 recipe.per=block",
        "recipe=mor/block recipe.mixture='e4m3:64x64:gam @ error<0.1 | bf16 ; per=tensor'",
        "recipe=nvfp4 recipe.rotated=[] recipe.rht=0 recipe.keep.last=0",
        "recipe=mor/block recipe.fprop.x=${recipe.mixture} recipe.threshold=0.01",
        "recipe=mor/block recipe.fprop={x:bf16}",
        "training.batch=8 training={steps:3,batch:16}",
        "evaluation.tasks=[a,'b c',1] evaluation.tasks=[]",
        "training.rounding_seed=null evaluation.tasks_path='a=b'",
        "training.rounding_seed=5 runtime.cache='null' runtime.runs=\"1\"",
        "training.batch=8 ~training.batch +training.batch=9",
        "training.steps=${training.batch} training.batch=3",
        "scale=cpu training.steps=9 data=torch optimizer.lr=1e-3",
        "data.size=5 ~observer.window",
        "optimizer.lr=1e-3 optimizer.clip=.5 training.blow_up=inf",
        "runtime.runs=a/b.c-d runtime.keep_steps=[1,2]",
    ],
)
def test_values_are_set_as_hydra_would(overrides: str) -> None:
    chosen = re.findall(r"""(?:'[^']*'|"[^"]*"|[^ '"])+""", overrides)  # split at spaces that are not quoted
    assert resolved(chosen) == composed(chosen)
    assert resolved(chosen) == composed(chosen)  # the first call has not changed the cached config


CHOICES = st.fixed_dictionaries(
    {},
    optional={
        "model": st.sampled_from(["gpt2-nano", "nemotron-nano"]),
        "recipe": st.sampled_from(["bf16", "mor/block", "mor/sub-channel", "nvfp4", "mxfp4", "gaussws"]),
        "data": st.sampled_from(["python", "synthetic"]),
        "scale": st.sampled_from(["smoke", "cpu"]),
    },
)
TEXTS = st.one_of(
    st.sampled_from(["null", "true", "1e-3", "off", "a b", "x:y", "é", "a,b", "[a]", "#", "", "don't", 'say "so"']),
    st.text("abz09 .:/_-", max_size=8),
)
VALUES: dict[str, st.SearchStrategy[object]] = {
    "training.steps": st.integers(1, 10**6),
    "training.rounding_seed": st.none() | st.integers(0, 2**62),
    "training.compile": st.booleans(),
    "optimizer.lr": st.floats(1e-9, 1.0),
    "model.layers": st.integers(1, 9),
    "evaluation.tasks": st.lists(TEXTS, max_size=3),
    "evaluation.tasks_path": st.none() | TEXTS,
    "runtime.runs": TEXTS,
    "recipe.name": TEXTS,
    "recipe.fprop.x": st.sampled_from(["bf16", "e4m3:128x128:gam"]),
    "seed": st.integers(0, 2**62),
}


@examples(20)
@given(
    choices=CHOICES,
    settings_list=st.lists(
        st.sampled_from(sorted(VALUES)).flatmap(lambda key: st.tuples(st.just(key), VALUES[key])), max_size=5
    ),
    before=st.booleans(),
)
def test_any_words_come_to_what_hydra_makes_of_them(
    choices: dict[str, str], settings_list: list[tuple[str, object]], before: bool
) -> None:
    values = [f"{key}={spelled(value)}" for key, value in settings_list]
    groups = [f"{key}={value}" for key, value in choices.items()]
    overrides = [*values, *groups] if before else [*groups, *values]
    tree = resolved(overrides)
    assert tree == composed(overrides)
    for key, value in dict(settings_list).items():
        node = tree
        for part in key.split("."):
            node = node[part]
        assert node == value  # the config has the value that `spelled` wrote as text


def test_a_path_with_a_letter_of_another_language_is_a_setting_and_a_config(tmp_path: Path) -> None:
    (tmp_path / "größe 日本.yaml").write_text("defaults: [mor/tensor]\nthreshold: 0.03\n")
    for force in ("", "++"):  # Hydra itself applies ++KEY=VALUE, and with it all others
        typed = [f"recipe={tmp_path}/größe 日本.yaml", f"runtime.cache={tmp_path}/ü (1)", f"{force}data.repeat=5"]
        trial, runtime = load_trial(typed)
        assert "0.03" in str(trial.recipe.operands["fprop.x"])
        assert runtime.cache == f"{tmp_path}/ü (1)"


# The cache on disk

CACHED = [(), ("model=hybrid-nano", "recipe=nvfp4"), ("recipe=mor/block", "optimizer=adam-mini", "scale=smoke")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEWBITS_CACHE", str(tmp_path))
    return tmp_path / "composed"


def hydra_composes(choice: tuple[str, ...]) -> Callable[[], DictConfig]:
    prepare(folders())
    return lambda: compose(FOLDER, ROOT, choice)


def nothing_composes() -> DictConfig:
    raise AssertionError("the config is not in the cache, so it would be composed")


@pytest.mark.parametrize("choice", CACHED)
def test_a_cached_config_is_the_composed_one(choice: tuple[str, ...], folder: Path) -> None:
    composed = cached(["a", choice], hydra_composes(choice))
    assert cached(["a", choice], nothing_composes) == composed == OmegaConf.to_container(hydra_composes(choice)())


def test_configs_made_of_other_things_are_other_configs(folder: Path) -> None:
    cached(["a", ()], hydra_composes(()))
    for made_of in (["a", ("model=gpt2-nano",)], ["b", ()]):
        with pytest.raises(AssertionError, match="in the cache"):
            cached(made_of, nothing_composes)


BASE = {"scale": "small", "steps": 0, "width": 0, "about": ""}


@pytest.fixture
def sweep_file(tmp_path: Path) -> Path:
    """Return a sweep file; with the defaults in `BASE` it includes the file `scale/small.yaml` beside it."""
    (tmp_path / "sweep" / "scale").mkdir(parents=True)
    (tmp_path / "sweep" / "scale" / "small.yaml").write_text("width: 1")
    (tmp_path / "sweep" / "a.yaml").write_text("steps: 1")
    return tmp_path / "sweep" / "a.yaml"


def test_a_sweep_file_is_composed_once_until_it_its_scale_or_overrides_change(sweep_file: Path, folder: Path) -> None:
    def composed(*overrides: str) -> dict[str, Any]:
        return compose_file(sweep_file, BASE, overrides, "scale")

    for _ in range(2):
        assert composed() == BASE | {"steps": 1, "width": 1}
        assert len(list(folder.iterdir())) == 1
    assert composed("steps=3") == BASE | {"steps": 3, "width": 1}
    sweep_file.write_text("steps: 2")
    assert composed() == BASE | {"steps": 2, "width": 1}
    (sweep_file.parent / "scale" / "small.yaml").write_text("width: 2")
    assert composed() == BASE | {"steps": 2, "width": 2}


@pytest.mark.parametrize("damage", ["", "{", "[1]", "null", '"text"'])
def test_a_damaged_file_is_composed_again(damage: str, folder: Path) -> None:
    composed = cached("it", hydra_composes(()))
    (file,) = folder.iterdir()
    file.write_text(damage)
    assert cached("it", hydra_composes(())) == composed
    assert json.loads(file.read_text())["seed"] == composed["seed"]


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FEWBITS_CACHE", str(tmp_path / "file"))
    assert cached("it", hydra_composes(()))["seed"] == 0


@pytest.mark.parametrize("override", ["data.seed=${seed}", "+data={seed:'${seed}'}"])
def test_what_reads_the_seed_follows_it(override: str) -> None:
    for seed in (3, 4):
        assert resolved([override, f"seed={seed}"])["data"]["seed"] == seed
