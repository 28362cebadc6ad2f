"""Convert the tokenizer in a GGUF file (tokens and merges of byte-level BPE) into the content of a tokenizer.json.

Before merging, text is split into words. The GGUF file names the rule for this; `SPLITS` has the supported rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from fewbits.models.importing.gguf import GgufFile

PREFIX: Final = "tokenizer.ggml."
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # GGUF's types of tokens
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _bytes(use_regex: bool = True) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


_DIGITS = {"type": "Digits", "individual_digits": True}
_LLAMA3_SPLIT = {"type": "Split", "pattern": {"Regex": _LLAMA3}, "behavior": "Isolated", "invert": False}

# Name of a rule: the steps that split text into words, as tokenizer.json describes them, and whether a word that is
# itself a token is used without merging.
SPLITS: Final[Mapping[str, tuple[list[dict[str, Any]], bool]]] = {
    "gpt-2": ([_bytes()], False),
    "smollm": ([_DIGITS, _bytes()], False),
    "llama-bpe": ([_LLAMA3_SPLIT, _bytes(use_regex=False)], True),
}


def gguf_tokenizer(path: Path) -> dict[str, Any]:
    """Return a GGUF file's tokenizer as the content of a tokenizer.json.

    Raise ValueError if the tokenizer is not byte-level BPE, or if its rule for splitting text is not in `SPLITS`.
    """
    metadata = GgufFile.open(path).metadata
    kind, split = metadata.get(f"{PREFIX}model"), metadata.get(f"{PREFIX}pre")
    if kind != "gpt2":
        raise ValueError(
            f"{path}: {PREFIX}model is {kind!r}, but only 'gpt2' (byte-level BPE) can be read; set "
            "data.tokenizer=file:PATH to read a tokenizer.json instead"
        )
    if not isinstance(split, str) or split not in SPLITS:
        raise ValueError(
            f"{path}: {PREFIX}pre is {split!r}, but only {', '.join(SPLITS)} can be read; set data.tokenizer=file:PATH "
            "to read a tokenizer.json instead"
        )
    tokens, merges = (_strings(path, metadata, f"{PREFIX}{name}") for name in ("tokens", "merges"))
    kinds = metadata.get(f"{PREFIX}token_type") or [_NORMAL] * len(tokens)
    if len(kinds) != len(tokens) or len(set(tokens)) != len(tokens):
        raise ValueError(
            f"{path}: {PREFIX}tokens has duplicates, or another length than {PREFIX}token_type; set "
            "data.tokenizer=file:PATH to read a tokenizer.json instead"
        )
    steps, ignore_merges = SPLITS[split]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, "content": token, **flags, "special": kind == _CONTROL}
            for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind in (_CONTROL, _USER_DEFINED)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": None,
        "decoder": _bytes(),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": ignore_merges,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": merges,
        },
    }


def _strings(path: Path, metadata: Mapping[str, Any], key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(
            f"{path} has no list of strings under the key {key}; set data.tokenizer=file:PATH to read a tokenizer.json "
            "instead"
        )
    return value
