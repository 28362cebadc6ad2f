"""Test reading folders of tokens, from nanoGPT and with our meta.json; damaged or inconsistent folders are refused."""

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest

from fewbits.experiments.data.corpus import Corpus, DataConfig, describe
from fewbits.experiments.data.load import load
from tests.experiments.data.data_inputs import bin_folder
from tests.messages import naming


def opened(folder: Path) -> Corpus:
    return load(DataConfig(kind="bin", path=str(folder)), folder.parent / "cache")


def test_nanogpts_folder_is_read_as_it_is(tmp_path: Path) -> None:
    corpus = opened(bin_folder(tmp_path / "owt", [5, 50256, 7, 9], [1, 2, 3]))
    assert set(corpus.splits) == {"train", "validation"}
    assert corpus.splits["train"].tolist() == [5, 50256, 7, 9]
    assert corpus.vocab == 50257
    assert corpus.tokens_in("validation") == 3
    with pytest.raises(ValueError, match="documents cannot be separated"):
        corpus.documents("train")


@pytest.mark.parametrize(("dtype", "name", "top"), [("<u4", "uint32", 127_999), ("u1", "uint8", 255)])
def test_meta_names_another_dtype(tmp_path: Path, dtype: str, name: str, top: int) -> None:
    corpus = opened(bin_folder(tmp_path / "x", [1, top, 0], [2], dtype, {"dtype": name, "vocab": top + 1}))
    assert corpus.splits["train"].tolist() == [1, top, 0]
    assert corpus.vocab == top + 1


def test_a_separator_gives_documents(tmp_path: Path) -> None:
    corpus = opened(bin_folder(tmp_path / "x", [1, 2, 9, 9, 3, 9, 4, 5], [7], meta={"separator": 9}))
    assert [document.tolist() for document in corpus.documents("train")] == [[1, 2], [3], [4, 5]]


@pytest.mark.parametrize(("size", "what"), [(7, "is truncated: 7 bytes .*uint16"), (0, "is empty")])
def test_a_file_that_was_cut_off_is_refused(tmp_path: Path, size: int, what: str) -> None:
    folder = bin_folder(tmp_path / "x", range(50))
    os.truncate(folder / "train.bin", size)
    with pytest.raises(ValueError, match=rf"train\.bin {what}"):
        opened(folder)


def test_a_token_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    folder = bin_folder(tmp_path / "x", [1, 300], [2], meta={"vocab": 300})
    with pytest.raises(ValueError, match=naming("train.bin", "token 300", "meta.json")):
        opened(folder)


def test_a_file_that_meta_does_not_describe_is_refused(tmp_path: Path) -> None:
    digest = hashlib.sha256(np.array([1, 2], "<u2").tobytes()).hexdigest()
    folder = bin_folder(tmp_path / "x", [1, 2], [3], meta={"sha256": {"train": digest}})
    assert opened(folder).vocab == 4
    bin_folder(folder, [1, 3], [3])
    with pytest.raises(ValueError, match=naming("train.bin", "meta.json")):
        opened(folder)


@pytest.mark.parametrize(
    ("meta", "what"),
    [
        ('{"vocab": ', "is not JSON"),
        ("[]", "is not a JSON object"),
        ('{"vocabulary": 5}', "unknown key vocabulary.*dtype, vocab, separator"),
        ('{"dtype": "int64"}', "dtype 'int64'.*uint8, uint16, uint32"),
        ('{"vocab": 65537}', "vocab 65537 with dtype uint16.*whole numbers from 0 to 65536"),
        ('{"vocab": 10, "separator": 10}', "separator 10 with dtype uint16.*whole numbers from 0 to 9"),
        ('{"vocab": "many"}', "vocab: int is expected, not 'many'"),
        ('{"sha256": 5}', "sha256: a mapping is expected, not 5"),
        ('{"text_bytes": []}', "text_bytes: a mapping is expected"),
        ('{"source": "here"}', "source: a mapping is expected, not 'here'"),
        ('{"entropy": "high"}', "entropy: float is expected, not 'high'"),
    ],
)
def test_a_meta_that_makes_no_sense_is_refused(tmp_path: Path, meta: str, what: str) -> None:
    folder = bin_folder(tmp_path / "x", [1])
    (folder / "meta.json").write_text(meta)
    with pytest.raises(ValueError, match=rf"meta\.json.*{what}"):
        opened(folder)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=naming("nowhere", "train.bin", "val.bin")):
        opened(tmp_path / "nowhere")
    folder = bin_folder(tmp_path / "x", [1])
    (folder / "val.bin").unlink()
    with pytest.raises(ValueError, match=r"x has no val\.bin"):
        opened(folder)


def test_the_fingerprint_is_of_the_content_and_not_of_the_place(tmp_path: Path) -> None:
    corpus = opened(bin_folder(tmp_path / "x", [1, 2]))
    assert opened(bin_folder(tmp_path / "y", [1, 2])).fingerprint == corpus.fingerprint
    others = [
        bin_folder(tmp_path / "train", [1, 3]),
        bin_folder(tmp_path / "validation", [1, 2], [4]),
        bin_folder(tmp_path / "vocab", [1, 2], meta={"vocab": 200}),
        bin_folder(tmp_path / "tokenizer", [1, 2], meta={"tokenizer_sha256": "ab"}),
        bin_folder(tmp_path / "separator", [1, 2], meta={"separator": 2}),
    ]
    assert len({corpus.fingerprint, *(opened(folder).fingerprint for folder in others)}) == 1 + len(others)


def test_resuming_on_other_data_is_refused_and_says_what_differs(tmp_path: Path) -> None:
    then = opened(bin_folder(tmp_path / "x", [1, 2, 3]))
    now = opened(bin_folder(tmp_path / "y", [1, 2]))
    recorded = json.loads(json.dumps(describe(then)))
    then.check(recorded)
    here, there = now.fingerprint[:16], then.fingerprint[:16]
    with pytest.raises(ValueError, match=rf"{here}….*{there}….*train\.tokens 2 \(then 3\), train\.sha256") as caught:
        now.check(recorded)
    assert "validation" not in str(caught.value)
