"""The page of claims is what the data say, and every claim says what it tests."""

from pathlib import Path

import pytest

from fewbits.analysis.engine.claims.schema import Claim, Part, load_claims, studies_with_claims
from fewbits.analysis.engine.claims.table import claims_table

PAGE = Path(__file__).parents[3] / "docs" / "claims.md"
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


def test_at_least_half_of_the_claims_about_runs_are_data_alone() -> None:
    built_in = ("validation_loss", "ood_loss", "validation_loss_unquantized", "loss@late")
    claims = [claim for claim in CLAIMS if any(part.test != "exact" for part in claim.parts)]
    data = [claim for claim in claims if all(is_data(part, built_in) for part in claim.parts)]
    assert len(data) >= 0.5 * len(claims)


def is_data(part: Part, built_in: tuple[str, ...]) -> bool:
    if part.out_of_reach:
        return True
    return part.test != "exact" and not part.data and set(part.metrics) <= {*built_in}
