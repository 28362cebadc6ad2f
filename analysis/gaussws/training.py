"""Figures 1, 3, 4 and F.1: how arms train, as they are and beside BF16.

The paper's curves are in its plots alone. Its average and maximum losses are over ranks; ours over the micro-batches of
a step. Losses of sampled arms are with their noise in training and without it in validation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from fewbits.analysis.arms import BASELINE
from fewbits.analysis.curves import LOSS, VALIDATION, Metric, Row, Shown, training
from fewbits.analysis.engine.frames import Results
from fewbits.analysis.gaussws.arms import ARMS, MINI, MINI_DIFFQ, MINI_OURS, PARTS, TRUNKS, chosen
from fewbits.analysis.registry import figure
from fewbits.analysis.results import FigureResult, NotRun, Picture

MAXIMUM = Metric("loss_max", "Maximum loss", "nats", every_step=True, of_micro_batches=True)
BRANCHES = (
    "The paper trains from nothing; where a trunk is shown, ours branch from it, and the rate named is the branch's."
)


@dataclass(frozen=True)
class Group:
    """Arms of one sweep, the baseline first; a row of panels for each metric."""

    sweep: str
    arms: tuple[str, ...]
    name: str
    metrics: tuple[Metric, ...]

    @property
    def shown(self) -> Shown:
        return Shown(tuple(ARMS[arm] for arm in self.arms), ARMS[self.arms[0]], TRUNKS, noise=self.arms[0] == BASELINE)


@dataclass(frozen=True)
class Curves:
    id: str
    groups: tuple[Group, ...]
    notes: tuple[str, ...] = ()


WAYS, LOW, MINIS = ("bf16", "gaussws", "diffq"), ("bf16-low", "gaussws-low", "diffq-low"), (MINI, MINI_OURS, MINI_DIFFQ)
FIGURES = (
    Curves(
        "Figure 1",
        (Group("gpt2", WAYS, "GPT-2", (LOSS, VALIDATION)), Group("gpt2", LOW, "low rate", (LOSS, VALIDATION))),
        ("The paper's left half, a schematic, is Figure C here, of the kernels' own noise.",),
    ),
    Curves(
        "Figure 3",
        (
            Group("parts", ("bf16-low", "all", *PARTS), "AdamW, low rate", (LOSS, VALIDATION)),
            Group("gpt2-mini", MINIS, "Adam-mini", (LOSS, VALIDATION)),
        ),
        ("Parts have a target of 0 bits, as in the paper; GaussWS without a part's name is on all of them.",),
    ),
    Curves(
        "Figure 4",
        (
            Group("llama2", WAYS, "AdamW", (LOSS, MAXIMUM, VALIDATION)),
            Group("llama2-mini", MINIS, "Adam-mini", (LOSS, MAXIMUM)),
            Group("large", WAYS, "1B", (LOSS, MAXIMUM)),
            Group("large", MINIS, "1B, Adam-mini", (LOSS, MAXIMUM)),
        ),
    ),
    Curves(
        "Figure F.1",
        (
            Group("large", ("bf16", "gaussws", "gaussws-8-6", "diffq"), "1B", (LOSS, MAXIMUM)),
            Group("llama2", ("bf16", "gaussws", "gaussws-8-6", "diffq"), "small", (LOSS, MAXIMUM, VALIDATION)),
        ),
        ("The paper's is of 1B parameters.",),
    ),
)


def curves(of: Curves, results: Results) -> Picture:
    """Of what is run; that some is not is said."""
    rows, missing = [], []
    for group in of.groups:
        part = chosen(results, group.sweep)
        if isinstance(part, NotRun):
            missing.append(f"{group.name} ({group.sweep})")
        else:
            rows += [Row(part, group.shown, metric, name=group.name) for metric in group.metrics]
    if not rows:
        return NotRun(results.scale_name)
    picture = training(rows)
    return (
        replace(picture, notes=(*picture.notes, *said(of, missing))) if isinstance(picture, FigureResult) else picture
    )


def said(of: Curves, missing: Sequence[str]) -> tuple[str, ...]:
    left = (f"Not run at this scale: {', '.join(missing)}.",) if missing else ()
    return (*of.notes, *left, BRANCHES)


for _one in FIGURES:
    figure("gaussws", _one.id)(partial(curves, _one))
