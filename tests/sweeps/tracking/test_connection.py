"""Test the owner of MLflow runs (a store and a user), and the creation of MLflow's database."""

import shutil
from pathlib import Path

import pytest

from fewbits.sweeps.tracking import connection
from fewbits.sweeps.tracking.connection import connect, store_id


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
