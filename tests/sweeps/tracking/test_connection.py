"""Test the owner of MLflow runs (a store and a user), and the creation of MLflow's database."""

import getpass
import shutil
from pathlib import Path

import pytest

from fewbits.sweeps.tracking import connection
from fewbits.sweeps.tracking.connection import connect, store_id, user


def test_a_store_keeps_its_id_when_it_is_moved_or_copied_and_two_stores_differ(tmp_path: Path) -> None:
    first, second = store_id(tmp_path / "a"), store_id(tmp_path / "b")
    assert first == store_id(tmp_path / "a") != second
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    (tmp_path / "a").rename(tmp_path / "c")
    assert store_id(tmp_path / "c") == store_id(tmp_path / "copy") == first


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"id": 5}', '{"id": "../x"}'])
def test_a_damaged_id_is_refused_and_never_replaced(content: str, tmp_path: Path) -> None:
    (tmp_path / connection.FILE).write_text(content)
    with pytest.raises(ValueError, match="restore or remove the file"):
        store_id(tmp_path)
    assert (tmp_path / connection.FILE).read_text() == content


def test_the_user_is_named_by_ours_then_mlflows_then_the_systems_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("FEWBITS_USER", "MLFLOW_TRACKING_USERNAME"):
        monkeypatch.delenv(variable, raising=False)
    assert user() == getpass.getuser()
    with monkeypatch.context() as patched:
        patched.setattr(getpass, "getuser", lambda: dict[str, str]()["name"])  # as in a container with `--user 12345`
        assert user().startswith("uid-")
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "of-mlflow")
    assert user() == "of-mlflow"
    monkeypatch.setenv("FEWBITS_USER", "ours")
    assert user() == "ours"
    for wrong in ("o'brien", 'a"b', "a`b", "x" * 81):
        monkeypatch.setenv("FEWBITS_USER", wrong)
        with pytest.raises(ValueError, match="FEWBITS_USER"):
            user()


def test_a_database_whose_creation_was_cut_short_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that an incomplete database, as after a full disk or a kill, is never used: MLflow would refuse it."""
    import mlflow

    def cut_short(tracking_uri: str) -> None:
        Path(tracking_uri.removeprefix("sqlite:///")).write_bytes(b"half a database")
        raise RuntimeError("the disk is full")

    runs = tmp_path / "runs"
    uri = f"sqlite:///{runs / connection.DATABASE}"
    with monkeypatch.context() as patched:
        patched.setattr(mlflow, "MlflowClient", cut_short)
        with pytest.raises(RuntimeError, match="full"):
            connect(runs, uri)
    assert [path.name for path in runs.iterdir()] == [connection.LOCK]
    assert connect(runs, uri).search_experiments()


def test_after_a_slow_failure_the_next_attempt_waits_for_twenty_times_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now, patience = 100.0, connection.Patience()
    monkeypatch.setattr("time.monotonic", lambda: now)
    assert patience.may_retry
    warned = pytest.warns(RuntimeWarning, match="MLflow was not updated, but trials go on: away")
    with warned, patience.guarding("trials go on"):
        now += 3.0  # seconds that the attempt took
        raise OSError("away")
    for later, may_retry in ((59.0, False), (60.0, True)):
        now = 103.0 + later
        assert patience.may_retry is may_retry
    with patience.guarding("trials go on"):  # a second failure is not reported
        raise OSError("away")
