"""Test that data in the cache are made once, appear only when complete, and are made again if they are damaged."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fewbits
from fewbits.experiments.data.corpus import DataConfig
from fewbits.experiments.data.folder import open_folder
from fewbits.experiments.data.load import load
from fewbits.experiments.data.once import opened_or_made

SOURCE = Path(fewbits.__file__).parents[1]
SMALL = DataConfig(kind="synthetic", size=5000)

# `make` takes 0.5 s, so that the other processes start before it ends.
RACE = """
import os, sys, time
from pathlib import Path
from fewbits.experiments.data.once import opened_or_made

cache = Path(sys.argv[1])

def open_(folder):
    return (folder / "content").read_text()

def make(folder):
    with open(cache / "log", "a") as log:
        log.write("made\\n")
    (folder / "content").write_text("who")
    time.sleep(0.5)
    (folder / "content").write_text("whole")

sys.exit(opened_or_made(cache / "thing", open_, make) != "whole")
"""


def test_processes_that_start_at_once_make_it_once(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-c", RACE, str(tmp_path)]
    processes = [subprocess.Popen(command, env=environment) for _ in range(5)]
    assert [process.wait() for process in processes] == [0] * 5
    assert (tmp_path / "log").read_text() == "made\n"
    assert {path.name for path in tmp_path.iterdir()} == {"log", "thing", "thing.lock"}


def test_a_terminal_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "500")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    folder, shown = tmp_path / "thing", []

    def make(folder: Path) -> None:
        shown.append(capsys.readouterr().err)

    opened_or_made(folder, os.listdir, make)
    assert shown == [f"\r\033[Kmaking {folder}, once"]
    assert capsys.readouterr().err == "\r\033[K"
    opened_or_made(folder, os.listdir, make)
    assert capsys.readouterr().err == ""


def test_what_a_killed_process_left_is_swept_away(tmp_path: Path) -> None:
    corpus = load(SMALL, tmp_path)
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    folder.rename(folder.with_name(f"{folder.name}.making"))
    (folder.with_name(f"{folder.name}.making") / "half").touch()
    assert load(SMALL, tmp_path).fingerprint == corpus.fingerprint
    assert {path.name for path in folder.iterdir()} == {"train.bin", "val.bin", "ood.bin", "meta.json"}
    assert {path.name for path in tmp_path.iterdir()} == {folder.name, f"{folder.name}.lock"}


@pytest.mark.parametrize("damage", ["flip", "cut", "missing", "meta"])
def test_a_damaged_corpus_is_made_again_and_said(tmp_path: Path, damage: str) -> None:
    fingerprint = load(SMALL, tmp_path).fingerprint
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    train = folder / "train.bin"
    if damage == "flip":
        train.write_bytes(bytes([train.read_bytes()[0] ^ 1]) + train.read_bytes()[1:])
    elif damage == "cut":
        os.truncate(train, 100)
    elif damage == "missing":
        train.unlink()
    else:
        os.truncate(folder / "meta.json", 50)
    with pytest.warns(RuntimeWarning, match="made again"):
        again = load(SMALL, tmp_path)
    assert again.fingerprint == fingerprint


def test_an_error_while_making_leaves_nothing(tmp_path: Path) -> None:
    def make(folder: Path) -> None:
        (folder / "half").touch()
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space left"):
        opened_or_made(tmp_path / "thing", open_folder, make)
    assert [path.name for path in tmp_path.iterdir()] == ["thing.lock"]
