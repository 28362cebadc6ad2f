"""Figure A: every arm's effect beside the noise, the margins and the paper's number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fewbits.analysis.arms import AGAIN, BAD, BASELINE, compared
from fewbits.analysis.effects import LOSS, NOISE, Effect, forest
from fewbits.analysis.engine.frames import Results
from fewbits.analysis.engine.paper import paper
from fewbits.analysis.nvfp4.arms import part
from fewbits.analysis.nvfp4.looks import LABELS
from fewbits.analysis.registry import figure
from fewbits.analysis.results import NotRun, Picture

SAID = {"nvfp4": "nvfp4-8b", "mxfp4": "mxfp4-8b"}  # the paper's numbers, of its 8B hybrid's training loss


@dataclass(frozen=True)
class Part:
    """Arms of one sweep that no part before it has."""

    sweep: str
    arms: tuple[str, ...]
    before: str = ""  # in front of their labels
    baseline: str = BASELINE


PARTS = (
    Part(
        "recipe",
        (
            AGAIN, "bf16-fp32-wgrad", "fp8", "nvfp4", "no-sr", "no-rht", "no-2d", "with-2d", "kept", "nvfp4-base",
            "mxfp4", "mxfp4-ocp", BAD,
        ),
    ),
    Part("rounding", ("sr-gradients", "sr-backward", "sr-activations", "sr-weights"), "stochastic: "),
    Part("hadamard", ("rht-wgrad", "rht-fprop", "rht-dgrad", "rht-2", "rht-4", "rht-128"), "Hadamard: "),
    Part("hadamard", ("signs-none", "signs-each"), "Hadamard: "),
    Part("consistency", ("weights-different", "weights-same", "weights-squares")),
    Part("consistency", ("activations-different", "activations-same")),
    Part(
        "switch",
        (
            "nvfp4-long", "long-no-sr", "long-no-rht", "long-no-2d",
            "switch-both", "switch-forward", "switch-backward", "switch-late", "switch-after",
        ),
        "switch: ",
    ),
    Part("outlook", ("four-over-six", "ue5m3", "ms-eden", "mxfp4-deterministic")),
    Part("layers", ("nvfp4-base", "last-1", "last-2", "last-4", "first-4", "first-2-last-2", BAD), "20 blocks: "),
    Part("hybrid", ("fp8", "nvfp4", "mxfp4", BAD), "hybrid: "),
    Part("scratch", ("nvfp4-whole", "base-whole", "mxfp4-1.00"), "from nothing: ", "bf16-whole"),
)  # fmt: skip
OWN_LABELS = {
    AGAIN: NOISE,
    "nvfp4-long": "none",
    "switch-after": "evaluation alone",
    "long-no-sr": "none, no stochastic",
    "long-no-rht": "none, no Hadamard",
    "long-no-2d": "none, no 2-D weights",
    "mxfp4-1.00": "MXFP4",
}  # in place of LABELS


@figure("nvfp4", "Figure A", "Every arm's effect beside the noise")
def effects(results: Results) -> Picture:
    rows = measured(results)
    if not rows:
        return NotRun(results.scale_name)
    notes = ("The paper's numbers are of its 8B hybrid's training loss, against BF16.",)
    fine, middle, coarse = (paper("nvfp4").margin(claim) for claim in ("N4", "N9", "N1"))
    widest = max([middle, *usual(rows)])
    return forest(rows, [margin for margin in (fine, middle, coarse) if margin <= widest], notes, widest=widest)


def usual(rows: Sequence[Effect]) -> list[float]:
    """How far arms go that go no further than four times what half of them do: controls go further, by far."""
    sizes = [abs(row.mean) for row in rows if row.mean is not None]
    half = float(np.median(sizes)) if sizes else 0.0
    ends = [row.interval for row in rows if row.mean is not None and abs(row.mean) <= 4 * half]
    within = [max(-one.low, one.high) for one in ends if one is not None and max(-one.low, one.high) <= 8 * half]
    return [size for size in sizes if size <= 4 * half] + within


def measured(results: Results) -> list[Effect]:
    """Of the arms that are run, each beside the BF16 that it compares with, as verdicts have it."""
    found = []
    for of in PARTS:
        for arm in of.arms:
            pairs = compared(part(results, of.sweep), LOSS, arm, of.baseline)
            if not isinstance(pairs, NotRun):
                label = of.before + OWN_LABELS.get(arm, LABELS.get(arm, arm))
                said = paper("nvfp4").numbers[SAID[arm]].value if arm in SAID else None
                found.append(Effect(label, pairs, said, f"{of.sweep} {of.arms[0]}"))
    return found
