"""Test a trial's id: it depends on everything that determines the trial's numbers, and on nothing else."""

import dataclasses
import hashlib
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fewbits import cli
from fewbits.experiments import identity as identity_module
from fewbits.experiments.config import load_trial
from fewbits.experiments.devices import check_openmp
from fewbits.experiments.environment import environments
from fewbits.experiments.identity import FREE, ParentPoint, identity, is_current, trial_id
from fewbits.experiments.trial import Runtime
from fewbits.kernels.backends import cpu, reference
from fewbits.kernels.reference import attention
from tests.experiments.trial_inputs import left, metric, overrides, train, train_until
from tests.kernels.orders import ORDERS

# The hash of the names of all settings that were there when ids began to contain them all; see the test below.
BY_CONTENT = ("data", "branch")  # of these, ids have the data's fingerprint and the parent's id
GOLDEN = "b901ca38f28818e27b780f64b9d587f8bd53039c4a10f90435f33b77e2de37bd"


def the_id(*overrides: str, data: str = "data", device: str = "cpu", **more: Any) -> str:
    return trial_id(identity(load_trial(overrides)[0], data, device, **more))


def test_names_intervals_and_extra_evaluation_are_no_part_of_an_id() -> None:
    overrides = ("recipe=nvfp4", "model=gpt2-nano")
    free = ["model.name=mine", "recipe.name=mine", "recipe.about=mine", "training.checkpoint_every=7"]
    free += ["recipe.source=mine", "recipe.differs=mine"]
    free += ["training.recompute=true"]
    free += ["evaluation.tasks=[mor]", "evaluation.tasks_path=x", "evaluation.run_code=true"]
    free += ["evaluation.texts=[x]", "evaluation.tasks_every=3"]
    assert {override.partition("=")[0] for override in free} == FREE
    assert the_id(*overrides, *free) == the_id(*overrides)
    settings: dict[str, object] = {"runs": "else", "cache": "else", "keep_checkpoints": 5, "keep_every": 3}
    settings |= {"keep_steps": [7], "tracking": "mlflow", "cuda_graph": "auto"}
    runtime_overrides = [f"runtime.{key}={value}" for key, value in settings.items()]
    assert the_id(*overrides, *runtime_overrides) == the_id(*overrides)
    assert {field.name for field in dataclasses.fields(Runtime)} == {*settings, "device", "threads"}  # tested below


def _leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], bool]]:
    """Yield (path, whether it declares a neutral value) for each field of nested dataclasses that is no dataclass."""
    for field in dataclasses.fields(value):
        item = getattr(value, field.name)
        if dataclasses.is_dataclass(item):
            yield from _leaves(item, (*path, field.name))
        else:
            yield (*path, field.name), "neutral" in field.metadata


def _replaced(value: Any, path: tuple[str, ...], leaf: Any) -> Any:
    """Return a copy of nested dataclasses with another value at `path`, without the checks of `__post_init__`."""
    if not path:
        return leaf
    other = object.__new__(type(value))
    for field in dataclasses.fields(value):
        item = getattr(value, field.name)
        object.__setattr__(other, field.name, _replaced(item, path[1:], leaf) if field.name == path[0] else item)
    return other


