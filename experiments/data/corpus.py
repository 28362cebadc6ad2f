"""Define `DataConfig`, the settings of a trial's data, and `Corpus`, splits of tokens that are read in windows."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fewbits.experiments.data import order
from fewbits.experiments.data.folder import TokenFolder, Tokens


@dataclass(frozen=True)
class Phase:
    """A part of training that reads its own text, the folder `path`.

    until: where the phase ends: a fraction of the steps; or, above 1, a step, counted from the start of the parents if
        the trial is a branch; 1: at the end of training.
    """

    path: str
    until: float = 1.0


@dataclass(frozen=True)
class DataConfig:
    """A kind of data and its settings; each kind takes only some of the settings (`data.load.KINDS` lists them)."""

    kind: str = "python"
    # For python, torch and text: a name by tokenizing.py. For the other kinds, the tokens exist already.
    tokenizer: str = "bytes"
    # For text, the file; for bin and collections, the folder of tokens (None: where `fewbits data` writes by default).
    path: str | None = None
    # Of the training split: bytes of text for python and torch, tokens for synthetic; None: the kind's default.
    size: int | None = None
    seed: int = 0  # for synthetic: another seed gives another language
    repeat: int = 4  # how often a trial of a sweep may read the training split; `fewbits train` has no limit
    # For bin: the folders that training reads one after the other. Losses are those of the held-out text of `path`, or
    # of the first phase without a `path`.
    phases: tuple[Phase, ...] = field(default=(), metadata={"neutral": ()})
    # For python, torch and synthetic: the share of the training split's bytes that random ones replace, as worse data.
    corrupted: float = field(default=0.0, metadata={"neutral": 0.0})

    def __post_init__(self) -> None:
        ends = [0.0, *(phase.until for phase in self.phases)]
        before = ends[:-1]
        mixed = any(end > 1 for end in before) and any(0 < end < 1 or end % 1 for end in before)
        if self.phases and (ends[-1] != 1 or mixed or 1 in before or not all(a < b for a, b in pairwise(before))):
            raise ValueError(
                f"data.phases: until {ends[1:]}: increasing fractions of the steps, or increasing steps, are expected, "
                "and 1 or nothing for the last phase"
            )


@dataclass(frozen=True)
class Corpus:
    """A corpus with the splits `train`, `validation` (text not in train) and optionally `ood` (out-of-domain text)."""

    kind: str
    folder: TokenFolder
    phases: tuple[tuple[float, TokenFolder], ...] = ()  # the fraction of the steps where each ends, and its tokens

    @property
    def vocab(self) -> int:
        """The size of the vocabulary; every token is a number below it."""
        return self.folder.vocab

    @property
    def splits(self) -> Mapping[str, Tokens]:
        return self.folder.splits

    @cached_property
    def fingerprint(self) -> str:
        """The SHA-256 of everything that defines the tokens: splits, dtype, vocabulary size, separator, tokenizer."""
        meta = self.folder.meta
        content = {name: survey.sha256 for name, survey in sorted(self.folder.surveys.items())}
        facts: list[object] = [content, meta.dtype, self.vocab, meta.separator, meta.tokenizer_sha256]
        facts += [[until, Corpus(self.kind, folder).fingerprint] for until, folder in self.phases]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    @property
    def folders(self) -> tuple[TokenFolder, ...]:
        return (self.folder, *(folder for _, folder in self.phases))

    def check_unchanged(self) -> None:
        """Raise ValueError if a file of tokens was written to since it was opened (`TokenFolder.check_unchanged`)."""
        for folder in self.folders:
            folder.check_unchanged()

    def phase_at(self, step: int, steps: int) -> tuple["Corpus", int]:
        """Return the corpus that this step reads, and the first step that reads it; 0 without phases.

        step: counted from the start of the parents if the trial is a branch. steps: the steps of the trial, of which
            ends of phases below 1 are fractions.
        """
        first = 0
        for end, folder in self._ends(steps):
            if end is None or step < end:
                return Corpus(self.kind, folder), first
            first = end
        return self, 0

    def _ends(self, steps: int) -> Iterator[tuple[int | None, TokenFolder]]:
        """Yield the step at which each phase ends (None: with the training), and its tokens."""
        for until, folder in self.phases:
            yield None if until == 1 else int(until) if until > 1 else round(until * steps), folder

    def steps_of_phases(self, steps: int) -> Iterator[tuple[int, TokenFolder]]:
        """Yield how many steps of a training from scratch read each phase, and its tokens."""
        first = 0
        for end, folder in self._ends(steps):
            end = steps if end is None else min(end, steps)
            yield max(0, end - first), folder
            first = max(first, end)

    def fresh_tokens(self, steps: int) -> int:
        """Return the number of tokens of training after which text is read a second time.

        It is computed from the share of the steps that read each folder.

        steps: the number of steps of training from scratch.
        """
        if not self.phases:
            return self.tokens_in("train")
        read, folders = Counter[str](), {}
        for count, folder in self.steps_of_phases(steps):
            read[str(folder.path)] += count
            folders[str(folder.path)] = folder
        sizes = {path: Corpus(self.kind, folder).tokens_in("train") for path, folder in folders.items()}
        return min(sizes[path] * steps // count for path, count in read.items() if count > 0)

    def tokens_in(self, split: str) -> int:
        return int(self._tokens(split).size)

    def batch(self, split: str, first: int, count: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, int64 [count, length], of the windows from number `first` on (`order.starts`).

        Training reads the split again and again, each time in another order, which the seed determines.
        """
        tokens = self._tokens(split)
        return _cut(tokens, order.starts(first, count, tokens.size, length, seed), length)

    def windows(self, split: str, count: int, length: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, int64 [count, length], of `count` windows spread evenly over the split.

        They depend on no seed, so all trials are evaluated on the same windows.
        """
        tokens = self._tokens(split)
        return _cut(tokens, order.evenly_spread(count, tokens.size, length), length)

    def documents_of_windows(self, split: str, count: int, length: int) -> npt.NDArray[np.int64]:
        """Return the document number of each target that `windows` returns, int64 [count, length].

        A separator belongs to the document that it ends. If the separator is unknown, each window counts as a document.
        """
        tokens = self._tokens(split)
        begins = order.evenly_spread(count, tokens.size, length)
        if self.folder.meta.separator is None:
            return np.broadcast_to(np.arange(count)[:, None], (count, length)).copy()
        ends = self.folder.document_ends(split)
        return np.searchsorted(ends, begins[:, None] + np.arange(1, length + 1), side="left")

    def documents(self, split: str) -> Iterator[Tokens]:
        """Yield the split's documents in order, without separators; raise ValueError if the separator is unknown."""
        self._tokens(split)
        return self.folder.documents(split)

    def check(self, described: Mapping[str, Any]) -> None:
        """Raise ValueError, with what differs, if `described`, which a checkpoint has recorded, is another corpus."""
        fingerprint = described["fingerprint"]
        if fingerprint == self.fingerprint:
            return
        here = describe(self)
        differing = [key for key in {**here, **described} if here.get(key) != described.get(key)]
        told = ", ".join(f"{key} {here.get(key)} (then {described.get(key)})" for key in differing)
        raise ValueError(
            f"these are not the data of the checkpoint: their fingerprint is {self.fingerprint[:16]}…, but the "
            f"checkpoint has the fingerprint {fingerprint[:16]}…. The data now: {told}. Resume with the same data, "
            "Python and torch, or start a new trial"
        )

    def _tokens(self, split: str) -> Tokens:
        if split not in self.splits:
            raise ValueError(f"no split {split!r} in data of kind {self.kind}: valid are {', '.join(self.splits)}")
        return self.splits[split]


def describe(corpus: Corpus) -> dict[str, object]:
    """Return what provenance.json records: kind, fingerprint, tokenizer, splits and source, as a flat dictionary."""
    meta = corpus.folder.meta
    facts: dict[str, object] = {"kind": corpus.kind, "fingerprint": corpus.fingerprint, "vocab": corpus.vocab}
    for name in corpus.splits:
        facts[f"{name}.tokens"] = corpus.tokens_in(name)
        facts[f"{name}.bytes"] = meta.text_bytes.get(name)
        facts[f"{name}.sha256"] = corpus.folder.surveys[name].sha256
    for number, (until, folder) in enumerate(corpus.phases):
        facts |= {f"phases.{number}.until": until, f"phases.{number}.sha256": folder.surveys["train"].sha256}
    facts |= {"tokenizer": meta.tokenizer, "separator": meta.separator, "entropy": meta.entropy}
    return facts | {f"source.{key}": value for key, value in meta.source.items()}


def _cut(tokens: Tokens, begins: order.Integers, length: int) -> tuple[Tensor, Tensor]:
    inputs, targets = np.empty((2, len(begins), length), np.int64)
    for row, begin in enumerate(begins.tolist()):
        inputs[row] = tokens[begin : begin + length]
        targets[row] = tokens[begin + 1 : begin + length + 1]
    return torch.from_numpy(inputs), torch.from_numpy(targets)
