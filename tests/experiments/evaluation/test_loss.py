"""Test that held-out loss is the mean cross entropy for any batch size, also by document and in other formats."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn

from fewbits.experiments.data.corpus import DataConfig
from fewbits.experiments.data.load import load
from fewbits.experiments.evaluation.loss import evaluate_loss, evaluate_windows, means
from tests.experiments.data.data_inputs import bin_folder
from tests.experiments.evaluation.evaluation_inputs import Bigram, LanguageModel, Recurrent, Text
from tests.experiments.trial_inputs import train

VOCAB = 7
CASTS = ("cast", "cast3", "cast4", "cast5")


@pytest.fixture
def corpus() -> Text:
    generator = torch.Generator().manual_seed(0)
    return Text(validation=[torch.randint(VOCAB, (401,), generator=generator).tolist() for _ in range(2)])


class Noisy(LanguageModel):
    """A model with active dropout in training, and with one module that is in evaluation mode even then."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Recurrent(VOCAB)
        self.dropout = nn.Dropout(0.5)
        self.frozen = nn.Dropout(0.5).eval()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.frozen(self.dropout(self.body(tokens)))


def settings(**changes: Any) -> Any:
    return {"windows": 10, "length": 20, "batch": 4} | changes


def test_each_window_has_its_own_mean(corpus: Text) -> None:
    model = Recurrent(VOCAB)
    each = evaluate_windows(model, corpus, "validation", **settings())
    inputs, targets = corpus.windows("validation", 10, 20)
    assert each.shape == (10,)
    assert each.dtype == torch.float64
    for loss, x, y in zip(each, inputs, targets, strict=True):
        torch.testing.assert_close(loss, model.loss(x[None], y[None]).detach(), rtol=1e-12, atol=0)
    assert evaluate_loss(model, corpus, "validation", **settings()) == pytest.approx(each.mean().item(), rel=1e-15)


@pytest.mark.parametrize("batch", [1, 3, 10, 64])
def test_sums_do_not_depend_on_the_batch(corpus: Text, batch: int) -> None:
    model = Bigram(torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1))).float()
    alone = evaluate_windows(model, corpus, "validation", **settings(windows=40, batch=1))
    assert torch.equal(evaluate_windows(model, corpus, "validation", **settings(windows=40, batch=batch)), alone)


def test_a_model_is_evaluated_in_evaluation_mode_and_left_as_it_was(corpus: Text) -> None:
    model = Noisy()
    first = evaluate_loss(model, corpus, "validation", **settings())
    assert evaluate_loss(model, corpus, "validation", **settings()) == first
    assert first == evaluate_loss(model.body, corpus, "validation", **settings())
    assert model.training
    assert model.dropout.training
    assert not model.frozen.training
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


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
    names = {f"{text}_loss_{form}" for text in ("validation", "ood") for form in ("unquantized", *CASTS)}
    assert set(means(frame)) == names
    for name in names:
        assert result[name] == means(frame)[name]
        assert result[name] != result[name.rpartition("_")[0]]


def test_a_trial_in_bf16_has_one_loss(cache: Path, tmp_path: Path) -> None:
    folder, result = train(cache, tmp_path, "recipe=bf16", "training.steps=2")
    frame = pd.read_parquet(folder.path / "evaluation.parquet")
    assert (frame["loss"] == frame["loss_unquantized"]).all()
    assert not {f"loss_{form}" for form in CASTS}.intersection(frame)
    assert result["validation_loss_unquantized"] == pytest.approx(result["validation_loss"], rel=1e-12)
