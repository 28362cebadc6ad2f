"""Test the synthetic source: its seeds, and that the entropy it declares is the entropy of its tokens."""

from collections import Counter
from math import log
from pathlib import Path

import numpy as np
import pytest

from fewbits.experiments.data.corpus import Corpus, DataConfig
from fewbits.experiments.data.load import load
from fewbits.experiments.data.synthetic import scaled_probabilities

SIZE = 1 << 20


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return load(DataConfig(kind="synthetic", size=SIZE, seed=4), tmp_path_factory.mktemp("synthetic"))


def zipf() -> list[float]:
    weights = [rank**-2.0 for rank in range(1, 257)]
    return [weight / sum(weights) for weight in weights]


def test_the_entropy_is_that_of_the_distribution_drawn_from(corpus: Corpus) -> None:
    drawn = scaled_probabilities().tolist()
    assert sum(drawn) == 1 << 32
    assert all(count > 0 for count in drawn)
    assert corpus.folder.meta.entropy == pytest.approx(-sum(n / 2**32 * log(n / 2**32) for n in drawn), rel=1e-13)
    assert corpus.folder.meta.entropy == pytest.approx(-sum(p * log(p) for p in zipf()), rel=1e-6)
    assert corpus.vocab == 256
    assert corpus.folder.meta.text_bytes["train"] == corpus.tokens_in("train")


def test_every_frequent_context_shows_the_same_probabilities_in_its_own_order(corpus: Corpus) -> None:
    tokens = corpus.splits["train"].astype(np.int64)
    pairs = tokens[:-2] * 256 + tokens[1:-1]
    favourites = set()
    for pair, count in Counter(pairs.tolist()).most_common(20):
        following = np.bincount(tokens[2:][pairs == pair], minlength=256)
        favourites.add(int(following.argmax()))
        for rank, p in enumerate(zipf()[:4]):
            share = np.sort(following)[::-1][rank] / count
            assert abs(share - p) < 5 * (p * (1 - p) / count) ** 0.5, (pair, rank)
    assert len(favourites) > 5


def test_out_of_domain_is_another_language_and_validation_the_same(corpus: Corpus) -> None:
    def pairs(split: str) -> set[int]:
        """Return the 30 most frequent pairs of bytes."""
        tokens = corpus.splits[split].astype(np.int64)
        return {pair for pair, _ in Counter((tokens[:-1] * 256 + tokens[1:]).tolist()).most_common(30)}

    assert len(pairs("train") & pairs("validation")) > 20
    assert len(pairs("train") & pairs("ood")) < 10
    assert not np.array_equal(corpus.splits["train"][:1000], corpus.splits["validation"][:1000])


def test_a_seed_is_a_language(corpus: Corpus, tmp_path: Path) -> None:
    again = load(DataConfig(kind="synthetic", size=SIZE, seed=4), tmp_path)
    assert again.fingerprint == corpus.fingerprint
    other = load(DataConfig(kind="synthetic", size=5000), tmp_path)
    assert not np.array_equal(other.splits["train"], corpus.splits["train"][:5000])
    assert other.folder.meta.entropy == corpus.folder.meta.entropy
    longer = load(DataConfig(kind="synthetic", size=9000), tmp_path)
    assert np.array_equal(longer.splits["train"][:5000], other.splits["train"]), "the size decides only where it stops"
