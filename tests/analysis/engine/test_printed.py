"""Test that claims accept the paper's own numbers: with the printed effects as data, every claim is reproduced.

Otherwise the test or the margin of a claim would contradict the statement that the claim is about.
"""

import pytest

from fewbits.analysis.engine.claims.findings import Outcome, Status
from fewbits.analysis.engine.claims.preview import printed_effect
from fewbits.analysis.engine.claims.schema import (
    BOUNDED,
    DIRECTIONS,
    Claim,
    Comparison,
    comparisons,
    load_claims,
    studies_with_claims,
)
from fewbits.analysis.engine.claims.tests import judge
from fewbits.analysis.engine.claims.verdicts import Evidence, conclude
from fewbits.analysis.engine.results.data import Differences

PRINTED = [
    pytest.param(study, claim, comparison, id=f"{claim.id}: {comparison.name}")
    for study in studies_with_claims()
    for claim in load_claims(study).claims
    for comparison in comparisons(claim)
    if comparison.part.printed is not None
]


SEEDS = 20  # equal values are tested by their signs, so the p value is 2^-20, which stays significant after correction


def printed_data(study: str, comparison: Comparison) -> Differences | None:
    """Return data in which each of SEEDS pairs has the paper's effect; None if the paper prints no effect."""
    effect = printed_effect(study, comparison)
    paired = comparison.test in (*DIRECTIONS, *BOUNDED)
    return None if effect is None else Differences((effect,) * SEEDS, relative=paired and comparison.part.relative)


@pytest.mark.parametrize(("study", "claim", "comparison"), PRINTED)
def test_a_printed_number_supports_its_claim(study: str, claim: Claim, comparison: Comparison) -> None:
    data = printed_data(study, comparison)
    assert data is not None, "the cell of the paper's table that `printed` names has no number"
    assert judge(comparison, data).status is Status.SUPPORTED


@pytest.mark.parametrize("study", studies_with_claims())
def test_claims_with_printed_numbers_come_out_reproduced(study: str) -> None:
    evidence = {}
    for claim in load_claims(study).claims:
        found = [(one, printed_data(study, one)) for one in comparisons(claim) if one.part.printed is not None]
        findings = tuple(judge(one, data) for one, data in found if data is not None)
        if findings:
            evidence[claim.id] = Evidence(claim, findings)
    verdicts = conclude(evidence)
    assert {name: one.outcome for name, one in verdicts.items()} == dict.fromkeys(evidence, Outcome.REPRODUCED)


def test_studies_with_tables_of_losses_print_numbers() -> None:
    assert {param.values[0] for param in PRINTED} >= {"mor", "nvfp4"}
