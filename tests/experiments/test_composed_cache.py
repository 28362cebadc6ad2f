"""Test the cache of composed configs: they equal those that Hydra composes, and are composed again after changes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fewbits.experiments import config as configs
from fewbits.experiments.composed_cache import digest_of_files, load_or_compose, resolve, to_config
from fewbits.experiments.composition import compose, compose_file
from fewbits.experiments.config_files import FOLDER, ROOT

CHOICES = [(), ("model=hybrid-nano", "recipe=nvfp4"), ("recipe=mor/block", "optimizer=adam-mini", "scale=smoke")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEWBITS_CACHE", str(tmp_path))
    return tmp_path / "composed"


def hydra_composes(choice: tuple[str, ...]) -> Callable[[], DictConfig]:
    configs.prepare()
    return lambda: compose(FOLDER, ROOT, choice)


def nothing_composes() -> DictConfig:
    raise AssertionError("the config is not in the cache, so it would be composed")


@pytest.mark.parametrize("choice", CHOICES)
def test_a_cached_config_is_the_composed_one(choice: tuple[str, ...], folder: Path) -> None:
    composed = load_or_compose("digest", choice, hydra_composes(choice))
    cached = load_or_compose("digest", choice, nothing_composes)
    assert cached == composed == OmegaConf.to_container(hydra_composes(choice)())
    assert resolve(cached) == OmegaConf.to_container(hydra_composes(choice)(), resolve=True)
    with pytest.raises(OmegaConfBaseException):
        OmegaConf.update(to_config(cached), "training.no_such_key", 1)


def test_other_overrides_and_other_sources_are_other_configs(folder: Path) -> None:
    load_or_compose("digest", (), hydra_composes(()))
    for digest, choice in (("digest", ("model=gpt2-nano",)), ("other", ())):
        with pytest.raises(AssertionError, match="in the cache"):
            load_or_compose(digest, choice, nothing_composes)


def test_the_digest_follows_every_file_its_name_and_the_models(tmp_path: Path) -> None:
    (tmp_path / "group").mkdir()
    file = tmp_path / "group" / "a.yaml"
    digests = set()
    for text in ("x: 1\n", "x: 2\n"):
        file.write_text(text)
        digests.add(digest_of_files(tmp_path, {"nano": 1}))
    digests.add(digest_of_files(tmp_path, {"nano": 2}))
    file.rename(tmp_path / "a.yaml")
    digests.add(digest_of_files(tmp_path, {"nano": 2}))
    assert len(digests) == 4


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
    composed = load_or_compose("digest", (), hydra_composes(()))
    (file,) = folder.iterdir()
    file.write_text(damage)
    assert load_or_compose("digest", (), hydra_composes(())) == composed
    assert json.loads(file.read_text())["seed"] == composed["seed"]


def test_a_config_that_json_would_change_is_not_cached(folder: Path) -> None:
    assert list(load_or_compose("digest", (), lambda: OmegaConf.create({1: "one"})).values()) == ["one"]
    assert not folder.exists()


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FEWBITS_CACHE", str(tmp_path / "file"))
    assert load_or_compose("digest", (), hydra_composes(()))["seed"] == 0
