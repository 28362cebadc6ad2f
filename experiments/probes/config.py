"""Declare the settings of a probe trial, which measures a recipe at a checkpoint instead of training."""

from __future__ import annotations

from dataclasses import dataclass

from fewbits.common.from_dict import one_of

SPLITS = ("train", "validation", "ood")
PARTS = ("gemms", "slots", "blocks")


@dataclass(frozen=True)
class ProbeConfig:
    """The settings of a probe trial. Its batches are counted by `training.steps`, and have `training.micro_batch` rows.

    A probe trial starts from the checkpoint of `branch` and changes no weights.
    """

    seeds: int = 0  # draws of noise for each batch, if the recipe draws any; 0: the trial trains and is no probe
    # validation and ood: windows of documents that the other seeds do not read; train: the parent's next batches.
    split: str = "validation"
    parts: tuple[str, ...] = ()  # also quantize each GEMM, slot or block alone, and all but that one
    update: bool = True  # measure the decrease of the loss after one update with each gradient

    def __post_init__(self) -> None:
        if self.seeds < 0:
            raise ValueError(f"probe.seeds {self.seeds}: 0 (no probe) or more is expected")
        one_of("probe.split", self.split, SPLITS)
        for part in self.parts:
            one_of("probe.parts", part, PARTS)
