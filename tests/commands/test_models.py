"""Test that `fewbits list models` lists all models, also the user's own."""

import json
from pathlib import Path

import pytest

from fewbits.commands.list import main
from fewbits.models.networks.presets import MODELS


def test_json_lists_every_model_with_its_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == list(MODELS)
    assert all(row.keys() == {"name", "parameters", "linear_parameters", "description"} for row in rows)
    nvfp4 = next(row for row in rows if row["name"] == "nvfp4-1.2b")
    assert (nvfp4["parameters"], nvfp4["linear_parameters"]) == (1_291_929_600, 754_974_720)


def test_the_table_has_a_line_for_each_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["name", "parameters", "linear", "description"]
    assert [line.split()[0] for line in lines] == list(MODELS)
    nemotron = next(line for line in lines if line.startswith("nemotron3-8b"))
    assert "8,540,135,424" in nemotron
    assert "squared ReLU 16384, LayerNorm1p, RoPE on 50%" in nemotron


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["models", "--help"])
    assert stopped.value.code == 0
    assert "fewbits list models --json" in capsys.readouterr().out


def test_an_unknown_option_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="list: unrecognized arguments: --xml"):
        main(["models", "--xml"])


def test_it_lists_the_models_of_the_users_config_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf" / "model").mkdir(parents=True)
    mine = tmp_path / "conf" / "model" / "mine.yaml"
    mine.write_text("defaults: [gpt2-nano, _self_]\nname: mine\nlayers: 2\n")
    assert main(["models", "--json"]) == 0
    *known, own = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in known] == list(MODELS)
    assert own["name"] == "mine"
    assert own["description"].startswith("2 blocks of width 256")
    assert main(["models", str(mine)]) == 0
    assert "2 blocks of width 256" in capsys.readouterr().out
    mine.write_text("name: mine\nlayers: two\n")
    with pytest.raises(ValueError, match="model mine"):
        main(["models"])
    assert next(iter(MODELS)) in capsys.readouterr().out
