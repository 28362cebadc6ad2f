"""Compute the order in which training reads windows of tokens: a pure function of the window's number, without state.

Training reads an infinite stream of windows. An epoch contains all windows of the split once, in a new permutation, and
cut at a new offset. So one integer, the number of windows read so far, is the whole position in the data, for any batch
size and number of ranks. The permutation is a Feistel network on Z_a × Z_b, with a·b just above the number of windows;
it is applied again until the result is the number of a window (cycle walking; Black and Rogaway, "Ciphers with
arbitrary finite domains", 2002).
"""

from math import isqrt

import numpy as np
import numpy.typing as npt

from fewbits.kernels.seeds import derive_seed

Integers = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

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
    """Return the positions in a split where windows begin: windows first … first+count−1 in the order of training.

    tokens: the number of tokens in the split. length: the number of inputs of a window.
    """
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
    """Return the positions where windows begin: `count` windows spread evenly over a split of `tokens` tokens.

    The windows do not overlap, and no seed affects them.
    """
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
