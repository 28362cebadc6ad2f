"""Test that a URL is refused as a store."""

from pathlib import Path

import pytest

from fewbits import cli

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
