"""Choose the batches of a probe trial: windows of held-out documents, or the batches that the parent would read next.

Tokens of one document are not independent of each other. Therefore the documents of a held-out split are divided into
GROUPS groups, and a probe with the seed s reads only the group s mod GROUPS. Seeds with different groups have no
document in common, so the variance of results over seeds includes the variance over texts.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from fewbits.experiments.data.corpus import Corpus
from fewbits.experiments.trial import ORDER, Trial
from fewbits.kernels.seeds import derive_seed

GROUPS = 6  # the message in `batches` says "a sixth"


def batches(corpus: Corpus, trial: Trial, parent: Trial, position: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and targets of each batch of a probe trial: int64 [training.micro_batch, training.length].

    parent: the trial whose checkpoint is probed. position: the number of sequences that the parent had read when it
    wrote the checkpoint; the batches of the split `train` begin there.
    Raise ValueError if the group of documents that the trial's seed reads has too little text.
    """
    t = trial.training
    if trial.probe.split == "train":
        for batch in range(t.steps):
            first = position + batch * t.micro_batch
            yield corpus.batch("train", first, t.micro_batch, t.length, parent.seed_for(ORDER))
        return
    windows = _windows(_documents(corpus, trial.probe.split, t.length)[trial.seed % GROUPS :: GROUPS], t.length)
    count = t.steps * t.micro_batch
    if len(windows) < count:
        raise ValueError(
            f"training.steps {t.steps}: the probe needs {count} windows of {t.length} tokens, but there are only "
            f"{len(windows)}, because each seed reads a sixth of the documents of split {trial.probe.split}: use fewer "
            "steps, a smaller training.micro_batch, a shorter training.length, or more data"
        )
    for first in range(0, count, t.micro_batch):
        rows = torch.from_numpy(np.stack(windows[first : first + t.micro_batch]).astype(np.int64))
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def _documents(corpus: Corpus, split: str, length: int) -> list[np.ndarray]:
    """Return the documents with more than `length` tokens, in a pseudorandom order that is the same for all seeds."""
    if corpus.folder.meta.separator is None:  # no documents are known: every window is a document, as in evaluations
        inputs, targets = corpus.windows(split, (corpus.tokens_in(split) - 1) // length, length)
        found = list(torch.cat((inputs, targets[:, -1:]), 1).numpy())
    else:
        found = [np.asarray(tokens) for tokens in corpus.documents(split) if len(tokens) > length]
    return [found[number] for number in sorted(range(len(found)), key=lambda number: derive_seed(0, number))]


def _windows(documents: list[np.ndarray], length: int) -> list[np.ndarray]:
    """Return windows of length + 1 tokens: the first window of each document, then the second of each, and so on."""
    longest = max(map(len, documents), default=0)
    return [
        tokens[begin : begin + length + 1]
        for begin in range(0, longest - length, length)
        for tokens in documents
        if begin + length < len(tokens)
    ]
