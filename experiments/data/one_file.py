"""Make a corpus of one text file: its last tenth, at most LARGEST characters, is for validation, the rest for training.

The file is cut at the end of a line, so validation text comes after all training text. If the file marks the ends of
documents by `<|endoftext|>`, as TinyStories does, it is cut at such a mark, and a separator token follows each document
as in other corpora. Otherwise the text is one document, without separators. The whole file is read into memory;
`fewbits data` is for larger collections.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from fewbits.experiments.data.folder import TokenFolder, Tokens, open_folder, smallest_dtype, write_folder
from fewbits.experiments.data.once import opened_or_made
from fewbits.experiments.data.text import content_key
from fewbits.experiments.data.tokenizing import (
    SEPARATORS,
    Tokenizer,
    bpe_size,
    joined,
    make_meta,
    ready_tokenizer,
    text_size,
    trained_tokenizer,
)

LARGEST = 4 << 20  # characters of validation text at most
_MARK = SEPARATORS[0]
_PIECE = 1 << 16  # approximate number of characters that are encoded at a time
_OTHER = (".json", ".jsonl", ".parquet", ".gz", ".zip", ".zst")  # suffixes of files that are refused


def text_file_folder(path: Path, tokenizer: str, cache: Path) -> TokenFolder:
    """Return the tokens of a text file; make them in the folder `cache` if they are not there yet.

    tokenizer: a name such as `bytes` or `bpe:4096`. Raise ValueError if the file cannot be read or is too short.
    """
    vocab = bpe_size(tokenizer)
    ready = None if vocab else ready_tokenizer(tokenizer)  # reports an invalid name before any work
    content = _read(path)
    identity = (ready.sha256 or ready.spelling) if ready else tokenizer
    key = content_key(hashlib.sha256(content).hexdigest(), identity)
    return opened_or_made(cache / f"text-{key}", open_folder, partial(_write, path, content, tokenizer))


def _read(path: Path) -> bytes:
    if path.is_dir():
        raise ValueError(f"data.path={path} is a folder: data=text reads one file, data=bin a folder of tokens")
    if path.suffix in _OTHER:
        raise ValueError(
            f"data.path={path}: data=text reads plain text; for {path.suffix} files: "
            f"fewbits data openwebtext --source {path}"
        )
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"data.path={path}: {error.strerror}") from None


def _write(path: Path, content: bytes, spelling: str, folder: Path) -> None:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        where = f"the byte at offset {error.start} is invalid"
        raise ValueError(f"data.path={path} is not text in UTF-8: {where}; convert the file to UTF-8") from None
    splits = dict(zip(("train", "validation"), _cut(path, text), strict=True))
    vocab = bpe_size(spelling)
    tokenizer = trained_tokenizer(vocab, _pieces(splits["train"])) if vocab else ready_tokenizer(spelling)
    source: dict[str, object] = {"file": path.name, "sha256": hashlib.sha256(content).hexdigest()}
    dtype = smallest_dtype(tokenizer.vocab)
    if _MARK in text:
        documents = {name: list(_documents(part)) for name, part in splits.items()}
        sizes = {name: text_size(texts) for name, texts in documents.items()}
        tokens = {name: joined(texts, tokenizer) for name, texts in documents.items()}
        meta = make_meta(tokenizer, dtype, sizes, source)
    else:
        sizes = {name: len(part.encode()) for name, part in splits.items()}
        tokens = {name: _continuous(part, tokenizer) for name, part in splits.items()}
        meta = replace(make_meta(tokenizer, dtype, sizes, source), separator=None)
    tokenizer.save(folder)
    write_folder(folder, tokens, meta)


def _cut(path: Path, text: str) -> tuple[str, str]:
    """Return the training text and the validation text of the file `path`, whose content is `text`.

    Raise ValueError if one of them would be blank.
    """
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
    """Yield the documents between the marks `<|endoftext|>`, without empty ones.

    NUL, the separator of the tokenizer `bytes`, is removed.
    """
    for document in text.split(_MARK):
        if stripped := document.replace("\0", "").strip("\n"):
            yield stripped


def _continuous(text: str, tokenizer: Tokenizer) -> Tokens:
    return np.concatenate(tokenizer.encode([*_pieces(text)]))


def _pieces(text: str) -> Iterator[str]:
    """Yield the text in pieces of whole lines, so that a tokenizer need not encode the whole text as one string."""
    begin = 0
    while begin < len(text):
        end = text.find("\n", begin + _PIECE) + 1 or len(text)
        yield text[begin:end]
        begin = end
