"""Turn text into tokens: bytes, or byte-level BPE by the package `tokenizers`.

A tokenizer is named `bytes`, `bpe:N` (N tokens, trained on the training split), `file:PATH` (a tokenizer.json or a GGUF
file), `package:NAME` (the tokenizer of a model in a Python package) or `hub:NAME` (on the Hugging Face Hub). Parameters
called `spelling` are such names. Every vocabulary has a token that separates documents and occurs nowhere else.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from fewbits.common.process import extras
from fewbits.experiments.data.folder import Meta, TokenFolder, Tokens, smallest_dtype, write_folder
from fewbits.models.importing.sources import source_path

SPELLINGS = (
    "bytes, bpe:N with N from 257 to 65536, file:PATH of a tokenizer.json or a GGUF file, package:smollm2, hub:NAME"
)
FILE = "tokenizer.json"
GGUF = ".gguf"

# The token that ends a document in the vocabularies of GPT-2, Llama 3, Llama 1 and 2, and others.
SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
_AT_ONCE = 1000  # documents that are encoded together; a limit, because encodings need memory


class Tokenizer(Protocol):
    """A tokenizer that turns texts into tokens and back."""

    spelling: str  # the name, such as `bpe:4096`
    vocab: int  # number of tokens
    separator: int  # the token after every document
    sha256: str | None  # of the content of tokenizer.json; None for `bytes`

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the tokens of each text, without separators."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the tokens' text, without separators; invalid UTF-8 becomes U+FFFD."""

    def save(self, folder: Path) -> None:
        """Write into the folder the files that are needed to decode this tokenizer's tokens."""


class Bytes:
    """The tokenizer whose tokens are the bytes of UTF-8. NUL separates documents, so no document may contain NUL."""

    spelling, vocab, separator = "bytes", 256, 0
    sha256: str | None = None

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if 0 < token < self.vocab).decode(errors="replace")

    def save(self, folder: Path) -> None:
        """Write nothing: bytes need no file."""


class Subwords:
    """A tokenizer of the package `tokenizers`. Text such as `<|endoftext|>` in a document is encoded as plain text."""

    def __init__(self, spelling: str, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        numbers: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        separator = next((numbers[name] for name in SEPARATORS if name in numbers), None)
        if separator is None:
            one = f"one of {', '.join(SEPARATORS)}, which must separate documents"
            raise ValueError(f"tokenizer {spelling}: its vocabulary lacks {one}; choose another tokenizer")
        self.spelling, self.separator, self.vocab = spelling, separator, 1 + max(numbers.values())
        self.sha256: str | None = hashlib.sha256(tokenizer.to_str().encode()).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(item.ids, smallest_dtype(self.vocab)) for item in encoded]

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    def save(self, folder: Path) -> None:
        self._tokenizer.save(str(folder / FILE))


def ready_tokenizer(spelling: str) -> Tokenizer:
    """Return the tokenizer with this name; raise ValueError for unknown names and for `bpe:N`, which needs training."""
    form, _, rest = spelling.partition(":")
    if spelling == "bytes":
        return Bytes()
    if form == "file" and rest:
        if not Path(rest).is_file():
            raise ValueError(f"tokenizer {spelling}: the file {rest} does not exist")
        return Subwords(spelling, _read(spelling, Path(rest)))
    if form == "package":
        return Subwords(spelling, _read(spelling, source_path(spelling)))
    if form == "hub" and rest:
        return Subwords(spelling, _fetch(spelling, rest))
    raise ValueError(f"unknown tokenizer {spelling!r}: valid tokenizers are {SPELLINGS}")


def saved_tokenizer(folder: TokenFolder) -> Tokenizer | None:
    """Return the tokenizer that made a folder's tokens, as the folder records it; None if it is not recorded."""
    meta, path = folder.meta, folder.path / FILE
    if meta.tokenizer == Bytes.spelling:
        return Bytes()
    if not path.is_file():
        return None
    spelling = meta.tokenizer or f"file:{path}"
    tokenizer = Subwords(spelling, _read(spelling, path))
    if meta.tokenizer_sha256 not in (None, tokenizer.sha256):
        reason = "its SHA-256 differs from tokenizer_sha256 in meta.json"
        raise ValueError(f"{path} is not the tokenizer of the tokens in its folder: {reason}; restore the file")
    return tokenizer


