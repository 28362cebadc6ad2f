"""`fewbits data prepare`: web text to a folder of tokens that the kinds openwebtext, c4 and bin (and nanoGPT) read.

nanoGPT's procedure: every document as tokens, a separator after each, all in one file of uint16 (uint32 for large
vocabularies). Which documents are validation is decided by their own SHA-256, so it depends on neither order nor
number, and a page that is there twice stays on one side. Out-of-domain text is the held-out code of the corpus python.

Work goes to FOLDER.partial, which becomes FOLDER when all is done. After every batch of documents the partial folder
notes how far it is and where in the collection: after an interruption the same command goes on from there, reads no
file again that it had read, and cuts off what is beyond the note. The commit of the collection on the Hub is fixed by
the first call; meta.json of the finished folder records it.
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path

from fewbits.common import terminal
from fewbits.common.arguments import CommandParser
from fewbits.common.locks import locked
from fewbits.experiments.data.folder import read_meta
from fewbits.experiments.data.once import default_cache
from fewbits.experiments.data.text import text_folder
from fewbits.experiments.data.tokenizing import Tokenizer, bpe_size, ready_tokenizer
from fewbits.experiments.data.unfinished import NOTE, SPLITS, Request, Unfinished
from fewbits.experiments.data.web import COLLECTIONS, Collection, Documents, resolved_revision

VALIDATION = 0.0005  # nanoGPT's share
_AT_ONCE = 1000  # documents between notes


def main(argv: Sequence[str]) -> int:
    options = _options(argv)
    collection = COLLECTIONS[options.collection]
    out: Path = (options.out or default_cache() / options.collection).expanduser().absolute()
    source: Path | None = options.source and options.source.expanduser().absolute()
    spelling = options.tokenizer or collection.tokenizer
    if bpe_size(spelling):
        raise ValueError(
            f"data prepare: --tokenizer {spelling} would need training: valid are bytes, file:PATH, hub:NAME"
        )
    if source and options.revision:
        raise ValueError(f"data prepare: --revision {options.revision} with --source: files that lie here have none")
    tokenizer = ready_tokenizer(spelling)
    request = Request(
        options.collection,
        str(source or collection.repository),
        tokenizer.sha256 or tokenizer.spelling,
        options.documents,
        options.validation,
    )
    try:
        with _alone(out):
            if not source:
                request = replace(request, revision=_revision(out, collection, options.revision))
            if _is_done(out, request):
                print(f"{out} is prepared already")
                return 0
            stream = Documents(collection, source, request.revision)
            _prepare(out, request, tokenizer, stream, options.documents or collection.documents)
    except OSError as error:
        raise ValueError(f"data prepare: {out}: {error}; the same command goes on from where it was") from error
    elsewhere = f" data.path={out}" if options.out else ""
    print(f"{out} is prepared: fewbits train data={options.collection}{elsewhere}")
    return 0


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(
        "fewbits data prepare",
        about="Turn web text into a folder of tokens to train on. Needs the packages datasets and tokenizers.",
        examples="example: fewbits data prepare openwebtext --source openwebtext/ --tokenizer file:gpt2/tokenizer.json",
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
    parser.add_argument(
        "--revision",
        metavar="COMMIT",
        help="of the collection on the Hub, or a branch or tag (default: "
        + "; ".join(f"{item.revision[:12]} for {name}" for name, item in COLLECTIONS.items() if item.revision)
        + "; else the newest at the first call, which later calls keep)",
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


def _revision(out: Path, collection: Collection, asked: str | None) -> str:
    """Return the commit asked for, else the one that an earlier call began with, else the collection's own."""
    return resolved_revision(collection, asked or _begun_with(out) or collection.revision)


def _begun_with(out: Path) -> str | None:
    """Return the commit that the finished or the partial folder records."""
    note = out.with_name(f"{out.name}.partial") / NOTE
    if out.is_dir():
        made = read_meta(out).source.get("request")
    else:
        made = json.loads(note.read_text("utf-8"))["request"] if note.is_file() else None
    return made.get("revision") if isinstance(made, dict) else None


def _is_done(out: Path, request: Request) -> bool:
    if not out.exists():
        return False
    made = read_meta(out).source.get("request") if out.is_dir() else None
    if not isinstance(made, dict) or asdict(request) | made != asdict(request):
        raise ValueError(
            f"data prepare: {out} is there and holds something else ({made}): remove it or choose an --out"
        )
    return True


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    out.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        lock = held.enter_context(open(out.with_name(f"{out.name}.lock"), "w"))
        try:
            held.enter_context(locked(lock, f"nothing keeps two processes from preparing {out}: start one", wait=False))
        except BlockingIOError:
            raise ValueError(f"data prepare: another process is preparing {out}") from None
        yield


def _prepare(out: Path, request: Request, tokenizer: Tokenizer, stream: Documents, expected: int) -> None:
    unfinished = Unfinished.found(out.with_name(f"{out.name}.partial"), request, tokenizer)
    stream.resume(unfinished.position, unfinished.documents)
    left = None if request.limit is None else max(request.limit - unfinished.documents, 0)
    texts = islice(stream, left)
    progress = _Progress(unfinished.documents, expected)
    try:
        while batch := list(islice(texts, _AT_ONCE)):
            unfinished.add(batch, stream.position())
            progress.show(unfinished.documents, sum(unfinished.tokens.values()))
    finally:
        progress.end()
    empty = [split for split in SPLITS if not unfinished.tokens[split]]
    if empty:
        shutil.rmtree(unfinished.folder, ignore_errors=True)
        raise ValueError(
            f"data prepare: none of {unfinished.documents} documents fell to {' and '.join(empty)}: "
            f"with so few, choose another --validation than {request.validation}"
        )
    code = text_folder("python", None, "bytes", default_cache())
    unfinished.finish(out, code.texts("validation"), {"ood": dict(code.meta.source)})


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
        terminal.show(line)

    def end(self) -> None:
        if sys.stderr.isatty() and self._shown > self._began:
            print(file=sys.stderr)
