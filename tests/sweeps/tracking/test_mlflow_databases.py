"""Test that a sweep has equal runs in MLflow with SQLite, PostgreSQL and a server, even if the server was stopped."""

import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fewbits.experiments.storage.lease import leased
from fewbits.experiments.tracking import connection, mlflow_runs
from fewbits.experiments.tracking.owner import owner_of
from fewbits.experiments.tracking.tracker import EXPERIMENT
from fewbits.sweeps.planning.plan import Plan
from fewbits.sweeps.tracking.mlflow_view import Mirror
from tests.forked_python import run_python
from tests.sweeps.tracking.mlflow_servers import mlflow_server
from tests.sweeps.tracking.postgres_server import needs_postgres, postgres_server
from tests.sweeps.tracking.test_mlflow_view import AT_ONCE, MANY, ONE, STEPS, copied, everything, planned, seen, train


@dataclass(frozen=True)
class Place:
    """An MLflow server or database to which tests send runs."""

    kind: str  # `server` or `postgres`
    uri: str  # its tracking URI


@pytest.fixture(scope="module", params=["server", pytest.param("postgres", marks=needs_postgres)])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    if request.param == "server":
        yield Place("server", request.getfixturevalue("shared_server"))
    else:
        with postgres_server() as uri:
            connection.connect(tmp_path_factory.mktemp("client"), uri)  # creates the tables before several processes do
            yield Place("postgres", uri)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Plan:
    """Return the plan of two trials that were trained without MLflow."""
    made = planned(tmp_path_factory.mktemp("done"), cache, f"seeds: [0, 1]{ONE}")
    for trial in made.trials.values():
        train(trial)
    return made


def test_the_same_sweep_gives_the_same_runs_as_in_sqlite(place: Place, done: Plan, tmp_path: Path) -> None:
    local = Mirror(done, f"sqlite:///{tmp_path / 'mlflow.db'}")
    there = Mirror(done, place.uri)
    for mirror in (local, there):
        assert mirror.sync(last=True).sent == 2
    assert everything(there) == everything(local)
    assert Mirror(done, place.uri).sync(afresh=True).sent == 2  # sends both trials again, into the existing runs
    assert everything(there) == everything(local)


def test_the_run_of_a_killed_trial_is_ended(place: Place, cache: Path, tmp_path: Path) -> None:
    made = planned(tmp_path, cache, ONE)
    (trial,) = made.trials.values()
    train(trial, until=3)
    mirror = Mirror(made, place.uri)
    with leased(trial.folder.path):
        mirror.sync()
        assert seen(mirror)[trial.id].info.status == "RUNNING"
    Mirror(made, place.uri).sync(last=True)
    assert seen(mirror)[trial.id].info.status == "KILLED"


def test_processes_at_once_lose_no_metric(place: Place, done: Plan, tmp_path: Path) -> None:
    original = next(iter(done.trials.values())).folder
    named = ((tmp_path / "runs" / f"trial-{number:08x}", f"{number:064x}") for number in range(AT_ONCE))
    folders = [copied(original, path, trial).path for path, trial in named]
    arguments = ["-c", MANY, *map(str, [tmp_path, *folders])]
    environment = os.environ | {"MLFLOW_TRACKING_URI": place.uri, "MLFLOW_HTTP_REQUEST_TIMEOUT": "100"}
    ended = run_python(arguments, folder=tmp_path, environment=environment)
    assert (ended.returncode, ended.stderr) == (0, "")
    client = connection.connect(tmp_path, place.uri)
    study = client.get_experiment_by_name(EXPERIMENT)
    assert study is not None
    owner = owner_of(tmp_path / "runs")
    runs = [run for run in client.search_runs([study.experiment_id]) if owner.owns(run.data.tags)]
    assert sorted(run.data.tags[mlflow_runs.TRIAL] for run in runs) == [f"{number:064x}" for number in range(AT_ONCE)]
    for run in runs:
        assert run.info.status == "FINISHED"
        assert [point.step for point in client.get_metric_history(run.info.run_id, "loss")] == list(range(STEPS))


def test_a_server_that_was_away_gets_everything_when_it_is_back(
    done: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that stops after it got one of two trials has both of them after its restart, and no run twice."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setattr(connection, "SHARE", 0)
    member, _ = done.members
    some = Plan(done.sweeps, (member,), {member.id: done.trials[member.id]})
    with mlflow_server(tmp_path) as address:
        mirror = Mirror(done, address)
        assert Mirror(some, address).sync().sent == 1
    with pytest.warns(RuntimeWarning, match="MLflow was not updated"):
        assert mirror.sync(last=True).away
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with mlflow_server(tmp_path, port=int(address.rpartition(":")[2])):
            assert mirror.sync(last=True).sent == 2  # after an error, all trials are compared with MLflow's runs again
            local: Any = Mirror(done, f"sqlite:///{tmp_path / 'other.db'}")
            assert local.sync(last=True).sent == 2
            assert everything(mirror) == everything(local)
