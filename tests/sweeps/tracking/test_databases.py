"""Test that a sweep has equal runs in MLflow with SQLite and a server, even if the server was stopped."""

import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fewbits.sweeps.planning.plan import Plan
from fewbits.sweeps.tracking import connection
from fewbits.sweeps.tracking.mirror import Mirror
from tests.sweeps.tracking.conftest import mlflow_server
from tests.sweeps.tracking.tracked import ONE, everything, planned, train


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Plan:
    """Return the plan of two trials that were trained without MLflow."""
    made = planned(tmp_path_factory.mktemp("done"), cache, f"seeds: [0, 1]{ONE}")
    for trial in made.trials.values():
        train(trial)
    return made


def test_the_same_sweep_gives_the_same_runs_as_in_sqlite(shared_server: str, done: Plan, tmp_path: Path) -> None:
    local = Mirror(done, uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    assert local.sync(last=True)
    expected = everything(local.uri, done.store)
    for _ in range(2):
        assert Mirror(done, uri=shared_server).sync(last=True)
        assert everything(shared_server, done.store) == expected


def test_users_that_send_at_once_lose_nothing(
    shared_server: str, done: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEWBITS_USER", "both")
    mirrors = [Mirror(done, uri=shared_server) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda mirror: mirror.sync(last=True), mirrors))
    local = Mirror(done, uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    local.sync(last=True)
    assert everything(shared_server, done.store) == everything(local.uri, done.store)


def test_a_server_that_was_away_gets_everything_when_it_is_back(
    done: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that stops after it got one of two trials has both of them after its restart, and no run twice."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setattr(connection, "SHARE", 0)
    member, _ = done.members
    some = Plan(done.sweeps, (member,), {member.id: done.trials[member.id]})
    with mlflow_server(tmp_path) as address:
        mirror = Mirror(done, uri=address)
        assert Mirror(some, uri=address).sync()
    with pytest.warns(RuntimeWarning, match="MLflow was not updated"):
        assert not mirror.sync(last=True)
    local = Mirror(done, uri=f"sqlite:///{tmp_path / 'other.db'}")
    assert local.sync(last=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with mlflow_server(tmp_path, port=int(address.rpartition(":")[2])):
            assert mirror.sync(last=True)
            assert everything(mirror.uri, done.store) == everything(local.uri, done.store)
