"""Test the corpus of a single text file, which is split by position: the end of the file is for validation."""

from pathlib import Path

import numpy as np
import pytest

from fewbits.experiments.data.corpus import Corpus, DataConfig, describe
from fewbits.experiments.data.load import load
from fewbits.experiments.data.text import LARGEST
from fewbits.experiments.data.tokenizing import saved_tokenizer

LINES = "".join(f"{i}: Größe {i * i}\n" for i in range(3000))


def corpus(folder: Path, content: str | bytes, tokenizer: str = "bytes", name: str = "novel.txt") -> Corpus:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return load(DataConfig(kind="text", path=str(path), tokenizer=tokenizer), folder / "cache")


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_the_splits_are_the_text_cut_at_a_line(tmp_path: Path, tokenizer: str) -> None:
    made = corpus(tmp_path, LINES, tokenizer)
    decoder = saved_tokenizer(made.folder)
    assert decoder is not None
    train, validation = (decoder.decode(made.splits[name].tolist()) for name in ("train", "validation"))
    assert train + validation == LINES
    assert train.endswith("\n")
    assert 0.09 < len(validation) / len(LINES) < 0.11
    assert made.folder.meta.text_bytes == {"train": len(train.encode()), "validation": len(validation.encode())}
    assert describe(made)["source.file"] == "novel.txt"


def test_marked_documents_are_separated_and_never_cut(tmp_path: Path) -> None:
    stories = [f"Story {i}.\nIt ends." for i in range(50)]
    made = corpus(tmp_path, "<|endoftext|>\n".join(stories))
    documents = {name: [tokens.tobytes().decode() for tokens in made.documents(name)] for name in made.splits}
    assert documents["train"] + documents["validation"] == stories
    assert len(documents["validation"]) in (5, 6)


def test_validation_text_of_a_large_file_is_limited(tmp_path: Path) -> None:
    made = corpus(tmp_path, b"All work and no play.\n" * (11 * LARGEST // 22))
    assert LARGEST <= made.tokens_in("validation") < LARGEST + 22


def test_equal_content_is_the_same_data_and_other_content_is_not(tmp_path: Path) -> None:
    first, renamed = corpus(tmp_path, LINES), corpus(tmp_path, LINES, name="other")
    changed = corpus(tmp_path, LINES.replace("7", "8"))
    assert first.fingerprint == renamed.fingerprint != changed.fingerprint
    assert np.array_equal(first.splits["train"], renamed.splits["train"])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"caf\xe9 " * 100, "UTF-8: the byte at offset 3"),
        ("a.txt", b"", "too few"),
        ("a.jsonl", b"{}", "fewbits data"),
    ],
)
def test_a_file_that_is_no_text_is_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        corpus(tmp_path, content, name=name)
    assert not list(tmp_path.glob("cache/text-*/"))


def test_a_file_where_a_folder_is_expected_names_the_kind_that_reads_it(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ValueError, match="data=text"):
        load(DataConfig(kind="bin", path=str(tmp_path / "a.txt")), tmp_path)
