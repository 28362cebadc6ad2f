"""A trial's id changes with everything that its bits depend on, and with nothing else."""

import dataclasses
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fewbits.experiments import sources as module
from fewbits.experiments.config import load_trial
from fewbits.experiments.devices import World
from fewbits.experiments.identity import identity, trial_id
from fewbits.experiments.trial import Runtime, Trial
from tests.experiments.trial_inputs import left, metric, train, words

CPU = World(torch.device("cpu"))


def the_id(*words: str, data: str = "data", world: World = CPU, parent: str | None = None) -> str:
    return trial_id(identity(load_trial(words)[0], data, world, parent))


def test_names_descriptions_and_the_runtime_are_no_part_of_an_id() -> None:
    words = ("recipe=nvfp4", "model=gpt2-nano")
    free = ("model.name=mine", "recipe.name=mine", "recipe.about=mine", "training.checkpoint_every=7")
    assert the_id(*words, *free) == the_id(*words)
    settings: dict[str, object] = {"runs": "else", "cache": "else", "keep_checkpoints": 5, "keep_every": 3}
    settings |= {"keep_steps": [7], "tracking": "mlflow"}
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


def test_an_edit_of_a_source_that_computes_changes_its_rooms_digest_and_no_other_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for room in module.ROOMS:
        shutil.copytree(module._HERE / room, tmp_path / room)
    monkeypatch.setattr(module, "_HERE", tmp_path)

    def digests() -> list[str]:
        module.sources.cache_clear()
        return [module.sources_digest(room) for room in module.ROOMS]

    def edited(file: str) -> list[bool]:
        """Which rooms' digests an edit changes."""
        before = digests()
        with (tmp_path / file).open("a") as source:
            source.write("\n")
        return [a != b for a, b in zip(before, digests(), strict=True)]

    try:
        assert (
            edited("experiments/README.md") == edited("kernels/bench.py") == edited("models/listing.py") == [False] * 3
        )
        assert edited("kernels/csrc/quantize.cu") == edited("kernels/csrc/format.h") == [True, False, False]
        assert edited("kernels/reference.py") == [True, False, False]
        assert edited("models/layers.py") == [False, True, False]
        assert edited("experiments/data/synthetic.py") == edited("experiments/training.py") == [False, False, True]
        assert edited("experiments/evaluation/harness.py") == [False, False, True]
    finally:
        module.sources.cache_clear()


LOADED = """
import sys
from fewbits.experiments.config import load_trial
from fewbits.experiments.training import run
trial, runtime = load_trial(sys.argv[1:])
run(trial, runtime)
print(*(name for name in sys.modules if name.startswith("fewbits.")))
"""
WORDS_TO_TRIALS = {
    "experiments/composition.py",
    "experiments/config.py",
    "experiments/sources.py",
}  # what they find is in the id itself


def test_whatever_a_trial_loads_is_among_its_sources(cache: Path, tmp_path: Path) -> None:
    chosen = words(cache, tmp_path, "recipe=mor/block", "training.steps=2", "evaluation.cloze=8", "data=python")
    done = subprocess.run(
        [sys.executable, "-c", LOADED, *chosen], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr
    files = {name.partition(".")[2].replace(".", "/") + ".py" for name in done.stdout.split()}
    loaded = {file for file in files if file.split("/")[0] in module.ROOMS and (module._HERE / file).is_file()}
    assert {"kernels/cpu.py", "models/decoder.py", "experiments/checkpoints.py"} <= loaded
    assert loaded - WORDS_TO_TRIALS <= set(module.sources())


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
