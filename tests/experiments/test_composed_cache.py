"""Test the cache of composed configs: they equal those that Hydra composes, and are composed again after changes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from fewbits.experiments import config as configs
from fewbits.experiments.composition import cached, compose, compose_file
from fewbits.experiments.config_files import FOLDER, ROOT, folders

CHOICES = [(), ("model=hybrid-nano", "recipe=nvfp4"), ("recipe=mor/block", "optimizer=adam-mini", "scale=smoke")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEWBITS_CACHE", str(tmp_path))
    return tmp_path / "composed"


def hydra_composes(choice: tuple[str, ...]) -> Callable[[], DictConfig]:
    configs.prepare(folders())
    return lambda: compose(FOLDER, ROOT, choice)


def nothing_composes() -> DictConfig:
    raise AssertionError("the config is not in the cache, so it would be composed")


@pytest.mark.parametrize("choice", CHOICES)
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


def test_a_sweep_file_is_composed_once_until_it_its_scale_or_an_override_changes(
    sweep_file: Path, folder: Path
) -> None:
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


def test_a_sweep_file_with_a_defaults_list_is_composed_each_time(sweep_file: Path, folder: Path) -> None:
    sweep_file.write_text("defaults: [other, _self_]\nsteps: 1")
    for about in ("one", "two"):
        (sweep_file.parent / "other.yaml").write_text(f"about: {about}")
        assert compose_file(sweep_file, BASE, [], "scale") == BASE | {"steps": 1, "width": 1, "about": about}
    assert not folder.exists()


@pytest.mark.parametrize("damage", ["", "{", "[1]", "null", '"text"'])
def test_a_damaged_file_is_composed_again(damage: str, folder: Path) -> None:
    composed = cached("it", hydra_composes(()))
    (file,) = folder.iterdir()
    file.write_text(damage)
    assert cached("it", hydra_composes(())) == composed
    assert json.loads(file.read_text())["seed"] == composed["seed"]


def test_a_config_that_json_would_change_is_not_cached(folder: Path) -> None:
    assert list(cached("it", lambda: OmegaConf.create({1: "one"})).values()) == ["one"]
    assert not folder.exists()


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FEWBITS_CACHE", str(tmp_path / "file"))
    assert cached("it", hydra_composes(()))["seed"] == 0


@pytest.mark.parametrize("override", ["data.seed=${seed}", "+data={seed:'${seed}'}"])
def test_what_reads_the_seed_follows_it(override: str) -> None:
    for seed in (3, 4):
        assert configs.resolved([override, f"seed={seed}"])["data"]["seed"] == seed
