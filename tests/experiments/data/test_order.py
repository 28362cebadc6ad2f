"""Test the order of training data: a pure function of the window's number that visits each window once per epoch."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fewbits.experiments.data import corpus as order
from tests.experiments.data.data_inputs import bin_corpus


@pytest.mark.parametrize("size", [*range(1, 130), 1000, 4096, 4097, 99_999])
def test_every_size_is_permuted_onto_itself(size: int) -> None:
    image = order.permuted(np.arange(size), size, key=3)
    assert np.array_equal(np.sort(image), np.arange(size))


def test_the_order_is_the_same_on_every_machine() -> None:
    begins = order.starts(0, 8, tokens=1000, length=16, seed=0).tolist()
    assert begins == [492, 556, 188, 828, 92, 572, 812, 508]


def test_an_epoch_holds_each_window_once_and_no_two_overlap() -> None:
    tokens, length = 1003, 10
    windows = order.windows_per_epoch(tokens, length)
    assert windows == 99
    offsets = set()
    for epoch in range(30):
        begins = np.sort(order.starts(epoch * windows, windows, tokens, length, seed=5))
        offsets.add(int(begins[0]))
        assert np.array_equal(begins, begins[0] + length * np.arange(windows))
        assert 0 <= begins[0] < length
        assert begins[-1] + length < tokens, "else the last target would be beyond the end"
    assert len(offsets) > 5, "every epoch is cut at another offset"


@given(st.integers(0, 500), st.lists(st.integers(0, 40), max_size=6), st.integers(0, 9))
def test_the_stream_does_not_depend_on_how_it_is_cut_into_batches(first: int, counts: list[int], seed: int) -> None:
    tokens, length = 333, 7
    pieces, at = [np.empty(0, np.int64)], first
    for count in counts:
        pieces.append(order.starts(at, count, tokens, length, seed))
        at += count
    assert np.array_equal(np.concatenate(pieces), order.starts(first, sum(counts), tokens, length, seed))


def test_a_batch_is_windows_of_the_text_and_targets_are_the_next_tokens(tmp_path: Path) -> None:
    corpus = bin_corpus(tmp_path, range(5000))
    inputs, targets = corpus.batch("train", first=700, count=9, length=31, seed=2)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.shape == targets.shape == (9, 31)
    assert inputs.is_contiguous()
    assert targets.is_contiguous()
    assert torch.equal(inputs[:, :1] + torch.arange(31), inputs)
    assert torch.equal(inputs + 1, targets)
    assert inputs[:, 0].tolist() == order.starts(700, 9, 5000, 31, seed=2).tolist()


def test_evaluation_windows_are_spread_evenly_and_do_not_overlap(tmp_path: Path) -> None:
    corpus = bin_corpus(tmp_path, range(1001))
    inputs, targets = corpus.windows("train", 4, 100)
    assert inputs[:, 0].tolist() == [0, 200, 500, 700]
    assert torch.equal(inputs + 1, targets)
    assert corpus.windows("train", 10, 100)[1][-1, -1] == 1000, "all windows: the last target is the last token"
