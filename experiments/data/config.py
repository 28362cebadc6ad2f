"""Declare the settings of a trial's data as a frozen dataclass, whose fields config files can set."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DataConfig:
    """A kind of data and its settings; each kind takes only some of the settings (`data.load.KINDS` lists them).

    kind: python, torch, synthetic, text, bin, openwebtext, c4 or c4-nemotron.
    tokenizer: for python, torch and text: `bytes`; `bpe:N`, byte-level BPE with N tokens, trained on the training
        split; `file:PATH` of a tokenizer.json or a GGUF file; `package:smollm2`, the tokenizer of a model in a Python
        package; or `hub:NAME` on the Hugging Face Hub. For the other kinds, the tokens exist already.
    path: for text, the file; for bin and the collections openwebtext, c4 and c4-nemotron, the folder of tokens (None:
        for a collection, the folder that `fewbits data` writes by default).
    size: the size of the training split, in bytes of text for python and torch, in tokens for synthetic (None: the
        kind's default).
    seed: for synthetic, the seed of the source: another seed gives another language. It does not affect the order in
        which training reads the data, which depends on the trial's seed.
    repeat: how many times a trial of a sweep may read the training split; planning refuses a trial that reads it more
        often. Every kind takes this setting, and it does not affect results.
    """

    kind: str = "python"
    tokenizer: str = "bytes"
    path: str | None = None
    size: int | None = None
    seed: int = 0
    repeat: int = 4