def bpe_size(spelling: str) -> int | None:
    """Return N if the name is `bpe:N`, or None for other tokenizers' names; raise ValueError if N is invalid."""
    if not spelling.startswith("bpe:"):
        return None
    if not re.fullmatch(r"bpe:[1-9][0-9]{2,4}", spelling) or not 257 <= int(spelling[4:]) <= 1 << 16:
        raise ValueError(f"unknown tokenizer {spelling!r}: valid tokenizers are {SPELLINGS}")
    return int(spelling[4:])


def trained_tokenizer(size: int, texts: Iterable[str]) -> Tokenizer:
    """Train byte-level BPE like GPT-2's, of `size` tokens: the bytes, the separator, and the most frequent merges."""
    spelling = f"bpe:{size}"
    package = _package()
    tokenizer = package.Tokenizer(package.models.BPE())
    tokenizer.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = package.decoders.ByteLevel()
    alphabet = package.pre_tokenizers.ByteLevel.alphabet()
    trainer = package.trainers.BpeTrainer(
        vocab_size=size, special_tokens=[SEPARATORS[0]], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return Subwords(spelling, tokenizer)


def identity(spelling: str) -> str:
    """Return the SHA-256 of the tokenizer with this name, or the name if that says all; ValueError for other names."""
    return spelling if bpe_size(spelling) else ready_tokenizer(spelling).sha256 or spelling


def made_tokenizer(spelling: str, texts: Iterable[str]) -> Tokenizer:
    """Return the tokenizer with this name; `bpe:N` is trained on the texts."""
    size = bpe_size(spelling)
    return trained_tokenizer(size, texts) if size else ready_tokenizer(spelling)


def write_text(folder: Path, documents: dict[str, list[str]], tokenizer: Tokenizer, source: dict[str, object]) -> None:
    """Write the documents of each split as tokens into an empty folder, each followed by a separator, and meta.json."""
    dtype = smallest_dtype(tokenizer.vocab)
    splits = {name: joined(texts, tokenizer) for name, texts in documents.items()}
    text_bytes = {name: text_size(texts) for name, texts in documents.items()}
    tokenizer.save(folder)
    write_folder(folder, splits, make_meta(tokenizer, dtype, text_bytes, source))


def make_meta(tokenizer: Tokenizer, dtype: str, text_bytes: dict[str, int], source: dict[str, object]) -> Meta:
    """Return the metadata (content of meta.json) of a folder whose tokens this tokenizer made."""
    t = tokenizer
    return Meta(dtype, t.vocab, t.separator, t.spelling, t.sha256, text_bytes=text_bytes, source=source)


def text_size(texts: Iterable[str]) -> int:
    """Return the number of bytes of the texts, counting one more byte for the separator after each text."""
    return sum(len(text.encode()) + 1 for text in texts)


def joined(texts: Sequence[str], tokenizer: Tokenizer) -> Tokens:
    """Return the tokens of all texts as one array, with a separator after each text."""
    dtype = smallest_dtype(tokenizer.vocab)
    end, parts = np.array([tokenizer.separator], dtype), [np.empty(0, dtype)]
    for begin in range(0, len(texts), _AT_ONCE):
        for tokens in tokenizer.encode(texts[begin : begin + _AT_ONCE]):
            parts += [tokens, end]
    return np.concatenate(parts)


def _read(spelling: str, path: Path) -> Any:
    package = _package()
    content = json.dumps(gguf_tokenizer(path)) if path.suffix == GGUF else None
    try:
        return package.Tokenizer.from_file(str(path)) if content is None else package.Tokenizer.from_str(content)
    except Exception as error:  # the package raises bare Exceptions
        raise ValueError(f"tokenizer {spelling}: not a valid tokenizer.json: {error}") from None


def _fetch(spelling: str, name: str) -> Any:
    package = _package()
    try:
        return package.Tokenizer.from_pretrained(name)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"tokenizer {spelling} could not be fetched ({reason}): download its tokenizer.json and use file:PATH"
        ) from None


