"""Test the owner of MLflow runs: the id of a store, which does not depend on its path, and the name of a user."""

import getpass
import shutil
import threading
from pathlib import Path

import pytest

from fewbits.experiments.tracking import owner
from fewbits.experiments.tracking.owner import Owner, owner_of, store_id, user

SECRET = "hunter2-Zq"


def test_a_store_keeps_its_id_when_it_moves_and_two_stores_differ(tmp_path: Path) -> None:
    first, second = store_id(tmp_path / "a"), store_id(tmp_path / "b")
    assert first == store_id(tmp_path / "a") != second
    (tmp_path / "a").rename(tmp_path / "c")
    assert store_id(tmp_path / "c") == first


def test_threads_that_ask_at_once_get_one_id_and_leave_one_file(tmp_path: Path) -> None:
    for attempt in range(20):
        runs, ids, together = tmp_path / str(attempt), list[str](), threading.Barrier(8)

        def ask(runs: Path = runs, ids: list[str] = ids, together: threading.Barrier = together) -> None:
            together.wait()
            ids.append(store_id(runs))

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(ids) == 8
        assert len(set(ids)) == 1
        assert [path.name for path in runs.iterdir()] == [owner.FILE]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"id": 5}', '{"id": "../x"}'])
def test_a_damaged_id_is_refused_and_never_replaced(content: str, tmp_path: Path) -> None:
    (tmp_path / owner.FILE).write_text(content)
    with pytest.raises(ValueError, match="restore or remove the file"):
        store_id(tmp_path)
    assert (tmp_path / owner.FILE).read_text() == content


def test_the_user_is_named_by_ours_then_mlflows_then_the_systems_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("FEWBITS_USER", "MLFLOW_TRACKING_USERNAME"):
        monkeypatch.delenv(variable, raising=False)
    assert user() == getpass.getuser()
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "of-mlflow")
    assert user() == "of-mlflow"
    monkeypatch.setenv("FEWBITS_USER", "ours")
    assert user() == "ours"
    for wrong in ("o'brien", 'a"b', "a`b", "x" * 81):
        monkeypatch.setenv("FEWBITS_USER", wrong)
        with pytest.raises(ValueError, match="FEWBITS_USER"):
            user()


def test_a_user_without_a_name_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a user id without a name is used as the name, as in a container that runs with `--user 12345`."""

    def unknown() -> str:
        raise KeyError("getpwuid(): uid not found")

    for variable in ("FEWBITS_USER", "MLFLOW_TRACKING_USERNAME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(getpass, "getuser", unknown)
    assert user().startswith("uid-")


def test_owners_of_one_store_or_one_name_are_different(tmp_path: Path) -> None:
    owners = [Owner(store, name) for store in ("0" * 16, "1" * 16) for name in ("a b", "a-b")]
    assert len({one.name for one in owners}) == 4
    assert len({one.cache_key("http://host") for one in owners}) == 4
    assert not owners[0].owns(owners[1].tags)
    assert owners[0].owns({**owners[0].tags, "more": "tags"})


def test_no_credential_is_part_of_a_stored_key(tmp_path: Path) -> None:
    """Check that a cache key does not depend on a URI's password: a short password could be guessed from a hash."""
    mine = owner_of(tmp_path)
    uri = "postgresql://alice:{}@host/db"
    assert mine.cache_key(uri.format(SECRET)) == mine.cache_key(uri.format("another"))
    assert mine.cache_key(uri.format(SECRET)) != mine.cache_key("postgresql://alice:x@host/other")


def test_a_copied_store_keeps_its_id(tmp_path: Path) -> None:
    first = store_id(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert store_id(tmp_path / "b") == first
