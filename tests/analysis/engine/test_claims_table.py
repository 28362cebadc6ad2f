"""Test that docs/claims.md is up to date, and that claims have descriptions, reasons for margins and sources."""

from collections.abc import Container
from pathlib import Path

import pytest

from fewbits.analysis.engine.claims.schema import (
    Claim,
    ControlClaim,
    Margin,
    Part,
    StudyClaims,
    load_claims,
    studies_with_claims,
)
from fewbits.analysis.engine.claims.table import claims_table
from tests.messages import naming

PAGE = Path(__file__).parents[3] / "docs" / "claims.md"
TRAINED = ("mor", "nvfp4", "gaussws")
CLAIMS = [claim for study in studies_with_claims() for claim in load_claims(study).claims]


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text("utf-8") == claims_table(), "run `fewbits claims --table > docs/claims.md`"


@pytest.mark.parametrize("claim", [c for c in CLAIMS if not c.out_of_reach], ids=lambda claim: claim.id)
def test_a_claim_says_what_is_tested(claim: Claim) -> None:
    assert claim.tests
    assert claim.statement.endswith(".")


def test_every_margin_gives_its_reason() -> None:
    margins = [m for claim in CLAIMS for part in claim.parts if (m := claim.margin_of(part)) is not None]
    assert margins
    assert all(margin.reason for margin in margins)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.id)
def test_every_bound_of_the_papers_claims_gives_its_source(claim: Claim) -> None:
    for part in claim.parts:
        if part.bounds and not claim.ours:
            assert part.reason, part


def test_a_bound_without_a_source_is_refused() -> None:
    part = Part("above", arms=("a",), metrics=("x",), than=1.0)
    with pytest.raises(ValueError, match="above needs a `reason`"):
        Claim("X1", "It is high.", (part,), place="p", sentence="s", reach="mechanism")


HALF = Margin(0.005, relative=True, reason="r")
EQUAL = Part("equivalent", arms=("a",), margin=HALF)
CLOSE = Part("no_worse", arms=("a",), metrics=("distance",), relative=False, margin=Margin(0.02, False, "r"))


@pytest.mark.parametrize(
    ("null", "control"),
    [
        (EQUAL, Part("higher", arms=("b",), margin=HALF)),
        (EQUAL, Part("lower", arms=("b",), margin=Margin(0.01, True, "r"))),
        (CLOSE, Part("above", arms=("b",), metrics=("distance",), than=0.02)),
    ],
)
def test_a_claim_of_no_effect_is_valid_with_a_control_that_exceeds_its_margin(null: Part, control: Part) -> None:
    assert with_control(null, control).claims


@pytest.mark.parametrize(
    ("null", "control"),
    [
        (EQUAL, Part("higher", arms=("b",))),
        (EQUAL, Part("higher", arms=("b",), margin=Margin(0.004, True, "r"))),
        (EQUAL, Part("higher", arms=("b",), margin=Margin(0.005, False, "r"))),
        (EQUAL, Part("higher", arms=("b",), metrics=("zeros",), margin=HALF)),
        (EQUAL, Part("higher", arms=("b",), relative=False, margin=HALF)),
        (EQUAL, Part("above", arms=("b",), metrics=("validation_loss",), than=0.005)),
        (CLOSE, Part("above", arms=("b",), metrics=("distance",), than=0.019)),
        (CLOSE, Part("above", arms=("b",), metrics=("another",), than=0.02)),
        (CLOSE, Part("all_below", arms=("b",), metrics=("distance",), than=0.5)),
    ],
)
def test_a_claim_of_no_effect_needs_a_control_that_exceeds_its_margin(null: Part, control: Part) -> None:
    with pytest.raises(ValueError, match=naming("X1", null.test, "control")):
        with_control(null, control)


def with_control(null: Part, control: Part) -> StudyClaims:
    claim = Claim("X1", "It is close.", (null,), reach="outcome", control=("works",), ours=True)
    return StudyClaims("mor", (claim,), (ControlClaim("works", "It works", (control,)),))


def test_only_tests_of_differences_have_the_margin_of_the_claim() -> None:
    bounded = Part("above", name="bounded", arms=("a",), metrics=("x",), than=1.0)
    claim = Claim("X1", "It is close.", (EQUAL, bounded), margin=HALF, ours=True)
    assert [claim.margin_of(part) for part in claim.parts] == [HALF, None]


def is_data(part: Part, hooks: Container[str]) -> bool:
    """Tell whether a part of a claim needs no Python code of its study.

    Such a part is out of reach, or uses only built-in metrics.
    """
    if part.out_of_reach:
        return True
    if part.test == "exact" or part.data:
        return False
    metrics = {place.metric for place in part.terms.values()} if part.formula else {*part.metrics}
    return not any(metric in hooks for metric in metrics)
