"""Test the tables of trials, the pairing of trials, and standard deviations over seeds that are pooled over arms.

The trials are those that conftest.py trains.
"""

import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pandas as pd
import pytest

from fewbits.analysis.engine.claims.pairs import formula
from fewbits.analysis.engine.results.data import Differences, NoData, NotPlanned
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.pairing import paired, sample
from fewbits.analysis.engine.results.rows import LABELS
from fewbits.analysis.figures import series
from fewbits.sweeps.planning.plan import Plan
from tests.messages import names, naming

Planner = Callable[..., Plan]
AXIS, STRICT, USUAL = "recipe.threshold", {"recipe.threshold": "0.0001"}, {"recipe.threshold": "0.045"}


def folder_of(results: Results, arm: str, seed: int) -> Path:
    rows = results.trials
    return Path(rows[(rows["arm"] == arm) & (rows["seed"] == seed)].iloc[0]["folder"])


def test_every_place_is_a_row_with_the_numbers_of_its_result(planned: Planner) -> None:
    rows = Results(planned()).trials
    places = [(row["arm"], row.get(AXIS), row["seed"], row["state"]) for row in rows.to_dict("records")]
    assert [place[0] for place in places] == ["bf16"] * 2 + ["mor"] * 4 + ["wild"] * 2
    assert [place[3] for place in places] == ["done"] * 6 + ["diverged"] * 2
    assert [place[1] for place in places if place[0] == "mor"] == ["0.0001", "0.0001", "0.045", "0.045"]
    for row in rows.to_dict("records"):
        result = json.loads((Path(row["folder"]) / "result.json").read_text())
        assert row["id"] == result["id"]
        assert row["loss"] == result["loss"]
        if row["state"] == "done":
            assert row["validation_loss"] == result["validation_loss"]
            assert (row["step"], row["steps"]) == (4, 4)
    assert Results(planned()).flags == ()


def test_curves_are_those_of_the_files(planned: Planner) -> None:
    results = Results(planned())
    losses, validation = results.curves("loss"), results.curves("validation_loss")
    of_one = losses[(losses["arm"] == "bf16") & (losses["seed"] == 1)]
    file = pd.read_parquet(folder_of(results, "bf16", 1) / "metrics.parquet")
    assert of_one["value"].tolist() == file["loss"].tolist()
    assert of_one["step"].tolist() == [0, 1, 2, 3]
    assert len(validation) == 6 * 2, "six trials are evaluated twice; the two that diverge at once are not evaluated"
    assert set(LABELS) <= set(losses.columns)
    with pytest.raises(ValueError, match="metric 'los'"):
        results.curves("los")


def test_numerics_have_the_places_labels(planned: Planner) -> None:
    numerics = Results(planned()).numerics()
    strict = numerics[numerics["axes"].map(lambda axes: dict(axes) == STRICT)]
    usual = numerics[numerics["axes"].map(lambda axes: dict(axes) == USUAL)]
    assert (strict["share_1"].dropna() == 1).all(), "no tensor passes a threshold of 0.01 %, so all fall back to BF16"
    assert usual["share_1"].mean() < strict["share_1"].mean()
    assert set(strict["seed"]) == {0, 1}


def test_pairs_share_their_seed_and_a_baseline_without_the_axis_is_shared(planned: Planner) -> None:
    results = Results(planned())
    rows = results.trials.set_index(["arm", "seed"])["validation_loss"]
    for where, first in ((STRICT, 0), (USUAL, 1)):
        found = paired(results, "validation_loss", "mor", "bf16", where)
        assert isinstance(found, Differences)
        ours = [rows.loc["mor"][seed].iloc[first] for seed in (0, 1)]
        base = [rows.loc["bf16"][seed] for seed in (0, 1)]
        assert found.values == tuple((a - b) / b for a, b in zip(ours, base, strict=True))
        assert len(found.trials) == 4
        assert found.notes == ()
    same = paired(results, "validation_loss", "mor", "bf16", STRICT)
    assert isinstance(same, Differences)
    assert same.values == (0, 0), "all tensors fall back to BF16, so the losses equal those of the arm bf16"


def test_seeds_alone_replicate(planned: Planner) -> None:
    """Check that the pairs that `paired` returns differ from each other only in their seed.

    If no value is chosen for an axis of the arm, an error lists the values.
    """
    results = Results(planned())
    with pytest.raises(ValueError, match=naming("arm mor", "recipe.threshold=0.0001")):
        paired(results, "validation_loss", "mor", "bf16")
    with pytest.raises(ValueError, match=naming("arm mor", "none", f"{AXIS}=7")):
        paired(results, "validation_loss", "mor", "bf16", {AXIS: "7"})
    with pytest.raises(ValueError, match="arm 'more'"):
        paired(results, "validation_loss", "more", "bf16")
    with pytest.raises(ValueError, match="metric 'los'"):
        paired(results, "los", "mor", "bf16", USUAL)


