"""What a trial trains on, as a frozen value of plain fields, which a config tree can fill."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DataConfig:
    """A kind of data and its settings; each kind takes only some of them (`fewbits.experiments.data.load.KINDS`).

    kind: python, torch, synthetic, bin, openwebtext, c4 or c4-nemotron.
    tokenizer: of text that is here: `bytes`; `bpe:N`, byte-level BPE with N tokens trained on the training split;
        `file:PATH` of a tokenizer.json; or `hub:NAME`, the Hugging Face Hub's. Folders of tokens carry their own.
    path: the folder of tokens of bin and of the collections openwebtext, c4 and c4-nemotron (None, for collections:
        where `fewbits data prepare` puts it).
    size: of the training split of python and torch in bytes of text, of synthetic in tokens (None: the kind's own).
    seed: of the synthetic source, so that another seed is another language. The order of training is not of the data:
        that seed is an argument of `Corpus.batch`.
    repeat: how many times a sweep's trial may read the training split; one that reads more is refused when it is
        planned. Every kind takes it, and it changes no number.
    """

    kind: str = "python"
    tokenizer: str = "bytes"
    path: str | None = None
    size: int | None = None
    seed: int = 0
    repeat: int = 4
