"""Choose the batches of a probe trial: windows of held-out documents, or the next batches of the parent.

Tokens of one document are not independent of each other, so each window comes from a document of its own. Documents are
read in an order that no seed changes, and each seed reads other documents than the seeds before it, as far as there are
enough: so the spread over seeds contains the spread over texts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fewbits.experiments.data.corpus import Corpus
from fewbits.experiments.probes.config import ProbeConfig
from fewbits.experiments.training import ORDER
from fewbits.experiments.trial import Trial
from fewbits.kernels.seeds import derive_seed


@dataclass(frozen=True)
class Batch:
    """A batch of a probe, and the number of its first document or window."""

    inputs: Tensor  # int64 [windows, length]
    targets: Tensor
    first: int


def batches(corpus: Corpus, trial: Trial, parent: Trial, position: int) -> Iterator[Batch]:
    """Yield the batches of a probe trial.

    parent: the trial whose checkpoint is probed. position: the number of sequences that it has read.
    Raise ValueError if the split has too few documents for one seed.
    """
    t = trial.training
    count = t.steps * t.micro_batch
    if trial.probe.split == "train":
        for batch in range(t.steps):
            first = position + batch * t.micro_batch
            inputs, targets = corpus.batch("train", first, t.micro_batch, t.length, derive_seed(parent.seed, ORDER))
            yield Batch(inputs, targets, first)
        return
    windows = _windows(corpus, trial.probe, t.length)
    if len(windows) < count:
        raise ValueError(
            f"training.steps {t.steps}: {count} documents of more than {t.length} tokens are needed, and split "
            f"{trial.probe.split} has {len(windows)}: use fewer steps, a smaller training.micro_batch or a shorter "
            "training.length"
        )
    start = trial.seed % (len(windows) // count) * count
    for first in range(start, start + count, t.micro_batch):
        rows = torch.from_numpy(np.stack(windows[first : first + t.micro_batch]))
        yield Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), first)


def _windows(corpus: Corpus, probe: ProbeConfig, length: int) -> list[np.ndarray]:
    """Return a window of length + 1 tokens from each document that is long enough, in an order without pattern."""
    if corpus.folder.meta.separator is None:  # every window counts as a document, as in evaluations
        size = (corpus.tokens_in(probe.split) - 1) // length
        inputs, targets = corpus.windows(probe.split, size, length)
        found = list(torch.cat((inputs, targets[:, -1:]), 1).numpy())
    else:
        found = [
            _middle(tokens, length) for tokens in map(np.asarray, corpus.documents(probe.split)) if len(tokens) > length
        ]
    return [found[i] for i in sorted(range(len(found)), key=lambda i: derive_seed(0, i))]


def _middle(tokens: np.ndarray, length: int) -> np.ndarray:
    """Return the window in the middle of a document; its start is often a licence that many documents share."""
    begin = (len(tokens) - length - 1) // 2
    return tokens[begin : begin + length + 1].astype(np.int64)
