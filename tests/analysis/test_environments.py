"""Test that only trials from the same environment are compared, and that messages name the differences."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fewbits.analysis.engine.results.data import Differences, NoData
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.pairing import paired
from fewbits.analysis.views.provenance import Provenance
from fewbits.sweeps.planning.plan import Plan
from tests.messages import names

Planner = Callable[..., Plan]
USUAL = {"recipe.threshold": "0.045"}


def recompute(plan: Plan, arm: str, seed: int, **environment: str) -> Path:
    """Change a trial's provenance.json as if another environment had computed its steps; return the run folder.

    environment: property → value. A value `A|B` means that A computed the first part of the steps and B the next.
    """
    folder = next(plan.trials[m.id].folder for m in plan.members if (m.cell.arm, m.cell.seed) == (arm, seed))
    path = folder.path / "provenance.json"
    provenance = json.loads(path.read_text())
    (segment,) = provenance["segments"][:1]
    count = max(value.count("|") for value in environment.values()) + 1
    parts = [{key: value.split("|")[at] for key, value in environment.items()} for at in range(count)]
    provenance["segments"] = [
        segment | {"step": at, "environment": segment["environment"] | part} for at, part in enumerate(parts)
    ]
    path.write_text(json.dumps(provenance))
    return folder.path


def compared(plan: Plan) -> Differences | NoData:
    return paired(Results(plan), "validation_loss", "mor", "bf16", USUAL)


def own_kind(plan: Plan) -> str:
    kinds = {one[0][0] for one in Results(plan).trials["computed"]}
    (kind,) = kinds
    return str(kind)


def mixed(plan: Plan) -> list[str]:
    return [line for line in Provenance(Results(plan), ()).mixed if "commit" not in line]


def test_a_pair_across_kinds_is_not_compared_and_says_what_mends_it(planned: Planner) -> None:
    plan, kind = planned(), own_kind(planned())
    recompute(plan, "bf16", 1, kind="intel-amx2")
    found = compared(plan)
    assert isinstance(found, Differences)
    assert len(found.values) == 1
    (note,) = found.notes
    assert names(note, "seed 1", "mor, recipe.threshold 0.045", kind, "bf16 on intel-amx2", f"on {kind}")
    (line,) = mixed(plan)
    assert names(line, "seed 1", f"{kind} (3 trials)", "intel-amx2 (1 trial)", f"on {kind}")


def test_no_pair_left_is_no_data_with_the_reasons(planned: Planner) -> None:
    plan = planned()
    for seed in (0, 1):
        recompute(plan, "bf16", seed, kind="intel-amx2")
    found = compared(plan)
    assert isinstance(found, NoData)
    assert found.reason.count("not compared") == 2
    assert Results(planned()).flags == ()


@pytest.mark.parametrize("key", ["torch", "backend"])
def test_torch_and_backends_are_named_and_kept_apart(planned: Planner, key: str) -> None:
    plan = planned()
    recompute(plan, "bf16", 0, **{key: "another"})
    found = compared(plan)
    assert len(found.notes) == 1  # type: ignore[union-attr]
    assert f"{key} another" in found.notes[0]  # type: ignore[union-attr]
    assert "run folders away" in found.notes[0]  # type: ignore[union-attr]
    (line,) = mixed(plan)
    assert "within seed 0" in line
    assert "another (1 trial)" in line


def test_a_trial_whose_parts_differ_is_named_and_compared_with_nothing(planned: Planner) -> None:
    plan, kind = planned(), own_kind(planned())
    path = recompute(plan, "bf16", 0, kind=f"{kind}|intel-amx2")
    assert len(compared(plan).values) == 1  # type: ignore[union-attr]
    assert mixed(plan)[-1].startswith(f"{path.name} was computed on {kind}, then intel-amx2, so nothing is compared")


def test_runs_of_older_versions_are_alike_among_themselves(planned: Planner) -> None:
    plan = planned()
    for one in plan.trials.values():
        path = one.folder.path / "provenance.json"
        provenance = json.loads(path.read_text())
        path.write_text(json.dumps({key: value for key, value in provenance.items() if key != "segments"}))
    found = compared(plan)
    assert isinstance(found, Differences)
    assert len(found.values) == 2
    assert mixed(plan) == []
