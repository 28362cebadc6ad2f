"""Test that a notebook's parameters select, in any working directory, the results that a command's overrides select."""

import shlex
from pathlib import Path

import pytest

from fewbits.analysis.tidy.selection import notebook_parameters, selection

FILE = "study: mor\noverrides: [model=nemotron-nano]\n"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my.yaml").write_text(FILE)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("overrides", "study", "scale", "rest"),
    [
        (["study=mor"], "mor", "smoke", []),
        (["study=mor", "scale=smoke", "seeds=[0,1]", 'runtime.runs="/a b"'], "mor", "smoke", ["seeds=[0,1]"]),
        (["training.steps=4", "study=mor", "sweep=ablations"], "mor", "smoke", ["training.steps=4", "sweep=ablations"]),
        (["my.yaml", "scale=cpu"], "HERE/my.yaml", "", ["scale=cpu"]),
        (["file=my.yaml"], "HERE/my.yaml", "", []),
        (["sweep=own", "model.name='a b'"], "sweep=own", "", ["model.name='a b'"]),
    ],
)
def test_parameters_are_absolute(overrides: list[str], study: str, scale: str, rest: list[str], tmp_path: Path) -> None:
    made = notebook_parameters(overrides, "smoke", Path("store"))
    assert made["study"] == study.replace("HERE", str(tmp_path))
    assert (made["scale"], shlex.split(made["overrides"])) == (scale, rest)
    assert made["runs"] == str(tmp_path / "store")


def test_the_users_config_folders_are_among_the_parameters(tmp_path: Path) -> None:
    for folder in ("mine", "conf"):
        (tmp_path / folder / "sweep").mkdir(parents=True)
    made = notebook_parameters(["hydra.searchpath=[mine]", "sweep=own"], "smoke", Path("runs"))
    (path,) = shlex.split(made["overrides"])
    assert path.startswith("hydra.searchpath=")
    assert path.index(str(tmp_path / "mine")) < path.index(str(tmp_path / "conf"))


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
