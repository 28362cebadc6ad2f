"""Cut a four-way cloze task from held-out text: choose which of four continuations follows a context.

It replaces the papers' downstream tasks for models that are too small for them (MoR's MMLU curves, NVFP4's table 2).
Chance is 25 %. The task tests whether the model uses the context, so nothing else may reveal or hide the true choice:

* All choices are real text of the same split with the same number of tokens, so no choice is unusual in itself, and
  sums of log-likelihoods are comparable.
* In the text, the token before a wrong choice is the same as the last token of the context, for example a letter or a
  space. Otherwise a choice could be recognised by whether it completes the context's last word. So a model has to use
  at least the last two tokens of the context; a model that knows only pairs of tokens is at chance.
* 64 random positions that follow such a token are drawn. The wrong choices are the three texts whose probability, under
  a model of token pairs, is closest to that of the true choice. With random wrong choices, differences in how common
  the words are would outweigh what a small model can gain from the context, and the model would stay near chance for
  long.
* The wrong choices overlap neither the context nor the true choice, and all four choices differ.

Continuations are short and mostly start inside a word, because models that read bytes learn these first. A model of
1.9 M parameters that had read 2 MB of Python was right in 55 ± 2 % of items of eight bytes. With another design, whose
choices were the first 16, 32 or 64 bytes of random lines with equal indentation, the model was right in 27 to 29 ± 2 %.

Items depend only on the text, the seed and the count (not on the random generator of a library), so every trial gets
the same items. A larger count keeps the items of a smaller count and adds items after them.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fewbits.experiments.evaluation.protocols import Corpus, Model, check_count, evaluating
from fewbits.kernels.seeds import derive_seed

CHOICES = 4
POOL = (
    1 << 22
)  # items are cut from at most this many tokens of a split: enough for any count, and it limits the time and memory
DRAWS = 64  # number of positions that are drawn as candidates for the wrong choices of one item

Tokens = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, eq=False)
class ClozeItems:
    """N cloze items, int64: contexts[N, tokens] and choices[N, 4, tokens]. Choice 0 is always the true one.

    This reveals nothing to a model, because the model scores each choice separately.
    """

    contexts: Tensor
    choices: Tensor


@dataclass(frozen=True, eq=False)
class ClozeScore:
    """The points of each item, float64 [N]: 1 if the true choice is the likeliest, 1/k in a tie of k choices, else 0.

    In a tie that includes the true choice, guessing among the k choices would give 1/k points on average. So a model
    that finds all choices equally likely is exactly at chance.
    """

    each: Tensor

    @property
    def count(self) -> int:
        return self.each.numel()

    @property
    def accuracy(self) -> float:
        return math.fsum(self.each.tolist()) / self.count

    @property
    def standard_error(self) -> float:
        """The binomial standard error of the accuracy. If choices tie, it is an upper bound."""
        return math.sqrt(self.accuracy * (1 - self.accuracy) / self.count)


def cloze_items(
    corpus: Corpus, split: str, *, count: int, context: int = 64, continuation: int = 8, seed: int = 0
) -> ClozeItems:
    """Return `count` items with `context` tokens of context and `continuation` tokens per choice.

    Raise ValueError if fewer items can be cut from the split.
    """
    for name, value in (("count", count), ("context", context), ("continuation", continuation)):
        check_count(name, value)
    pool = _Pool.read(corpus, split, context, continuation)
    size = f"of {context} + {continuation} tokens ({len(pool.tokens)} tokens, {len(pool.places)} positions to cut at)"
    if count > len(pool.places):  # checked first, because trying all positions of a large split takes hours
        raise ValueError(
            f"split {split!r} has fewer than {count} items, each a context and a continuation {size}; request fewer "
            "items, or use a longer text"
        )
    contexts, choices = [], []
    for drawn in _shuffled(len(pool.places), seed):
        place = int(pool.places[drawn])
        starts = pool.choices(place, seed)
        if len(starts) == CHOICES:
            contexts.append(pool.tokens[place - context : place])
            choices.append(np.stack([pool.text(start) for start in starts]))
        if len(choices) == count:
            return ClozeItems(torch.from_numpy(np.stack(contexts)), torch.from_numpy(np.stack(choices)))
    raise ValueError(
        f"split {split!r} has only {len(choices)} of {count} items, each a context and a continuation {size}; request "
        "fewer items, or use a longer text"
    )


def evaluate_cloze(model: Model, items: ClozeItems, *, batch: int = 8) -> ClozeScore:
    """Score a model on the items, `batch` items at a time, by the sum of log-likelihoods of each choice's tokens."""
    check_count("batch", batch)
    n, ways, m = items.contexts.shape[1], *items.choices.shape[1:]
    earned = []
    with evaluating(model) as device:
        for contexts, choices in zip(items.contexts.split(batch), items.choices.split(batch), strict=True):
            texts = torch.cat([contexts[:, None].expand(-1, ways, -1), choices], dim=2).flatten(0, 1).to(device)
            losses = model.loss(texts[:, :-1], texts[:, 1:], reduction="none").reshape(-1, n + m - 1)
            likelihoods = -losses[:, n - 1 :].double().sum(1).reshape(-1, ways).cpu()
            best = likelihoods == likelihoods.max(1, keepdim=True).values  # false for NaNs
            earned.append(best[:, 0].double() / best.sum(1).clamp(min=1))
    return ClozeScore(torch.cat(earned))


