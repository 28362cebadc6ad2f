"""Test stored plans: the plan of some overrides is read as it was stored, also if the store is mounted elsewhere."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from fewbits import cli
from fewbits.commands.sweep import in_store
from fewbits.experiments.identity import trial_id
from fewbits.sweeps.planning import stored_plans as plans
from fewbits.sweeps.planning.plan import Member, Plan
from fewbits.sweeps.planning.stored_plans import UnusablePlan, changes, find_plan, load_plan, save_plan, selection
from tests.messages import names
from tests.sweeps.sweep_inputs import FAMILY, planned, tiny_file


class Stored:
    """A sweep file whose plan is stored; none of its trials has run."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.file, self.runs = tiny_file(folder, cache, FAMILY, "family"), folder / "runs"
        self.overrides = in_store([str(self.file)], self.runs)
        self.plan = planned(*self.overrides)
        self.path = save_plan(self.plan, self.overrides)

    def edit(self, **changes: Any) -> None:
        self.file.write_text(yaml.safe_dump(yaml.safe_load(self.file.read_text()) | changes, sort_keys=False))


@pytest.fixture
def stored(tmp_path: Path, cache: Path) -> Stored:
    return Stored(tmp_path, cache)


def parts(plan: Plan) -> list[Any]:
    """Return all fields of a plan to compare, as a stored plan has them: lists for tuples, no path of the store."""

    def place(member: Member) -> Member:
        overrides = tuple(text for text in member.cell.overrides if not text.startswith("runtime.runs="))
        return replace(member, cell=replace(member.cell, overrides=overrides, parent=None))

    trials = plan.trials.values()
    made_of = [json.loads(json.dumps(planned.made_of)) for planned in trials]
    rest = [(p.folder, p.trial, p.runtime, p.resources, p.parent, p.keep) for p in trials]
    return [plan.sweeps, [place(member) for member in plan.members], list(plan.trials), made_of, rest]


def test_a_plan_is_read_as_it_was_stored(stored: Stored) -> None:
    found = load_plan(stored.runs, stored.overrides)
    assert found is not None
    assert parts(found.plan) == parts(stored.plan)
    assert all(trial_id(planned.made_of) == planned.id for planned in found.plan.trials.values())


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
    ("overrides", "other", "equal"),
    [
        ("study=mor scale=cpu seeds=[0,1]", "seeds=[0,1] study=mor scale=cpu", True),
        ("study=mor scale=smoke", "study=mor", True),
        ("study=mor runtime.runs=/a", "study=mor runtime.runs=/b runtime.cache=/d", True),
        ("study=mor optimizer.lr=1 optimizer.lr=2", "optimizer.lr=2 study=mor", True),
        ("a/b/my.yaml", "my.yaml", True),
        ("file=a/my.yaml", "my.yaml", True),
        ("study=mor", "study=mor scale=cpu", False),
        ("my.yaml", "my.yaml scale=smoke", False),
        ("study=mor", "study=mor sweep=tables", False),
        ("study=mor seeds=[0,1]", "study=mor seeds=[1,0]", False),
        ("my.yaml", "your.yaml", False),
    ],
)
def test_overrides_are_one_selection_whatever_their_order_and_places(overrides: str, other: str, equal: bool) -> None:
    assert (selection(overrides.split()) == selection(other.split())) == equal


@pytest.mark.parametrize("key", ["", "trials", "members", "sweeps", "time", "id"])
def test_a_damaged_plan_is_told_in_a_line_and_sweep_writes_a_new_one(
    key: str, stored: Stored, capsys: pytest.CaptureFixture[str]
) -> None:
    content = json.loads(stored.path.read_text())
    if key == "id":
        del content["trials"][0]["id"]
    elif key:
        del content[key]
    stored.path.write_text(json.dumps(content) if key else "{")
    with pytest.raises(UnusablePlan, match="is damaged"):
        load_plan(stored.runs, stored.overrides)
    assert list(plans.stored_plans(stored.runs)) == []
    assert cli.main(["status", str(stored.file), "--runs", str(stored.runs)]) == 0
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert names(err, str(stored.path), "is damaged", "`fewbits sweep`")
    (line,) = changes(stored.overrides, stored.plan)
    assert str(stored.path) in line
    assert save_plan(stored.plan, stored.overrides) == stored.path
    assert parts(find_plan(stored.overrides)) == parts(stored.plan)


@pytest.mark.parametrize("how", ["changed", "gone", "broken", "without data"])
def test_readers_use_the_stored_plan_whatever_became_of_the_sweep(how: str, stored: Stored) -> None:
    if how == "changed":
        stored.edit(seeds=[0, 5])
    elif how == "gone":
        stored.file.unlink()
    elif how == "broken":
        stored.file.write_text("arms: [")
    else:
        stored.edit(overrides=["model=nemotron-nano", "data=bin", "data.path=/nowhere", "training.steps=5"])
    assert parts(find_plan(stored.overrides)) == parts(stored.plan)
    if how == "gone":
        with pytest.raises(ValueError, match=r"family\.yaml"):
            find_plan([*stored.overrides, "seeds=[7]"])


def test_what_has_changed_since_the_stored_plan_is_told(stored: Stored) -> None:
    assert changes(stored.overrides, stored.plan) == []
    assert changes([*stored.overrides, "seeds=[0,7]"], stored.plan) == [], "these overrides have no plan"
    stored.edit(seeds=[0, 5])
    (line,) = changes(stored.overrides, planned(*stored.overrides))
    half = len(stored.plan.members) // 2
    assert line.endswith(f": {half} trials added, {half} trials removed")
    stored.edit(seeds=[0, 1], overrides=[*yaml.safe_load(stored.file.read_text())["overrides"], "training.blow_up=2"])
    first, *_ = stored.plan.trials.values()
    first.folder.path.mkdir(parents=True)
    (first.folder.path / "result.json").write_text(json.dumps({"id": first.id, "status": "done", "step": 8}))
    counted, named = changes(stored.overrides, planned(*stored.overrides))
    assert counted.endswith(f": {len(stored.plan.members)} trials changed")
    assert names(named, "training.blow_up", "1 result")
