"""Generate a language whose entropy is known exactly, so that a loss can be compared with the best possible one.

Tokens are bytes. Every byte belongs to one of 16 classes, and the classes of the last two tokens select one of 256
permutations of the bytes. The next token is the r-th byte of this permutation with probability p_r, close to Zipf's
r^-2. So this is a Markov source of order 2. Every context has the same probabilities in another order, so the entropy
rate is −Σ p_r ln p_r, independent of the contexts' frequencies. The p_r are multiples of 2^-32, and tokens are drawn by
comparing integers, so this entropy is exact. A model reads both tokens that determine the probabilities, except for a
window's first target, where it reads only one of them.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fewbits.experiments.data.folder import Meta, write_folder
from fewbits.kernels.seeds import derive_seed

VOCAB, CLASSES, EXPONENT, DRAWN_BITS = 256, 16, 2, 32
SIZE, HELD_OUT = 1 << 22, 1 << 19  # default tokens of the training split, and tokens of each other split

# By split, numbers from which seeds are derived. Train and validation share a language, ood has another language; the
# random draws of each split are different.
_LANGUAGE, _DRAWS = {"train": 0, "validation": 0, "ood": 1}, {"train": 0, "validation": 1, "ood": 2}
_CHUNK = 1 << 20


def scaled_probabilities() -> npt.NDArray[np.int64]:
    """Return the probabilities of the next token in every context, times 2^32, from the largest to the smallest.

    They are whole numbers that sum to 2^32; the first one absorbs the rounding errors.
    """
    zipf = [1 / (rank + 1) ** EXPONENT for rank in range(VOCAB)]
    total = sum(zipf)
    whole = np.array([int(share / total * (1 << DRAWN_BITS)) for share in zipf], np.int64)
    whole[0] += (1 << DRAWN_BITS) - whole.sum()
    return whole


def entropy() -> float:
    """Return the entropy of the source in nats per token."""
    p = scaled_probabilities() / 2.0**DRAWN_BITS
    return float(-(p * np.log(p)).sum())


def write_synthetic(folder: Path, size: int, seed: int) -> None:
    """Write a training split of `size` tokens, and validation and ood of HELD_OUT tokens, into an empty folder.

    ood comes from another source of the same kind. seed: determines both sources and all tokens.
    """
    sizes = {"train": size, "validation": HELD_OUT, "ood": HELD_OUT}
    splits = {name: np.frombuffer(b"".join(_generate(seed, name, count)), np.uint8) for name, count in sizes.items()}
    source = {"seed": seed, "what": "Markov source of order 2, Zipf r^-2; ood is another such source"}
    write_folder(folder, splits, Meta("uint8", VOCAB, text_bytes=sizes, entropy=entropy(), source=source))


def _generate(seed: int, split: str, count: int) -> Iterator[bytes]:
    """Yield `count` tokens of the split, one byte each, in chunks; each token depends on the two before it."""
    class_of, orders = _language(derive_seed(seed, _LANGUAGE[split], 0))
    bits = np.random.Philox(key=derive_seed(seed, _DRAWS[split], 1))
    upper = np.cumsum(scaled_probabilities()).astype(np.uint64)
    older = newer = 0
    for begin in range(0, count, _CHUNK):
        drawn = bits.random_raw(min(_CHUNK, count - begin)) >> np.uint64(64 - DRAWN_BITS)
        chunk = bytearray(len(drawn))
        for place, rank in enumerate(np.searchsorted(upper, drawn, side="right").tolist()):
            token = chunk[place] = orders[older * CLASSES + newer][rank]
            older, newer = newer, class_of[token]
        yield bytes(chunk)


def _language(key: int) -> tuple[list[int], list[list[int]]]:
    """Return the class of every byte, and a permutation of the bytes for every pair of classes, drawn from a seed."""
    bits = np.random.Philox(key=key)  # raw words of Philox are equal in every version of numpy

    def shuffled() -> npt.NDArray[np.int64]:
        return np.argsort(bits.random_raw(VOCAB), kind="stable")

    class_of = (shuffled() % CLASSES).tolist()
    return class_of, [shuffled().tolist() for _ in range(CLASSES**2)]
