"""Evaluate a trial's last weights document by document: with the recipe, unquantized, and with sampled weights cast.

A claim compares the losses of two arms. Its confidence interval has to cover other text as well as other seeds, and the
tokens of one document are not independent of each other. So losses are stored per document, and reports
cluster them by document.

The weights are evaluated twice, or four times if layers are sampled, on the held-out windows that are also evaluated
during training:

* `loss`: with the recipe's own operands;
* `loss_unquantized`: with all operands in the compute dtype (BF16 as a rule), which separates the effect of the
  recipe on training from its effect on the evaluation itself;
* `loss_cast`: sampled layers with weights cast to the formats of their learned bit widths (GaussWS, Table C.1);
* `loss_narrow`: sampled layers with all weights cast to the narrowest format of Table C.1, which shows whether a
  format that is too narrow would change the loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pandas as pd

from fewbits.experiments.data.corpus import Corpus
from fewbits.experiments.evaluation.loss import Model, token_losses, window_count
from fewbits.experiments.trial import Trial
from fewbits.models.learned_widths import NARROWEST, sampled_layers, weights_cast
from fewbits.models.quantize import Quantization, unquantized

LOSS = "loss"
COLUMNS = ("text", "document", "tokens")


def evaluated_windows(trial: Trial, corpus: Corpus) -> dict[str, int]:
    """Return the number of windows to evaluate, by held-out split."""
    e = trial.evaluation
    splits = [name for name in ("validation", "ood") if name in corpus.splits]
    return {name: window_count(name, e.windows, e.ood_windows) for name in splits}


def evaluate_documents(
    model: Model, quantization: Quantization, corpus: Corpus, windows: Mapping[str, int], *, length: int, batch: int
) -> pd.DataFrame:
    """Return the content of evaluation.parquet: a row for each document of each held-out split.

    The columns are `text` (the split), `document` (its number), `tokens` (the number of evaluated tokens) and, as means
    over these tokens, the two losses, or the four if layers are sampled, that the module's docstring lists.
    windows: the number of windows to evaluate, by split. length: tokens per window. batch: windows per forward pass.
    """
    frames = []
    for split, count in windows.items():
        inputs, targets = corpus.windows(split, count, length)
        documents = corpus.documents_of_windows(split, count, length)
        frame = pd.DataFrame({"document": documents.ravel()})
        for column, context in _evaluation_modes(quantization):
            with context:
                frame[column] = [
                    loss for rows in token_losses(model, inputs, targets, batch) for row in rows for loss in row
                ]
        grouped = frame.groupby("document", sort=True)
        table = grouped.agg(_mean)
        table.insert(0, "tokens", grouped.size())
        table.insert(0, "text", split)
        frames.append(table.reset_index())
    return pd.concat(frames, ignore_index=True)[[*COLUMNS, *(name for name, _ in _evaluation_modes(quantization))]]


def means(frame: pd.DataFrame) -> dict[str, float]:
    """Return the mean losses of each split, over its evaluated tokens, by names such as `ood_loss_unquantized`.

    The column `loss`, with the recipe's operands, is omitted, because callers compute its mean with `evaluate_loss`.
    frame: the result of `evaluate_documents`.
    """
    losses: dict[str, float] = {}
    for text, rows in frame.groupby("text", sort=False):
        weights = rows["tokens"].to_numpy(np.float64)
        for column in frame.columns:
            if column.startswith(f"{LOSS}_"):
                values: Any = rows[column].to_numpy(np.float64)
                losses[f"{text}_{column}"] = math.fsum(weights * values) / math.fsum(weights)
    return losses


def loss_count(quantization: Quantization) -> int:
    """Return the number of losses that `evaluate_documents` computes for each window: 2, or 4 with sampled layers."""
    return sum(1 for _ in _evaluation_modes(quantization))


def _mean(losses: pd.Series) -> float:
    return math.fsum(losses) / len(losses)


def _evaluation_modes(quantization: Quantization) -> Iterator[tuple[str, AbstractContextManager[None]]]:
    """Yield the name of each loss, and a context manager in which the model computes that loss."""
    yield LOSS, nullcontext()
    yield f"{LOSS}_unquantized", unquantized(quantization)
    if any(sampled_layers(quantization)):
        yield f"{LOSS}_cast", weights_cast(quantization)
        yield f"{LOSS}_narrow", weights_cast(quantization, NARROWEST)
