"""Test that results.parquet gives the same results as the store from which it was written."""

import io
import json
import shutil
from collections.abc import Callable

import pandas as pd
import pytest

from fewbits.analysis.engine.results import archive
from fewbits.analysis.engine.results.archive import Archive, Detail, Joined, archived
from fewbits.analysis.engine.results.frames import Results
from fewbits.common.store_folder import BENCH
from fewbits.sweeps.planning.plan import Plan

Planner = Callable[..., Plan]
TABLES = ("metrics.parquet", "numerics.parquet", "evaluation.parquet")


def test_an_archive_has_the_results_of_its_store(planned: Planner) -> None:
    store = Results(planned())
    (store.plan.store / BENCH).mkdir()
    (store.plan.store / BENCH / "train-cpu.json").write_text('{"turns": 3}')
    found = Archive(archived(store, ["study=mor", "runtime.runs=/somewhere"]))
    results = Results(found.plan, found)
    assert found.overrides == ("study=mor",)
    assert [(one.id, one.place) for one in results.members] == [(one.id, one.place) for one in store.members]
    assert {key: one.trial.recipe for key, one in results.plan.trials.items()} == {
        key: one.trial.recipe for key, one in store.plan.trials.items()
    }
    ignored = ["folder"]
    pd.testing.assert_frame_equal(results.trials.drop(columns=ignored), store.trials.drop(columns=ignored))
    assert results.late("loss") == store.late("loss")
    assert results.flags == store.flags
    for name in TABLES[:2]:
        ours, theirs = results.table_of(name), store.table_of(name)
        for column in (column for column in theirs if column in ours):
            present = theirs[column].notna()
            assert (ours[column].notna() == present).all()
            pd.testing.assert_series_equal(ours[column][present], theirs[column][present], check_dtype=False, rtol=3e-4)
    planned_one = next(iter(store.plan.trials.values()))
    assert found.provenance(planned_one) == json.loads(json.dumps(store.files.provenance(planned_one)))
    assert found.benches(found.plan) == {"train-cpu": {"turns": 3}}


def test_an_archive_is_read_by_pandas_and_has_no_path(planned: Planner) -> None:
    content = archived(Results(planned()), ["study=mor"])
    rows = pd.read_parquet(io.BytesIO(content))
    assert set(rows["table"]) == {"plan", "trials", *TABLES}
    assert rows[rows["table"] == "trials"]["validation_loss"].notna().sum() == 6
    assert archived(Results(planned()), ["study=mor"]) == content


def test_a_trial_without_a_result_is_missing_in_the_archive_too(planned: Planner) -> None:
    shutil.rmtree(next(iter(Results(planned()).plan.trials.values())).folder.path)
    store = Results(planned())
    found = Archive(archived(store, []))
    assert Results(found.plan, found).flags == store.flags != ()


def test_archives_of_two_machines_complete_a_store(planned: Planner) -> None:
    plan = planned()
    whole = Results(plan)
    finished = [one.folder.path for one in plan.trials.values()]
    halves = []
    for removed in (finished[:2], finished[2:]):
        for folder in removed:
            folder.rename(folder.with_name(f"away-{folder.name}"))
        halves.append(Archive(archived(Results(planned()), ["study=mor"])))
        for folder in removed:
            folder.with_name(f"away-{folder.name}").rename(folder)
    expected, late = whole.trials.drop(columns="folder"), whole.late("loss")
    for folder in finished:
        shutil.rmtree(folder)
    joined = Results(planned(), Joined(halves))
    pd.testing.assert_frame_equal(joined.trials.drop(columns="folder"), expected)
    assert joined.late("loss") == late
    assert joined.flags == ()
    assert Results(planned(), Joined(halves[:1])).flags != ()


def test_less_detail_is_kept_if_the_file_would_be_too_large(planned: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    results = Results(planned())
    whole = archived(results, [])
    with pytest.raises(ValueError, match="at most 1,000"):
        archived(results, [], 1000)
    monkeypatch.setattr(archive, "DETAILS", (Detail(200, 50), Detail(2, 1)))
    found = Archive(less := archived(results, [], len(whole) - 1))
    assert len(less) < len(whole)
    assert Results(found.plan, found).numerics().groupby("id")["step"].nunique().max() == 1
    assert Results(found.plan, found).numerics()["step"].max() == results.numerics()["step"].max()
