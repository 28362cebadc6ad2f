"""Turn web text into a folder of tokens that trials and nanoGPT can train on (`fewbits data`).

The format is nanoGPT's: a file for each split, with each document as tokens followed by a separator, in uint16 (uint32
for large vocabularies). Whether a document is in the validation split depends only on the SHA-256 of its text, so two
copies of a page are always in the same split. The out-of-domain text is the validation text of the corpus `python`.

The command writes to FOLDER.partial and renames it to FOLDER at the end. After every batch of documents it records its
progress and its position in the collection of web text, such as openwebtext. After an interruption the same command
resumes from this position, does not read finished input files again, and removes tokens that were written after the
last record. The first call chooses a commit of the collection on the Hugging Face Hub; later calls use the same commit,
which the finished folder's meta.json records.
"""

import argparse
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path

from fewbits.common import terminal
from fewbits.common.arguments import CommandParser, positive
from fewbits.common.atomic import checked_json
from fewbits.common.process import locked
from fewbits.experiments.data.folder import read_meta
from fewbits.experiments.data.once import default_cache
from fewbits.experiments.data.text import text_folder
from fewbits.experiments.data.tokenizing import Tokenizer, bpe_size, ready_tokenizer
from fewbits.experiments.data.web_text import (
    COLLECTIONS,
    NOTE,
    SPLITS,
    Collection,
    Documents,
    Request,
    Unfinished,
    resolved_revision,
)

VALIDATION = 0.0005  # share of documents in the validation split, as in nanoGPT
_AT_ONCE = 1000  # documents between progress records


def main(argv: Sequence[str]) -> int:
    options = _options(argv)
    collection = COLLECTIONS[options.collection]
    out: Path = (options.out or default_cache() / options.collection).expanduser().absolute()
    source: Path | None = options.source and options.source.expanduser().absolute()
    spelling = options.tokenizer or collection.tokenizer
    if bpe_size(spelling):
        raise ValueError(
            f"data: --tokenizer {spelling} needs training, which this command cannot do: valid tokenizers are "
            "bytes, file:PATH, package:smollm2, hub:NAME"
        )
    if source and options.revision:
        raise ValueError(
            f"data: --revision {options.revision} with --source: local files have no revision; use only one of "
            "the two options"
        )
    tokenizer = ready_tokenizer(spelling)
    request = Request(
        options.collection,
        str(source or collection.repository),
        tokenizer.sha256 or tokenizer.spelling,
        options.documents,
        options.validation,
    )
    try:
        with _exclusive(out):
            if not source:
                request = replace(request, revision=_revision(out, collection, options.revision))
            if _is_done(out, request):
                print(f"{out} is already prepared")
                return 0
            stream = Documents(collection, source, request.revision)
            _prepare(out, request, tokenizer, stream, options.documents or collection.documents)
    except OSError as error:
        raise ValueError(f"data: {out}: {error}; run the same command again to resume") from error
    path_override = f" data.path={out}" if options.out else ""
    print(f"{out} is prepared; to train on it: fewbits train data={options.collection}{path_override}")
    return 0


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(
        "fewbits data",
        about="Turn web text into a folder of tokens to train on. Needs the packages datasets and tokenizers.",
        examples="example: fewbits data openwebtext --source openwebtext/ --tokenizer file:gpt2/tokenizer.json",
    )
    parser.add_argument(
        "collection", choices=COLLECTIONS, help="the collection of text; it also sets the default tokenizer"
    )
    parser.add_argument(
        "--source",
        type=Path,
        metavar="PATH",
        help="a file or folder of .json, .jsonl, .parquet (documents in a field text) or .txt files, optionally with "
        ".gz (default: the collection on the Hugging Face Hub)",
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=f"default: {default_cache()}/COLLECTION")
    parser.add_argument(
        "--tokenizer",
        metavar="TOKENIZER",
        help="bytes, file:PATH of a tokenizer.json or GGUF file, package:smollm2, or hub:NAME (default: "
        + "; ".join(f"{item.tokenizer} for {name}" for name, item in COLLECTIONS.items())
        + ")",
    )
    parser.add_argument(
        "--revision",
        metavar="COMMIT",
        help="commit, branch or tag of the collection on the Hub (default: "
        + "; ".join(f"{item.revision[:12]} for {name}" for name, item in COLLECTIONS.items() if item.revision)
        + "; else the newest at the first call; later calls keep it)",
    )
    parser.add_argument("--documents", type=positive, metavar="N", help="stop after N documents (default: all)")
    parser.add_argument(
        "--validation",
        type=_fraction,
        default=VALIDATION,
        metavar="SHARE",
        help=f"share of documents in the validation split (default: {VALIDATION})",
    )
    return parser.parse_args(argv)


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a number between 0 and 1 is expected")
    return value


def _revision(out: Path, collection: Collection, requested: str | None) -> str:
    """Return the collection's commit to read: that of `requested`, else that of an earlier call, else the default one.

    requested: a commit, branch or tag, or None. out: the folder into which earlier calls have written, if there were
        any.
    """
    return resolved_revision(collection, requested or _earlier_revision(out) or collection.revision)


def _earlier_revision(out: Path) -> str | None:
    """Return the collection's commit that earlier calls have recorded; None if none is recorded.

    It is read from `out`, the finished folder, if this exists, else from the folder `out`.partial.
    """
    begun = checked_json(out.with_name(f"{out.name}.partial") / NOTE) or {}
    made = read_meta(out).source.get("request") if out.is_dir() else begun.get("request")
    return made.get("revision") if isinstance(made, dict) else None


def _is_done(out: Path, request: Request) -> bool:
    if not out.exists():
        return False
    made = read_meta(out).source.get("request") if out.is_dir() else None
    if not isinstance(made, dict) or asdict(request) | made != asdict(request):
        raise ValueError(
            f"data: {out} was prepared with other options ({made}): remove this folder or choose another --out"
        )
    return True


@contextmanager
def _exclusive(out: Path) -> Iterator[None]:
    out.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        lock = held.enter_context(open(out.with_name(f"{out.name}.lock"), "w"))
        try:
            held.enter_context(locked(lock, f"two processes could prepare {out} at once: start only one", wait=False))
        except BlockingIOError:
            raise ValueError(f"data: another process is preparing {out}: wait until it ends") from None
        yield


def _prepare(out: Path, request: Request, tokenizer: Tokenizer, stream: Documents, expected: int) -> None:
    unfinished = Unfinished.open(out.with_name(f"{out.name}.partial"), request, tokenizer)
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
            f"data: none of {unfinished.documents} documents is in split {' and '.join(empty)}: set a "
            f"--validation other than {request.validation}, or prepare more documents. To train on a single text file "
            "without preparation, use fewbits train data=text data.path=FILE"
        )
    code = text_folder("python", None, "bytes", default_cache())
    unfinished.finish(out, code.texts("validation"), {"ood": dict(code.meta.source)})


class _Progress:
    """A progress line on stderr, updated every second; nothing is shown if stderr is no terminal.

    before: the number of documents that earlier calls have prepared.
    expected: the approximate number of documents at the end, including those.
    """

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
