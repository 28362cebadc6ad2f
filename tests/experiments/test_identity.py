"""A trial's id changes with everything that its bits depend on, and with nothing else."""

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fewbits.experiments import identity as module
from fewbits.experiments.config import load_trial
from fewbits.experiments.devices import World
from fewbits.experiments.identity import identity, sources_digest, trial_id
from fewbits.experiments.trial import Runtime, Trial
from tests.experiments.trial_inputs import left, metric, train

CPU = World(torch.device("cpu"))


def the_id(*words: str, data: str = "data", world: World = CPU, parent: str | None = None) -> str:
    return trial_id(identity(load_trial(words)[0], data, world, parent))


def test_names_descriptions_and_the_runtime_are_no_part_of_an_id() -> None:
    words = ("recipe=nvfp4", "model=gpt2-nano")
    free = ("model.name=mine", "recipe.name=mine", "recipe.about=mine", "training.checkpoint_every=7")
    assert the_id(*words, *free) == the_id(*words)
    settings = {"runs": "else", "cache": "else", "keep_checkpoints": 5, "keep_every": 3, "tracking": "mlflow"}
    told = [f"runtime.{key}={value}" for key, value in settings.items()]
    assert the_id(*words, *told) == the_id(*words)
    assert {field.name for field in dataclasses.fields(Runtime)} == {*settings, "device", "threads"}  # see below


def test_equal_recipes_by_other_names_are_one_trial(cache: Path, tmp_path: Path) -> None:
    assert the_id("recipe=mor/block", "recipe.threshold=0.05") == the_id("recipe=mor/threshold-5")
    first, _ = train(cache, tmp_path, "recipe=mor/threshold-5", "training.steps=2")
    same, _ = train(cache, tmp_path, "recipe=mor/block", "recipe.threshold=0.05", "training.steps=2")
    assert same == first


def _values(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _values(inner, (*path, key))
    else:
        yield path, value


FREE = {"model.name", "recipe.name", "recipe.about", "training.checkpoint_every"}


def test_every_other_field_is_part_of_an_id() -> None:
    """Each field, changed to whatever else: data are known by their fingerprint and branches by their parent's id."""

    trial, _ = load_trial(["recipe=nvfp4"])
    unchanged = trial_id(identity(trial, "data", CPU))
    seen = set()
    for path, _ in list(_values(trial.to_dict())):
        if path[0] in ("data", "branch"):
            continue
        whole = trial.to_dict()
        inner = whole
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = "else"

        class Told(Trial):
            def to_dict(self) -> dict[str, Any]:
                return whole  # noqa: B023

        told = Told(**{f.name: getattr(trial, f.name) for f in dataclasses.fields(trial)})
        if trial_id(identity(told, "data", CPU)) != unchanged:
            seen.add(".".join(path))
    assert seen == {".".join(path) for path, _ in _values(trial.to_dict()) if path[0] not in ("data", "branch")} - FREE
    assert len(seen) > 60


def test_data_parent_device_ranks_and_threads_are_part_of_an_id(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [
        the_id(),
        the_id(data="other"),
        the_id(parent="id@8"),
        the_id(parent="id@9"),
        the_id(world=World(torch.device("cuda"))),
        the_id(world=World(torch.device("cpu"), ranks=2)),
        the_id(world=World(torch.device("cpu"), threads=2)),
    ]
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    ids.append(the_id())
    assert len(set(ids)) == len(ids)
    ids = [the_id(world=World(torch.device("cuda"), threads=threads)) for threads in (1, 2)]
    assert ids[0] == ids[1]  # a GPU does not sum on the CPU's threads
    assert the_id(world=World(torch.device("cpu"), rank=1, ranks=2)) == the_id(
        world=World(torch.device("cpu"), ranks=2)
    )


def test_an_edit_of_any_source_of_a_room_changes_its_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Path(module.__file__).parent
    for room in module.ROOMS:
        shutil.copytree((here.parent / room).resolve(), tmp_path / room)
    monkeypatch.setattr(module, "_HERE", tmp_path / "experiments")

    def digests() -> list[str]:
        sources_digest.cache_clear()
        return [sources_digest(room) for room in module.ROOMS]

    try:
        before = digests()
        (tmp_path / "experiments" / "README.md").write_text("other words")
        assert digests() == before
        header = next((tmp_path / "kernels" / "csrc").glob("*.h"))
        header.write_text(header.read_text() + "\n")
        after = digests()
        assert [a == b for a, b in zip(after, before, strict=True)] == [False, True, True]
        (tmp_path / "models" / "layers.py").rename(tmp_path / "models" / "strata.py")
        assert digests()[1] != before[1]
        (tmp_path / "experiments" / "data" / "new.py").write_text("")
        assert digests()[2] != before[2]
    finally:
        sources_digest.cache_clear()


@pytest.mark.parametrize(
    "recipe",
    [
        (
            *("recipe=nvfp4", "recipe.sampler.kind=gaussws", "recipe.sampler.penalty=0.0001"),
            "recipe.wgrad.output=bf16",
        ),
        ("recipe=mor/three-way", "recipe.scaling=e8m0"),
    ],
    ids=["nvfp4 and gaussws", "mor/three-way"],
)
def test_another_backend_is_another_trial_with_the_same_numbers(
    recipe: tuple[str, ...], cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products into FP32 aside, of weight gradients and their measurement: each backend sums them in its own order."""
    asked = (*recipe, "training.steps=3", "evaluation.every=3", "observer.every=1", "observer.gradients_every=0")
    runs = {}
    for backend in ("cpu", "reference"):
        monkeypatch.setenv("FEWBITS_BACKEND", backend)
        runs[backend], _ = train(cache, tmp_path, *asked)
        assert runs[backend].provenance()["identity"]["backend"] == f"cpu:{backend}"  # type: ignore[index]
    assert runs["cpu"].id != runs["reference"].id
    fast, slow = (left(runs[backend].path) for backend in ("cpu", "reference"))
    assert {name for name in fast if fast[name] != slow[name]} == {"result.json"}  # which holds the id
    assert metric(runs["cpu"], "loss") == metric(runs["reference"], "loss")


def test_provenance_says_what_an_id_is_made_of(cache: Path, tmp_path: Path) -> None:
    folder, _ = train(cache, tmp_path, "training.steps=1")
    provenance = folder.provenance()
    assert provenance
    assert provenance["id"] == folder.id == trial_id(provenance["identity"])
    assert folder.path.name == f"nemotron-nano-bf16-synthetic-s0-{folder.id[:8]}"
    assert provenance["data"]["fingerprint"] == provenance["identity"]["data"]