def test_every_other_setting_is_part_of_an_id() -> None:
    """Check that each setting changes the id, except the settings in FREE and those of the data and of the branch.

    For data and branches, the id contains the data's fingerprint and the parent's id instead of the settings.
    """
    trial, _ = load_trial(["recipe=nvfp4"])
    unchanged = trial_id(identity(trial, "data", "cpu"))
    paths = [path for path, _ in _leaves(trial) if path[0] not in BY_CONTENT]
    part = {path for path in paths if trial_id(identity(_replaced(trial, path, "else"), "data", "cpu")) != unchanged}
    assert {".".join(path) for path in part} == {".".join(path) for path in paths} - FREE
    assert len(part) > 60


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that lets the sources seem to have this version and, if they are edited, this digest."""

    def set_to(version: int, edited: str | None = None) -> None:
        parts = {"numerics": version} | ({"edited": edited} if edited else {})
        monkeypatch.setattr(identity_module, "numerics", lambda: parts)

    return set_to


def test_a_setting_that_is_added_later_leaves_the_ids_of_trials_that_do_not_use_it() -> None:
    """A failure of the first assertion means that a setting was added, renamed or removed, which changes all ids.

    An added setting has to declare its neutral value (see identity.py). For the others there is no way to keep ids:
    give GOLDEN the new value together with a new numerics version.
    """
    trial, _ = load_trial(["recipe=nvfp4"])
    names = sorted(".".join(path) for path, is_later in _leaves(trial) if not is_later and path[0] not in BY_CONTENT)
    assert hashlib.sha256(" ".join(names).encode()).hexdigest() == GOLDEN, names
    neutral = dataclasses.field(default=3, metadata={"neutral": 2})
    bases = (type(trial.training),)
    grown: Any = dataclasses.make_dataclass("Training", [("brand_new", int, neutral)], bases=bases, frozen=True)
    values = {field.name: getattr(trial.training, field.name) for field in dataclasses.fields(trial.training)}
    same, other = (dataclasses.replace(trial, training=grown(**values, **new)) for new in ({"brand_new": 2}, {}))
    assert trial_id(identity(same, "data", "cpu")) == trial_id(identity(trial, "data", "cpu"))
    assert trial_id(identity(other, "data", "cpu")) != trial_id(identity(trial, "data", "cpu"))


def test_data_device_ranks_threads_and_parent_are_part_of_an_id() -> None:
    parent = ParentPoint("parent", 8)
    ids = [
        the_id(),
        the_id(data="other"),
        the_id(device="cuda"),
        the_id(ranks=2),
        the_id(threads=2),
        the_id(parent=parent),
        the_id(parent=dataclasses.replace(parent, step=9)),
        the_id(parent=dataclasses.replace(parent, id="other")),
    ]
    assert len(set(ids)) == len(ids)
    assert the_id(device="cuda", threads=2) == the_id(device="cuda")  # sums on a GPU do not depend on CPU threads


def test_no_machine_is_asked_for_an_id(monkeypatch: pytest.MonkeyPatch) -> None:
    before = the_id(), the_id("scale=gpu", device="cuda")
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("an id must not depend on this machine's GPU"))
    kind = "fewbits.experiments.environment.processor_kind"
    monkeypatch.setattr(kind, lambda: pytest.fail("an id must not depend on this machine"))
    monkeypatch.setenv("FEWBITS_BACKEND", "reference")
    assert (the_id(), the_id("scale=gpu", device="cuda")) == before


def test_train_prints_the_id_and_nothing_else(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = overrides(cache, tmp_path, "training.steps=1")
    assert cli.main(["train", *asked, "--id"]) == 0
    printed = capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    folder, _ = train(cache, tmp_path, "training.steps=1")
    assert printed == f"{folder.id}\n"


# Provenance: where each part of a trial was computed


def test_provenance_says_what_an_id_is_made_of_and_where_each_part_was_computed(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("training.steps=6", "training.checkpoint_every=2")
    train_until(5, cache, tmp_path, *asked)
    monkeypatch.setattr(platform, "python_version", lambda: "9.9.9")
    folder, _ = train(cache, tmp_path, *asked)
    provenance = folder.provenance()
    assert provenance
    assert provenance["id"] == folder.id == trial_id(provenance["identity"])
    assert folder.path.name == f"nemotron-nano-bf16-synthetic-s0-{folder.id[:8]}"
    assert provenance["data"]["fingerprint"] == provenance["identity"]["data"]
    assert [part["step"] for part in provenance["segments"]] == [0, 4]
    first, second = environments(provenance)
    assert first["python"] != second["python"] == "9.9.9"
    assert first["instruction_set"] == second["instruction_set"]


@pytest.mark.parametrize("steps", [(0, 40, 20), (0, 2, 2)])
def test_a_part_that_was_computed_again_counts_where_it_was_computed_last(steps: tuple[int, int, int]) -> None:
    """Check that a segment replaces the segment that starts at a later step, or at the same one."""
    parts = [{"step": step, "environment": {"kind": kind}} for step, kind in zip(steps, "abc", strict=True)]
    assert environments({"segments": parts}) == [{"kind": "a"}, {"kind": "c"}]


# Sources


def test_edited_sources_have_their_own_results_and_undoing_the_edit_finds_the_old_ones(
    cache: Path, tmp_path: Path, sources: Any
) -> None:
    sources(2)
    stored, _ = train(cache, tmp_path, "training.steps=2")
    before = (stored.path / "metrics.parquet").stat().st_mtime_ns
    sources(2, "edit")
    edited, _ = train(cache, tmp_path, "training.steps=2")
    assert not is_current(stored.provenance() or {})
    sources(2)
    again, _ = train(cache, tmp_path, "training.steps=2")
    assert again == stored != edited
    assert (stored.path / "metrics.parquet").stat().st_mtime_ns == before
    assert is_current(stored.provenance() or {})
    assert not is_current(edited.provenance() or {})


# Backends


def test_backends_are_provenance_and_give_the_same_numbers(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the backends cpu and reference give the same id and the same bytes.

    For this test the reference adds the products of a sum in the order of the compiled library.
    """
    order = ORDERS[cpu.library().fb_matmul_order()]
    monkeypatch.setattr(attention, "product", ORDERS[cpu.library().fb_attention_order()])
    monkeypatch.setattr(reference, "matmul_fp32", order)
    recipe = ("recipe=nvfp4", "recipe.sampler.kind=gaussws", "recipe.sampler.penalty=0.0001")
    asked = (*recipe, "training.steps=3", "evaluation.every=3", "observer.every=1")
    runs = {}
    for backend in ("cpu", "reference"):
        monkeypatch.setenv("FEWBITS_BACKEND", backend)
        runs[backend], _ = train(cache, tmp_path / backend, *asked)
        (environment,) = environments(runs[backend].provenance() or {})
        assert environment["backend"] == backend
    assert runs["cpu"].id == runs["reference"].id
    assert left(runs["cpu"].path) == left(runs["reference"].path)
    assert metric(runs["cpu"], "loss") == metric(runs["reference"], "loss")


@pytest.mark.parametrize(("name", "value"), [("OMP_THREAD_LIMIT", "1"), ("OMP_DYNAMIC", "true")])
def test_openmp_may_not_start_fewer_threads_than_the_id_names(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    check_openmp(1)
    with pytest.raises(ValueError, match=name):
        check_openmp(2)
