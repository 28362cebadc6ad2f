"""Test claims: the papers' own numbers in each test, comparisons of scales, and power."""

from dataclasses import replace

import numpy as np
import pytest

from fewbits.analysis.engine.claims.findings import Status
from fewbits.analysis.engine.claims.judging import printed_effect
from fewbits.analysis.engine.claims.preview import preview, preview_lines
from fewbits.analysis.engine.claims.schema import (
    Claim,
    comparisons,
    load_claims,
    studies_with_claims,
)
from fewbits.analysis.engine.claims.tests import judge
from fewbits.analysis.engine.results.data import Differences
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.places import scope_of
from fewbits.sweeps.planning.plan import plan
from fewbits.sweeps.planning.studies import load_sweeps

ALL = [(study, claim) for study in studies_with_claims() for claim in load_claims(study).claims]


@pytest.mark.parametrize(("study", "claim"), ALL, ids=lambda one: one if isinstance(one, str) else one.id)
def test_the_numbers_that_a_paper_prints_pass_its_own_claims(study: str, claim: Claim) -> None:
    for one in comparisons(claim):
        if (value := printed_effect(study, one)) is not None:
            values = value + 1e-6 * np.array([-1.0, 1.0, -1.0, 1.0, -1.0, 1.0])
            margin = one.margin.value if one.margin else None
            found = judge(one, Differences(tuple(values), relative=one.part.relative), margin)
            assert found.status is Status.SUPPORTED, one.name


@pytest.mark.parametrize(
    ("study", "scale", "sweeps", "arms", "expected"),
    [
        ("mor", "cpu", ("probes", "partitions"), ("tensor", "block"), ("probe-tensor", "probe-block")),
        ("mor", "paper", ("probes", "partitions"), ("tensor", "block"), ("tensor", "block")),
        ("nvfp4", "cpu", ("switch", "large"), ("nvfp4-long|nvfp4", "bf16|fp8"), ("nvfp4-long", "bf16")),
        ("nvfp4", "paper", ("switch", "large"), ("nvfp4-long|nvfp4", "bf16|fp8"), ("nvfp4", "fp8")),
        ("nvfp4", "paper", ("switch",), ("nvfp4-long", "bf16"), None),
    ],
)
def test_a_comparison_is_found_where_a_scale_has_it(
    study: str, scale: str, sweeps: tuple[str, ...], arms: tuple[str, str], expected: tuple[str, str] | None
) -> None:
    # The data of scale paper are not on this machine.
    data: tuple[str, ...] = (
        "data=synthetic",
        "data.path=null",
        "data.phases=[]",
        "evaluation.tasks=[]",
        "evaluation.tasks_every=0",
    )
    data += ("data.repeat=1000000000", "evaluation.windows=2")
    results = Results(plan(*load_sweeps((f"study={study}", f"scale={scale}", *(data if scale == "paper" else ())))))
    found = scope_of(results, arms, sweeps, {"configuration": "1"} if study == "mor" else {})
    assert (found and found.arms) == expected


def test_power_follows_from_a_given_spread() -> None:
    results = Results(plan(*load_sweeps(("study=mor", "scale=cpu"))))
    (first, *_) = [one for one in preview("mor", results, {"validation_loss": 0.0005}) if one.claim == "M3"]
    assert first.mde is not None
    assert 0.0004 < first.mde < 0.003
    assert first.aim == 0.005
    assert "seeds" in "\n".join(preview_lines([first, replace(first, sd=None, mde=None)]))
