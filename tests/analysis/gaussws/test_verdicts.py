"""Test GaussWS's verdicts with simulated results whose true effects are known: as the paper says, and the opposite."""

from dataclasses import replace

import pytest

from fewbits.analysis.engine.claims.findings import Outcome, Status
from fewbits.analysis.engine.claims.judging import judge_study
from fewbits.sweeps.planning.plan import Plan
from tests.analysis.gaussws.worlds import PAPER, results
from tests.analysis.worlds import differing, planned
from tests.experiments.data.data_inputs import shared_cache

LONG = ("G7", "G10", "G11", "G14")  # claims that need runs of the paper's length
TIMED = ("G16", "G18")  # claims about speed, which no trial has
TRUE = replace(
    PAPER,
    effect=dict(PAPER.effect)
    | {"diffq-matched": 0.012, "gaussws-matched": 0.0005}
    | {"llama2/gaussws": -0.001, "llama2/diffq": 0.002, "parts/all": 0.02},
)


@pytest.fixture(scope="module")
def six(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    where = tmp_path_factory.mktemp("gaussws"), shared_cache(tmp_path_factory)
    return planned("gaussws", *where, "scale=cpu", "seeds=[0,1,2,3,4,5]", "seeds_of={}")


def test_where_all_is_as_the_paper_says_every_claim_is_reproduced(six: Plan) -> None:
    expected = dict.fromkeys(LONG, Outcome.NOT_TESTABLE) | dict.fromkeys(TIMED, Outcome.NOT_RUN)
    assert differing("gaussws", results(six, TRUE), Outcome.REPRODUCED, **expected) == {}


def test_widths_that_stay_below_nine_bits_cannot_fail_a_claim_about_nine(six: Plan) -> None:
    found = judge_study("gaussws", results(six, TRUE))["G15"]
    assert [part.status for part in found.findings] == [Status.SUPPORTED, Status.VACUOUS, Status.VACUOUS]


@pytest.mark.parametrize(("to_nine", "status"), [(1.0, Status.SUPPORTED), (0.95, Status.OPPOSED)])
def test_widths_that_start_at_twelve_bits_decide_about_nine(
    tmp_path_factory: pytest.TempPathFactory, to_nine: float, status: Status
) -> None:
    where = tmp_path_factory.mktemp("from-12"), shared_cache(tmp_path_factory)
    plan = planned("gaussws", *where, "scale=cpu-full", "seeds=[0,1,2,3,4,5]", "seeds_of={}")
    found = judge_study("gaussws", results(plan, replace(TRUE, to_nine=to_nine)))["G15"]
    assert [part.status for part in found.findings[1:]] == [status, status]


def test_a_cast_to_fewer_bits_that_costs_no_more_leaves_g19_undecided(six: Plan) -> None:
    world = replace(TRUE, doses=(0.05, 0.05, 0.05))
    assert judge_study("gaussws", results(six, world))["G19"].outcome is Outcome.CANNOT_TELL


def test_where_the_opposite_holds_claims_are_not_reproduced(six: Plan) -> None:
    opposite = {
        "gpt2/gaussws": 0.02,
        "gaussws-low": 0.02,
        "gaussws-matched": 0.02,
        "gpt2-mini/adam-mini-gaussws": 0.08,
        "gpt2-mini/adam-mini-diffq": 0.05,
        "llama2/gaussws": 0.02,
        "llama2/bf16": 0.0,
        "llama2-mini/adam-mini-gaussws": 0.09,
        "llama2/diffq": 0.01,
    }
    world = replace(
        TRUE, effect={**TRUE.effect, **opposite, "parts/all": 0.03}, cast=0.02, bits={"gpt2": 4.5, "llama2": 5.5}
    )
    unlike = differing("gaussws", results(six, world), Outcome.NOT_REPRODUCED)
    assert not {"G8", "G9", "G12", "G13", "G15", "G19", "G20"} & set(unlike), unlike
