"""Test `fewbits data`: all file formats give the same folder, also after a kill, and bad files are refused."""

import gzip
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import huggingface_hub
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import fewbits
from fewbits.commands.data import main
from fewbits.experiments.data.corpus import DataConfig
from fewbits.experiments.data.load import load
from fewbits.experiments.data.tokenizing import trained_tokenizer
from fewbits.experiments.data.web_text import COLLECTIONS, Documents, Unfinished
from tests.experiments.data.data_inputs import shared_cache, shared_home
from tests.messages import names

SOURCE = Path(fewbits.__file__).parents[1]
SMALL = ["--tokenizer", "bytes", "--validation", "0.1"]


def pages(count: int) -> list[str]:
    generator = random.Random(1)
    words = ["alpha", "beta", "é", "<|endoftext|>", "\n\n", "1969", "gamma"]
    return [" ".join(generator.choices(words, k=generator.randint(1, 60))) + f" {n}" for n in range(count)]


def jsonl(path: Path, documents: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text, "url": "https://example.org"}) + "\n" for text in documents))
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEWBITS_CACHE", str(shared_home(tmp_path_factory)))
    return shared_cache(tmp_path_factory)


def test_pages_become_splits_that_load(tmp_path: Path, cache: Path) -> None:
    documents = pages(400)
    out = tmp_path / "out"
    assert (
        main(["openwebtext", "--source", str(jsonl(tmp_path / "a.jsonl", documents)), "--out", str(out), *SMALL]) == 0
    )

    corpus = load(DataConfig(kind="openwebtext", path=str(out)), cache)
    found = {split: [tokens.tobytes().decode() for tokens in corpus.documents(split)] for split in corpus.splits}
    assert sorted(found["train"] + found["validation"]) == sorted(documents)
    assert [text for text in documents if text in set(found["train"])] == found["train"], "documents keep their order"
    assert 15 < len(found["validation"]) < 80
    sizes = corpus.folder.meta.text_bytes
    assert (sizes["train"], sizes["ood"]) == (corpus.tokens_in("train"), corpus.tokens_in("ood"))
    code = load(DataConfig(), cache)
    assert np.array_equal(corpus.splits["ood"], code.splits["validation"])
    assert {path.name for path in tmp_path.iterdir()} == {"a.jsonl", "out", "out.lock"}
    assert {path.name for path in out.iterdir()} == {"train.bin", "val.bin", "ood.bin", "meta.json"}


def test_every_kind_of_file_gives_the_same_tokens(tmp_path: Path) -> None:
    documents = pages(60)
    half = len(documents) // 2
    jsonl(tmp_path / "one.jsonl", documents)
    with gzip.open(tmp_path / "two.json.gz", "wt") as file:
        file.write("".join(json.dumps({"text": text}) + "\n" for text in documents))
    pq.write_table(pa.table({"text": documents}), tmp_path / "three.parquet")
    for folder in ("four", "five"):
        (tmp_path / folder).mkdir()
    jsonl(tmp_path / "four" / "0.jsonl", documents[:half])
    jsonl(tmp_path / "four" / "1.jsonl", documents[half:])
    for number, text in enumerate(documents):
        (tmp_path / "five" / f"{number:03}.txt").write_text(text)
    contents = set()
    for name in ("one.jsonl", "two.json.gz", "three.parquet", "four", "five"):
        out = tmp_path / f"out-{name}"
        assert main(["c4", "--source", str(tmp_path / name), "--out", str(out), *SMALL]) == 0
        contents.add(((out / "train.bin").read_bytes(), (out / "val.bin").read_bytes()))
    assert len(contents) == 1


def test_a_document_falls_on_the_same_side_whatever_the_order(tmp_path: Path, cache: Path) -> None:
    documents, held_out = pages(200), []
    for name, order in (("forth", documents + documents[:50]), ("back", documents[::-1][:120])):
        out = tmp_path / name
        main(["c4", "--source", str(jsonl(tmp_path / f"{name}.jsonl", order)), "--out", str(out), *SMALL])
        corpus = load(DataConfig(kind="c4", path=str(out)), cache)
        sides = [{tokens.tobytes() for tokens in corpus.documents(split)} for split in ("train", "validation")]
        assert not sides[0] & sides[1], "a page that occurs twice stays in one split"
        held_out.append(sides[1])
    assert held_out[1] < held_out[0]


