"""Test stored plans: the plan of some overrides is read as it was stored, also if the store is mounted elsewhere."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from fewbits import cli
from fewbits.commands.sweep import in_store
from fewbits.experiments.identity import trial_id
from fewbits.sweeps.planning.lookup import find_plan
from fewbits.sweeps.planning.overrides import normalised
from fewbits.sweeps.planning.plan import Plan
from fewbits.sweeps.planning.stored_plans import (
    FOLDER,
    UnusablePlan,
    earlier_runs,
    load_plan,
    place_of,
    save_plan,
)
from tests.messages import names
from tests.sweeps.sweep_inputs import FAMILY, planned, tiny_file

CHANGED = "the definition of the sweep has changed since it last ran"


class Stored:
    """A sweep file whose plan is stored; none of its trials has run."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.file, self.runs = tiny_file(folder, cache, FAMILY, "family"), folder / "runs"
        self.overrides = in_store([str(self.file)], str(self.runs))
        self.plan = planned(*self.overrides)
        self.path = save_plan(self.plan, self.overrides)

    def edit(self, **changes: Any) -> None:
        self.file.write_text(yaml.safe_dump(yaml.safe_load(self.file.read_text()) | changes, sort_keys=False))


@pytest.fixture
def stored(tmp_path: Path, cache: Path) -> Stored:
    return Stored(tmp_path, cache)


def parts(plan: Plan) -> list[Any]:
    """Return all fields of a plan to compare; tuples in `made_of` become lists, as JSON gives them."""
    trials = plan.trials.values()
    made_of = [json.loads(json.dumps(planned.made_of)) for planned in trials]
    rest = [(p.folder, p.trial, p.runtime, p.resources, p.parent, p.keep) for p in trials]
    return [plan.sweeps, plan.members, list(plan.trials), made_of, rest]


def test_a_plan_is_read_as_it_was_stored(stored: Stored) -> None:
    found = load_plan(stored.runs, stored.overrides)
    assert found is not None
    assert parts(found.plan) == parts(stored.plan)
    assert all(trial_id(planned.made_of) == planned.id for planned in found.plan.trials.values())


def test_an_equal_plan_leaves_the_file_alone_and_another_replaces_it(stored: Stored) -> None:
    os.utime(stored.path, ns=(1, 1))
    assert save_plan(planned(*stored.overrides), stored.overrides) == stored.path
    assert stored.path.stat().st_mtime_ns == 1
    stored.edit(seeds=[0])
    assert save_plan(planned(*stored.overrides), stored.overrides) == stored.path
    assert stored.path.stat().st_mtime_ns != 1
    assert len(list(stored.path.parent.iterdir())) == 1


def test_paths_follow_the_store_to_where_it_is_mounted(stored: Stored, tmp_path: Path) -> None:
    moved = tmp_path / "mnt" / "store"
    shutil.copytree(stored.runs, moved)
    found = load_plan(moved, stored.overrides)
    assert found is not None
    assert found.plan.store == moved
    for planned_trial in found.plan.trials.values():
        assert planned_trial.runtime.runs == str(moved)
        if planned_trial.parent is not None:
            assert planned_trial.trial.branch.parent == str(found.plan.trials[planned_trial.parent].folder.path)
    assert str(stored.runs) not in stored.path.read_text()


@pytest.mark.parametrize(
    ("overrides", "equal"),
    [
        (("study=mor", "scale=cpu", "seeds=[0,1]"), ("seeds=[0, 1]", "study=mor", "scale=cpu")),
        (("study=mor", "scale=smoke"), ("study=mor",)),
        (("study=mor", "runtime.runs=/a"), ("study=mor", 'runtime.runs="/b c"', "runtime.cache=/d")),
        (("study=mor", "optimizer.lr=1", "optimizer.lr=2"), ("optimizer.lr=2", "study=mor")),
        (("a/b/my.yaml",), ("my.yaml",)),
        (("file=a/my.yaml",), ("my.yaml",)),
    ],
)
def test_overrides_are_one_selection_whatever_their_order_and_places(
    overrides: tuple[str, ...], equal: tuple[str, ...]
) -> None:
    assert normalised(overrides) == normalised(equal)


@pytest.mark.parametrize(
    ("overrides", "other"),
    [
        (("study=mor",), ("study=mor", "scale=cpu")),
        (("my.yaml",), ("my.yaml", "scale=smoke")),
        (("study=mor",), ("study=mor", "sweep=tables")),
        (("study=mor", "seeds=[0,1]"), ("study=mor", "seeds=[1,0]")),
    ],
)
def test_other_overrides_are_another_selection(overrides: tuple[str, ...], other: tuple[str, ...]) -> None:
    assert normalised(overrides) != normalised(other)


