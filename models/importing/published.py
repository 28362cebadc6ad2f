"""Define `Published`: a published model that has been opened and can be loaded into a Decoder."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from fewbits.models.importing.layouts import Layout, Tensors, load_state
from fewbits.models.networks.decoder import DecoderConfig


@dataclass(frozen=True)
class Published:
    """A published model that has been opened: its configuration as a DecoderConfig, and the files with its weights.

    files: the files that were read, such as config.json and the weights.
    tokenizer: the file that contains the tokenizer, a tokenizer.json or a GGUF file; None if there is none.
    notes: sentences for the user on how the loaded model differs from the published one.
    """

    config: DecoderConfig
    layout: Layout
    tensors: Tensors
    files: tuple[Path, ...]
    tokenizer: Path | None
    notes: tuple[str, ...] = ()

    def state(self) -> dict[str, Tensor]:
        """Read the weights and return them as a state_dict of the decoder, in FP32."""
        return load_state(self.config, self.layout, self.tensors)

    def digests(self) -> dict[str, str]:
        """Return the SHA-256 of each file of the model, including the tokenizer's, by file name without folder."""
        files = [*self.files, *([self.tokenizer] if self.tokenizer else [])]
        return {path.name: _sha256(path) for path in dict.fromkeys(files)}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
