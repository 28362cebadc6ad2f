"""Test that a report is sent to MLflow as an artifact, once for each content, also after MLflow was unreachable."""

from pathlib import Path
from typing import Any

import pytest

from fewbits.sweeps.planning.plan import Plan
from fewbits.sweeps.tracking import connection
from fewbits.sweeps.tracking.mirror import Mirror, track_report
from tests.sweeps.tracking.tracked import ONE, planned, seen, train


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


def sent(made: Plan, folder: Path) -> tuple[Any, str]:
    """Return the report's run in MLflow, and the page that it has."""
    uri = connection.tracking_uri(made.store)
    run = seen(uri, made.store)["report"]
    client = connection.connect(made.store, uri)
    tables = [item.path for item in client.list_artifacts(run.info.run_id, "report/tables")]
    assert tables == ["report/tables/losses.csv"]
    return run, Path(client.download_artifacts(run.info.run_id, "report/index.html", str(folder))).read_text()


def test_a_report_is_sent_once_for_each_content(made: Plan, report: Path, tmp_path: Path) -> None:
    before = sorted(made.store.iterdir())
    track_report(made.store, "cost", "smoke", report)
    assert sorted(made.store.iterdir()) == before  # MLflow has nothing of this store
    Mirror(made).sync(last=True)
    track_report(made.store, "cost", "gpu", report)  # MLflow has no arm of this study at scale gpu
    assert "report" not in seen(connection.tracking_uri(made.store), made.store)
    track_report(made.store, "cost", "smoke", report)
    run, page = sent(made, tmp_path)
    assert (run.info.status, run.data.tags["fewbits.scale"], page) == ("FINISHED", "smoke", "<h1>first</h1>")
    (report / "index.html").write_text("<h1>second, longer</h1>")
    track_report(made.store, "cost", "smoke", report)
    again, page = sent(made, tmp_path)
    assert (again.info.run_id, page) == (run.info.run_id, "<h1>second, longer</h1>")


def test_a_report_written_while_mlflow_is_away_is_sent_by_the_next_call(
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
    track_report(made.store, "cost", "smoke", report)
    assert sent(made, tmp_path)[1] == "<h1>first</h1>"
