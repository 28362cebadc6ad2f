"""Test that data in the cache are made once, whole, and again if they are damaged; and the synthetic source."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from math import log
from pathlib import Path

import numpy as np
import pytest

import fewbits
from fewbits.experiments.data.corpus import Corpus, DataConfig
from fewbits.experiments.data.folder import open_folder
from fewbits.experiments.data.load import load, scaled_probabilities
from fewbits.experiments.data.once import opened_or_made

SOURCE = Path(fewbits.__file__).parents[1]
SMALL = DataConfig(kind="synthetic", size=5000)

# `make` takes 0.5 s, so that the other processes start before it ends.
RACE = """
import os, sys, time
from pathlib import Path
from fewbits.experiments.data.once import opened_or_made
from fewbits.experiments.data.load import scaled_probabilities

cache = Path(sys.argv[1])

def open_(folder):
    return (folder / "content").read_text()

def make(folder):
    with open(cache / "log", "a") as log:
        log.write("made\\n")
    (folder / "content").write_text("who")
    time.sleep(0.5)
    (folder / "content").write_text("whole")

sys.exit(opened_or_made(cache / "thing", open_, make) != "whole")
"""


def test_processes_that_start_at_once_make_it_once(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-c", RACE, str(tmp_path)]
    processes = [subprocess.Popen(command, env=environment) for _ in range(5)]
    assert [process.wait() for process in processes] == [0] * 5
    assert (tmp_path / "log").read_text() == "made\n"
    assert {path.name for path in tmp_path.iterdir()} == {"log", "thing", "thing.lock"}


def test_what_a_killed_process_left_is_swept_away(tmp_path: Path) -> None:
    corpus = load(SMALL, tmp_path)
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    folder.rename(folder.with_name(f"{folder.name}.making"))
    (folder.with_name(f"{folder.name}.making") / "half").touch()
    assert load(SMALL, tmp_path).fingerprint == corpus.fingerprint
    assert {path.name for path in folder.iterdir()} == {"train.bin", "val.bin", "ood.bin", "meta.json"}
    assert {path.name for path in tmp_path.iterdir()} == {folder.name, f"{folder.name}.lock"}


DAMAGE: dict[str, Callable[[Path], object]] = {
    "flip": lambda folder: (folder / "train.bin").write_bytes(bytes(5000)),
    "cut": lambda folder: os.truncate(folder / "train.bin", 100),
    "missing": lambda folder: (folder / "train.bin").unlink(),
    "meta": lambda folder: os.truncate(folder / "meta.json", 50),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_corpus_is_made_again_and_said(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    fingerprint = load(SMALL, tmp_path).fingerprint
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    damage(folder)
    with pytest.warns(RuntimeWarning, match="made again"):
        again = load(SMALL, tmp_path)
    assert again.fingerprint == fingerprint


def test_an_error_while_making_leaves_nothing(tmp_path: Path) -> None:
    def make(folder: Path) -> None:
        (folder / "half").touch()
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space left"):
        opened_or_made(tmp_path / "thing", open_folder, make)
    assert [path.name for path in tmp_path.iterdir()] == ["thing.lock"]


# The synthetic source

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


def test_a_seed_is_a_language(corpus: Corpus, tmp_path: Path) -> None:
    again = load(DataConfig(kind="synthetic", size=SIZE, seed=4), tmp_path)
    assert again.fingerprint == corpus.fingerprint
    other = load(DataConfig(kind="synthetic", size=5000), tmp_path)
    assert not np.array_equal(other.splits["train"], corpus.splits["train"][:5000])
    assert other.folder.meta.entropy == corpus.folder.meta.entropy
    longer = load(DataConfig(kind="synthetic", size=9000), tmp_path)
    assert np.array_equal(longer.splits["train"][:5000], other.splits["train"]), "the size decides only where it stops"
