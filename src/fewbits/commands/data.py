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
from fewbits.common.wording import clock
from fewbits.experiments.data.folder import read_meta
from fewbits.experiments.data.once import default_cache
from fewbits.experiments.data.text import text_folder
from fewbits.experiments.data.tokenizing import Tokenizer, bpe_size, ready_tokenizer
from fewbits.experiments.data.web_text import (
    COLLECTIONS,
    NOTE,
    SPLITS,
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
        valid = "bytes, file:PATH, package:smollm2, hub:NAME"
        raise ValueError(f"data: --tokenizer {spelling} needs training, which this command cannot do: use {valid}")
    if source and options.revision:
        raise ValueError(f"data: --revision {options.revision} with --source: local files have no revision")
    tokenizer, origin = ready_tokenizer(spelling), str(source or collection.repository)
    identity = tokenizer.sha256 or tokenizer.spelling
    request = Request(options.collection, origin, identity, options.documents, options.validation)
    try:
        with _exclusive(out):
            if not source:
                wanted = options.revision or _earlier_revision(out) or collection.revision
                request = replace(request, revision=resolved_revision(collection, wanted))
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
    about = "Turn web text into a folder of tokens to train on. Needs the packages datasets and tokenizers."
    example = "example: fewbits data openwebtext --source openwebtext/ --tokenizer file:gpt2/tokenizer.json"
    parser = CommandParser("fewbits data", about, example)
    parser.add_argument("collection", choices=COLLECTIONS, help="the collection of text, with its own tokenizer")
    source = "a file or folder of .json, .jsonl, .parquet (documents in a field text) or .txt, also with .gz"
    parser.add_argument("--source", type=Path, metavar="PATH", help=f"{source} (default: the Hugging Face Hub)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=f"default: {default_cache()}/COLLECTION")
    defaults = "; ".join(f"{item.tokenizer} for {name}" for name, item in COLLECTIONS.items())
    spellings = "bytes, file:PATH of a tokenizer.json or GGUF file, package:smollm2, or hub:NAME"
    parser.add_argument("--tokenizer", metavar="TOKENIZER", help=f"{spellings} (default: {defaults})")
    revisions = "; ".join(f"{item.revision[:12]} for {name}" for name, item in COLLECTIONS.items() if item.revision)
    commit = f"commit, branch or tag of the collection on the Hub (default: {revisions}; else the newest at first)"
    parser.add_argument("--revision", metavar="COMMIT", help=commit)
    parser.add_argument("--documents", type=positive, metavar="N", help="stop after N documents (default: all)")
    share = "share of documents in the validation split (default: %(default)s)"
    parser.add_argument("--validation", type=_fraction, default=VALIDATION, metavar="SHARE", help=share)
    return parser.parse_args(argv)


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a number between 0 and 1 is expected")
    return value


def _earlier_revision(out: Path) -> str | None:
    """Return the collection's commit that an earlier call recorded in the folder `out` or `out`.partial, or None."""
    begun = checked_json(out.with_name(f"{out.name}.partial") / NOTE) or {}
    made = read_meta(out).source.get("request") if out.is_dir() else begun.get("request")
    return made.get("revision") if isinstance(made, dict) else None


def _is_done(out: Path, request: Request) -> bool:
    if not out.exists():
        return False
    made = read_meta(out).source.get("request") if out.is_dir() else None
    if not isinstance(made, dict) or asdict(request) | made != asdict(request):
        raise ValueError(f"data: {out} was prepared with other options ({made}): remove it or choose another --out")
    return True


@contextmanager
def _exclusive(out: Path) -> Iterator[None]:
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.with_name(f"{out.name}.lock").open("w") as lock, ExitStack() as held:
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
    began, before = time.monotonic(), unfinished.documents
    try:
        while batch := list(islice(texts, _AT_ONCE)):
            unfinished.add(batch, stream.position())
            done, tokens = unfinished.documents, sum(unfinished.tokens.values())
            time_left = clock((time.monotonic() - began) / (done - before) * max(expected - done, 0))
            terminal.show(f"{done:,} of about {expected:,} documents, {tokens:,} tokens, {time_left} left")
    finally:
        terminal.clear()
    empty = [split for split in SPLITS if not unfinished.tokens[split]]
    if empty:
        shutil.rmtree(unfinished.folder, ignore_errors=True)
        raise ValueError(
            f"data: none of {unfinished.documents} documents is in split {' and '.join(empty)}: set a --validation "
            f"other than {request.validation}, or prepare more documents; data=text data.path=FILE needs no preparation"
        )
    code = text_folder("python", None, "bytes", default_cache())
    unfinished.finish(out, code.texts("validation"), {"ood": dict(code.meta.source)})