def test_subwords_from_a_file_are_what_nanogpt_reads(tmp_path: Path, cache: Path) -> None:
    documents = pages(80)
    trained_tokenizer(300, documents).save(tmp_path)
    out, spelling = tmp_path / "out", f"file:{tmp_path / 'tokenizer.json'}"
    source = str(jsonl(tmp_path / "a.jsonl", documents))
    assert (
        main(["openwebtext", "--source", source, "--out", str(out), "--tokenizer", spelling, "--validation", "0.2"])
        == 0
    )

    import tokenizers

    reader = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json"))
    tokens = np.memmap(out / "train.bin", np.uint16, mode="r")
    ends = np.flatnonzero(tokens == 0)
    decoded = [reader.decode(part[part != 0].tolist()) for part in np.split(np.asarray(tokens), ends + 1)[:-1]]
    assert ends[-1] == len(tokens) - 1
    assert set(decoded) < set(documents)
    corpus = load(DataConfig(kind="openwebtext", path=str(out)), cache)
    assert corpus.vocab == 300
    assert corpus.folder.meta.text_bytes["train"] == sum(len(text.encode()) + 1 for text in decoded)


def test_what_cannot_be_text_is_cleaned(tmp_path: Path, cache: Path) -> None:
    out = tmp_path / "out"
    texts = [*pages(60), "nul\0here"]
    main(["c4", "--source", str(jsonl(tmp_path / "a.jsonl", texts)), "--out", str(out), *SMALL])
    corpus = load(DataConfig(kind="c4", path=str(out)), cache)
    both = b"".join(corpus.splits[split].tobytes() for split in ("train", "validation"))
    assert b"nulhere" in both
    assert both.count(b"\0") == 61


def test_done_again_it_says_so_and_other_options_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["c4", "--source", str(jsonl(tmp_path / "a.jsonl", pages(60))), "--out", str(tmp_path / "out"), *SMALL]
    main(options)
    assert names(capsys.readouterr().out, f"fewbits train data=c4 data.path={tmp_path / 'out'}")
    before = (tmp_path / "out" / "meta.json").stat().st_mtime_ns
    assert main(options) == 0
    assert names(capsys.readouterr().out, tmp_path / "out", "already")
    assert (tmp_path / "out" / "meta.json").stat().st_mtime_ns == before
    with pytest.raises(ValueError, match=rf"{tmp_path / 'out'} .*choose another --out"):
        main([*options, "--documents", "40"])


def shards(folder: Path, documents: list[str], count: int) -> list[Path]:
    """Write the documents into `count` files with names like C4's files on the Hub; return their paths."""
    folder.mkdir()
    paths = [folder / f"c4-train.{number:05}.json.gz" for number in range(count)]
    each = len(documents) // count
    for number, path in enumerate(paths):
        with gzip.open(path, "wt") as file:
            file.writelines(
                json.dumps({"text": text}) + "\n" for text in documents[number * each : (number + 1) * each]
            )
    return paths


def test_a_killed_preparation_goes_on_and_reads_no_finished_file_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A preparation killed in the fifth of six files resumes, although files two to four are destroyed meanwhile."""
    documents = pages(6 * 1500)
    paths = shards(tmp_path / "source", documents, 6)
    straight = ["c4", "--source", str(tmp_path / "source"), *SMALL]
    assert main([*straight, "--out", str(tmp_path / "straight")]) == 0

    script = """
import os, signal, sys
from fewbits.commands import data as prepare
add = prepare.Unfinished.add
def killed(self, batch, position):
    add(self, batch, position)
    if self.documents == 7000:
        os.kill(os.getpid(), signal.SIGKILL)
