"""Make and cache corpora of text: the built-in ones, `python` and `torch`, and one text file of the user.

The name of a cached folder depends on the text, the tokenizer and the sources of the modules in this folder, so that
corpora are made again if this code changes.

The last tenth of a text file, at most LARGEST characters, is for validation, the rest for training; it is cut at the
end of a line. If the file marks the ends of documents by `<|endoftext|>`, as TinyStories does, it is cut at such a
mark, and a separator token follows each document. Otherwise the text is one document, without separators. The whole
file is read into memory; `fewbits data` is for larger collections.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from fewbits.experiments.data import python_sources
from fewbits.experiments.data.folder import TokenFolder, open_folder, smallest_dtype, write_folder
from fewbits.experiments.data.once import opened_or_made
from fewbits.experiments.data.tokenizing import (
    SEPARATORS,
    Bytes,
    identity,
    made_tokenizer,
    make_meta,
    write_text,
)

SOURCES = {sources.name: sources for sources in (python_sources.PYTHON, python_sources.TORCH)}
LARGEST = 4 << 20  # characters of validation text at most
_MARK = SEPARATORS[0]
_PIECE = 1 << 16  # approximate number of characters that are encoded at a time
_OTHER = (".json", ".jsonl", ".parquet", ".gz", ".zip", ".zst")  # suffixes of files that are refused


def text_folder(kind: str, size: int | None, tokenizer: str, cache: Path) -> TokenFolder:
    """Return the tokens of the corpus `kind` (python or torch), which are made in the folder `cache` if needed.

    size: bytes of text in train; None: the corpus's default. tokenizer: a name such as `bytes` or `bpe:4096`.
    """
    sources = SOURCES[kind]
    size = sources.size if size is None else size
    tokenizer_id = identity(tokenizer)  # first, because it reports an invalid name
    made_from = [python_sources.stamp(sources), str(size)]
    prose = None
    if sources is not python_sources.PYTHON:  # torch has the out-of-domain text of the corpus `python`
        python = text_folder("python", None, "bytes", cache)
        prose = python.texts("ood")
        made_from.append(python.surveys["ood"].sha256)
    in_bytes = opened_or_made(
        cache / f"{kind}-{content_key(*made_from)}", open_folder, partial(_write_bytes, sources, size, prose)
    )
    if tokenizer == "bytes":
        return in_bytes
    content = [survey.sha256 for _, survey in sorted(in_bytes.surveys.items())]
    folder = cache / f"{kind}-{content_key(*content, tokenizer_id)}"
    return opened_or_made(folder, open_folder, partial(_write_subwords, in_bytes, tokenizer))


def _write_bytes(sources: python_sources.Sources, size: int, prose: list[str] | None, folder: Path) -> None:
    texts = python_sources.collect(sources, size, prose)
    write_text(folder, texts.documents, Bytes(), texts.source)


def _write_subwords(in_bytes: TokenFolder, spelling: str, folder: Path) -> None:
    documents = {split: in_bytes.texts(split) for split in in_bytes.splits}
    write_text(folder, documents, made_tokenizer(spelling, documents["train"]), dict(in_bytes.meta.source))


def corrupted_folder(clean: TokenFolder, share: float, cache: Path) -> TokenFolder:
    """Return the bytes of `clean` with this share of the training split's bytes replaced by random ones.

    Separators of documents are kept, and held-out splits are those of `clean`.
    """
    content = [survey.sha256 for _, survey in sorted(clean.surveys.items())]
    folder = cache / f"corrupted-{content_key(*content, str(share))}"
    return opened_or_made(folder, open_folder, partial(_write_corrupted, clean, share))


def _write_corrupted(clean: TokenFolder, share: float, folder: Path) -> None:
    generator = np.random.Generator(np.random.PCG64(0))
    tokens = clean.splits["train"]
    replaced = (generator.random(len(tokens)) < share) & (tokens != Bytes.separator)
    noise = generator.integers(1, clean.vocab, len(tokens))  # 0 separates documents
    splits = {**clean.splits, "train": np.where(replaced, noise, tokens)}
    write_folder(folder, splits, replace(clean.meta, source={**clean.meta.source, "corrupted": share}))


def content_key(*made_from: str) -> str:
    """Return the hash in a folder's name: of what determines its tokens, and of the sources beside this module."""
    code = [path.read_text("utf-8") for path in sorted(Path(__file__).parent.glob("*.py"))]
    return hashlib.sha256("\0".join([*made_from, *code]).encode()).hexdigest()[:16]


def text_file_folder(path: Path, tokenizer: str, cache: Path) -> TokenFolder:
    """Return the tokens of a text file, which are made in the folder `cache` if needed."""
    tokenizer_id, content = identity(tokenizer), _read(path)
    key = content_key(hashlib.sha256(content).hexdigest(), tokenizer_id)
    return opened_or_made(cache / f"text-{key}", open_folder, partial(_write_file, path, content, tokenizer))


def _read(path: Path) -> bytes:
    if path.is_dir():
        raise ValueError(f"data.path={path} is a folder: data=text reads one file, data=bin a folder of tokens")
    if path.suffix in _OTHER:
        raise ValueError(f"data.path={path} is no plain text: use fewbits data openwebtext --source {path}")
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"data.path={path}: {error.strerror}") from None


def _write_file(path: Path, content: bytes, spelling: str, folder: Path) -> None:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        where = f"the byte at offset {error.start} is invalid"
        raise ValueError(f"data.path={path} is not text in UTF-8: {where}; convert the file to UTF-8") from None
    splits = dict(zip(("train", "validation"), _split(path, text), strict=True))
    tokenizer = made_tokenizer(spelling, _pieces(splits["train"]))
    source: dict[str, object] = {"file": path.name, "sha256": hashlib.sha256(content).hexdigest()}
    if _MARK in text:
        write_text(folder, {name: list(_documents(part)) for name, part in splits.items()}, tokenizer, source)
        return
    sizes = {name: len(part.encode()) for name, part in splits.items()}
    tokens = {name: np.concatenate(tokenizer.encode([*_pieces(part)])) for name, part in splits.items()}
    meta = make_meta(tokenizer, smallest_dtype(tokenizer.vocab), sizes, source)
    tokenizer.save(folder)
    write_folder(folder, tokens, replace(meta, separator=None))


def _split(path: Path, text: str) -> tuple[str, str]:
    """Return the training text and the validation text; raise ValueError if one of them would be blank."""
    at = len(text) - min(len(text) // 10, LARGEST)
    for mark in (_MARK, "\n"):
        start = text.rfind(mark, 0, at)
        if start >= 0 and (mark == _MARK or start > at - _PIECE):
            at = start + len(mark)
            break
    if not text[:at].strip() or not text[at:].strip():
        raise ValueError(f"data.path={path} has {len(text)} characters, too few for a training and a validation split")
    return text[:at], text[at:]


def _documents(text: str) -> Iterator[str]:
    """Yield the documents between the marks, without empty ones and without NUL, the separator of `bytes`."""
    for document in text.split(_MARK):
        if stripped := document.replace("\0", "").strip("\n"):
            yield stripped


def _pieces(text: str) -> Iterator[str]:
    """Yield the text in pieces of whole lines, so that a tokenizer need not encode the whole text as one string."""
    begin = 0
    while begin < len(text):
        end = text.find("\n", begin + _PIECE) + 1 or len(text)
        yield text[begin:end]
        begin = end
