"""Test that the title of a comparison contains labels of arms for readers, and its name the names of the arms."""

from collections.abc import Iterator

import pytest

from fewbits.analysis.engine.claims.findings import Finding, Status
from fewbits.analysis.engine.claims.schema import (
    Claim,
    Comparison,
    ControlClaim,
    comparisons,
    load_claims,
    studies_with_claims,
)
from fewbits.analysis.engine.claims.tests import judge
from fewbits.analysis.engine.claims.verdicts import Evidence, conclude
from fewbits.analysis.engine.results.arms import arm_table
from fewbits.analysis.engine.results.data import Differences
from fewbits.analysis.views.claims import view


def of_arms(study: str) -> Iterator[Comparison]:
    """Yield all comparisons of a study's claims and controls that compare arms."""
    claims: tuple[Claim | ControlClaim, ...] = (*load_claims(study).claims, *load_claims(study).controls)
    for claim in claims:
        yield from (one for one in comparisons(claim, arm_table(study)) if one.arm)


@pytest.mark.parametrize("study", studies_with_claims())
def test_every_arm_of_a_claim_has_a_label_that_its_title_shows(study: str) -> None:
    table = arm_table(study)
    known = {arm.name for arm in table.arms}
    for one in of_arms(study):
        if not one.part.name:  # a part with a name has this name as its title
            assert {one.arm, one.baseline or one.arm} <= known, one.name
            assert one.title.startswith(f"{table.prefix(one.part.sweep)}{table.label(one.arm)}"), one.name
            assert not one.baseline or f" {table.label(one.baseline)}" in one.title, one.name


def test_a_title_has_the_prefix_of_its_sweep_once() -> None:
    (first, *_) = comparisons(load_claims("nvfp4").claim("N6"), arm_table("nvfp4"))
    assert first.name == "first-4 above last-4, validation loss"
    assert first.title == "20 blocks: first 4 above last 4, validation loss"


def test_without_a_table_of_arms_titles_are_names() -> None:
    assert all(one.title == one.name for one in comparisons(load_claims("mor").claim("M3")))


def test_findings_reasons_and_pages_show_titles() -> None:
    claim = load_claims("nvfp4").claim("N6")
    differences = ((0.02, 0.021, 0.022), (-0.02, -0.021, -0.022))
    found = tuple(
        judge(one, Differences(values, relative=True))
        for one, values in zip(comparisons(claim, arm_table("nvfp4"))[::2], differences, strict=True)
    )
    assert [one.status for one in found] == [Status.SUPPORTED, Status.OPPOSED]
    verdict = conclude({"N6": Evidence(claim, found, covered=False)})["N6"]
    assert verdict.supported == (found[0].name,)
    assert 0 <= verdict.reason.index(found[0].title) < verdict.reason.index(found[1].title)
    assert not any(finding.name in verdict.reason for finding in found)
    assert view(found[0]).name == found[0].title
    assert Finding("by arithmetic", Status.SUPPORTED, "").heading == "by arithmetic"


def test_parts_with_a_name_keep_it() -> None:
    claim = load_claims("nvfp4").claim("N20")
    assert [one.title for one in comparisons(claim, arm_table("nvfp4"))][:2] == ["transformer", "hybrid"]
