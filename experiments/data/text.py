"""Make and cache the built-in text corpora `python` and `torch`, as bytes or as subword tokens.

The name of a folder of bytes identifies the source files; the name of a folder of subword tokens identifies these bytes
and the tokenizer. Both names also depend on the sources of the modules beside this one, so that the corpora are made
again if this code changes.
"""

import hashlib
from functools import partial
from pathlib import Path

from fewbits.experiments.data import python_sources
from fewbits.experiments.data.folder import TokenFolder, open_folder
from fewbits.experiments.data.once import opened_or_made
from fewbits.experiments.data.tokenizing import (
    Bytes,
    bpe_size,
    ready_tokenizer,
    trained_tokenizer,
    write_text,
)

SOURCES = {sources.name: sources for sources in (python_sources.PYTHON, python_sources.TORCH)}


def text_folder(kind: str, size: int | None, tokenizer: str, cache: Path) -> TokenFolder:
    """Return the tokens of the corpus `kind` (python or torch); make them in the folder `cache` if they are not there.

    size: bytes of text in train; None: the corpus's default. tokenizer: a name such as `bytes` or `bpe:4096`.
    """
    sources = SOURCES[kind]
    size = sources.size if size is None else size
    vocab = bpe_size(tokenizer)
    ready = None if vocab else ready_tokenizer(tokenizer)  # reports an invalid name before any work

    made_from = [python_sources.stamp(sources), str(size)]
    prose = None
    if sources is not python_sources.PYTHON:  # torch has the out-of-domain text of the corpus `python`
        python = text_folder("python", None, "bytes", cache)
        prose = python.texts("ood")
        made_from.append(python.surveys["ood"].sha256)
    in_bytes = opened_or_made(
        cache / f"{kind}-{content_key(*made_from)}", open_folder, partial(_write_bytes, sources, size, prose)
    )
    if tokenizer == "bytes":
        return in_bytes
    content = [survey.sha256 for _, survey in sorted(in_bytes.surveys.items())]
    identity = ready.sha256 if ready else tokenizer
    return opened_or_made(
        cache / f"{kind}-{content_key(*content, str(identity))}",
        open_folder,
        partial(_write_subwords, in_bytes, tokenizer),
    )


def _write_bytes(sources: python_sources.Sources, size: int, prose: list[str] | None, folder: Path) -> None:
    texts = python_sources.collect(sources, size, prose)
    write_text(folder, texts.documents, Bytes(), texts.source)


def _write_subwords(in_bytes: TokenFolder, spelling: str, folder: Path) -> None:
    documents = {split: in_bytes.texts(split) for split in in_bytes.splits}
    vocab = bpe_size(spelling)
    tokenizer = trained_tokenizer(vocab, documents["train"]) if vocab else ready_tokenizer(spelling)
    write_text(folder, documents, tokenizer, dict(in_bytes.meta.source))


def content_key(*made_from: str) -> str:
    """Return the hash in the name of a folder of tokens.

    It is a hash of `made_from`, the inputs that determine the tokens, and of the modules' sources in this directory.
    """
    code = [path.read_text("utf-8") for path in sorted(Path(__file__).parent.glob("*.py"))]
    return hashlib.sha256("\0".join([*made_from, *code]).encode()).hexdigest()[:16]
