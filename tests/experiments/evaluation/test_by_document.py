"""Test the evaluation at the end of training: the losses by document, with the recipe's operands and in other formats.

The windows of text are the same as in evaluations during training.
"""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fewbits.experiments.data.corpus import DataConfig
from fewbits.experiments.data.load import load
from fewbits.experiments.evaluation.loss import means
from tests.experiments.data.data_inputs import bin_folder
from tests.experiments.trial_inputs import train


def test_targets_belong_to_the_documents_that_separators_end(tmp_path: Path) -> None:
    tokens = [5, 5, 9, 9, 6, 9, 7, 7, 7, 7]  # documents: 5 5, nothing, 6, 7 7 7 7
    folder = bin_folder(tmp_path / "tokens", tokens, tokens, meta={"dtype": "uint16", "separator": 9})
    corpus = load(DataConfig(kind="bin", path=str(folder)), tmp_path)
    assert corpus.documents_of_windows("validation", 3, 3).tolist() == [[0, 0, 1], [2, 2, 3], [3, 3, 3]]


def test_windows_are_documents_where_no_separator_is_known(tmp_path: Path) -> None:
    folder = bin_folder(tmp_path / "tokens", [1, 2, 3] * 100)
    corpus = load(DataConfig(kind="bin", path=str(folder)), tmp_path)
    assert corpus.documents_of_windows("validation", 2, 4).tolist() == [[0] * 4, [1] * 4]


@pytest.fixture(scope="module")
def evaluated(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[pd.DataFrame, dict[str, float]]:
    more = ("data=python", "data.size=200000", "recipe=gaussws-mor", "recipe.block=32x32", "training.steps=2")
    folder, result = train(cache, tmp_path_factory.mktemp("runs"), *more)
    assert json.loads((folder.path / "result.json").read_text()) == result
    return pd.read_parquet(folder.path / "evaluation.parquet"), result


def test_documents_add_up_to_the_losses_of_training(evaluated: tuple[pd.DataFrame, dict[str, float]]) -> None:
    frame, result = evaluated
    assert list(frame["text"].unique()) == ["validation", "ood"]
    for text, rows in frame.groupby("text"):
        assert rows["tokens"].sum() == 4 * 128
        assert len(rows) > 1
        assert rows["document"].is_unique
        mean = np.average(rows["loss"], weights=rows["tokens"])
        assert mean == pytest.approx(result[f"{text}_loss"], rel=1e-12)


def test_results_have_the_means_of_the_other_formats(evaluated: tuple[pd.DataFrame, dict[str, float]]) -> None:
    frame, result = evaluated
    names = {f"{text}_loss_{form}" for text in ("validation", "ood") for form in ("unquantized", "cast", "narrow")}
    assert set(means(frame)) == names
    for name in names:
        assert result[name] == means(frame)[name]
        assert result[name] != result[name.rpartition("_")[0]]


def test_a_trial_in_bf16_has_one_loss(cache: Path, tmp_path: Path) -> None:
    folder, result = train(cache, tmp_path, "recipe=bf16", "training.steps=2")
    frame = pd.read_parquet(folder.path / "evaluation.parquet")
    assert (frame["loss"] == frame["loss_unquantized"]).all()
    assert not {"loss_cast", "loss_narrow"}.intersection(frame)
    assert result["validation_loss_unquantized"] == pytest.approx(result["validation_loss"], rel=1e-12)
