"""`fewbits data prepare`: web text to a folder of tokens that the kinds openwebtext, c4 and bin (and nanoGPT) read.

nanoGPT's procedure: every document as tokens, a separator after each, all in one file of uint16 (uint32 for large
vocabularies). Which documents are validation is decided by their own SHA-256, so it depends on neither order nor
number, and a page that is there twice stays on one side. Out-of-domain text is the held-out code of the corpus python.

Work goes to FOLDER.partial, which becomes FOLDER when all is done. After every batch of documents the partial folder
notes how far it is: the same command goes on from there after an interruption, and cuts off what is beyond the note.
"""

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import NoReturn

import numpy as np

from fewbits.experiments.data.folder import FILES, read_meta, smallest_dtype, write_meta
from fewbits.experiments.data.once import default_cache
from fewbits.experiments.data.text import text_folder
from fewbits.experiments.data.tokenizing import Tokenizer, joined, meta_of, ready_tokenizer, text_size
from fewbits.experiments.data.web import COLLECTIONS, documents

NOTE = "progress.json"
SPLITS = ("train", "validation")
VALIDATION = 0.0005  # nanoGPT's share
_AT_ONCE = 1000  # documents between notes


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"data prepare: {message}")


def main(argv: Sequence[str]) -> int:
    options = _options(argv)
    collection = COLLECTIONS[options.collection]
    out: Path = (options.out or default_cache() / options.collection).expanduser().absolute()
    source: Path | None = options.source and options.source.expanduser().absolute()
    tokenizer = ready_tokenizer(options.tokenizer or collection.tokenizer)
    request = Request(
        options.collection,
        str(source or collection.repository),
        tokenizer.sha256 or tokenizer.spelling,
        options.documents,
        options.validation,
    )
    try:
        if _is_done(out, request):
            print(f"{out} is prepared already")
            return 0
        with _alone(out):
            stream = documents(collection, source)
            _prepare(out, request, tokenizer, stream, options.documents or collection.documents)
    except OSError as error:
        raise ValueError(f"data prepare: {out}: {error}; the same command goes on from where it was") from error
    print(f"{out} is prepared: fewbits train data={options.collection}")
    return 0


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(
        prog="fewbits data prepare",
        description="Turn web text into a folder of tokens to train on. Needs the packages datasets and tokenizers.",
        epilog="example: fewbits data prepare openwebtext --source openwebtext/ --tokenizer file:gpt2/tokenizer.json",
    )
    parser.add_argument("collection", choices=COLLECTIONS, help="which text, and whose tokenizer by default")
    parser.add_argument(
        "--source",
        type=Path,
        metavar="PATH",
        help="a file or folder of .json, .jsonl, .parquet (documents in a field text) or .txt files, perhaps with .gz "
        "(default: the collection on the Hugging Face Hub)",
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=f"default: {default_cache()}/COLLECTION")
    parser.add_argument(
        "--tokenizer",
        metavar="SPELLING",
        help="bytes, file:PATH of a tokenizer.json, or hub:NAME (default: "
        + "; ".join(f"{item.tokenizer} for {name}" for name, item in COLLECTIONS.items())
        + ")",
    )
    parser.add_argument("--documents", type=_positive, metavar="N", help="stop after N documents (default: all)")
    parser.add_argument(
        "--validation",
        type=_fraction,
        default=VALIDATION,
        metavar="SHARE",
        help=f"of documents held out (default: {VALIDATION})",
    )
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number from 1 up")
    return int(text)


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a number between 0 and 1")
    return value


@dataclass(frozen=True)
class Request:
    """What decides the result: two preparations of the same request are the same."""

    collection: str
    origin: str
    tokenizer: str
    limit: int | None
    validation: float


def is_held_out(text: str, share: float) -> bool:
    """Whether a document is validation, for this share of them."""
    digest = hashlib.sha256(text.encode(errors="replace")).digest()
    return int.from_bytes(digest[:8], "big") < share * 2.0**64