def test_sweeps_of_other_seeds_have_a_plan_each(stored: Stored) -> None:
    overrides = [*stored.overrides, "seeds=[0,2]"]
    save_plan(planned(*overrides), overrides)
    for selection, seeds in ((stored.overrides, {0, 1}), (overrides, {0, 2}), (overrides[::-1], {0, 2})):
        found = find_plan(selection)
        assert {member.cell.seed for member in found.plan.members} == seeds
        assert (found.notes, found.earlier) == ((), {})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is damaged"),
        ("[]", "is damaged"),
        ('{"format": 99}', "has format 99"),
        ('{"format": 3, "overrides": ["other.yaml"]}', "other.yaml"),
    ],
)
def test_a_file_that_is_no_plan_is_told_in_a_line_and_not_used(
    content: str, message: str, stored: Stored, capsys: pytest.CaptureFixture[str]
) -> None:
    stored.path.write_text(content)
    with pytest.raises(UnusablePlan, match=message):
        load_plan(stored.runs, stored.overrides)
    assert parts(find_plan(stored.overrides).plan) == parts(stored.plan), "the sweep is planned again instead"
    assert cli.main(["status", *stored.overrides]) == 0
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert message in err
    assert f"`fewbits sweep family.yaml --runs {stored.runs}` writes a new one" in err


@pytest.mark.parametrize("key", ["trials", "members", "sweeps", "time", "checksum"])
def test_half_a_plan_is_not_used(key: str, stored: Stored) -> None:
    """Check that a stored plan without one of its keys raises UnusablePlan."""
    content = json.loads(stored.path.read_text())
    del content[key]
    stored.path.write_text(json.dumps(content))
    with pytest.raises(UnusablePlan):
        load_plan(stored.runs, stored.overrides)


@pytest.mark.parametrize("key", ["trials", "members", "sweeps"])
def test_a_plan_that_lost_an_entry_is_not_used(key: str, stored: Stored) -> None:
    content = json.loads(stored.path.read_text())
    content[key].pop()
    stored.path.write_text(json.dumps(content))
    with pytest.raises(UnusablePlan, match="checksum"):
        load_plan(stored.runs, stored.overrides)


def test_a_changed_definition_is_planned_anew_where_its_data_are(stored: Stored) -> None:
    stored.edit(seeds=[0, 5])
    found = find_plan(stored.overrides)
    assert {member.cell.seed for member in found.plan.members} == {0, 5}
    assert found.changed.startswith(CHANGED)
    assert found.notes == (found.changed,)


def test_a_changed_definition_without_its_data_leaves_the_stored_plan(stored: Stored) -> None:
    stored.edit(overrides=["model=nemotron-nano", "data=bin", "data.path=/nowhere", "training.steps=5"])
    found = find_plan(stored.overrides)
    assert parts(found.plan) == parts(stored.plan)
    assert found.changed.startswith(CHANGED)
    assert "no folder /nowhere" in found.changed


@pytest.mark.parametrize("how", ["gone", "broken"])
def test_without_a_readable_definition_the_stored_plan_is_shown(how: str, stored: Stored) -> None:
    if how == "gone":
        stored.file.unlink()
    else:
        stored.file.write_text("arms: [")
    found = find_plan(stored.overrides)
    assert parts(found.plan) == parts(stored.plan)
    assert names(found.changed, "definition", "cannot be read")
    with pytest.raises(ValueError, match=r"family\.yaml"):
        find_plan([*stored.overrides, "seeds=[7]"])


def test_one_sweep_of_a_study_is_read_from_the_studys_plan(tmp_path: Path, cache: Path) -> None:
    small = ["data=synthetic", "data.size=65536", f"runtime.cache={cache}", "runtime.device=cpu"]
    overrides = in_store(["study=mor", *small], str(tmp_path))
    whole = planned(*overrides)
    save_plan(whole, overrides)
    there = {member.cell.sweep for member in whole.members}
    for sweep in (sweep for sweep in whole.sweeps if sweep.name in there):
        part, alone = find_plan([*overrides, f"sweep={sweep.name}"]), planned(*overrides, f"sweep={sweep.name}")
        assert part.notes == ()
        assert part.plan.sweeps == alone.sweeps
        assert part.plan.members == alone.members
        assert part.plan.trials.keys() == alone.trials.keys()


def test_another_config_in_the_same_place_is_named_while_the_sweep_has_no_plan(stored: Stored) -> None:
    overrides = [*stored.overrides, "training.blow_up=2"]
    other = planned(*overrides)
    assert earlier_runs(other) == {}, "no trial has begun"
    for trial in stored.plan.trials.values():
        trial.folder.path.mkdir(parents=True)
    found = find_plan(overrides)
    was = {place_of(m): stored.plan.trials[m.id].folder.path.name for m in stored.plan.members}
    assert found.earlier == was
    save_plan(other, overrides)
    assert find_plan(overrides).earlier == {}


def test_looking_writes_nothing(stored: Stored) -> None:
    before = {path: path.stat().st_mtime_ns for path in stored.runs.rglob("*")}
    assert cli.main(["status", *stored.overrides]) == 0
    assert cli.main(["status", *stored.overrides, "seeds=[3]"]) == 0
    assert {path: path.stat().st_mtime_ns for path in stored.runs.rglob("*")} == before
    assert {path.name for path in before} == {FOLDER, stored.path.name}
