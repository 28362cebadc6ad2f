"""Test where a store and its MLflow database are.

A URL is refused as a store. If a store is on a network file system, its SQLite database is in the user's cache folder.
"""

import os
import warnings
from pathlib import Path

import pytest

from fewbits import cli
from fewbits.common import store_folder
from fewbits.sweeps.tracking import connection

URL = "s3://bucket/runs"
COMMANDS = {
    "train": ["train", f"runtime.runs={URL}"],
    "train --multirun": ["train", "-m", "seed=0,1", f"runtime.runs={URL}"],
    "sweep": ["sweep", "study=mor", "scale=smoke", "--runs", URL],
    "sweep by an override": ["sweep", "study=mor", "scale=smoke", f"runtime.runs={URL}"],
    "dry run": ["sweep", "study=mor", "scale=smoke", "--dry-run", "--runs", URL],
    "status": ["status", "study=mor", "scale=smoke", "--runs", URL],
    "report": ["report", "study=mor", "scale=smoke", "--runs", URL],
    "claims": ["claims", "study=mor", "scale=smoke", "--runs", URL],
    "ui": ["ui", "--runs", URL],
    "explain": ["explain", "1a2b3c4d", "--runs", URL],
    "probe": ["probe", "some-run", "nvfp4", "--runs", URL],
    "bench train": ["bench", "train", "--store", URL],
    "bench kernels": ["bench", "kernels", "--generators", "--store", URL],
}


@pytest.mark.parametrize("argv", COMMANDS.values(), ids=COMMANDS)
def test_a_store_that_is_a_url_is_one_line(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert URL in line
    assert "a store is a folder" in line
    assert "mount" in line
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def on_nfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a store that a false list of mounts places on NFS; the user's cache folder is on a local file system."""
    runs = tmp_path / "shared" / "runs"
    runs.mkdir(parents=True)
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"22 1 254:0 / / rw - ext4 /dev/vda rw\n30 22 0:40 / {runs.parent} rw - nfs4 server:/x rw\n")
    monkeypatch.setattr(store_folder, "MOUNTS", mounts)
    monkeypatch.setattr(connection, "_warned", set())
    monkeypatch.setenv("FEWBITS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return runs


def test_on_a_network_file_system_the_database_is_in_the_users_cache_and_one_line_says_so(on_nfs: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first, second = connection.tracking_uri(on_nfs), connection.tracking_uri(on_nfs)
    assert first == second
    path = Path(first.removeprefix("sqlite:///"))
    assert path.is_relative_to(Path(os.environ["FEWBITS_CACHE"]))
    assert connection.store_id(on_nfs) in path.parts
    (message,) = (str(one.message) for one in caught)
    assert "\n" not in message
    for part in ("nfs4", str(on_nfs), str(path), "MLFLOW_TRACKING_URI"):
        assert part in message
    assert connection.connect(on_nfs, first).search_experiments()
    assert not (on_nfs / connection.DATABASE).exists()


def test_ui_uses_the_database_in_the_cache(on_nfs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ui", "--sync-only", "--runs", str(on_nfs)]) == 0
    shown = capfd.readouterr().err
    assert sum("nfs4" in line for line in shown.splitlines()) == 1
    (database,) = (tmp_path / "cache" / "mlflow" / "stores").rglob(connection.DATABASE)
    assert f"sqlite:///{database}" in shown
    database.write_bytes(b"no database")  # so that the error of `ui` names the database that it opens
    assert cli.main(["ui", "--runs", str(on_nfs)]) == 2
    assert f"MLflow cannot open sqlite:///{database}" in capfd.readouterr().err
