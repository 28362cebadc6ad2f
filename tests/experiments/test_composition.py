"""Test that `resolved`, which sets values in a copy of a cached config, gives the config that Hydra itself composes.

The expected config is composed by Hydra from all overrides at once, without any code of ours.
"""

from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from fewbits.experiments.composition import spelled
from fewbits.experiments.config import load_trial, prepare, resolved
from fewbits.experiments.config_files import FOLDER, ROOT, folders
from tests.effort import examples


def composed(overrides: list[str]) -> Any:
    prepare(folders())
    with initialize_config_dir(str(FOLDER), version_base=None):
        return OmegaConf.to_container(compose(ROOT, overrides=overrides), resolve=True, throw_on_missing=True)


@pytest.mark.parametrize(
    "overrides",
    [
        "training.steps=7 seed=3",
        "seed=1 seed=2 training.steps=3 training.steps=4",
        "recipe=mor/block recipe.threshold=0.03",
        "recipe.threshold=0.03 recipe=mor/block",
        "recipe=mor/block recipe.threshold=0.03 recipe.threshold=0.02 recipe.per=block",
        "recipe=mor/block recipe.mixture='e4m3:64x64:gam @ error<0.1 | bf16 ; per=tensor'",
        "recipe=nvfp4 recipe.weights=1x16 recipe.stochastic=[] recipe.signs=3",
        "recipe=nvfp4 recipe.rotated=[] recipe.rht=0 recipe.keep.last=0",
        "recipe=nvfp4 recipe.fprop.x=bf16",
        "recipe=mor/block recipe.fprop.x=${recipe.mixture} recipe.threshold=0.01",
        "recipe=mor/block recipe.fprop={x:bf16}",
        "training={steps:3} training.batch=8",
        "training.batch=8 training={steps:3,batch:16}",
        "evaluation.tasks=[a,'b c',1] evaluation.tasks=[]",
        "training.rounding_seed=null evaluation.tasks_path='a=b'",
        "training.rounding_seed=5 runtime.cache='null' runtime.runs=\"1\"",
        "model=gpt2-nano model.layers=3 scale=cpu",
        "training.batch=8 ~training.batch +training.batch=9",
        "training.steps=${training.batch} training.batch=3",
        "scale=cpu scale=smoke",
        "scale=cpu training.steps=9 data=torch optimizer.lr=1e-3",
        "schedule.warmup_fraction=0 +data.size=5",
        "+recipe.extra=3",
        "data.size=5 ~observer.window",
        "optimizer.lr=1e-3 optimizer.clip=.5 training.blow_up=inf",
        "runtime.runs=a/b.c-d runtime.keep_steps=[1,2]",
    ],
)
def test_values_are_set_as_hydra_would(overrides: str) -> None:
    chosen = split(overrides)
    assert resolved(chosen) == composed(chosen)
    assert resolved(chosen) == composed(chosen)  # the first call has not changed the cached config


def split(overrides: str) -> list[str]:
    """Split the text at each space that is not inside quotes."""
    parts, quote = [""], ""
    for letter in overrides:
        if letter == " " and not quote:
            parts.append("")
            continue
        if letter in "'\"":
            quote = "" if letter == quote else quote or letter
        parts[-1] += letter
    return parts


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


@pytest.mark.parametrize(
    "overrides", ["scale=cpu +scale=smoke", "training.stepz=1", "recipe.threshold=1", "observer=3"]
)
def test_what_hydra_refuses_is_refused(overrides: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        load_trial(overrides.split())
