"""Test NVFP4's verdicts with simulated results whose true effects are known: as the paper says, and without effects."""

from dataclasses import replace

import pytest

from fewbits.analysis.engine.claims.findings import Outcome
from fewbits.sweeps.planning.plan import Plan
from tests.analysis.nvfp4.worlds import PAPER, results
from tests.analysis.worlds import differing, planned
from tests.experiments.data.data_inputs import shared_cache

# Claims that need models or scores that scale cpu does not have.
LARGE = ("N2", "N3", "N5", "N11", "N15", "N21", "N27", "N28")
# All recipes in four bits increase the loss equally, so that no choice among them matters.
CHOICES = (
    "kept",
    "with-2d",
    "no-sr",
    "no-rht",
    "no-2d",
    "sr-",
    "rht-",
    "signs-",
    "weights-",
    "activations-",
    "first-",
    "last-",
)
TRUE = replace(
    PAPER,
    effect=dict(PAPER.effect)
    | {
        "fp8-long": 0.001,
        "fp8-trunk": 0.001,
        "fp8": 0.001,
        "switch-both": 0.0011,
        "bf16-again": 1e-5,
        "mxfp4-1.00": 0.0172,
        "mxfp4-1.25": 0.0136,
        "mxfp4-1.36": 0.0121,
        "mxfp4-1.50": 0.0102,
    },
)


@pytest.fixture(scope="module")
def six(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    where = tmp_path_factory.mktemp("nvfp4"), shared_cache(tmp_path_factory)
    return planned("nvfp4", *where, "scale=cpu", "seeds=[0,1,2,3,4,5]", "seeds_of={}")


def test_where_all_is_as_the_paper_says_every_claim_is_reproduced(six: Plan) -> None:
    expected = dict.fromkeys(LARGE, Outcome.NOT_TESTABLE)
    assert differing("nvfp4", results(six, TRUE), Outcome.REPRODUCED, **expected) == {}


def test_where_no_choice_matters_no_claim_about_choices_is_reproduced(six: Plan) -> None:
    same = {
        name: 0.01 if name.rpartition("/")[2].startswith(CHOICES) else effect for name, effect in TRUE.effect.items()
    }
    same |= dict.fromkeys(
        ("nvfp4-long", "long-no-sr", "long-no-rht", "long-no-2d", "recipe/nvfp4", "recipe/mxfp4"), 0.01
    )
    world = replace(
        TRUE, effect=same | {"hybrid/nvfp4": 0.01, "hybrid/mxfp4": 0.01}, gradients=lambda block, part: 0.12
    )
    others = differing("nvfp4", results(six, world), Outcome.REPRODUCED)
    for name in ("N4", "N6", "N7", "N8", "N9", "N13", "N17", "N20"):
        assert others[name][0] in (Outcome.CANNOT_TELL, Outcome.NOT_REPRODUCED, Outcome.MIXED), name
    assert not {"N10", "N14", "N16"} & set(others), "equal losses"
