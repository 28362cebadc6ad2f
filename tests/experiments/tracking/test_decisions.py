"""Test `add_decisions`: it adds shares of mixtures' decisions, computed from numerics.parquet, to the result once."""

import json
from pathlib import Path

import pandas as pd
import pytest

from fewbits.commands.train import summary
from fewbits.experiments.storage.run_folder import RunFolder
from fewbits.experiments.tracking.decisions import add_decisions

MOR = {"layer": "a", "quantizer": "e4m3:128x128:gam @ error<0.045 | bf16"}
RESULT = {"id": "an id", "status": "done", "step": 4, "loss": 1.0}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    (tmp_path / "result.json").write_text(json.dumps(RESULT))
    return RunFolder(tmp_path, "an id")


def write(folder: RunFolder, *rows: dict[str, object]) -> None:
    pd.DataFrame(list(rows)).to_parquet(folder.path / "numerics.parquet")


def test_the_shares_are_means_over_windows_layers_and_slots(folder: RunFolder) -> None:
    write(
        folder,
        {"step": 1, "slot": "fprop.x", "share_0": 1.0, "share_1": 0.0, **MOR},
        {"step": 3, "slot": "fprop.x", "share_0": 0.5, "share_1": 0.5, **MOR},
        {"step": 3, "slot": "dgrad.dy", "share_0": 0.0, "share_1": 1.0, **MOR},
        {"step": 3, "slot": "weight", "layer": "a", "quantizer": None},
    )
    add_decisions(folder)
    result = folder.result()
    assert result == RESULT | {"decisions": {"e4m3": 0.5, "bf16": 0.5}}
    assert "BF16 in 50.0 % of decisions" in summary(result)
    written = (folder.path / "result.json").stat().st_mtime_ns
    add_decisions(folder)
    assert (folder.path / "result.json").stat().st_mtime_ns == written


def test_a_recipe_without_mixtures_has_none(folder: RunFolder) -> None:
    for rows in ([{"step": 1, "slot": "fprop.x", "error": 0.1}], [{"step": 1, "slot": "x", "share_0": None, **MOR}]):
        write(folder, *rows)
        add_decisions(folder)
        assert folder.result() == RESULT
    assert "BF16" not in summary(RESULT)
