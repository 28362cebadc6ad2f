"""Stream documents of OpenWebText and C4, from the Hugging Face Hub or local files, into a folder of tokens.

A stream of documents reports its position, as the package `datasets` does: a file and a document in this file. After
every batch of documents, a progress record with this position is written. An interrupted preparation resumes there, and
tokens that were written after the last record are removed. The folder gets its final name when it is complete.
"""

import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from fewbits.common.atomic import checked_json, write_json
from fewbits.common.process import extras
from fewbits.experiments.data.folder import FILES, smallest_dtype, write_meta
from fewbits.experiments.data.tokenizing import Tokenizer, joined, make_meta, text_size

NOTE = "progress.json"  # the progress record
SPLITS = ("train", "validation")
_COUNTS = ("documents", "tokens", "text_bytes")


@dataclass(frozen=True)
class Collection:
    """A collection on the Hugging Face Hub, and the tokenizer that a paper used with it."""

    repository: str  # the data set's name on the Hub
    subset: str | None  # the name of its config
    documents: int
    tokens: int  # the approximate number that `tokenizer` makes of all documents
    tokenizer: str
    what: str  # a description
    revision: str | None = None  # the commit that is read by default; None: the newest when `fewbits data` starts
    assumed: str = ""  # the facts here that the paper does not state


# The commit that public training code uses, for example torchtitan's data loader.
_C4_REVISION = "1588ec454efa1a09f29cd18ddd04fe05fc8653a2"

COLLECTIONS = {
    # nanoGPT's data and vocabulary, on which GaussWS trained GPT-2. Number of tokens: from nanoGPT's
    # data/openwebtext/readme.md.
    "openwebtext": Collection(
        "Skylion007/openwebtext", None, 8_013_769, 9_035_582_198, "hub:gpt2", "OpenWebText: 8 M web pages"
    ),
    # torchtitan's data. GaussWS does not name the vocabulary of its Llama 2; Llama 2's own is assumed, because it gives
    # the paper's number of parameters. Number of tokens: table in Dolma 1.6's data card (198 B by Llama's tokenizer).
    "c4": Collection(
        "allenai/c4",
        "en",
        364_868_892,
        198_000_000_000,
        "hub:meta-llama/Llama-2-7b-hf",
        "C4's English part: 365 M web pages",
        _C4_REVISION,
        assumed="Llama 2's tokenizer",
    ),
    # For NVFP4's models, whose data are not public. Nemotron-H's vocabulary has 131,072 tokens, as these models have.
    # Number of tokens: 156 B by arXiv 2104.08758, table 1; no count with this tokenizer is published.
    "c4-nemotron": Collection(
        "allenai/c4",
        "en",
        364_868_892,
        156_000_000_000,
        "hub:nvidia/Nemotron-H-8B-Base-8K",
        "C4's English part, tokenized by Nemotron-H's tokenizer of 131,072 tokens",
        _C4_REVISION,
        assumed="C4 in place of the paper's own data, and Nemotron-H's tokenizer",
    ),
}

# By file suffix: the reader's name in the package `datasets`, and its options. A .txt file is one document.
_READERS: dict[str, tuple[str, dict[str, str]]] = {
    ".json": ("json", {}),
    ".jsonl": ("json", {}),
    ".parquet": ("parquet", {}),
    ".txt": ("text", {"sample_by": "document"}),
}


def resolved_revision(collection: Collection, requested: str | None) -> str:
    """Return the SHA of the collection's commit that `requested` names: a commit, tag or branch; None: `main`."""
    if requested is not None and len(requested) == 40 and set(requested) <= set("0123456789abcdef"):
        return requested
    with extras():
        from huggingface_hub import HfApi
    try:
        commit = HfApi().dataset_info(collection.repository, revision=requested).sha
    except Exception as error:  # the package raises errors of many kinds, from the network or the Hub
        raise ValueError(_unreadable(collection.repository, error, _OFFLINE)) from error
    if commit is None:
        raise ValueError(f"{collection.repository}: the Hub has no commit for revision {requested or 'main'}")
    return commit


class Documents:
    """An iterable of a collection's documents, from a local file or folder, or from the Hub if `source` is None.

    NUL, the separator of the tokenizer `bytes`, is removed. A lone surrogate, which UTF-8 cannot encode, becomes `?`.
    """

    def __init__(self, collection: Collection, source: Path | None, revision: str | None = None) -> None:
        self._name = str(source or collection.repository)
        self._remedy = "" if source else _OFFLINE
        self._skip = 0
        with extras():
            import datasets
        self._version = str(datasets.__version__)
        reader, paths, options = _files(source) if source else ("", [], {})
        try:
            if source:
                self._stream = datasets.load_dataset(reader, data_files=paths, split="train", streaming=True, **options)
            else:
                self._stream = datasets.load_dataset(
                    collection.repository, collection.subset, split="train", streaming=True, revision=revision
                )
        except Exception as error:  # the package raises errors of many kinds, from the network or file formats
            raise ValueError(_unreadable(self._name, error, self._remedy)) from error

    def position(self) -> dict[str, Any]:
        """Return the current position in the collection as JSON data, for `resume`."""
        return {"datasets": self._version, "state": self._stream.state_dict()}

    def resume(self, position: dict[str, Any] | None, count: int) -> None:
        """Make the iteration start after the first `count` documents of the collection.

        position: what the method `position` returned after these documents. If it is None or from another version of
            `datasets`, the documents are read and skipped.
        """
        if position is not None and position["datasets"] == self._version:
            self._stream.load_state_dict(position["state"])
        else:
            self._skip = count

    def __iter__(self) -> Iterator[str]:
        for row in islice(self._rows(), self._skip, None):
            text = row.get("text")
            if not isinstance(text, str):
                columns = ", ".join(map(str, row))
                raise ValueError(f"{self._name}: a document has no string field 'text'; its fields are {columns}")
            yield text.encode(errors="replace").decode().replace("\0", "")

    def _rows(self) -> Iterator[dict[str, Any]]:
        try:
            yield from self._stream
        except Exception as error:
            raise ValueError(_unreadable(self._name, error, self._remedy)) from error