def _package() -> Any:
    with extras():
        import tokenizers
    return tokenizers


# ------------------------------------------------------------------------------------------------ tokenizer.json


def bytes_tokenizer() -> dict[str, Any]:
    """Return the content of tokenizer.json for `Bytes`: byte-level BPE without merges, each id its byte's value."""
    level, end = _byte_level(use_regex=False), _spelled(Bytes.separator)
    vocab = {_spelled(byte): byte for byte in range(Bytes.vocab)}
    return _tokenizer_json([(Bytes.separator, end, True)], level, level, vocab=vocab, merges=[])


def gguf_tokenizer(path: Path) -> dict[str, Any]:
    """Return the tokenizer in a GGUF file (tokens and merges of byte-level BPE) as the content of a tokenizer.json.

    Before merging, text is split into words by a rule that the file names; `SPLITS` has the supported rules.
    """
    from fewbits.models.importing.gguf import GgufFile  # loads torch

    metadata = GgufFile.open(path).metadata
    names = ("model", "pre", "tokens", "merges", "token_type")
    values: tuple[Any, ...] = tuple(metadata.get(f"{PREFIX}{name}") for name in names)
    kind, split, tokens, merges, kinds = values
    wrong = None
    if kind != "gpt2":
        wrong = f"model is {kind!r}, but only 'gpt2' (byte-level BPE) can be read"
    elif not isinstance(split, str) or split not in SPLITS:
        wrong = f"pre is {split!r}, but only {', '.join(SPLITS)} can be read"
    elif not _are_strings(tokens) or not _are_strings(merges):
        wrong = "tokens or merges is not a list of strings"
    elif len({*tokens}) != len(tokens) or len(kinds or tokens) != len(tokens):
        wrong = "tokens has duplicates, or another length than token_type"
    if wrong:
        raise ValueError(f"{path}: {PREFIX}{wrong}; set data.tokenizer=file:PATH to read a tokenizer.json instead")
    steps, ignore_merges = SPLITS[split]
    kinds = kinds or [_NORMAL] * len(tokens)
    added = [
        (number, token, kind == _CONTROL)
        for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    return _tokenizer_json(
        added,
        {"type": "Sequence", "pretokenizers": steps},
        _byte_level(),
        ignore_merges=ignore_merges,
        vocab={token: number for number, token in enumerate(tokens)},
        merges=merges,
    )


def _byte_level(use_regex: bool = True) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


PREFIX: Final = "tokenizer.ggml."
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # GGUF's types of tokens
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGITS = {"type": "Digits", "individual_digits": True}
_LLAMA3_SPLIT = {"type": "Split", "pattern": {"Regex": _LLAMA3}, "behavior": "Isolated", "invert": False}

# Name of a rule: the steps that split text into words, as tokenizer.json describes them, and whether a word that is
# itself a token is used without merging.
SPLITS: Final[Mapping[str, tuple[list[dict[str, Any]], bool]]] = {
    "gpt-2": ([_byte_level()], False),
    "smollm": ([_DIGITS, _byte_level()], False),
    "llama-bpe": ([_LLAMA3_SPLIT, _byte_level(use_regex=False)], True),
}


def _tokenizer_json(
    added: Sequence[tuple[int, str, bool]], pre_tokenizer: dict[str, Any], decoder: dict[str, Any], **model: Any
) -> dict[str, Any]:
    """Return the content of a tokenizer.json. added: (id, content, whether it is special) of each added token."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    unused = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": id_, "content": text, **flags, "special": special} for id_, text, special in added],
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": {"type": "BPE", **dict.fromkeys(unused), "fuse_unk": False, "byte_fallback": False, **model},
    }


def _are_strings(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _spelled(byte: int) -> str:
    """Return byte-level BPE's character for a byte: its Latin-1 character if visible, else one from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in visible:
        return chr(byte)
    return chr(0x100 + [other for other in range(0x100) if other not in visible].index(byte))
