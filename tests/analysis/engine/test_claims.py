"""Test the files of claims and their table, the papers' own numbers in each test, and who needs what."""

from dataclasses import replace

import numpy as np
import pytest
import yaml

from fewbits.analysis.engine.claims.findings import Status
from fewbits.analysis.engine.claims.hooks import hooks_of, load_hooks
from fewbits.analysis.engine.claims.judging import printed_effect
from fewbits.analysis.engine.claims.preview import preview, preview_lines
from fewbits.analysis.engine.claims.schema import (
    WITHIN,
    Claim,
    Kind,
    Margin,
    Needs,
    Part,
    Source,
    comparisons,
    load_claims,
    studies_with_claims,
)
from fewbits.analysis.engine.claims.tests import judge
from fewbits.analysis.engine.results.arms import arm_table
from fewbits.analysis.engine.results.data import Differences
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.paper import STUDIES, paper
from fewbits.analysis.engine.results.places import scope_of
from fewbits.sweeps.planning.plan import plan
from fewbits.sweeps.planning.studies import STUDIES as STUDY
from fewbits.sweeps.planning.studies import load_sweeps

ALL = [(study, claim) for study in studies_with_claims() for claim in load_claims(study).claims]


@pytest.mark.parametrize("study", studies_with_claims())
def test_files_are_short_and_name_what_exists(study: str) -> None:
    for claim in yaml.safe_load((STUDIES / study / "claims.yaml").read_text("utf-8"))["claims"]:
        assert len(claim) <= 9, claim["id"]
    load_hooks(study)
    claims = {claim.id: claim for claim in load_claims(study).claims}
    for name, part in paper(study).primary.items():
        assert claims[name].kind is Kind.EMPIRICAL, name
        assert not part or part in [one.name for one in claims[name].parts]
    for claim in claims.values():
        comparisons(claim, arm_table(study))
        assert claim.judged_at in STUDY[study].scales, claim.id
        assert claim.source is None or claim.source.size in {"default": 0, **paper(study).sizes}
        exact = any(part.test == "exact" for part in claim.parts)
        assert exact == (claim.id in hooks_of(study).exact), claim.id
        assert any(part.data for part in claim.parts) <= (claim.id in hooks_of(study).measures), claim.id


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"test": "above"}, "test"),
        ({"test": WITHIN}, "bounds"),
        ({"test": WITHIN, "bounds": (2.0, 1.0)}, "LOW < HIGH"),
        ({"test": "higher", "data": "x"}, "exactly one"),
        ({"needs": Needs(other="more")}, "no test"),
    ],
)
def test_parts_that_make_no_sense_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Part(**({"test": "higher", "arms": ("a",)} | change))  # type: ignore[arg-type]


def test_claims_and_margins_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="needs a margin"):
        Claim("M1", "s", (Part("equal", arms=("a",)),))
    with pytest.raises(ValueError, match="reason"):
        Claim("M1", "s", (Part(WITHIN, arms=("a",), bounds=(0.0, None)),), Source("p", "s"))
    with pytest.raises(ValueError, match="third"):
        Margin(0.1, third=True)
