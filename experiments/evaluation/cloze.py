"""A four-way cloze task cut from held-out text: which of four continuations follows this context?

It stands in for downstream suites at sizes where those sit at chance (MoR's MMLU curves, NVFP4's Table 2). Chance is
25 %. What is asked is whether the model uses the context, so nothing else may give the answer away:

* All continuations are real text of the same split and hold the same number of tokens: none is unlikely in itself, and
  sums of log-likelihoods compare.
* All begin where a line's text begins, after the same indentation, which is the end of the context. A cut in mid-word
  would be solved by spelling alone; lines of other depth, by counting spaces.
* Wrong ones lie elsewhere, mostly in other documents, and overlap neither the context nor the truth; they differ from
  the truth and from each other. Text close by would often be a continuation as good as the true one.

A line goes on with the context's names, sentence and syntax, so a small byte model is well above chance after some
training; a line of the same depth from elsewhere is often plausible too, so it stays well below certainty.

Items depend on the text, the seed and the count alone (never on the library's generators), so every trial sees the
same, and the first items are the same whatever the count.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fewbits.experiments.evaluation.protocols import Corpus, Model, Tokenizer, check_count, evaluating
from fewbits.kernels.seeds import derive_seed

CHOICES = 4
POOL = 1 << 22  # tokens of a split that items are cut from: enough for any count, and a split may be the web
ATTEMPTS = 64  # draws for the wrong choices of one item, before its place is passed over

Tokens = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, eq=False)
class ClozeItems:
    """contexts[N, n] and choices[N, 4, m], int64. Choice 0 is the truth: scoring must not depend on the order."""

    contexts: Tensor
    choices: Tensor


@dataclass(frozen=True, eq=False)
class ClozeScore:
    """What each item earned, float64 [N]: 1 if the truth alone is likeliest, 1/k if it ties with k − 1 others, else 0.

    A tie earns what guessing among the tied would, on average: a model that says nothing is at chance exactly.
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
        """Binomial; an upper bound where there are ties."""
        return math.sqrt(self.accuracy * (1 - self.accuracy) / self.count)


def cloze_items(
    corpus: Corpus,
    split: str,
    tokenizer: Tokenizer | None,
    *,
    count: int,
    context: int = 128,
    continuation: int = 32,
    seed: int = 0,
) -> ClozeItems:
    """Cut items with so many tokens of context and continuation. Without a tokenizer (symbols that are no text, which
    have neither lines nor words) they begin anywhere."""
    for name, value in (("count", count), ("context", context), ("continuation", continuation)):
        check_count(name, value)
    tokens, starts = _pool(corpus, split)
    places, kinds = _places(tokens, starts, tokenizer, context, continuation)
    same = {kind: np.flatnonzero(kinds == kind) for kind in np.unique(kinds).tolist()}
    contexts, choices = [], []
    for chosen in _shuffled(len(places), seed):
        place = int(places[chosen])
        alike = places[same[int(kinds[chosen])]]
        options = _options(tokens, place, alike, context, continuation, seed)
        if options is not None:
            contexts.append(tokens[place - context : place])
            choices.append(options)
        if len(choices) == count:
            return ClozeItems(torch.from_numpy(np.stack(contexts)), torch.from_numpy(np.stack(choices)))
    raise ValueError(
        f"count={count}: split {split!r} holds {len(choices)} items of {context} + {continuation} tokens"
        f" ({len(tokens)} tokens, {len(places)} places to cut)"
    )


def evaluate_cloze(model: Model, items: ClozeItems, *, batch: int = 8) -> ClozeScore:
    """Score a model, so many items at a time. The likeliest choice has the largest sum of log-likelihoods."""
    check_count("batch", batch)
    n, ways, m = items.contexts.shape[1], *items.choices.shape[1:]
    earned = []
    with evaluating(model) as device:
        for contexts, choices in zip(items.contexts.split(batch), items.choices.split(batch), strict=True):
            texts = torch.cat([contexts[:, None].expand(-1, ways, -1), choices], dim=2).flatten(0, 1).to(device)
            losses = model.loss(texts[:, :-1], texts[:, 1:], reduction="none").reshape(-1, n + m - 1)
            likelihoods = -losses[:, n - 1 :].double().sum(1).reshape(-1, ways).cpu()
            best = likelihoods == likelihoods.max(1, keepdim=True).values  # of NaNs none is best
            earned.append(best[:, 0].double() / best.sum(1).clamp(min=1))
    return ClozeScore(torch.cat(earned))


def _pool(corpus: Corpus, split: str) -> tuple[Tokens, Tokens]:
    """The split's first tokens, and for each of them where its document starts."""
    documents, starts, size = [], [], 0
    for document in corpus.documents(split):
        documents.append(document[: POOL - size].astype(np.int64))
        starts.append(np.full(len(documents[-1]), size))
        size += len(documents[-1])
        if size == POOL:
            break
    if not documents:
        raise ValueError(f"split {split!r} holds no documents: no cloze items can be cut")
    return np.concatenate(documents), np.concatenate(starts)


def _places(
    tokens: Tokens, starts: Tokens, tokenizer: Tokenizer | None, context: int, continuation: int
) -> tuple[Tokens, Tokens]:
    """Where a continuation may begin, and for each place its kind: one for every depth of indentation."""
    first, last = np.arange(len(tokens)) - context, np.arange(len(tokens)) + continuation - 1
    fits = (first >= starts) & (last < len(tokens))
    fits[fits] = starts[last[fits]] == starts[fits]  # both ends in one document
    if tokenizer is None:
        places = np.flatnonzero(fits)
        return places, np.zeros_like(places)
    words, token_words = np.unique(tokens, return_inverse=True)
    texts = [tokenizer.decode([word]) for word in words.tolist()]
    breaks = np.array(["\n" in text and not text.rpartition("\n")[2].strip() for text in texts])[token_words]
    blank = np.array([not text.strip() for text in texts])[token_words] & ~breaks
    index = np.arange(len(tokens))
    line = np.maximum.accumulate(np.where(breaks, index, -1))  # the last line break up to here
    word = np.maximum.accumulate(np.where(~breaks & ~blank, index, -1))  # and the last token that is neither
    begins = np.zeros(len(tokens), dtype=bool)
    begins[1:] = (word[1:] == index[1:]) & (line[:-1] > word[:-1])
    places = np.flatnonzero(begins & fits)
    indents = ["".join(texts[t] for t in token_words[line[p - 1] : p]).rpartition("\n")[2] for p in places.tolist()]
    depth = {indent: kind for kind, indent in enumerate(dict.fromkeys(indents))}
    return places, np.array([depth[indent] for indent in indents], dtype=np.int64)


def _shuffled(size: int, seed: int) -> Iterator[int]:
    """0 … size − 1 in an order drawn from the seed (Fisher and Yates, as far as it is asked for)."""
    moved: dict[int, int] = {}
    for i in range(size):
        j = i + derive_seed(seed, i) % (size - i)
        yield moved.get(j, j)
        moved[j] = moved.get(i, i)


def _options(tokens: Tokens, place: int, alike: Tokens, context: int, continuation: int, seed: int) -> Tokens | None:
    """The truth and three wrong choices, or None if too few were found."""
    options = [tokens[place : place + continuation]]
    for attempt in range(ATTEMPTS):
        other = int(alike[derive_seed(seed, place, attempt) % len(alike)])
        text = tokens[other : other + continuation]
        apart = abs(other - place) >= context + continuation
        if apart and not any(np.array_equal(text, option) for option in options):
            options.append(text)
        if len(options) == CHOICES:
            return np.stack(options)
    return None
