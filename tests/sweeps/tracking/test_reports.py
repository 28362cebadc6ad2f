"""Test that a report is sent to MLflow as an artifact, once for each content, and later if MLflow was unreachable."""

import warnings
from pathlib import Path
from typing import Any

import pytest

from fewbits.experiments.tracking import connection, mlflow_runs
from fewbits.experiments.tracking.owner import owner_of
from fewbits.sweeps.planning.plan import Plan
from fewbits.sweeps.tracking.comparison import KIND, SCALE
from fewbits.sweeps.tracking.mlflow_view import Mirror
from fewbits.sweeps.tracking.reports import track_report
from fewbits.sweeps.tracking.sent import look_at_database
from tests.sweeps.tracking.test_mlflow_view import ONE, planned, train


@pytest.fixture
def made(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    made = planned(tmp_path, cache, ONE)
    for trial in made.trials.values():
        train(trial)
    return made


@pytest.fixture
def report(tmp_path: Path) -> Path:
    folder = tmp_path / "reports" / "cost-smoke"
    (folder / "tables").mkdir(parents=True)
    (folder / "index.html").write_text("<h1>first</h1>")
    (folder / "tables" / "losses.csv").write_text("arm,loss\n")
    return folder


def report_runs(made: Plan) -> list[Any]:
    client = connection.connect(made.store, connection.tracking_uri(made.store))
    study = client.get_experiment_by_name("cost")
    assert study is not None
    return mlflow_runs.search(client, study.experiment_id, {KIND: "report", **owner_of(made.store).key})


def page(made: Plan, run: Any, folder: Path) -> str:
    client = connection.connect(made.store, connection.tracking_uri(made.store))
    assert [item.path for item in client.list_artifacts(run.info.run_id, "report/tables")] == [
        "report/tables/losses.csv"
    ]
    return Path(client.download_artifacts(run.info.run_id, "report/index.html", str(folder))).read_text()


def test_a_report_is_sent_once_for_each_content(made: Plan, report: Path, tmp_path: Path) -> None:
    uri = connection.tracking_uri(made.store)
    Mirror(made).sync(last=True)
    track_report(made.store, "cost", "smoke", report)
    (run,) = report_runs(made)
    assert (run.info.status, run.data.tags[SCALE]) == ("FINISHED", "smoke")
    assert page(made, run, tmp_path) == "<h1>first</h1>"

    before = look_at_database(uri)
    track_report(made.store, "cost", "smoke", report)
    assert Mirror(made).sync(last=True).sent == 0
    assert look_at_database(uri) == before  # nothing was sent again

    (report / "index.html").write_text("<h1>second, longer</h1>")
    track_report(made.store, "cost", "smoke", report)
    (again,) = report_runs(made)
    assert again.info.run_id == run.info.run_id
    assert page(made, again, tmp_path) == "<h1>second, longer</h1>"


def test_a_report_of_a_store_that_mlflow_does_not_have_is_not_sent(made: Plan, report: Path) -> None:
    before = sorted(made.store.iterdir())
    track_report(made.store, "cost", "smoke", report)
    assert sorted(made.store.iterdir()) == before
    Mirror(made).sync(last=True)
    track_report(made.store, "cost", "gpu", report)  # MLflow has no sweep of this study at scale gpu
    assert report_runs(made) == []


def test_a_report_written_while_mlflow_is_away_is_sent_by_the_next_driver(
    made: Plan, report: Path, tmp_path: Path
) -> None:
    Mirror(made).sync(last=True)
    database = made.store / connection.DATABASE
    away = database.rename(tmp_path / "away.db")
    database.mkdir()
    with pytest.warns(RuntimeWarning, match="MLflow was not updated"):
        track_report(made.store, "cost", "smoke", report)
    database.rmdir()
    away.rename(database)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert not Mirror(made).sync(last=True).away
    (run,) = report_runs(made)
    assert page(made, run, tmp_path) == "<h1>first</h1>"
