"""Streams of documents of OpenWebText and C4: from the Hugging Face Hub, or from files that lie here."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Collection:
    """Where a collection is on the Hub, how many documents it has, and the tokenizer that papers used with it."""

    repository: str
    subset: str | None
    documents: int
    tokenizer: str
    what: str


COLLECTIONS = {
    # nanoGPT's data and vocabulary, which GaussWS trained GPT-2 on
    "openwebtext": Collection("Skylion007/openwebtext", None, 8_013_769, "hub:gpt2", "OpenWebText: 8 M web pages"),
    # torchtitan's data; GaussWS does not name the vocabulary of its Llama 2: assumed, as the parameter count fits it
    "c4": Collection(
        "allenai/c4", "en", 364_868_892, "hub:meta-llama/Llama-2-7b-hf", "C4's English part: 365 M web pages"
    ),
}

# Files that `datasets` reads: by what, and with which options. A text file is one document.
_READERS: dict[str, tuple[str, dict[str, str]]] = {
    ".json": ("json", {}),
    ".jsonl": ("json", {}),
    ".parquet": ("parquet", {}),
    ".txt": ("text", {"sample_by": "document"}),
}


def documents(collection: Collection, source: Path | None) -> Iterator[str]:
    """Every document in turn; from `source`, a file or a folder of them, if given, else from the Hub.

    NUL, which separates documents of bytes, is left out, and half a surrogate pair, which has no UTF-8, becomes `?`.
    """
    for row in _rows(collection, source):
        text = row.get("text")
        if not isinstance(text, str):
            raise ValueError(f"{source}: a document has no string named 'text', but {', '.join(map(str, row))}")
        yield text.encode(errors="replace").decode().replace("\0", "")


def _rows(collection: Collection, source: Path | None) -> Iterator[dict[str, Any]]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise ValueError("reading web text needs the package datasets: pip install 'fewbits[data]'") from None
    reader, paths, options = _files(source) if source else ("", [], {})
    try:
        if source:
            yield from load_dataset(reader, data_files=paths, split="train", streaming=True, **options)
        else:
            yield from load_dataset(collection.repository, collection.subset, split="train", streaming=True)
    except Exception as error:  # of the network, of file formats: the package lets them all through
        said = str(error.__cause__ or error).strip().partition("\n")[0]
        remedy = "" if source else "; without a network, download the files elsewhere and give --source PATH"
        raise ValueError(f"{source or collection.repository} cannot be read: {said}{remedy}") from error


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
