"""Load the corpus that a data config describes; `KINDS` lists the kinds of data and the settings of each kind."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fewbits.experiments.data.corpus import Corpus, DataConfig
from fewbits.experiments.data.folder import Meta, TokenFolder, open_folder, write_folder
from fewbits.experiments.data.once import Damaged, opened_or_made
from fewbits.experiments.data.text import content_key, corrupted_folder, text_file_folder, text_folder
from fewbits.experiments.data.web_text import COLLECTIONS
from fewbits.kernels.seeds import derive_seed


@dataclass(frozen=True)
class Kind:
    """A kind of data that `data.kind` can choose, such as `python` or `bin`."""

    summary: str  # a description for `fewbits data`
    takes: tuple[str, ...]  # the settings of DataConfig that apply to this kind, besides `kind` and `repeat`
    tokens: Callable[[DataConfig, Path], TokenFolder]  # makes the tokens in the cache folder if needed, and opens them


def load(config: DataConfig, cache: Path) -> Corpus:
    """Return the corpus of a data config; if its tokens have to be made first, make them in the folder `cache`.

    Raise ValueError for settings that are invalid or that the kind of data does not take.
    """
    if config.kind not in KINDS:
        raise ValueError(f"unknown kind of data {config.kind!r}: valid kinds are {', '.join(KINDS)}")
    kind = KINDS[config.kind]
    for setting in fields(DataConfig):
        value = getattr(config, setting.name)
        if setting.name not in ("kind", "repeat", *kind.takes) and value != setting.default:
            given = f"data.{setting.name}={value} with data.kind={config.kind}"
            raise ValueError(f"{given}, which takes only {', '.join(kind.takes)}: remove data.{setting.name}")
    if config.repeat < 1:
        raise ValueError(f"data.repeat={config.repeat}: a trial may read the training split 1 time or more")
    if config.size is not None and config.size < 1:
        raise ValueError(f"data.size={config.size}: a training split has at least 1 byte or token")
    if not 0 <= config.corrupted < 1:
        raise ValueError(f"data.corrupted={config.corrupted}: a share from 0 to below 1 is expected")
    if config.corrupted and config.tokenizer != "bytes":
        raise ValueError(f"data.corrupted={config.corrupted} needs data.tokenizer=bytes")
    if not config.phases:
        return Corpus(config.kind, kind.tokens(config, cache))
    parts = [kind.tokens(replace(config, path=phase.path, phases=()), cache) for phase in config.phases]
    folder = parts[0] if config.path is None else kind.tokens(replace(config, phases=()), cache)
    for phase, part in zip(config.phases, parts, strict=True):
        if (part.vocab, part.meta.tokenizer_sha256) != (folder.vocab, folder.meta.tokenizer_sha256):
            raise ValueError(
                f"data.phases: {phase.path} has another vocabulary or tokenizer than {folder.path}: {part.vocab} and "
                f"{folder.vocab} tokens; tokenize all phases alike"
            )
    return Corpus(config.kind, folder, tuple(zip((phase.until for phase in config.phases), parts, strict=True)))


def _text(config: DataConfig, cache: Path) -> TokenFolder:
    folder = text_folder(config.kind, config.size, config.tokenizer, cache)
    return corrupted_folder(folder, config.corrupted, cache) if config.corrupted else folder


def _synthetic(config: DataConfig, cache: Path) -> TokenFolder:
    size = SIZE if config.size is None else config.size
    path = cache / f"synthetic-{content_key(str(size), str(config.seed))}"
    folder = opened_or_made(path, open_folder, partial(write_synthetic, size=size, seed=config.seed))
    return corrupted_folder(folder, config.corrupted, cache) if config.corrupted else folder


def _tokens(config: DataConfig, cache: Path) -> TokenFolder:
    remedy = "a folder with train.bin and val.bin is expected: write these files again, or set another data.path"
    if config.kind in COLLECTIONS:
        remedy = f"make it by fewbits data {config.kind}"
    elif config.path is None:
        raise ValueError("data.path is missing: data=bin reads a folder of train.bin and val.bin: set data.path")
    folder = cache / config.kind if config.path is None else Path(config.path)
    if folder.expanduser().is_file():
        raise ValueError(f"data.path={folder} is a file: a folder of tokens is expected; data=text reads a text file")
    try:
        return open_folder(folder.expanduser(), survey_cache=cache / "surveys")
    except (FileNotFoundError, Damaged) as error:
        raise ValueError(f"{error}; {remedy}") from None


def _text_file(config: DataConfig, cache: Path) -> TokenFolder:
    if config.path is None:
        raise ValueError("data.path is missing: data=text reads one text file: set data.path=FILE")
    return text_file_folder(Path(config.path).expanduser(), config.tokenizer, cache)


KINDS = {
    "python": Kind(
        "the Python standard library's sources, available without a network", ("tokenizer", "size", "corrupted"), _text
    ),
    "torch": Kind(
        "torch's sources: more text than python, filtered, mostly annotated; the out-of-domain text of python",
        ("tokenizer", "size", "corrupted"),
        _text,
    ),
    "synthetic": Kind(
        "a seeded source over bytes whose entropy is known exactly", ("size", "seed", "corrupted"), _synthetic
    ),
    "text": Kind("one text file of your own; its last tenth is for validation", ("path", "tokenizer"), _text_file),
    "bin": Kind("a folder of tokens as nanoGPT writes them: train.bin and val.bin", ("path", "phases"), _tokens),
    **{name: Kind(collection.what, ("path",), _tokens) for name, collection in COLLECTIONS.items()},
}


# ------------------------------------------------------------------------------------------------ synthetic

# A language whose entropy is known exactly, so that a loss can be compared with the best possible one. Tokens are
# bytes. Every byte belongs to one of 16 classes, and the classes of the last two tokens select one of 256 permutations
# of the bytes. The next token is the r-th byte of this permutation with probability p_r, close to Zipf's r^-2. Every
# context has the same probabilities in another order, so the entropy rate is −Σ p_r ln p_r. The p_r are multiples of
# 2^-32, and tokens are drawn by comparing integers, so this entropy is exact. A model reads both tokens that determine
# the probabilities, except for a window's first target, where it reads only one of them.
VOCAB, CLASSES, EXPONENT, DRAWN_BITS = 256, 16, 2, 32
SIZE, HELD_OUT = 1 << 22, 1 << 19  # default tokens of the training split, and tokens of each other split

# By split, numbers from which seeds are derived. Train and validation share a language, ood has another language; the
# random draws of each split are different.
_LANGUAGE, _DRAWS = {"train": 0, "validation": 0, "ood": 1}, {"train": 0, "validation": 1, "ood": 2}
_CHUNK = 1 << 20


def scaled_probabilities() -> npt.NDArray[np.int64]:
    """Return the probabilities of the next token in every context, times 2^32, as whole numbers with the sum 2^32."""
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
    """Write a training split of `size` tokens, and validation and ood of HELD_OUT tokens, into an empty folder."""
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
