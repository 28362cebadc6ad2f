"""Test verdicts of whole studies: without results no claim is decided, and runs that are too small contradict none."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from fewbits.analysis.engine.claims.findings import Outcome, Status
from fewbits.analysis.engine.claims.hooks import hooks_of, load_hooks
from fewbits.analysis.engine.claims.judging import Training, covered, evidence_of, training_of
from fewbits.analysis.engine.claims.preview import preview, preview_lines
from fewbits.analysis.engine.claims.schema import Claim, Part, Stated, load_claims, studies_with_claims
from fewbits.analysis.engine.claims.verdicts import conclude
from fewbits.analysis.engine.results.data import Exact
from fewbits.analysis.engine.results.frames import Results
from fewbits.sweeps.planning.plan import Plan, plan
from fewbits.sweeps.planning.studies import STUDIES, load_sweeps
from tests.messages import naming


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Results]:
    """Return a function (study, scale, further overrides) → results of a plan of which no trial has run."""

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


@pytest.mark.parametrize("holds", [True, False])
@pytest.mark.parametrize("study", ["mor", "nvfp4", "gaussws"])
def test_exact_claims_are_decided_without_any_trial(
    study: str, holds: bool, empty: Callable[..., Results], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check it with fixed results in place of the checks, which the tests of each study's arithmetic call."""
    load_hooks(study)
    own = hooks_of(study).exact
    assert set(own) == {c.id for c in load_claims(study).claims if any(part.test == "exact" for part in c.parts)}
    for name in own:
        monkeypatch.setitem(own, name, lambda: {"": Exact(holds, "computed")})
    results = empty(study, "cpu")
    verdicts = conclude({name: evidence_of(study, load_claims(study).claim(name), results) for name in own})
    assert {one.outcome for one in verdicts.values()} == {Outcome.REPRODUCED if holds else Outcome.CONTRADICTED}


def test_a_scale_that_cannot_judge_a_claim_does_not(empty: Callable[..., Results]) -> None:
    """Check that a claim is out of reach at the scales in its `unfit`, with the given reason."""
    results, claim = empty("mor", "cpu"), load_claims("mor").claim("M3")
    load_hooks("mor")
    for unfit, outcome in (({"cpu": "the reason"}, Outcome.OUT_OF_REACH), ({"smoke": "another"}, Outcome.INCONCLUSIVE)):
        evidence = evidence_of("mor", replace(claim, unfit=unfit), results)
        verdict = conclude({"M3": evidence})["M3"]
        assert verdict.outcome is outcome
        assert (evidence.p_for is None and verdict.reason == "the reason") == (outcome is Outcome.OUT_OF_REACH)


BY_ARITHMETIC = Claim("X1", "It holds.", (Part("exact"),), ours=True)


def test_evidence_of_trials_of_the_scale_smoke_is_marked(
    empty: Callable[..., Results], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = load_claims("mor").claim("M3")
    load_hooks("mor")
    smoke = empty("mor", "smoke")
    assert evidence_of("mor", trained, smoke).smoke
    assert not evidence_of("mor", trained, empty("mor", "cpu")).smoke
    monkeypatch.setitem(hooks_of("mor").exact, "X1", lambda: Exact(True, "2 of 2 codes"))
    evidence = evidence_of("mor", BY_ARITHMETIC, smoke)
    assert [one.status for one in evidence.findings] == [Status.SUPPORTED]
    assert not evidence.smoke, "arithmetic needs no trials"


def test_a_claim_by_arithmetic_needs_its_function(empty: Callable[..., Results]) -> None:
    with pytest.raises(ValueError, match=naming("X2", "exact")):
        evidence_of("mor", replace(BY_ARITHMETIC, id="X2"), empty("mor", "cpu"))


STATED = replace(BY_ARITHMETIC, stated=Stated(parameters=1e6, tokens=1e9))


@pytest.mark.parametrize(
    ("parameters", "tokens", "expected"),
    [
        ((500_000,), 500_000_000, True),
        ((499_999,), 1_000_000_000, False),
        ((499_999, 10_000_000), 1_000_000_000, False),
        ((1_000_000,), 499_999_999, False),
    ],
)
def test_runs_of_half_the_size_and_half_the_length_can_contradict_a_claim(
    parameters: tuple[int, ...], tokens: int, expected: bool
) -> None:
    assert covered(STATED, Training(parameters, tokens, 1.0)) is expected


def test_without_runs_only_a_claim_of_no_size_can_be_contradicted() -> None:
    """Check that without runs, only claims that name no model size and no number of tokens can be contradicted.

    `covered` tells whether runs are large enough to contradict a claim.
    """
    assert covered(BY_ARITHMETIC, None)
    assert not covered(STATED, None)


def test_a_branch_has_trained_with_the_tokens_of_its_trunk_too(empty: Callable[..., Results]) -> None:
    results = empty("nvfp4", "cpu")
    trials = results.plan.trials
    name, parent = next(
        (name, one.parent)
        for name, one in trials.items()
        if one.parent is not None and trials[one.parent].parent is None
    )
    branch, trunk = trials[name].trial, trials[parent].trial
    assert branch.branch.step is not None
    whole_trunk, own = (one.training.steps * one.training.batch * one.training.length for one in (trunk, branch))
    whole = own + branch.branch.step * trunk.training.batch * trunk.training.length
    assert whole != whole_trunk
    alone, both = training_of(results, [name]), training_of(results, [parent, name])
    assert alone is not None
    assert both is not None
    assert (alone.tokens, alone.quantized) == (whole, own / whole)
    assert (both.tokens, both.quantized) == (max(whole, whole_trunk), 1.0)
    assert training_of(results, ["nobody's"]) is None


@pytest.mark.parametrize("study", studies_with_claims())
def test_unfit_scales_are_scales_of_the_study(study: str) -> None:
    claims = load_claims(study)
    unfit = {*claims.unfit, *(scale for claim in claims.claims for scale in claim.unfit)}
    assert unfit <= set(STUDIES[study].scales)


def test_a_scale_for_other_questions_decides_exact_claims_alone(empty: Callable[..., Results]) -> None:
    claims = replace(load_claims("mor"), unfit={"cpu": "the reason"})
    load_hooks("mor")
    by_reach = {
        claim.reach: evidence_of("mor", claim, empty("mor", "cpu"), claims)
        for claim in map(claims.claim, ("M2", "M9", "M3"))
    }
    verdicts = conclude({evidence.claim.id: evidence for evidence in by_reach.values()})
    assert verdicts["M2"].outcome is Outcome.REPRODUCED
    assert {verdicts[name].reason for name in ("M9", "M3")} == {"the reason"}
    assert {verdicts[name].outcome for name in ("M9", "M3")} == {Outcome.OUT_OF_REACH}


def test_a_preview_names_what_the_planned_seeds_cannot_decide(empty: Callable[..., Results]) -> None:
    found = {(one.claim, one.comparison.name): one for one in preview("mor", empty("mor", "cpu"))}
    loss = found["M3", "block like bf16, validation loss, configuration 1"]
    assert loss.mde is not None
    assert loss.margin is not None
    assert loss.mde < loss.margin
    assert not loss.undecidable
    one_seed = preview("mor", empty("mor", "cpu", "seeds=[10]"))
    assert all(one.undecidable for one in one_seed)
    lines = preview_lines(one_seed)
    assert all(any(one.claim in line and one.comparison.title in line for line in lines) for one in one_seed)


def test_effects_are_not_previewed_for_a_scale_that_tests_no_claim(empty: Callable[..., Results]) -> None:
    assert preview("mor", empty("mor", "questions")) == ()