prepare.Unfinished.add = killed
prepare.main(sys.argv[1:])
"""
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    command = [sys.executable, "-c", script, *straight, "--out", str(out)]
    assert subprocess.run(command, env=os.environ | {"PYTHONPATH": str(SOURCE)}).returncode == -signal.SIGKILL
    assert not out.exists(), "nothing has the final name before it is complete"
    with open(partial / "train.bin", "ab") as file:
        file.write(b"written after the note")
    (partial / "ood.bin").write_bytes(b"half")
    with pytest.raises(ValueError, match="was started with other options"):
        main([*straight, "--out", str(out), "--documents", "5000"])

    for path in paths[1:4]:  # not the first: `datasets` reads column names from it
        path.write_bytes(b"")
    read = 0
    rows = Documents._rows

    def counted(self: Documents) -> Iterator[dict[str, Any]]:
        nonlocal read
        for row in rows(self):
            read += 1
            yield row

    monkeypatch.setattr(Documents, "_rows", counted)
    assert main([*straight, "--out", str(out)]) == 0
    assert read == len(documents) - 7000
    assert not partial.exists()
    files = {path.name for path in (tmp_path / "straight").iterdir()}
    assert {path.name for path in out.iterdir()} == files >= {"train.bin", "val.bin", "ood.bin", "meta.json"}
    assert all((out / name).read_bytes() == (tmp_path / "straight" / name).read_bytes() for name in files)


class Hub:
    """A fake of the Hub: each request for the newest commit gets another commit; data are read from a local file."""

    def __init__(self, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.commits = iter(["a" * 40, "b" * 40])
        self.asked: list[str | None] = []
        self.read: list[str | None] = []
        local = datasets.load_dataset

        def load_dataset(name: str, *_: object, revision: str | None = None, **options: Any) -> Any:
            assert name in [collection.repository for collection in COLLECTIONS.values()]
            self.read.append(revision)
            return local("json", data_files=[str(source)], **options)

        def dataset_info(_: object, repository: str, revision: str | None = None) -> SimpleNamespace:
            self.asked.append(revision)
            return SimpleNamespace(sha=next(self.commits))

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    return Hub(jsonl(tmp_path / "hub.jsonl", pages(2500)), monkeypatch)


def revision_of(out: Path) -> str:
    revision: str = json.loads((out / "meta.json").read_text())["source"]["request"]["revision"]
    return revision


def test_the_commit_of_the_first_call_is_kept_by_later_ones(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["openwebtext", "--out", str(tmp_path / "out"), *SMALL]
    with monkeypatch.context() as patched:
        patched.setattr(Unfinished, "finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            main(command)
    with pytest.raises(ValueError, match="was started with other options"):
        main([*command, "--revision", "c" * 40])
    assert main(command) == 0
    assert revision_of(tmp_path / "out") == "a" * 40
    assert main(command) == 0, "the folder is already prepared"
    assert hub.asked == [None], "one request for the newest commit"
    assert hub.read == ["a" * 40, "c" * 40, "a" * 40]
    with pytest.raises(ValueError, match=rf"{tmp_path / 'out'} .*choose another --out"):
        main([*command, "--revision", "c" * 40])


def test_a_commit_is_the_collections_own_or_the_one_asked_for(hub: Hub, tmp_path: Path) -> None:
    for name, options, expected in (
        ("own", [], COLLECTIONS["c4"].revision),
        ("asked", ["--revision", "d" * 40], "d" * 40),
        ("branch", ["--revision", "main"], "a" * 40),
    ):
        assert main(["c4", "--out", str(tmp_path / name), *SMALL, *options]) == 0
        assert revision_of(tmp_path / name) == expected
    assert hub.asked == ["main"], "only the name of a branch needs a request"


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ('{"text": "a"}\n{nonsense\n', r"bad\.jsonl cannot be read: .*JSON"),
        ('{"body": "a"}\n', r"a document has no string field 'text'; its fields are body"),
        ('{"text": 5}\n', r"a document has no string field 'text'"),
        (
            '{"text": "a"}\n',
            r"split (train|validation): set a --validation other than",
        ),
    ],
)
def test_bad_files_are_refused_and_leave_nothing(tmp_path: Path, content: str, what: str) -> None:
    (tmp_path / "bad.jsonl").write_text(content)
    with pytest.raises(ValueError, match=what):
        main(["c4", "--source", str(tmp_path / "bad.jsonl"), "--out", str(tmp_path / "out"), *SMALL])
    assert {path.name for path in tmp_path.iterdir()} == {"bad.jsonl", "out.lock"}


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--source", "nowhere", "--tokenizer", "bytes"], "nowhere: the file or folder does not exist"),
        (["--source", ".", "--tokenizer", "bytes"], "it has json and parquet files"),
        (["--source", "empty", "--tokenizer", "bytes"], "it has none"),
        (["--tokenizer", "bpe:4096"], "--tokenizer bpe:4096 needs training.*bytes, file:PATH, .*hub:NAME"),
        (["--source", ".", "--revision", "main", "--tokenizer", "bytes"], "local files have no revision"),
        (["--tokenizer", "gpt2"], "unknown tokenizer 'gpt2'"),
        (["--documents", "0"], "'0': .*whole number"),
        (["--validation", "1.5"], "'1.5': a number between 0 and 1"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], what: str
) -> None:
    monkeypatch.chdir(tmp_path)
    jsonl(tmp_path / "a.jsonl", ["x"])
    pq.write_table(pa.table({"text": ["x"]}), "b.parquet")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=what):
        main(["c4", "--out", "out", *options])
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match=r"data: .*choose from"):
        main(["pile"])


def test_the_hubs_tokenizer_is_found_where_the_hub_keeps_it(tmp_path: Path) -> None:
    """Without a network, a tokenizer from an earlier download is found; otherwise the error says what to do."""
    held = tmp_path / "hub" / "models--gpt2"
    (held / "snapshots" / "abc").mkdir(parents=True)
    (held / "refs").mkdir()
    (held / "refs" / "main").write_text("abc")
    trained_tokenizer(300, pages(50)).save(held / "snapshots" / "abc")
    probe = """
from fewbits.experiments.data.tokenizing import ready_tokenizer
print(ready_tokenizer("hub:gpt2").vocab)
try:
    ready_tokenizer("hub:meta-llama/Llama-2-7b-hf")
except ValueError as error:
    print(error)
"""
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", probe], env=environment, capture_output=True, text=True, check=True)
    vocab, advice = done.stdout.splitlines()
    assert vocab == "300"
    assert "Llama-2-7b-hf could not be fetched" in advice
    assert advice.endswith("download its tokenizer.json and use file:PATH")
