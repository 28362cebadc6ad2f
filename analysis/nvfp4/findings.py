"""Findings of our own that runs decide: how far noise goes, what the baseline is, and what came after the paper."""

from __future__ import annotations

from fewbits.analysis.arms import AGAIN, BASELINE, decided
from fewbits.analysis.frames import Results
from fewbits.analysis.noise import VALIDATION
from fewbits.analysis.nvfp4.claims import beside
from fewbits.analysis.paper import Claim, Margin
from fewbits.analysis.registry import claim
from fewbits.analysis.verdicts import Verdict, equivalent, lower, no_worse, noted

FP32_WGRAD = "bf16-fp32-wgrad"
FINE, LEAST = 0.0005, 0.0015  # the margins of the paper's claims: the finest, and a tenth of what the recipe costs


def _finding(name: str, kind: str, statement: str, arm: str, baseline: str, margin: float, why: str) -> Claim:
    return Claim(name, statement, "", kind, VALIDATION, (arm,), baseline, "bad-arm", Margin(margin, True, why))


S3 = _finding(
    "S3",
    "equal",
    "The same mathematics, its sums in another order, comes to the same loss: noise is below the finest margin.",
    AGAIN,
    BASELINE,
    FINE,
    "the finest margin of the paper's claims",
)


@claim("nvfp4", "S3", S3)
def s3(results: Results) -> Verdict:
    return decided(beside(results, "recipe", AGAIN), lambda found: equivalent(found, FINE))


S4 = _finding(
    "S4",
    "no worse",
    "MXFP4 does as well with a Hadamard transform without random signs and nearest rounding as with chance in both "
    "(arXiv 2605.09825; not the paper's).",
    "mxfp4-deterministic",
    "mxfp4",
    LEAST,
    "as in N20",
)


@claim("nvfp4", "S4", S4)
def s4(results: Results) -> Verdict:
    found = beside(results, "outlook", "mxfp4-deterministic", "mxfp4")
    return decided(found, lambda data: no_worse(data, LEAST))


S5 = _finding(
    "S5",
    "lower",
    "Four Over Six, which chooses each block's greatest value among 4 and 6, comes to a lower loss than NVFP4 "
    "(arXiv 2512.02010; not the paper's).",
    "four-over-six",
    "nvfp4",
    FINE,
    "as in N4",
)


@claim("nvfp4", "S5", S5)
def s5(results: Results) -> Verdict:
    found = beside(results, "outlook", "four-over-six", "nvfp4")
    verdict = decided(found, lambda data: lower(data, FINE, absence_contradicts=True))
    return noted(verdict, "gradients are scaled so too, without the room above 6 that its authors leave their rounding")


S6 = _finding(
    "S6",
    "equal",
    "BF16 with weight gradients in FP32, as the quantized recipes have them, comes to the loss of plain BF16.",
    FP32_WGRAD,
    BASELINE,
    LEAST,
    "a tenth of what the recipe costs",
)


@claim("nvfp4", "S6", S6)
def s6(results: Results) -> Verdict:
    return decided(beside(results, "recipe", FP32_WGRAD), lambda found: equivalent(found, LEAST))