def _is_done(out: Path, request: Request) -> bool:
    if not out.exists():
        return False
    made = read_meta(out).source.get("request") if out.is_dir() else None
    if made != asdict(request):
        raise ValueError(
            f"data prepare: {out} is there and holds something else ({made}): remove it or choose an --out"
        )
    return True


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    out.parent.mkdir(parents=True, exist_ok=True)
    with open(out.with_name(f"{out.name}.lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"data prepare: another process is preparing {out}") from None
        yield


def _prepare(out: Path, request: Request, tokenizer: Tokenizer, stream: Iterator[str], expected: int) -> None:
    unfinished = _Unfinished.found(out.with_name(f"{out.name}.partial"), request, tokenizer)
    progress = _Progress(unfinished.documents, expected)
    for batch in _batches(islice(stream, unfinished.documents, request.limit)):
        unfinished.add(batch)
        progress.show(unfinished.documents, sum(unfinished.tokens.values()))
    progress.end()
    empty = [split for split in SPLITS if not unfinished.tokens[split]]
    if empty:
        shutil.rmtree(unfinished.folder)
        raise ValueError(
            f"data prepare: none of {unfinished.documents} documents fell to {' and '.join(empty)}: "
            f"with so few, choose another --validation than {request.validation}"
        )
    unfinished.finish(out)


class _Unfinished:
    """The partial folder: .bin files that grow, and a note of how far they are valid."""

    def __init__(self, folder: Path, request: Request, tokenizer: Tokenizer) -> None:
        self.folder, self.request, self._tokenizer = folder, request, tokenizer
        self.documents = 0
        self.tokens = dict.fromkeys(SPLITS, 0)
        self.text_bytes = dict.fromkeys(SPLITS, 0)
        self._dtype = np.dtype(smallest_dtype(tokenizer.vocab)).newbyteorder("<")

    @staticmethod
    def found(folder: Path, request: Request, tokenizer: Tokenizer) -> "_Unfinished":
        """As far as an earlier process came with the same request; else a new one."""
        unfinished = _Unfinished(folder, request, tokenizer)
        if (folder / NOTE).is_file():
            note = json.loads((folder / NOTE).read_text("utf-8"))
            if note.pop("request") != asdict(request):
                raise ValueError(f"data prepare: {folder} was begun with other options: remove it or choose an --out")
            unfinished.documents, unfinished.tokens, unfinished.text_bytes = note.values()
        folder.mkdir(exist_ok=True)
        for split in SPLITS:
            with open(folder / FILES[split], "ab") as file:
                file.truncate(unfinished.tokens[split] * unfinished._dtype.itemsize)
        return unfinished

    def add(self, batch: list[str]) -> None:
        sides: dict[str, list[str]] = {split: [] for split in SPLITS}
        for text in batch:
            sides["validation" if is_held_out(text, self.request.validation) else "train"].append(text)
        for split, texts in sides.items():
            self.tokens[split] += self._append(split, texts)
            self.text_bytes[split] += text_size(texts)
        self.documents += len(batch)
        note = {"documents": self.documents, "tokens": self.tokens, "text_bytes": self.text_bytes}
        unfinished = self.folder / f"{NOTE}.new"
        unfinished.write_text(json.dumps({**note, "request": asdict(self.request)}))
        unfinished.replace(self.folder / NOTE)

    def finish(self, out: Path) -> None:
        code = text_folder("python", None, "bytes", default_cache())
        texts = [tokens.tobytes().decode() for tokens in code.documents("validation")]
        self._append("ood", texts)
        self._tokenizer.save(self.folder)
        sizes = {**self.text_bytes, "ood": text_size(texts)}
        source = {"request": asdict(self.request), "documents": self.documents, "ood": dict(code.meta.source)}
        write_meta(self.folder, meta_of(self._tokenizer, self._dtype.name, sizes, source))
        (self.folder / NOTE).unlink()
        self.folder.rename(out)

    def _append(self, split: str, texts: Sequence[str]) -> int:
        tokens = joined(texts, self._tokenizer)
        with open(self.folder / FILES[split], "ab") as file:
            file.write(tokens.astype(self._dtype, copy=False).tobytes())
            file.flush()
            os.fsync(file.fileno())  # the note that follows must not be ahead of the tokens
        return int(tokens.size)


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    texts = iter(texts)
    while batch := list(islice(texts, _AT_ONCE)):
        yield batch


class _Progress:
    """One line on stderr, if that is a terminal, renewed every second."""

    def __init__(self, before: int, expected: int) -> None:
        self._before, self._expected = before, expected
        self._began = self._shown = time.monotonic()

    def show(self, done: int, tokens: int) -> None:
        now = time.monotonic()
        if not sys.stderr.isatty() or now - self._shown < 1:
            return
        self._shown = now
        rate = (done - self._before) / (now - self._began)
        left = max(self._expected - done, 0) / rate / 60
        line = f"{done:,} of about {self._expected:,} documents, {tokens:,} tokens, {rate:,.0f}/s, {left:,.0f} min left"
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        if sys.stderr.isatty() and self._shown > self._began:
            print(file=sys.stderr)
