"""Findings of our own that runs decide: how far noise goes, what the baseline is, and what came after the paper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from fewbits.analysis.arms import AGAIN, BASELINE, decided
from fewbits.analysis.engine.data import Data
from fewbits.analysis.engine.frames import Results
from fewbits.analysis.engine.paper import Claim, Margin
from fewbits.analysis.noise import VALIDATION
from fewbits.analysis.nvfp4.claims import beside
from fewbits.analysis.registry import claim
from fewbits.analysis.verdicts import Verdict, equivalent, lower, no_worse, noted

FINEST = Margin(0.0005, True, "the finest margin of the paper's claims, as in N4")
TENTH = Margin(0.0015, True, "a tenth of what the recipe costs")
KINDS: dict[str, Callable[[Data, float], Verdict]] = {
    "equal": equivalent,
    "no worse": no_worse,
    "lower": partial(lower, absence_contradicts=True),
}


@dataclass(frozen=True)
class Finding:
    """An arm beside another one of a sweep, by their validation losses."""

    id: str
    statement: str
    kind: str
    sweep: str
    arm: str
    baseline: str
    margin: Margin
    notes: tuple[str, ...] = ()

    @property
    def declared(self) -> Claim:
        said = (self.id, self.statement, "", self.kind, VALIDATION, (self.arm,), self.baseline, "bad-arm")
        return Claim(*said, self.margin)

    def judge(self, results: Results) -> Verdict:
        found = beside(results, self.sweep, self.arm, self.baseline)
        return noted(decided(found, lambda data: KINDS[self.kind](data, self.margin.value)), *self.notes)


FINDINGS = (
    Finding(
        "S3",
        "The same mathematics, its sums in another order, comes to the same loss: BF16's noise is below all margins.",
        "equal",
        "recipe",
        AGAIN,
        BASELINE,
        FINEST,
    ),
    Finding(
        "S4",
        "MXFP4 does as well with a Hadamard transform without random signs and nearest rounding as with chance in both "
        "(arXiv 2605.09825; not the paper's).",
        "no worse",
        "outlook",
        "mxfp4-deterministic",
        "mxfp4",
        TENTH,
    ),
    Finding(
        "S5",
        "Four Over Six, which chooses each block's greatest value among 4 and 6, comes to a lower loss than NVFP4 "
        "(arXiv 2512.02010; not the paper's).",
        "lower",
        "outlook",
        "four-over-six",
        "nvfp4",
        FINEST,
        ("gradients are scaled so too, without the room above 6 that its authors leave their rounding",),
    ),
    Finding(
        "S6",
        "BF16 with weight gradients in FP32, as the quantized recipes have them, comes to the loss of plain BF16.",
        "equal",
        "recipe",
        "bf16-fp32-wgrad",
        BASELINE,
        TENTH,
    ),
)

for _one in FINDINGS:
    claim("nvfp4", _one.id, _one.declared)(_one.judge)
