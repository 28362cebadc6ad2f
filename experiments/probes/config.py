"""Define the settings of a probe trial, which measures a recipe at a checkpoint instead of training."""

from __future__ import annotations

from dataclasses import dataclass, field

from fewbits.common.from_dict import one_of

SPLITS = ("train", "validation", "ood")
PARTS = ("gemms", "slots", "blocks")
REFERENCES = ("bf16", "fp16", "fp32")


@dataclass(frozen=True)
class ProbeConfig:
    """The settings of a probe trial.

    A probe trial starts from the checkpoint that `branch` names and does not change it. It reads `training.steps`
    batches of `training.micro_batch` sequences.
    """

    # How often each batch is measured with other random numbers, if the recipe uses any; 0: the trial is no probe, but
    # trains.
    seeds: int = 0
    # validation, ood: held-out text, of which each seed reads other documents (batches.py); train: the batches that
    # the parent would read next.
    split: str = "validation"
    # Also measure the recipe with only one GEMM, slot or block quantized, and with all but this one (variants.py).
    parts: tuple[str, ...] = ()
    # Also measure how much one optimizer update decreases the loss: with the quantized and with the exact gradient.
    update: bool = True
    # The dtype in which the unquantized model computes: bf16, fp16 or fp32; None: training.dtype.
    reference: str | None = field(default=None, metadata={"neutral": None})
    # Also measure the error of sums with these accumulators, such as hopper-fp8 (sum_errors.py).
    accumulators: tuple[str, ...] = field(default=(), metadata={"neutral": ()})

    def __post_init__(self) -> None:
        if self.seeds < 0:
            raise ValueError(f"probe.seeds {self.seeds}: 0 (no probe) or more is expected")
        one_of("probe.split", self.split, SPLITS)
        if self.reference is not None:
            one_of("probe.reference", self.reference, REFERENCES)
        for part in self.parts:
            one_of("probe.parts", part, PARTS)
