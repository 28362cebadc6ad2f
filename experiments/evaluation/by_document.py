"""Evaluate the end of training document by document: in the recipe's format, unquantized, and with weights cast.

A claim compares the losses of two arms. Its interval has to cover other text as well as other seeds, and the tokens of
one document are not independent of each other. So the losses are kept per document, where they can be clustered.

The same weights are evaluated up to three times, on the same windows as during training:

* `loss`: with the recipe's own operands;
* `loss_unquantized`: with all operands in the compute dtype (BF16 as a rule), which separates what the format did to
  the weights in training from what it costs in evaluation;
* `loss_cast`: sampled layers with weights cast to the formats of their learned bit widths (GaussWS, Table C.1).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pandas as pd

from fewbits.experiments.data.corpus import Corpus
from fewbits.experiments.evaluation.loss import token_losses
from fewbits.experiments.evaluation.protocols import Model
from fewbits.models.learned_widths import sampled_layers, weights_cast
from fewbits.models.quantize import Quantization, unquantized

LOSS = "loss"
COLUMNS = ("text", "document", "tokens")


def evaluate_documents(
    model: Model, quantization: Quantization, corpus: Corpus, windows: Mapping[str, int], *, length: int, batch: int
) -> pd.DataFrame:
    """Return a row per text and document: its number of evaluated tokens, and their mean loss in each format.

    windows: how many windows of each split are evaluated.
    """
    frames = []
    for split, count in windows.items():
        inputs, targets = corpus.windows(split, count, length)
        documents = corpus.documents_of_windows(split, count, length)
        frame = pd.DataFrame({"document": documents.ravel()})
        for column, context in _formats(quantization):
            with context:
                frame[column] = [
                    loss for rows in token_losses(model, inputs, targets, batch) for row in rows for loss in row
                ]
        grouped = frame.groupby("document", sort=True)
        table = grouped.agg(_mean)
        table.insert(0, "tokens", grouped.size())
        table.insert(0, "text", split)
        frames.append(table.reset_index())
    return pd.concat(frames, ignore_index=True)[[*COLUMNS, *(name for name, _ in _formats(quantization))]]


def means(frame: pd.DataFrame) -> dict[str, float]:
    """Return the mean loss of each text in each format but the recipe's, with names like `ood_loss_unquantized`."""
    losses: dict[str, float] = {}
    for text, rows in frame.groupby("text", sort=False):
        weights = rows["tokens"].to_numpy(np.float64)
        for column in frame.columns:
            if column.startswith(f"{LOSS}_"):
                values: Any = rows[column].to_numpy(np.float64)
                losses[f"{text}_{column}"] = math.fsum(weights * values) / math.fsum(weights)
    return losses


def _mean(losses: pd.Series) -> float:
    return math.fsum(losses) / len(losses)


def _formats(quantization: Quantization) -> Iterator[tuple[str, AbstractContextManager[None]]]:
    """Yield the name of each loss, with a context in which the model computes it."""
    yield LOSS, nullcontext()
    yield f"{LOSS}_unquantized", unquantized(quantization)
    if any(sampled_layers(quantization)):
        yield f"{LOSS}_cast", weights_cast(quantization)