_OFFLINE = "; without a network, download the files elsewhere and use --source PATH"


def _unreadable(name: str, error: Exception, remedy: str) -> str:
    reason = str(error.__cause__ or error).strip().partition("\n")[0]
    return f"{name} cannot be read: {reason}{remedy}"


def _files(source: Path) -> tuple[str, list[str], dict[str, str]]:
    if not source.exists():
        raise ValueError(f"--source {source}: the file or folder does not exist")
    candidates = sorted(source.rglob("*")) if source.is_dir() else [source]
    by_reader: dict[str, list[str]] = {}
    for path in candidates:
        suffix = Path(path.name.removesuffix(".gz")).suffix
        if path.is_file() and suffix in _READERS:
            by_reader.setdefault(_READERS[suffix][0], []).append(str(path))
    if len(by_reader) != 1:
        problem = f"it has {' and '.join(by_reader)} files" if by_reader else "it has none of these"
        kinds = ", ".join(_READERS)
        raise ValueError(f"--source {source}: files of a single kind are expected, {kinds} (or with .gz); {problem}")
    ((reader, paths),) = by_reader.items()
    return reader, paths, next(options for name, options in _READERS.values() if name == reader)


@dataclass(frozen=True)
class Request:
    """The inputs of one `fewbits data`, which determine the tokens that it writes."""

    collection: str  # its name, such as c4
    origin: str  # its repository on the Hub, or the path of local files
    tokenizer: str  # the tokenizer's SHA-256, or its name `bytes`
    limit: int | None  # the number of documents at most; None: all
    validation: float  # the share of documents in the validation split
    revision: str | None = None  # the commit on the Hub; None for local files


def is_held_out(text: str, share: float) -> bool:
    """Tell whether a document is in the validation split, a share of all: whether its hash, as a fraction, is below."""
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2.0**64


class Unfinished:
    """A partial folder of tokens: .bin files that grow, and a record of how many tokens in them are valid."""

    def __init__(self, folder: Path, request: Request, tokenizer: Tokenizer) -> None:
        self.folder, self.request, self._tokenizer = folder, request, tokenizer
        self.documents = 0
        self.position: dict[str, Any] | None = None  # position in the collection after `documents` documents
        self.tokens = dict.fromkeys(SPLITS, 0)
        self.text_bytes = dict.fromkeys(SPLITS, 0)
        self._dtype = np.dtype(smallest_dtype(tokenizer.vocab)).newbyteorder("<")

    @staticmethod
    def open(folder: Path, request: Request, tokenizer: Tokenizer) -> "Unfinished":
        """Resume the partial folder that an earlier process began with an equal request, or start a new one."""
        unfinished = Unfinished(folder, request, tokenizer)
        if (note := checked_json(folder / NOTE)) is None:
            shutil.rmtree(folder, ignore_errors=True)
            return unfinished
        if asdict(request) | note["request"] != asdict(request):
            raise ValueError(f"data: {folder} was started with other options: remove it or choose another --out")
        unfinished.documents, unfinished.tokens, unfinished.text_bytes = (note[name] for name in _COUNTS)
        unfinished.position = note.get("position")
        for split in SPLITS:
            os.truncate(folder / FILES[split], unfinished.tokens[split] * unfinished._dtype.itemsize)
        (folder / FILES["ood"]).unlink(missing_ok=True)
        return unfinished

    def add(self, batch: list[str], position: dict[str, Any]) -> None:
        """Append a batch of documents, and record the progress and the position in the collection after them."""
        sides: dict[str, list[str]] = {split: [] for split in SPLITS}
        for text in batch:
            sides["validation" if is_held_out(text, self.request.validation) else "train"].append(text)
        for split, texts in sides.items():
            self.tokens[split] += self._append(split, texts)
            self.text_bytes[split] += text_size(texts)
        self.documents, self.position = self.documents + len(batch), position
        note = {"position": position} | {name: getattr(self, name) for name in _COUNTS}
        write_json(self.folder / NOTE, {**note, "request": asdict(self.request)})

    def finish(self, out: Path, ood: list[str], source: dict[str, object]) -> None:
        """Add the out-of-domain documents and meta.json, and rename the folder to its final name `out`."""
        self._append("ood", ood)
        self._tokenizer.save(self.folder)
        sizes = {**self.text_bytes, "ood": text_size(ood)}
        known = {"request": asdict(self.request), "documents": self.documents, **source}
        write_meta(self.folder, make_meta(self._tokenizer, self._dtype.name, sizes, known))
        self.folder.rename(out)
        (out / NOTE).unlink()

    def _append(self, split: str, texts: Sequence[str]) -> int:
        tokens = joined(texts, self._tokenizer)
        self.folder.mkdir(exist_ok=True)
        with open(self.folder / FILES[split], "ab") as file:
            file.write(tokens.astype(self._dtype, copy=False).tobytes())
            file.flush()
            os.fsync(file.fileno())  # the tokens must be on disk before the record that counts them
        return int(tokens.size)
