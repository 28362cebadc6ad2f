"""Declare what a trial trains on, as a frozen dataclass of plain fields, which config files can set."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DataConfig:
    """A kind of data and its settings; each kind takes only some of them (`fewbits.experiments.data.load.KINDS`).

    kind: python, torch, synthetic, text, bin, openwebtext, c4 or c4-nemotron.
    tokenizer: for the kinds that hold text: `bytes`; `bpe:N`, byte-level BPE with N tokens trained on the training
        split; `file:PATH` of a tokenizer.json or a GGUF file; `package:smollm2`, of a model in a Python package; or
        `hub:NAME` on the Hugging Face Hub. A folder of tokens records its own tokenizer.
    path: the file, for text; the folder of tokens, for bin and the collections openwebtext, c4 and c4-nemotron (None:
        for collections, the folder that `fewbits data prepare` writes).
    size: the size of the training split, in bytes of text for python and torch, in tokens for synthetic (None: the
        kind's default).
    seed: the seed of the synthetic source; another seed gives another language. The order in which training reads the
        data does not depend on it; its seed is an argument of `Corpus.batch`.
    repeat: how many times a sweep's trial may read the training split; planning refuses a trial that reads more. Every
        kind takes it, and it does not affect results.
    """

    kind: str = "python"
    tokenizer: str = "bytes"
    path: str | None = None
    size: int | None = None
    seed: int = 0
    repeat: int = 4
