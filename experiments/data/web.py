"""Streams of documents of OpenWebText and C4: from the Hugging Face Hub, or from files that lie here.

A stream can say where it is and be started there again, so that an interrupted preparation does not read again what it
has read. The package datasets finds the place by the file and the document within it: only the file in hand is read
from its beginning.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Collection:
    """A collection on the Hub, and the tokenizer that papers used with it.

    documents: how many it has.
    tokens: how many tokens of the training split `tokenizer` makes of all documents, about.
    revision: the commit that is read unless another one is asked for; None: the newest when the preparation begins.
    assumed: which part of this the papers do not state.
    """

    repository: str
    subset: str | None
    documents: int
    tokens: int
    tokenizer: str
    what: str
    revision: str | None = None
    assumed: str = ""


# The commit that public training code pins, torchtitan's data loader among it.
_C4_REVISION = "1588ec454efa1a09f29cd18ddd04fe05fc8653a2"

COLLECTIONS = {
    # nanoGPT's data and vocabulary, which GaussWS trained GPT-2 on. Tokens: data/openwebtext/readme.md of nanoGPT.
    "openwebtext": Collection(
        "Skylion007/openwebtext", None, 8_013_769, 9_035_582_198, "hub:gpt2", "OpenWebText: 8 M web pages"
    ),
    # torchtitan's data; GaussWS does not name the vocabulary of its Llama 2: assumed, as the parameter count fits it.
    # Tokens: the table of Dolma 1.6's data card (198 B by Llama's tokenizer).
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
    # For NVFP4's models, whose data are not public. Nemotron-H's vocabulary has 131,072 tokens, as theirs has.
    # Tokens: 156 B as arXiv 2104.08758 counts them (table 1); a count by this tokenizer is not published.
    "c4-nemotron": Collection(
        "allenai/c4",
        "en",
        364_868_892,
        156_000_000_000,
        "hub:nvidia/Nemotron-H-8B-Base-8K",
        "C4's English part by the tokenizer of Nemotron-H, of 131,072 tokens",
        _C4_REVISION,
        assumed="C4 in place of the paper's own data, and Nemotron-H's tokenizer",
    ),
}

# Files that `datasets` reads: by what, and with which options. A text file is one document.
_READERS: dict[str, tuple[str, dict[str, str]]] = {
    ".json": ("json", {}),
    ".jsonl": ("json", {}),
    ".parquet": ("parquet", {}),
    ".txt": ("text", {"sample_by": "document"}),
}


def resolved_revision(collection: Collection, asked: str | None) -> str:
    """Return the commit on the Hub that a branch, a tag or a commit (None: the newest) stands for now."""
    if asked is not None and len(asked) == 40 and set(asked) <= set("0123456789abcdef"):
        return asked
    try:
        from huggingface_hub import HfApi
    except ImportError:
        raise ValueError(_MISSING) from None
    try:
        found = HfApi().dataset_info(collection.repository, revision=asked).sha
    except Exception as error:  # of the network, of the Hub: the package lets them all through
        raise ValueError(_unreadable(collection.repository, error, _OFFLINE)) from error
    if found is None:
        raise ValueError(f"{collection.repository}: the Hub names no commit of revision {asked or 'main'}")
    return found


class Documents:
    """Iterate over the documents of a collection; from `source`, a file or a folder of them, if given, else the Hub.

    NUL, which separates documents of bytes, is left out, and half a surrogate pair, which has no UTF-8, becomes `?`.
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
        except Exception as error:  # of the network, of file formats: the package lets them all through
            raise ValueError(_unreadable(self._name, error, self._remedy)) from error

    def position(self) -> dict[str, Any]:
        """Return where the iteration stands, as JSON holds it, for `resume`."""
        return {"datasets": self._version, "state": self._stream.state_dict()}

    def resume(self, position: dict[str, Any] | None, count: int) -> None:
        """Start the iteration after `count` documents: at the position, or by reading where it is of no use.

        It is of use to the version of the package that wrote it.
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
                raise ValueError(f"{self._name}: a document has no string named 'text', but {columns}")
            yield text.encode(errors="replace").decode().replace("\0", "")

    def _rows(self) -> Iterator[dict[str, Any]]:
        try:
            yield from self._stream
        except Exception as error:
            raise ValueError(_unreadable(self._name, error, self._remedy)) from error


_MISSING = "reading web text needs the package datasets: pip install 'fewbits[data]'"
_OFFLINE = "; without a network, download the files elsewhere and give --source PATH"


def _unreadable(name: str, error: Exception, remedy: str) -> str:
    said = str(error.__cause__ or error).strip().partition("\n")[0]
    return f"{name} cannot be read: {said}{remedy}"


def _files(source: Path) -> tuple[str, list[str], dict[str, str]]:
    if not source.exists():
        raise ValueError(f"--source {source}: there is no such file or folder")
    candidates = sorted(source.rglob("*")) if source.is_dir() else [source]
    found: dict[str, list[str]] = {}
    for path in candidates:
        suffix = Path(path.name.removesuffix(".gz")).suffix
        if path.is_file() and suffix in _READERS:
            found.setdefault(_READERS[suffix][0], []).append(str(path))
    if len(found) != 1:
        what = f"holds {' and '.join(found)} files" if found else "holds none of them"
        kinds = ", ".join(_READERS)
        raise ValueError(f"--source {source}: files of one kind of {kinds} (or with .gz) are expected; it {what}")
    ((reader, paths),) = found.items()
    return reader, paths, next(options for name, options in _READERS.values() if name == reader)