@dataclass(frozen=True, eq=False)
class _Pool:
    """The text that items are cut from, and the positions in it where a continuation may begin."""

    tokens: Tokens
    places: Tokens  # positions where a continuation may begin: a full context in the same document comes before
    alike: dict[int, Tokens]  # by token: the places that directly follow this token
    surprise: Tokens  # cumulative sum of `_surprise`, up to and including each token
    context: int  # tokens of a context
    continuation: int  # tokens of a continuation

    @classmethod
    def read(cls, corpus: Corpus, split: str, context: int, continuation: int) -> "_Pool":
        tokens, document = _read(corpus, split)
        places = np.arange(context, len(tokens) - continuation + 1)
        places = places[document[places - context] == document[places + continuation - 1]]
        before = tokens[places - 1]
        by_token = places[np.argsort(before, kind="stable")]
        kinds, first = np.unique(np.sort(before), return_index=True)
        alike = dict(zip(kinds.tolist(), np.split(by_token, first[1:]), strict=False))
        return cls(tokens, places, alike, np.cumsum(_surprise(tokens)), context, continuation)

    def text(self, place: int) -> Tokens:
        return self.tokens[place : place + self.continuation]

    def choices(self, place: int, seed: int) -> list[int]:
        """Return the positions where the choices of an item begin: the true one, then up to three wrong ones.

        place: the position of the true choice, directly after the context.
        """
        alike = self.alike[int(self.tokens[place - 1])]
        by_text = {self.text(place).tobytes(): place}
        for draw in range(DRAWS):
            other = int(alike[derive_seed(seed, place, draw) % len(alike)])
            if abs(other - place) >= self.context + self.continuation:
                by_text.setdefault(self.text(other).tobytes(), other)
        return sorted(by_text.values(), key=lambda start: abs(self._cost(start) - self._cost(place)))[:CHOICES]

    def _cost(self, place: int) -> int:
        return int(self.surprise[place + self.continuation - 1] - self.surprise[place - 1])


def _read(corpus: Corpus, split: str) -> tuple[Tokens, Tokens]:
    """Return the split's first tokens, at most POOL, and the number of each token's document."""
    documents, size = [], 0
    for document in corpus.documents(split):
        documents.append(document[: POOL - size].astype(np.int64))
        size += len(documents[-1])
        if size == POOL:
            break
    if not documents:
        raise ValueError(f"split {split!r} has no documents to make cloze items of; use a longer text")
    return np.concatenate(documents), np.repeat(np.arange(len(documents)), [len(document) for document in documents])


def _surprise(tokens: Tokens) -> Tokens:
    """Return −log₂ p of each token, in whole 1024ths of a bit; p is the token's frequency after the previous token.

    Integers are used because their sums are the same on every machine.
    """
    surprise = np.zeros(len(tokens), dtype=np.int64)
    if len(tokens) > 1:
        before, after = tokens[:-1], tokens[1:]
        _, pair, pairs = np.unique(before * (tokens.max() + 1) + after, return_inverse=True, return_counts=True)
        share = pairs[pair] / np.bincount(before)[before]
        surprise[1:] = np.rint(-1024 * np.log2(share)).astype(np.int64)
    return surprise


def _shuffled(size: int, seed: int) -> Iterator[int]:
    """Yield 0 … size − 1 in a random order that the seed determines (Fisher and Yates' shuffle, computed lazily)."""
    moved: dict[int, int] = {}
    for i in range(size):
        j = i + derive_seed(seed, i) % (size - i)
        yield moved.get(j, j)
        moved[j] = moved.get(i, i)
