"""Read and write tokens on disk: nanoGPT's folder of train.bin and val.bin, plus an optional meta.json.

A .bin file holds token numbers one after another, little-endian, uint16 unless meta.json says uint8 or uint32. A folder
may have a third file, ood.bin, with out-of-domain text. The files are memory-mapped, never read whole. Every file is
surveyed before use: its SHA-256, which goes into the corpus's fingerprint, and its largest token, which must be below
the vocabulary. The survey of a large file is cached under the file's size and modification time.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fewbits.common.atomic import checked_json, read_json, write_json
from fewbits.common.from_dict import from_dict
from fewbits.experiments.data.once import Damaged

Tokens = npt.NDArray[np.integer[Any]]

FILES = {"train": "train.bin", "validation": "val.bin", "ood": "ood.bin"}
DTYPES = ("uint8", "uint16", "uint32")
META = "meta.json"

REMEMBERED_FROM = 64 << 20  # bytes: reading a smaller file takes less than 0.1 s, so its survey is not cached
_CHUNK = 16 << 20


@dataclass(frozen=True)
class Meta:
    """The content of meta.json.

    dtype: the type of the numbers in the .bin files.
    vocab: the size of the vocabulary; every token is below it. None: the largest token + 1.
    separator: the token that follows every document.
    tokenizer: the tokenizer's name, such as `bpe:4096`, for people. tokenizer_sha256: SHA-256 of its tokenizer.json.
    text_bytes: the bytes of text in each split, to convert a loss to bits per byte; a separator counts as one byte.
    sha256: the SHA-256 of each .bin file, by split; it is checked when the folder is opened.
    entropy: the entropy of the source in nats per token, if it is known.
    source: other facts about where the text came from.
    """

    dtype: str = "uint16"
    vocab: int | None = None
    separator: int | None = None
    tokenizer: str | None = None
    tokenizer_sha256: str | None = None
    text_bytes: dict[str, int] = field(default_factory=dict)
    sha256: dict[str, str] = field(default_factory=dict)
    entropy: float | None = None
    source: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r}: valid types are {', '.join(DTYPES)}")
        limit = 1 << 8 * np.dtype(self.dtype).itemsize
        self._whole("vocab", self.vocab, limit)
        self._whole("separator", self.separator, (self.vocab or limit) - 1)

    def _whole(self, name: str, value: int | None, top: int) -> None:
        if value is not None and not 0 <= value <= top:
            raise ValueError(
                f"{name} {value!r} with dtype {self.dtype}: valid values are whole numbers from 0 to {top}"
            )


@dataclass(frozen=True)
class Survey:
    """The SHA-256 and the largest token of a .bin file."""

    sha256: str
    largest: int


@dataclass(frozen=True)
class Stamp:
    """The state of a file: it changes when the file is written to or replaced."""

    inode: int
    size: int
    changed: int  # ns


@dataclass(frozen=True)
class TokenFolder:
    """An opened folder of tokens: its metadata, its memory-mapped splits, and their checksums and largest tokens."""

    path: Path
    meta: Meta
    vocab: int
    splits: Mapping[str, Tokens]
    surveys: Mapping[str, Survey]  # SHA-256 and largest token of each split
    stamps: Mapping[str, Stamp]  # taken before the survey

    def check_unchanged(self) -> None:
        """Raise ValueError if a file was written to after its survey: its tokens may differ from its fingerprint.

        A file that was replaced by another one is fine: the memory map still shows the old content.
        """
        for name, stamp in self.stamps.items():
            now = _stamp(self.path / FILES[name])
            if now.inode == stamp.inode and now != stamp:
                raise ValueError(
                    f"{self.path / FILES[name]} was written to while it was in use; run the same command again, which "
                    "starts another trial if the content differs"
                )

    def documents(self, split: str) -> Iterator[Tokens]:
        """Yield the split's documents in order, without separators; raise ValueError if the separator is unknown."""
        if self.meta.separator is None:
            raise ValueError(f"the documents cannot be separated: {META} names no separator")
        return _separated(self.splits[split], self.meta.separator)

    def document_ends(self, split: str) -> npt.NDArray[np.int64]:
        """Return the positions of the split's separators; raise ValueError if the separator is unknown."""
        if self.meta.separator is None:
            raise ValueError(f"the documents cannot be separated: {META} names no separator")
        return separator_positions(self.splits[split], self.meta.separator)

    def texts(self, split: str) -> list[str]:
        """Return the documents of a folder whose tokens are bytes of UTF-8."""
        return [tokens.tobytes().decode() for tokens in self.documents(split)]


def smallest_dtype(vocab: int) -> str:
    """Return the smallest dtype that holds every token of a vocabulary."""
    return next(dtype for dtype in DTYPES if vocab <= 1 << 8 * np.dtype(dtype).itemsize)


