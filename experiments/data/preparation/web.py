"""Stream documents of OpenWebText and C4, from the Hugging Face Hub or from local files.

A stream of documents reports its position and can be resumed there, so that an interrupted preparation does not read
finished files again. A position, as the package `datasets` reports it, consists of a file and a document in this file;
on resuming, only this file is read again from its beginning.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Collection:
    """A collection on the Hugging Face Hub, and the tokenizer that a paper used with it.

    repository, subset: the names of the data set and of its config on the Hub.
    documents: the number of documents in the collection.
    tokens: the approximate number of tokens that `tokenizer` makes of all documents.
    what: a description.
    revision: the commit that is read by default; None: the newest commit when `fewbits data` starts.
    assumed: the facts here that are assumed, because the paper does not state them; empty: none.
    """

    repository: str
    subset: str | None
    documents: int
    tokens: int
    tokenizer: str
    what: str
    revision: str | None = None
    assumed: str = ""


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
    """Return the SHA of the collection's commit on the Hub that `requested` names.

    requested: a commit, a tag, or a branch, which stands for its newest commit; None: the branch `main`.
    """
    if requested is not None and len(requested) == 40 and set(requested) <= set("0123456789abcdef"):
        return requested
    try:
        from huggingface_hub import HfApi
    except ImportError:
        raise ValueError(_MISSING) from None
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
        try:
            import datasets
        except ImportError:
            raise ValueError(_MISSING) from None
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

        position: what the method `position` returned after these documents; files that were finished then are not read
            again. If it is None or from another version of `datasets`, the `count` documents are read and skipped.
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
                raise ValueError(
                    f"{self._name}: a document has no string field 'text'; its fields are {columns}: store each "
                    "document's text in a field 'text'"
                )
            yield text.encode(errors="replace").decode().replace("\0", "")

    def _rows(self) -> Iterator[dict[str, Any]]:
        try:
            yield from self._stream
        except Exception as error:
            raise ValueError(_unreadable(self._name, error, self._remedy)) from error


_MISSING = "reading web text needs the package datasets: pip install 'fewbits[data]'"
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