def test_numbers_of_ones_own_pair_by_id(planned: Planner) -> None:
    """Check that `sample` and `paired` take numbers by trial id, and name seeds for which a number is missing."""
    results = Results(planned())
    numerics = results.numerics()
    share = numerics[numerics["arm"] == "mor"].groupby("id")["share_1"].mean()
    found = sample(results, {str(key): value for key, value in share.items()}, "mor", STRICT)
    assert isinstance(found, Differences)
    assert found.values == (1.0, 1.0)
    assert not found.relative
    none: dict[str, float] = {}
    for numbers in (none, dict.fromkeys(map(str, results.trials["id"]), math.nan)):
        missing = sample(results, numbers, "mor", STRICT)
        assert isinstance(missing, NoData)
        assert "seed 0: no number" in missing.reason
    of_baseline = {row["id"]: 1.0 for row in results.rows if row["arm"] == "bf16"}
    unpaired = paired(results, of_baseline, "mor", "bf16", STRICT)
    assert isinstance(unpaired, NoData)
    assert "seed 0: no number" in unpaired.reason


def test_divergence_is_an_event_of_its_pair(planned: Planner) -> None:
    results = Results(planned())
    found = paired(results, "validation_loss", "wild", "bf16")
    assert isinstance(found, Differences)
    assert (found.values, found.diverged, found.baseline_diverged) == ((), 2, 0)
    both = paired(results, "validation_loss", "wild", "wild")
    assert isinstance(both, NoData)
    assert "both trials of the pair diverged" in both.reason


def difference(values: Mapping[str, float]) -> float:
    return values["end"] - values["training"]


def of_arm(arm: str) -> dict[str, tuple[tuple[str], str, str]]:
    """Return the argument `arms` of `formula`, name → (sweeps, arm, metric), for the two losses in `difference`."""
    return {"end": (("tiny",), arm, "validation_loss"), "training": (("tiny",), arm, "loss")}


def test_a_formula_takes_the_numbers_of_each_seed_whose_trials_are_done(planned: Planner) -> None:
    results = Results(planned())
    rows = results.trials[results.trials["arm"] == "bf16"]
    expected = (rows["validation_loss"] - rows["loss"]).tolist()
    found = formula(results, of_arm("bf16"), difference, relative=False)
    assert isinstance(found, Differences)
    assert found.values == pytest.approx(expected)
    assert (found.relative, found.trials, found.notes) == (False, tuple(rows["id"]), ())
    shutil.rmtree(folder_of(results, "bf16", 0))
    one = formula(Results(planned()), of_arm("bf16"), difference)
    assert isinstance(one, Differences)
    assert one.values == pytest.approx(expected[1:])
    assert one.notes == ("bf16, seed 0: missing: not run yet, or not finished",)


def test_a_formula_without_numbers_says_why(planned: Planner) -> None:
    results = Results(planned())

    def fails(values: Mapping[str, float]) -> float:
        raise ValueError("the cost is 0")

    bf16, wild = of_arm("bf16"), of_arm("wild")
    for arms, combine, reasons in (
        (wild, difference, ("wild, seed 0: diverged", "wild, seed 1: diverged")),
        (bf16 | {"training": wild["training"]}, difference, ("wild, seed 0: diverged",)),
        (bf16 | {"training": (("tiny",), "bf16", "los")}, difference, ("los",)),
        (bf16, fails, ("the cost is 0",)),
    ):
        nothing = formula(results, arms, combine)
        assert isinstance(nothing, NoData)
        assert all(names(nothing.reason, reason) for reason in reasons)
    for missing in (of_arm("fp8"), bf16 | {"training": (("big",), "bf16", "loss")}):
        assert isinstance(formula(results, missing, difference), NotPlanned)


def test_a_deleted_trial_is_missing_and_said_to_be(planned: Planner) -> None:
    shutil.rmtree(folder_of(Results(planned()), "bf16", 0))
    results = Results(planned())
    assert len(results.trials) == 8
    assert results.flags == ("bf16, seed 0: missing: not run yet, or not finished",)
    found = paired(results, "validation_loss", "mor", "bf16", USUAL)
    assert isinstance(found, Differences)
    assert len(found.values) == 1
    assert found.notes == results.flags
    shutil.rmtree(folder_of(results, "bf16", 1))
    nothing = paired(Results(planned()), "validation_loss", "mor", "bf16", USUAL)
    assert isinstance(nothing, NoData)


def test_what_another_config_computed_is_not_used(planned: Planner) -> None:
    before = Results(planned()).trials
    other = planned("optimizer.lr=0.01")
    results = Results(other)
    rows = results.trials
    assert set(rows["id"]).isdisjoint(before["id"])
    assert set(rows["state"]) == {"planned"}
    assert all("missing: " in flag for flag in results.flags)
    assert len(results.flags) == 8
    found = paired(results, "validation_loss", "mor", "bf16", USUAL)
    assert isinstance(found, NoData)
    assert results.curves("loss").empty


@pytest.mark.parametrize("text", ["{", "[]", '{"id": "another", "status": "done", "step": 4}'])
def test_a_result_that_is_none_is_a_failure_and_said_to_be(planned: Planner, text: str) -> None:
    (folder_of(Results(planned()), "bf16", 0) / "result.json").write_text(text)
    results = Results(planned())
    (flag,) = results.flags
    assert flag.startswith("bf16, seed 0: ")
    assert "result.json" in flag
    found = paired(results, "validation_loss", "mor", "bf16", USUAL)
    assert isinstance(found, Differences)
    assert len(found.values) == 1


def test_a_damaged_table_is_named_and_not_left_out(planned: Planner) -> None:
    path = folder_of(Results(planned()), "bf16", 0) / "metrics.parquet"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"metrics\.parquet is damaged \("):
        Results(planned()).curves("loss")
    with pytest.raises(ValueError, match="is damaged"):
        series.curves(Results(planned()), "loss")
