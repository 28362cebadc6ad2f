"""Test corpora of text: the built-in ones, with fixed sizes and separate splits, tokenizers, and files of the user."""

import ast
import json
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fewbits.experiments.data.corpus import Corpus, DataConfig, describe
from fewbits.experiments.data.load import load
from fewbits.experiments.data.python_sources import HELD_OUT, PYTHON, TORCH, Sources, collect, without_docstrings
from fewbits.experiments.data.tokenizing import (
    FILE,
    PREFIX,
    SPLITS,
    joined,
    ready_tokenizer,
    saved_tokenizer,
    trained_tokenizer,
)
from tests.experiments.data.data_inputs import shared_cache
from tests.messages import naming
from tests.models.importing.gguf_writer import write_gguf


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_cache(tmp_path_factory)


@pytest.fixture(scope="module")
def python(cache: Path) -> Corpus:
    return load(DataConfig(), cache)


@pytest.fixture(scope="module")
def torch_sources(cache: Path) -> Corpus:
    return load(DataConfig(kind="torch", size=1 << 20), cache)


def texts(corpus: Corpus, split: str) -> list[str]:
    return [document.tobytes().decode() for document in corpus.documents(split)]


def lines(documents: list[str], shortest: int) -> set[str]:
    return {line for text in documents for line in map(str.strip, text.splitlines()) if len(line) >= shortest}


# Content of the built-in corpora


def test_sizes_are_fixed(python: Corpus, torch_sources: Corpus) -> None:
    for corpus, size in ((python, PYTHON.size), (torch_sources, 1 << 20)):
        sizes = {split: corpus.tokens_in(split) for split in corpus.splits}
        wanted = {"train": size, "validation": HELD_OUT, "ood": HELD_OUT}
        assert sizes.keys() == wanted.keys()
        assert all(wanted[split] - 4 <= sizes[split] <= wanted[split] for split in wanted), sizes
        assert corpus.vocab == 256
        assert corpus.folder.meta.text_bytes["train"] == corpus.tokens_in("train")


def test_making_it_again_gives_the_same_bytes(python: Corpus) -> None:
    again = collect(PYTHON, PYTHON.size).documents
    for split in ("train", "validation", "ood"):
        assert "".join(f"{text}\0" for text in again[split]).encode() == python.splits[split].tobytes()


@pytest.mark.parametrize("corpus", ["python", "torch_sources"])
def test_no_held_out_text_is_in_train_nor_a_near_copy(corpus: str, request: pytest.FixtureRequest) -> None:
    held: Corpus = request.getfixturevalue(corpus)
    train = lines(texts(held, "train"), shortest=16)
    for text in texts(held, "validation"):
        own = lines([text], shortest=16)
        assert sum(len(line) for line in own & train) <= 0.75 * sum(map(len, own)), text[:200]
    assert not lines(texts(held, "ood"), shortest=16) & train


# Documents from sources


def sources(root: Path, like: Sources = PYTHON) -> Sources:
    return Sources("mine", lambda: str(root), like.left_out, like.accepts, 1000)


