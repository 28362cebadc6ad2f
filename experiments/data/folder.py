"""Read and write tokens on disk: a folder of train.bin and val.bin, as nanoGPT writes it, plus an optional meta.json.

A .bin file is a sequence of token numbers, little-endian, uint16 unless meta.json says uint8 or uint32. A folder may
have a third file, ood.bin, with out-of-domain text. The files are memory-mapped. Before use, each is surveyed: its
SHA-256 is computed, for the corpus's fingerprint, and its largest token, which must be below the vocabulary size.
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

REMEMBERED_FROM = 64 << 20  # bytes; the survey of a smaller file is not cached, because it takes less than 0.1 s
_CHUNK = 16 << 20


@dataclass(frozen=True)
class Meta:
    """The content of meta.json."""

    dtype: str = "uint16"  # of the numbers in the .bin files
    vocab: int | None = None  # every token is a number below it; None: the largest token + 1
    separator: int | None = None  # the token that follows every document
    tokenizer: str | None = None  # its name, such as `bpe:4096`
    tokenizer_sha256: str | None = None  # of its tokenizer.json
    text_bytes: dict[str, int] = field(default_factory=dict)  # by split; a separator counts as one byte
    sha256: dict[str, str] = field(default_factory=dict)  # of each .bin file, by split; checked at opening
    entropy: float | None = None  # of the process that generated the text, in nats per token; None: unknown
    source: dict[str, object] = field(default_factory=dict)  # other facts about where the text came from

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r}: valid types are {', '.join(DTYPES)}")
        limit = 1 << 8 * np.dtype(self.dtype).itemsize
        self._whole("vocab", self.vocab, limit)
        self._whole("separator", self.separator, (self.vocab or limit) - 1)

    def _whole(self, name: str, value: int | None, top: int) -> None:
        if value is not None and not 0 <= value <= top:
            raise ValueError(f"{name} {value!r} with dtype {self.dtype}: whole numbers from 0 to {top} are valid")


@dataclass(frozen=True)
class Survey:
    """The SHA-256 and the largest token of a .bin file."""

    sha256: str
    largest: int


@dataclass(frozen=True)
class TokenFolder:
    """An opened folder of tokens: its metadata, its memory-mapped splits, and their checksums and largest tokens."""

    path: Path
    meta: Meta
    vocab: int
    splits: Mapping[str, Tokens]
    surveys: Mapping[str, Survey]
    stamps: Mapping[str, tuple[int, ...]]  # inode, size and time of change of each split's file, before its survey

    def check_unchanged(self) -> None:
        """Raise ValueError if a .bin file was written to after the folder was opened: the fingerprint may be wrong.

        A file that was replaced or deleted is no problem, because the memory map still shows the old content.
        """
        for name, stamp in self.stamps.items():
            path = self.path / FILES[name]
            if path.exists() and (now := _stamp(path))[0] == stamp[0] and now != stamp:
                raise ValueError(
                    f"{path} was written to while it was in use; run the same command again, which starts another "
                    "trial if the content differs"
                )

    def documents(self, split: str) -> Iterator[Tokens]:
        """Yield the split's documents in order, without separators; raise ValueError if the separator is unknown."""
        return _separated(self.splits[split], self._separator())

    def document_ends(self, split: str) -> npt.NDArray[np.int64]:
        """Return the positions of the split's separators; raise ValueError if the separator is unknown."""
        return separator_positions(self.splits[split], self._separator())

    def _separator(self) -> int:
        if self.meta.separator is None:
            raise ValueError(
                f"the documents cannot be separated: {META} in the folder of the data must have the key `separator`, "
                "the token after each document"
            )
        return self.meta.separator

    def texts(self, split: str) -> list[str]:
        """Return the split's documents as text, for a folder whose tokens are bytes of UTF-8."""
        return [tokens.tobytes().decode() for tokens in self.documents(split)]


def smallest_dtype(vocab: int) -> str:
    """Return the smallest dtype (uint8, uint16 or uint32) for the tokens of a vocabulary of this size."""
    return next(dtype for dtype in DTYPES if vocab <= 1 << 8 * np.dtype(dtype).itemsize)


def write_folder(folder: Path, splits: Mapping[str, Tokens], meta: Meta) -> None:
    """Write the .bin files of the splits into an empty folder, then meta.json: `meta` with the files' checksums."""
    for name, tokens in splits.items():
        tokens.astype(np.dtype(meta.dtype).newbyteorder("<"), copy=False).tofile(folder / FILES[name])
    write_meta(folder, meta)


def write_meta(folder: Path, meta: Meta) -> None:
    """Write meta.json into the folder: `meta` with the checksums of the .bin files in the folder."""
    sha256 = {name: survey(path, meta.dtype).sha256 for name, path in _files(folder).items()}
    (folder / META).write_text(json.dumps({**asdict(meta), "sha256": sha256}, indent=1) + "\n")


def read_meta(folder: Path) -> Meta:
    """Return the content of the folder's meta.json, or a `Meta` of defaults if there is no such file."""
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
    """Open a folder: memory-map and survey its splits. survey_cache: caches surveys of large files; None: no cache.

    Raise FileNotFoundError without the folder, `Damaged` if a file is missing or does not match meta.json.
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
            raise Damaged(f"{files[name]} is damaged: its SHA-256 is not the one in {META}, beside it")
        if result.largest >= vocab:
            raise ValueError(
                f"{files[name]} contains token {result.largest}, but `vocab` in {META} is {vocab}: correct one of them"
            )
    return TokenFolder(folder, meta, vocab, splits, surveys, stamps)


def survey(path: Path, dtype: str, survey_cache: Path | None = None) -> Survey:
    """Return the survey of a .bin file: for a large file that has not changed since, the one in `survey_cache`."""
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


def _stamp(path: Path) -> tuple[int, ...]:
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def _map_tokens(path: Path, dtype: str) -> Tokens:
    little, size = np.dtype(dtype).newbyteorder("<"), path.stat().st_size
    if size == 0 or size % little.itemsize:
        problem = "is empty" if size == 0 else f"is truncated: {size} bytes are no whole number of {dtype} tokens"
        raise Damaged(f"{path} {problem}")
    # Return a plain array that views the map, because slicing an np.memmap is several times slower.
    return np.asarray(np.memmap(path, little, mode="r"))


def _files(folder: Path) -> dict[str, Path]:
    return {name: folder / file for name, file in FILES.items() if (folder / file).is_file()}


def separator_positions(tokens: Tokens, separator: int) -> npt.NDArray[np.int64]:
    """Return the positions of the separators; a large split is read chunk by chunk, to save memory."""
    chunks = range(0, tokens.size, _CHUNK)
    parts = [chunk + np.flatnonzero(tokens[chunk : chunk + _CHUNK] == separator) for chunk in chunks]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _separated(tokens: Tokens, separator: int) -> Iterator[Tokens]:
    begin = 0
    for chunk in range(0, tokens.size, _CHUNK):  # a generator, because a list for a large split would need much memory
        for end in (chunk + separator_positions(tokens[chunk : chunk + _CHUNK], separator)).tolist():
            if end > begin:
                yield tokens[begin:end]
            begin = end + 1
    if begin < tokens.size:
        yield tokens[begin:]
