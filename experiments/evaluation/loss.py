"""Evaluate the loss of held-out windows, documents and texts: the mean cross entropy in nats per token.

The windows are the same for every trial, so two trials can be compared window by window; the mean of these paired
differences has far less noise than a difference of losses on different windows. Sums are exact (math.fsum rounds once).
But the model's own arithmetic depends on the batch size: if a whole tensor has one scale, all windows of a batch share
it. So compare only losses of the same batch size.

The confidence interval of a claim has to cover other text as well as other seeds, and the tokens of one document are
not independent. So the last weights are evaluated document by document, and reports cluster losses by document. This is
done twice, or six times if layers are sampled: docs/columns.md lists the losses (evaluation.parquet). Unquantized
operands separate the effect of the recipe on training from its effect on the evaluation itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from fewbits.experiments.data.corpus import Corpus
from fewbits.experiments.trial import Trial
from fewbits.models.learned_widths import sampled_layers, weights_cast
from fewbits.models.quantize import Quantization, unquantized

if TYPE_CHECKING:
    import pandas as pd

LOSS = "loss"
COLUMNS = ("text", "document", "tokens")
WIDTHS = (3, 4, 5)  # bit widths to which all sampled weights are cast, a dose response


class Model(Protocol):
    """A language model: an nn.Module whose forward gives logits[B, T, V] for tokens[B, T]."""

    def __call__(self, tokens: Tensor, /) -> Tensor: ...

    def loss(self, tokens: Tensor, targets: Tensor, /, reduction: Literal["mean", "none"] = "mean") -> Tensor:
        """Return the cross entropy in nats: the mean over all targets, or with reduction="none" that of each target."""

    def modules(self) -> Iterator[nn.Module]: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...


class Windows(Protocol):
    """A corpus whose splits can be read as windows of equal length."""

    def windows(self, split: str, count: int, length: int) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets of `count` windows of a split, int64 [count, length], the same in every call.

        The target of an input token is the next token of the split.
        """


@contextmanager
def evaluating(model: Model) -> Iterator[torch.device]:
    """Disable gradients and set every module to evaluation mode for the `with` block; yield the model's device.

    The modules' modes are restored afterwards. Quantizers stay active: the model is evaluated with its recipe.
    """
    modes = [(module, module.training) for module in model.modules()]
    for module, _ in modes:
        module.training = False
    try:
        with torch.no_grad():
            yield next(model.parameters()).device
    finally:
        for module, mode in modes:
            module.training = mode


def check_count(name: str, value: int) -> None:
    """Raise ValueError, with the argument's name in the message, if `value` is not an integer of 1 or more."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={value!r}: an integer of 1 or more is expected")


def evaluated_windows(trial: Trial, corpus: Corpus) -> dict[str, int]:
    """Return the number of windows to evaluate, by held-out split."""
    e = trial.evaluation
    counts = {"validation": e.windows, "ood": e.windows if e.ood_windows is None else e.ood_windows}
    return {name: count for name, count in counts.items() if name in corpus.splits}


def evaluate_loss(model: Model, corpus: Windows, split: str, *, windows: int, length: int, batch: int) -> float:
    """Return the mean loss in nats per token over `windows` windows of a split, `batch` windows per forward pass."""
    each = evaluate_windows(model, corpus, split, windows=windows, length=length, batch=batch)
    return math.fsum(each.tolist()) / each.numel()


def evaluate_windows(model: Model, corpus: Windows, split: str, *, windows: int, length: int, batch: int) -> Tensor:
    """Return the mean loss of each window in nats per token, float64 [windows], for paired comparisons.

    length: tokens per window. batch: windows per forward pass.
    """
    for name, value in (("windows", windows), ("length", length), ("batch", batch)):
        check_count(name, value)
    inputs, targets = corpus.windows(split, windows, length)
    if inputs.shape != (windows, length) or targets.shape != (windows, length):
        shapes = f"{tuple(inputs.shape)} and {tuple(targets.shape)}"
        raise ValueError(f"split {split!r}: inputs and targets have the shapes {shapes}, not ({windows}, {length})")
    means = [math.fsum(row) / length for losses in token_losses(model, inputs, targets, batch) for row in losses]
    return torch.tensor(means, dtype=torch.float64)


def token_losses(model: Model, inputs: Tensor, targets: Tensor, batch: int) -> Iterator[list[list[float]]]:
    """Yield, for each forward pass, a nested list [windows of this pass][length] with each token's loss in nats.

    inputs, targets: the tokens of all windows, [windows, length]. batch: windows per forward pass.
    """
    with evaluating(model) as device:
        for x, y in zip(inputs.split(batch), targets.split(batch), strict=True):
            losses = model.loss(x.to(device), y.to(device), reduction="none").reshape(x.shape)
            yield losses.double().tolist()


# ------------------------------------------------------------------------------------------------ documents


def evaluate_documents(
    model: Model, quantization: Quantization, corpus: Corpus, windows: Mapping[str, int], *, length: int, batch: int
) -> pd.DataFrame:
    """Return the content of evaluation.parquet: a row for each document of each held-out split.

    docs/columns.md lists the columns. windows: the number of windows, by split.
    """
    import pandas as pd

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

    The column `loss` is omitted, because callers compute its mean with `evaluate_loss`.
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
    """Return the number of losses that `evaluate_documents` computes for each window: 2, or 6 with sampled layers."""
    return sum(1 for _ in _evaluation_modes(quantization))


def _mean(losses: pd.Series) -> float:
    return math.fsum(losses) / len(losses)


def _evaluation_modes(quantization: Quantization) -> Iterator[tuple[str, AbstractContextManager[None]]]:
    """Yield the name of each loss, and a context manager in which the model computes that loss."""
    yield LOSS, nullcontext()
    yield f"{LOSS}_unquantized", unquantized(quantization)
    if any(sampled_layers(quantization)):
        yield f"{LOSS}_cast", weights_cast(quantization)
        for width in WIDTHS:
            yield f"{LOSS}_cast{width}", weights_cast(quantization, width)


# ------------------------------------------------------------------------------------------------ texts


def text_windows(tokens: Sequence[int], separator: int | None, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs, targets, and a mask of the targets that count, each [windows, length].

    The text is cut into consecutive windows. If the last window, which ends at the end of the text, overlaps the window
    before it, its targets in the overlap do not count. A text of fewer than `length` tokens is one shorter window.
    separator: the token that precedes a text in training; None: the text's first token is not predicted.
    """
    text = torch.tensor(tokens if separator is None else [separator, *tokens], dtype=torch.int64)
    count = len(text) - 1
    if count < 1:
        raise ValueError("a text to evaluate (option --text) has no token to predict; use a longer text")
    length = min(length, count)
    starts = torch.arange(0, count - length + 1, length)
    if rest := count % length:
        starts = torch.cat((starts, torch.tensor([count - length])))
    places = starts[:, None] + torch.arange(length)
    counts = torch.ones_like(places, dtype=torch.bool)
    if rest:
        counts[-1, : length - rest] = False
    return text[places], text[places + 1], counts


def text_loss(model: Model, windows: tuple[Tensor, Tensor, Tensor], batch: int) -> float:
    """Return the mean loss of a text in nats per token. windows: the result of `text_windows`."""
    inputs, targets, counts = windows
    losses = torch.tensor([row for rows in token_losses(model, inputs, targets, batch) for row in rows])
    return math.fsum(losses[counts].tolist()) / int(counts.sum())