def code(name: str, size: int) -> str:
    """Return Python code of about `size` bytes: a string whose lines contain `name`, so no other file has them."""
    body = [f"line number {number} of the file that is called {name}\n" for number in range(size // 40)]
    return f'{name} = """\n{"".join(body)}{name} ends here, says its last line"""\n'


def filled(root: Path) -> Path:
    """Write six files into the folder, enough for the validation split and 1000 bytes of train; return the folder."""
    for name in string.ascii_lowercase[:6]:
        (root / f"{name}.py").write_text(code(name * 3, HELD_OUT // 4))
    return root


def test_copies_and_near_copies_are_taken_once(tmp_path: Path) -> None:
    plain = collect(sources(filled(tmp_path)), 1000, prose=["x" * HELD_OUT]).documents
    last = set()
    for path in sorted(tmp_path.iterdir()):
        last.add(path.read_text().splitlines()[-1])
        path.with_stem(f"{path.stem}_again").write_text("# another first line of the file\n" + path.read_text())
    again = collect(sources(tmp_path), 1000, prose=["x" * HELD_OUT]).documents
    assert {text.splitlines()[-1] for text in again["validation"][:-1]} <= last
    assert len(again["validation"]) == len(plain["validation"])


def test_folders_of_tests_and_unreadable_files_are_left_out(tmp_path: Path) -> None:
    filled(tmp_path)
    plain = collect(sources(tmp_path), 1000, prose=["x" * HELD_OUT]).documents
    for number in range(20):
        for folder in ("test", "pkg/tests", "__pycache__", "site-packages"):
            (tmp_path / folder).mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / f"{number}.py").write_text(code(f"no{number}", 400))
        (tmp_path / f"broken{number}.py").write_text(f"def broken{number}(:\n")
        (tmp_path / f"latin{number}.py").write_bytes(b"name = '\xe9\xff' # not UTF-8, and no coding line\n")
        (tmp_path / f"notes{number}.txt").write_text(code(f"no{number}", 400))
    assert collect(sources(tmp_path), 1000, prose=["x" * HELD_OUT]).documents == plain


@pytest.mark.parametrize(
    "bad",
    [
        "# This file is generated by a script\n" + code("generated", 4000),
        f"table = [{'1234567, ' * 200}]\n",
        "x = (\n" + "    +-+-+-+-+-+-+-+-+-+-+-+-+ 1\n" * 200 + ")\n",
        "".join(f"def function_{number}(argument):\n    return {number}\n" for number in range(50)),
    ],
    ids=["generated", "long lines", "no words", "not annotated"],
)
def test_torch_sources_are_filtered(tmp_path: Path, bad: str) -> None:
    good = "def function(argument: int) -> int:\n    return argument\n"
    assert not TORCH.accepts(bad, ast.parse(bad))
    assert TORCH.accepts(good, ast.parse(good))
    assert PYTHON.accepts(bad, ast.parse(bad))


def test_docstrings_are_taken_out_and_nothing_else() -> None:
    source = '''
"""Module."""
# é before it on the line: columns are bytes
class A:
    """Class,
    over lines."""
    x = "not a docstring"

    def only(self):
        """Only this."""

    def same_line(self): "é"; return 1

    def code(self):
        """Two lines
        of it.
        """
        """A string, no docstring."""
        return f"""{self}"""
'''
    wanted = '''
# é before it on the line: columns are bytes
class A:
    x = "not a docstring"

    def only(self):
        ...

    def same_line(self): ...; return 1

    def code(self):
        """A string, no docstring."""
        return f"""{self}"""
'''
    assert without_docstrings(source, ast.parse(source)) == wanted


# Tokenizers


def test_a_share_of_the_training_bytes_is_random_and_nothing_else_changes(python: Corpus, cache: Path) -> None:
    worse = load(DataConfig(corrupted=0.15), cache)
    changed = worse.folder.splits["train"] != python.folder.splits["train"]
    assert changed.mean() == pytest.approx(0.15 * 254 / 255, rel=0.01)
    assert (worse.folder.document_ends("train") == python.folder.document_ends("train")).all()
    for split in ("validation", "ood"):
        assert (worse.folder.splits[split] == python.folder.splits[split]).all()
    assert worse.fingerprint != python.fingerprint
    for config in (DataConfig(corrupted=1.0), DataConfig(corrupted=0.1, tokenizer="bpe:300")):
        with pytest.raises(ValueError, match="corrupted"):
            load(config, cache)


def test_byte_level_bpe_is_trained_on_train_and_loses_nothing(torch_sources: Corpus, cache: Path) -> None:
    config = DataConfig(kind="torch", size=1 << 20, tokenizer="bpe:400")
    corpus = load(config, cache)
    assert corpus.vocab == 400
    import tokenizers

    (folder,) = (path.parent for path in cache.glob("torch-*/tokenizer.json"))
    reader = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    for split in corpus.splits:
        decoded = [reader.decode(document.tolist()) for document in corpus.documents(split)]
        assert decoded == texts(torch_sources, split)
        assert corpus.folder.meta.text_bytes[split] == torch_sources.tokens_in(split) > 1.3 * corpus.tokens_in(split)
    assert corpus.fingerprint != torch_sources.fingerprint
    assert load(config, cache).fingerprint == corpus.fingerprint


def test_a_tokenizer_from_a_file_separates_documents_by_its_own_token(tmp_path: Path) -> None:
    trained_tokenizer(300, [code("alpha", 3000)]).save(tmp_path)
    path = tmp_path / "tokenizer.json"
    tokenizer = ready_tokenizer(f"file:{path}")
    assert tokenizer.separator == 0
    text = "alpha <|endoftext|> beta"
    tokens = joined([text, text], tokenizer).tolist()
    assert tokens.count(0) == 2, "text that looks like the separator is text"
    assert tokens[-1] == 0

    stripped = json.loads(path.read_text())
    stripped["added_tokens"] = []
    del stripped["model"]["vocab"]["<|endoftext|>"]
    path.write_text(json.dumps(stripped))
    with pytest.raises(ValueError, match=naming("<|endoftext|>")):
        ready_tokenizer(f"file:{path}")
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"not a valid tokenizer\.json"):
        ready_tokenizer(f"file:{path}")


# The tokenizer in a GGUF file encodes like the tokenizer.json from which the GGUF file was made

GGUF_TEXT = ["def square(x):\n    return x * 1234  # 日本\n", "it's <|endoftext|> 2026 naïve\t\r\n\n"]


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the metadata of a GGUF file with the tokens and merges of a small tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizer")
    trained_tokenizer(400, GGUF_TEXT * 50).save(folder)
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
    assert [tokenizer.decode(tokens.tolist()) for tokens in tokenizer.encode(GGUF_TEXT)] == GGUF_TEXT
    assert tokenizer.vocab == len(metadata[f"{PREFIX}tokens"])
    return [tokens.tolist() for tokens in tokenizer.encode(GGUF_TEXT)]


def test_the_tokens_are_those_of_the_tokenizer_that_was_written(metadata: dict[str, Any], tmp_path: Path) -> None:
    expected = [tokens.tolist() for tokens in trained_tokenizer(400, GGUF_TEXT * 50).encode(GGUF_TEXT)]
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


# Files of the user

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
