"""Write a folder of tokens, one batch of documents at a time, so that writing can continue after an interruption.

After every batch a progress record is written. On resuming, tokens that were written after the last record are removed.
The folder gets its final name when it is complete.
"""

import hashlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fewbits.common.atomic import checked_json, write_json
from fewbits.experiments.data.folder import FILES, smallest_dtype, write_meta
from fewbits.experiments.data.tokenizing import Tokenizer, joined, make_meta, text_size

NOTE = "progress.json"  # the progress record
SPLITS = ("train", "validation")
_COUNTS = ("documents", "tokens", "text_bytes")


@dataclass(frozen=True)
class Request:
    """The inputs of one `fewbits data`, which determine the tokens that it writes.

    collection: the collection's name, such as c4. origin: its repository on the Hub, or the path of local files.
    tokenizer: the tokenizer's SHA-256, or its name `bytes`. limit: the number of documents at most; None: all.
    validation: the share of documents in the validation split.
    revision: the commit of the collection on the Hub; None for local files.
    """

    collection: str
    origin: str
    tokenizer: str
    limit: int | None
    validation: float
    revision: str | None = None


def is_held_out(text: str, share: float) -> bool:
    """Tell whether a document is in the validation split: whether its text's hash, as a fraction, is below `share`.

    share: the share of documents in the validation split, 0 to 1.
    """
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2.0**64


class Unfinished:
    """A partial folder of tokens: .bin files that grow, and a record of how many tokens in them are valid."""

    def __init__(self, folder: Path, request: Request, tokenizer: Tokenizer) -> None:
        self.folder, self.request, self._tokenizer = folder, request, tokenizer
        self.documents = 0
        self.position: dict[str, Any] | None = None  # position in the collection after `documents` documents
        self.tokens = dict.fromkeys(SPLITS, 0)
        self.text_bytes = dict.fromkeys(SPLITS, 0)
        self._dtype = np.dtype(smallest_dtype(tokenizer.vocab)).newbyteorder("<")

    @staticmethod
    def open(folder: Path, request: Request, tokenizer: Tokenizer) -> "Unfinished":
        """Resume the partial folder `folder` that an earlier process began, or start a new one.

        tokenizer: encodes the documents; `request.tokenizer` only identifies it.
        Raise ValueError if the request of the earlier process was not equal to `request`.
        """
        unfinished = Unfinished(folder, request, tokenizer)
        if (note := checked_json(folder / NOTE)) is None:
            shutil.rmtree(folder, ignore_errors=True)
            return unfinished
        if asdict(request) | note["request"] != asdict(request):
            raise ValueError(
                f"data: {folder} was started with other options: remove this folder or choose another --out"
            )
        unfinished.documents, unfinished.tokens, unfinished.text_bytes = (note[name] for name in _COUNTS)
        unfinished.position = note.get("position")
        for split in SPLITS:
            os.truncate(folder / FILES[split], unfinished.tokens[split] * unfinished._dtype.itemsize)
        (folder / FILES["ood"]).unlink(missing_ok=True)
        return unfinished

    def add(self, batch: list[str], position: dict[str, Any]) -> None:
        """Append a batch of documents and record the progress.

        position: the position in the collection after these documents.
        """
        sides: dict[str, list[str]] = {split: [] for split in SPLITS}
        for text in batch:
            sides["validation" if is_held_out(text, self.request.validation) else "train"].append(text)
        for split, texts in sides.items():
            self.tokens[split] += self._append(split, texts)
            self.text_bytes[split] += text_size(texts)
        self.documents, self.position = self.documents + len(batch), position
        note = {"position": position} | {name: getattr(self, name) for name in _COUNTS}
        write_json(self.folder / NOTE, {**note, "request": asdict(self.request)})

    def finish(self, out: Path, ood: list[str], source: dict[str, object]) -> None:
        """Add the out-of-domain documents and meta.json, and rename the folder to its final name `out`.

        source: facts for the field `source` of meta.json, besides the request and the number of documents.
        """
        self._append("ood", ood)
        self._tokenizer.save(self.folder)
        sizes = {**self.text_bytes, "ood": text_size(ood)}
        known = {"request": asdict(self.request), "documents": self.documents, **source}
        write_meta(self.folder, make_meta(self._tokenizer, self._dtype.name, sizes, known))
        self.folder.rename(out)
        (out / NOTE).unlink()

    def _append(self, split: str, texts: Sequence[str]) -> int:
        tokens = joined(texts, self._tokenizer)
        self.folder.mkdir(exist_ok=True)
        with open(self.folder / FILES[split], "ab") as file:
            file.write(tokens.astype(self._dtype, copy=False).tobytes())
            file.flush()
            os.fsync(file.fileno())  # the tokens must be on disk before the record that counts them
        return int(tokens.size)
