"""Every claim of every study can be judged at every scale; an empty store decides nothing."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from fewbits.analysis.engine.claims.findings import Outcome, Status
from fewbits.analysis.engine.claims.hooks import load_hooks
from fewbits.analysis.engine.claims.judging import evidence_of
from fewbits.analysis.engine.claims.preview import preview, preview_lines
from fewbits.analysis.engine.claims.schema import load_claims, studies_with_claims
from fewbits.analysis.engine.claims.verdicts import conclude
from fewbits.analysis.engine.results.frames import Results
from fewbits.sweeps.planning.plan import Plan, plan
from fewbits.sweeps.planning.studies import STUDIES
from fewbits.sweeps.planning.sweep import load_sweeps


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Results]:
    """Return a function that gives the results of a plan in an empty store; each plan is made once."""

    @cache
    def planned(*words: str) -> Plan:
        where = f"runtime.runs={tmp_path_factory.mktemp('runs')}"
        small = ("data=synthetic", "data.size=65536", "data.repeat=1000000000")
        return plan(*load_sweeps((*words, where, "runtime.device=cpu", *small)))

    return lambda study, scale, *more: Results(planned(f"study={study}", f"scale={scale}", *more))


@pytest.mark.parametrize(
    ("study", "scale"),
    [
        pytest.param(name, scale, marks=pytest.mark.deep if scale == "cpu-full" else ())
        for name in studies_with_claims()
        for scale in ("cpu", "cpu-full")
        if scale in STUDIES[name].scales
    ],
)
def test_an_empty_store_decides_nothing(study: str, scale: str, empty: Callable[..., Results]) -> None:
    load_hooks(study)
    results = empty(study, scale)
    claims = [one for one in load_claims(study).claims if all(part.test != "exact" for part in one.parts)]
    evidence = {one.id: evidence_of(study, one, results) for one in claims}
    verdicts = conclude(evidence)
    assert not [name for name, one in verdicts.items() if one.outcome.decided]
    statuses = {part.status for one in verdicts.values() for part in one.findings}
    assert statuses <= {Status.UNDECIDED, Status.NOT_RUN, Status.OUT_OF_REACH}
    assert Status.UNDECIDED in statuses


def test_a_scale_that_cannot_judge_a_claim_does_not(empty: Callable[..., Results]) -> None:
    results, claim = empty("mor", "cpu"), load_claims("mor").claim("M3")
    load_hooks("mor")
    for unfit, outcome in (({"cpu": "the reason"}, Outcome.OUT_OF_REACH), ({"smoke": "another"}, Outcome.INCONCLUSIVE)):
        evidence = evidence_of("mor", replace(claim, unfit=unfit), results)
        verdict = conclude({"M3": evidence})["M3"]
        assert verdict.outcome is outcome
        assert (evidence.p_for is None and verdict.reason == "the reason") == (outcome is Outcome.OUT_OF_REACH)


@pytest.mark.parametrize("study", studies_with_claims())
def test_unfit_scales_are_scales_of_the_study(study: str) -> None:
    assert {scale for claim in load_claims(study).claims for scale in claim.unfit} <= set(STUDIES[study].scales)


def test_a_preview_names_what_the_planned_seeds_cannot_decide(empty: Callable[..., Results]) -> None:
    found = {(one.claim, one.comparison.name): one for one in preview("mor", empty("mor", "cpu"))}
    loss = found["M3", "block like bf16, validation loss, configuration 1"]
    assert loss.mde is not None
    assert loss.margin is not None
    assert loss.mde < loss.margin
    assert not loss.undecidable
    one_seed = preview("mor", empty("mor", "cpu", "seeds=[10]"))
    assert all(one.undecidable for one in one_seed)
    assert any("cannot decide" in line for line in preview_lines(one_seed))
