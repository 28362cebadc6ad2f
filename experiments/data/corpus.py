"""Define `DataConfig`, the settings of a trial's data, and `Corpus`, splits of tokens that are read in windows.

Training reads an infinite stream of windows, in an order that is a pure function of the window's number. An epoch
contains all windows of the split once, in a new permutation, and cut at a new offset. So one integer, the number of
windows read so far, is the whole position in the data, for any batch size and number of ranks. The permutation is a
Feistel network on Z_a × Z_b, with a·b just above the number of windows; it is applied again until the result is the
number of a window (cycle walking; Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import isqrt
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fewbits.experiments.data.folder import TokenFolder, Tokens
from fewbits.kernels.seeds import derive_seed

Integers = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]


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
        """Return the number of tokens of a training from scratch after which text is read a second time.

        It is computed from the share of the steps that read each folder.
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
        """Return inputs and targets, int64 [count, length], of the windows from number `first` on (`starts`)."""
        tokens = self._tokens(split)
        return _cut(tokens, starts(first, count, tokens.size, length, seed), length)

    def windows(self, split: str, count: int, length: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, int64 [count, length], of `count` windows spread evenly over the split.

        They depend on no seed, so all trials are evaluated on the same windows.
        """
        tokens = self._tokens(split)
        return _cut(tokens, evenly_spread(count, tokens.size, length), length)

    def documents_of_windows(self, split: str, count: int, length: int) -> npt.NDArray[np.int64]:
        """Return the document number of each target that `windows` returns, int64 [count, length].

        A separator belongs to the document that it ends. If the separator is unknown, each window counts as a document.
        """
        tokens = self._tokens(split)
        begins = evenly_spread(count, tokens.size, length)
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


def _cut(tokens: Tokens, begins: Integers, length: int) -> tuple[Tensor, Tensor]:
    inputs, targets = np.empty((2, len(begins), length), np.int64)
    for row, begin in enumerate(begins.tolist()):
        inputs[row] = tokens[begin : begin + length]
        targets[row] = tokens[begin + 1 : begin + length + 1]
    return torch.from_numpy(inputs), torch.from_numpy(targets)


# ------------------------------------------------------------------------------------------------ order

ROUNDS = 6  # four make a Feistel network pseudo-random; the cost of two more is negligible
_PERMUTATION, _OFFSET = 1, 2  # purposes for which seeds are derived


def windows_per_epoch(tokens: int, length: int) -> int:
    """Return the number of windows in each epoch over a split of `tokens` tokens: as many as fit with every offset.

    A window has `length` inputs, and one more token after them, the last target. An epoch's first window begins at an
    offset from 0 to length − 1.
    """
    if length < 1:
        raise ValueError(f"training.length {length}: a window has at least 1 token")
    if tokens < 2 * length:
        raise ValueError(
            f"training split: {tokens} tokens are too few for windows of length {length}: at least {2 * length} are "
            "needed; set a shorter training.length, or use more data"
        )
    return (tokens - length) // length


def starts(first: int, count: int, tokens: int, length: int, seed: int) -> Integers:
    """Return the positions in a split where windows begin: windows first … first+count−1 in the order of training."""
    if first < 0 or count < 0:
        raise ValueError(f"windows from {first}, count {count}: both must be 0 or more")
    windows = windows_per_epoch(tokens, length)
    numbers = np.arange(first, first + count, dtype=np.int64)
    epochs, within = np.divmod(numbers, windows)
    begins = np.empty(count, np.int64)
    for epoch in range(first // windows, (first + max(count, 1) - 1) // windows + 1):
        in_epoch = epochs == epoch
        offset = derive_seed(seed, epoch, _OFFSET) % length
        begins[in_epoch] = offset + length * permuted(within[in_epoch], windows, derive_seed(seed, epoch, _PERMUTATION))
    return begins


def evenly_spread(count: int, tokens: int, length: int) -> Integers:
    """Return where windows begin: `count` windows without overlap, spread evenly over a split of `tokens` tokens."""
    if length < 1 or count < 1:
        raise ValueError(f"{count} windows of length {length}: both must be 1 or more")
    windows = (tokens - 1) // length
    if count > windows:
        raise ValueError(
            f"{count} windows of length {length} do not fit into {tokens} tokens: at most {max(windows, 0)} windows fit"
        )
    return length * (np.arange(count, dtype=np.int64) * windows // count)


def permuted(index: Integers, size: int, key: int) -> Integers:
    """Apply a permutation of 0 … size−1 to each index; the key determines the permutation."""
    a = isqrt(size - 1) + 1
    b = -(-size // a)
    keys = [derive_seed(key, number) for number in range(ROUNDS)]
    image = _feistel(index.astype(np.uint64), a, b, keys)
    while (outside := image >= size).any():
        image[outside] = _feistel(image[outside], a, b, keys)
    return image.astype(np.int64)


def _feistel(index: _Words, a: int, b: int, keys: list[int]) -> _Words:
    left, right = np.divmod(index, np.uint64(b))
    for number, key in enumerate(keys):
        if number % 2 == 0:
            left = (left + _mixed(right, key) % np.uint64(a)) % np.uint64(a)
        else:
            right = (right + _mixed(left, key) % np.uint64(b)) % np.uint64(b)
    return left * np.uint64(b) + right


def _mixed(values: _Words, key: int) -> _Words:
    """Apply SplitMix64's finalizer, as `derive_seed` does, to each value XOR key, modulo 2^64."""
    z = values ^ np.uint64(key)
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
