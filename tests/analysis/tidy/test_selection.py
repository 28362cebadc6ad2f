"""Test which sweep and store a Python call selects."""

from pathlib import Path

import pytest

from fewbits.analysis.tidy.selection import selection

FILE = "study: mor\noverrides: [model=nemotron-nano]\n"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my.yaml").write_text(FILE)
    monkeypatch.chdir(tmp_path)


def test_a_study_a_file_and_a_multirun_are_selected(tmp_path: Path) -> None:
    store = f'runtime.runs="{tmp_path / "runs"}"'
    assert selection("mor", (), "cpu", "runs") == ["study=mor", "scale=cpu", store]
    assert selection(Path("my.yaml"), ("seeds=[1]",), None, "") == ["my.yaml", "seeds=[1]"]
    assert selection("multirun-1a2b3c4d", (), "", None) == ["multirun-1a2b3c4d"]


def test_a_store_that_the_sweep_names_is_kept(tmp_path: Path) -> None:
    (tmp_path / "runs" / "plans").mkdir(parents=True)
    assert selection("my.yaml", (), None, None)[1:] == [f'runtime.runs="{tmp_path / "runs"}"']
    (tmp_path / "my.yaml").write_text(FILE.replace("]", ", runtime.runs=elsewhere]"))
    assert selection("my.yaml", (), None, None) == ["my.yaml"]
