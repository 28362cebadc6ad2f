"""What a trial trains on, as a frozen value with plain fields: a structured config as it stands."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DataConfig:
    """A kind of data and its settings; each kind takes only some of them (`fewbits.experiments.data.load.KINDS`).

    kind: python, torch, synthetic, bin, openwebtext or c4.
    tokenizer: of text that is here: `bytes`; `bpe:N`, byte-level BPE with N tokens trained on the training split; or
        `file:PATH` of a tokenizer.json. Folders of tokens carry their own.
    path: the folder of tokens of bin, openwebtext and c4 (None, for the latter two: where `fewbits data prepare` puts
        it).
    size: of the training split of python and torch in bytes of text, of synthetic in tokens (None: the kind's own).
    seed: of the synthetic source, so that another seed is another language. The order of training is not of the data:
        that seed is an argument of `Corpus.batch`.
    """

    kind: str = "python"
    tokenizer: str = "bytes"
    path: str | None = None
    size: int | None = None
    seed: int = 0
