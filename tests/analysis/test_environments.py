"""Test that only trials from the same environment are compared, and that messages name the differences."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fewbits.analysis.engine.results.data import Differences, NoData
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.pairing import paired
from fewbits.analysis.engine.results.rows import why_not_compared
from fewbits.analysis.views.provenance import Provenance
from fewbits.sweeps.planning.plan import Plan
from fewbits.sweeps.planning.store import State
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


def test_trials_of_one_kind_are_compared_and_nothing_is_noted(planned: Planner) -> None:
    found = compared(planned())
    assert isinstance(found, Differences)
    assert (len(found.values), found.notes) == (2, ())
    assert mixed(planned()) == []


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


def test_divergence_beside_another_kind_is_no_event(planned: Planner) -> None:
    plan = planned()
    recompute(plan, "wild", 0, kind="intel-amx2")
    found = paired(Results(plan), "validation_loss", "wild", "bf16")
    assert isinstance(found, Differences)
    assert found.diverged == 1


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


def test_kinds_that_differ_between_seeds_are_fine(planned: Planner) -> None:
    plan = planned()
    for one in plan.members:
        if one.cell.seed == 1:
            path = plan.trials[one.id].folder.path / "provenance.json"
            provenance: Any = json.loads(path.read_text())
            for segment in provenance["segments"]:
                segment["environment"]["kind"] = "intel-amx2"
            path.write_text(json.dumps(provenance))
    assert len(compared(plan).values) == 2  # type: ignore[union-attr]
    assert mixed(plan) == []


def row(key: str, *computed: tuple[str | None, ...]) -> dict[str, Any]:
    return {"id": key, "arm": "mor", "axes": (), "state": State.DONE, "seed": 0, "computed": computed}


def test_a_trial_is_compared_with_itself_even_if_two_kinds_computed_it() -> None:
    mixed = row("a", ("amd-avx2", "cpu", "2.13", None), ("intel-amx", "cpu", "2.13", None))
    assert why_not_compared(mixed, mixed, None) is None
    assert why_not_compared(mixed, {**mixed, "id": "b"}, None) is not None


def test_a_trial_of_an_unknown_kind_is_to_be_run_again() -> None:
    known = row("a", ("amd-avx2", "cpu", "2.13", None))
    note = why_not_compared(row("b"), known, "amd-avx2")
    assert note is not None
    assert "on amd-avx2" in note
