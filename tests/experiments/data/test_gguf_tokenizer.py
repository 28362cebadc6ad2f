"""Test that the tokenizer in a GGUF file encodes like the tokenizer.json from which the GGUF file was made."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fewbits.experiments.data.tokenizing import FILE, PREFIX, SPLITS, ready_tokenizer, trained_tokenizer
from tests.messages import naming
from tests.models.importing.gguf_writer import write_gguf

TEXT = ["def square(x):\n    return x * 1234  # 日本\n", "it's <|endoftext|> 2026 naïve\t\r\n\n"]


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the metadata of a GGUF file with the tokens and merges of a small tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizer")
    trained_tokenizer(400, TEXT * 50).save(folder)
    content = json.loads((folder / FILE).read_text())
    tokens = sorted(content["model"]["vocab"], key=content["model"]["vocab"].get)
    special = {token["content"] for token in content["added_tokens"]}
    return {
        f"{PREFIX}model": "gpt2",
        f"{PREFIX}tokens": tokens,
        f"{PREFIX}token_type": [3 if token in special else 1 for token in tokens],
        f"{PREFIX}merges": [" ".join(pair) for pair in content["model"]["merges"]],
    }


def encoded(folder: Path, metadata: Mapping[str, Any], split: str) -> list[list[int]]:
    path = write_gguf(folder / "m.gguf", {**metadata, f"{PREFIX}pre": split}, {})
    tokenizer = ready_tokenizer(f"file:{path}")
    assert [tokenizer.decode(tokens.tolist()) for tokens in tokenizer.encode(TEXT)] == TEXT
    assert tokenizer.vocab == len(metadata[f"{PREFIX}tokens"])
    return [tokens.tolist() for tokens in tokenizer.encode(TEXT)]


def test_the_tokens_are_those_of_the_tokenizer_that_was_written(metadata: dict[str, Any], tmp_path: Path) -> None:
    expected = [tokens.tolist() for tokens in trained_tokenizer(400, TEXT * 50).encode(TEXT)]
    assert encoded(tmp_path, metadata, "gpt-2") == expected


def test_smollms_rule_makes_a_token_of_each_digit(metadata: dict[str, Any], tmp_path: Path) -> None:
    digits = {metadata[f"{PREFIX}tokens"].index(digit) for digit in "0123456789"}
    counts = {
        split: sum(token in digits for tokens in encoded(tmp_path, metadata, split) for token in tokens)
        for split in SPLITS
    }
    assert counts["smollm"] == 8
    assert counts["gpt-2"] < 8


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": "llama"}, ("model", "llama", "gpt2")),
        ({"pre": "unheard-of"}, ("pre", "unheard-of", "smollm")),
        ({"merges": 3}, ("merges",)),
        ({"token_type": [1]}, ("token_type",)),
        ({"merges": ["no such token pair"]}, ("m.gguf",)),
    ],
)
def test_a_tokenizer_of_another_kind_is_refused_by_name(
    changes: dict[str, Any], named: tuple[str, ...], metadata: dict[str, Any], tmp_path: Path
) -> None:
    changed = {f"{PREFIX}pre": "gpt-2", **metadata, **{f"{PREFIX}{key}": value for key, value in changes.items()}}
    path = write_gguf(tmp_path / "m.gguf", changed, {})
    with pytest.raises(ValueError, match=naming("m.gguf", *named)):
        ready_tokenizer(f"file:{path}")