def write_folder(folder: Path, splits: Mapping[str, Tokens], meta: Meta) -> None:
    """Write splits into an empty folder; meta.json, with the files' checksums, comes last."""
    for name, tokens in splits.items():
        tokens.astype(np.dtype(meta.dtype).newbyteorder("<"), copy=False).tofile(folder / FILES[name])
    write_meta(folder, meta)


def write_meta(folder: Path, meta: Meta) -> None:
    """Write meta.json for the .bin files in the folder, with their checksums."""
    sha256 = {name: survey(path, meta.dtype).sha256 for name, path in _files(folder).items()}
    (folder / META).write_text(json.dumps({**asdict(meta), "sha256": sha256}, indent=1) + "\n")


def read_meta(folder: Path) -> Meta:
    """Return the folder's meta.json, or the defaults if there is none."""
    path = folder / META
    try:
        written = checked_json(path)
    except ValueError as error:
        raise Damaged(str(error)) from None
    try:
        return from_dict(Meta, written or {})
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def open_folder(folder: Path, survey_cache: Path | None = None) -> TokenFolder:
    """Open a folder: memory-map and survey its splits. `survey_cache` is a folder for surveys of large files.

    Raises FileNotFoundError if the folder does not exist, `Damaged` if a file does not match meta.json, and ValueError
    if meta.json is invalid or a token is outside the vocabulary.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}")
    meta, files = read_meta(folder), _files(folder)
    for name in ("train", "validation"):
        if name not in files:
            raise Damaged(f"{folder} has no {FILES[name]}: a folder of tokens needs train.bin and val.bin")
    stamps = {name: _stamp(path) for name, path in files.items()}
    splits = {name: _map_tokens(path, meta.dtype) for name, path in files.items()}
    surveys = {name: survey(path, meta.dtype, survey_cache) for name, path in files.items()}
    vocab = meta.vocab if meta.vocab is not None else 1 + max(result.largest for result in surveys.values())
    for name, result in surveys.items():
        if meta.sha256.get(name, result.sha256) != result.sha256:
            raise Damaged(f"{files[name]} is not the file that {META} beside it describes: its SHA-256 differs")
        if result.largest >= vocab:
            raise ValueError(f"{files[name]} holds token {result.largest}, but the vocabulary in {META} is {vocab}")
    return TokenFolder(folder, meta, vocab, splits, surveys, stamps)


def survey(path: Path, dtype: str, survey_cache: Path | None = None) -> Survey:
    """Return a file's survey, from the cache folder `survey_cache` if the file is large and unchanged."""
    status = path.stat()
    if survey_cache is None or status.st_size < REMEMBERED_FROM:
        return _read_through(path, dtype)
    identity = (str(path.resolve()), status.st_size, status.st_mtime_ns, status.st_ino, dtype)
    cached = survey_cache / f"{hashlib.sha256(repr(identity).encode()).hexdigest()[:32]}.json"
    try:
        return from_dict(Survey, read_json(cached) or {})
    except ValueError:
        result = _read_through(path, dtype)
    survey_cache.mkdir(parents=True, exist_ok=True)
    write_json(cached, asdict(result))
    return result


def _read_through(path: Path, dtype: str) -> Survey:
    digest, largest = hashlib.sha256(), -1
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            largest = max(largest, int(np.frombuffer(chunk, np.dtype(dtype).newbyteorder("<")).max()))
    return Survey(digest.hexdigest(), largest)


def _stamp(path: Path) -> Stamp:
    """Return a file's stamp; zeros if the file was deleted, which leaves its memory map intact."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return Stamp(0, 0, 0)
    return Stamp(status.st_ino, status.st_size, status.st_mtime_ns)


def _map_tokens(path: Path, dtype: str) -> Tokens:
    little, size = np.dtype(dtype).newbyteorder("<"), path.stat().st_size
    if size == 0 or size % little.itemsize:
        problem = "is empty" if size == 0 else f"has {size} bytes, which is no multiple of {dtype}: it is truncated"
        raise Damaged(f"{path} {problem}")
    # A plain array over the map: slicing np.memmap itself is several times slower.
    return np.asarray(np.memmap(path, little, mode="r"))


def _files(folder: Path) -> dict[str, Path]:
    return {name: folder / file for name, file in FILES.items() if (folder / file).is_file()}


def separator_positions(tokens: Tokens, separator: int) -> npt.NDArray[np.int64]:
    """Return the positions of the separators, reading a large split chunk by chunk."""
    chunks = range(0, tokens.size, _CHUNK)
    parts = [chunk + np.flatnonzero(tokens[chunk : chunk + _CHUNK] == separator) for chunk in chunks]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _separated(tokens: Tokens, separator: int) -> Iterator[Tokens]:
    begin = 0
    for chunk in range(0, tokens.size, _CHUNK):  # a split may be as large as the web: read on only when asked to
        for end in (chunk + separator_positions(tokens[chunk : chunk + _CHUNK], separator)).tolist():
            if end > begin:
                yield tokens[begin:end]
            begin = end + 1
    if begin < tokens.size:
        yield tokens[begin:]
