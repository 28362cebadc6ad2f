"""Each kind of test in worlds whose truth is known: true, false, absent, underpowered; and how often it errs.

Error rates are simulated through the same functions that judge runs: `judge` and `conclude`, with few seeds.
"""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest

from fewbits.analysis.engine.claims.findings import ControlResult, Finding, Outcome, Status
from fewbits.analysis.engine.claims.schema import Claim, Comparison, ControlClaim, Margin, Part, Stated, comparisons
from fewbits.analysis.engine.claims.tests import judge
from fewbits.analysis.engine.claims.verdicts import Evidence, conclude
from fewbits.analysis.engine.results.data import Differences, Events
from fewbits.analysis.engine.statistics.estimates import Shared, Side, Spread, estimate
from fewbits.analysis.engine.statistics.multiplicity import Stratum, compare_events, holm

MARGIN = Margin(0.005, True, "for tests")
SUPPORTED, OPPOSED, ABSENT, UNDECIDED = Status.SUPPORTED, Status.OPPOSED, Status.ABSENT, Status.UNDECIDED
FEW, MANY = 0.0005, 0.02  # spreads: of a design that resolves the margin, and of one that does not


def part(test: str, **more: object) -> Comparison:
    own = {"within": {"low": 0.4, "high": 0.6}, "above": {"than": 0.5}, "below": {"than": 0.5}}.get(test, {})
    margin = MARGIN if test in ("higher", "lower", "no_worse", "equivalent") else None
    made = Part(test, arms=("a",), margin=margin, **own, **more)  # type: ignore[arg-type]
    (one,) = comparisons(Claim("X", "", (made,), ours=True, reach="mechanism"))
    return one


def found(test: str, mean: float, spread: float, seeds: int = 5) -> Status:
    deviations = np.array([-1.2, 0.9, 0.4, -0.6, 0.5, 0.3, -0.3])[:seeds]
    deviations = deviations - deviations.mean()
    values = mean + spread * deviations / deviations.std(ddof=1)
    return judge(part(test), Differences(tuple(values), relative=True)).status


@pytest.mark.parametrize(
    ("test", "mean", "spread", "status"),
    [
        ("higher", 0.01, FEW, SUPPORTED),
        ("higher", -0.01, FEW, OPPOSED),
        ("higher", 0.001, FEW, ABSENT),
        ("higher", 0.01, MANY, UNDECIDED),
        ("lower", -0.01, FEW, SUPPORTED),
        ("lower", 0.01, FEW, OPPOSED),
        ("lower", -0.001, FEW, ABSENT),
        ("lower", -0.01, MANY, UNDECIDED),
        ("no_worse", 0.001, FEW, SUPPORTED),
        ("no_worse", -0.05, FEW, SUPPORTED),
        ("no_worse", 0.01, FEW, OPPOSED),
        ("no_worse", 0.0, MANY, UNDECIDED),
        ("equivalent", 0.001, FEW, SUPPORTED),
        ("equivalent", 0.01, FEW, OPPOSED),
        ("equivalent", -0.01, FEW, OPPOSED),
        ("equivalent", 0.001, MANY, UNDECIDED),
        ("equivalent", 0.0049, FEW, UNDECIDED),
        ("equivalent", -0.0049, FEW, UNDECIDED),
        ("within", 0.5, FEW, SUPPORTED),
        ("within", 0.7, FEW, OPPOSED),
        ("within", 0.5, 0.5, UNDECIDED),
        ("above", 0.6, FEW, SUPPORTED),
        ("above", 0.4, FEW, OPPOSED),
        ("below", 0.4, FEW, SUPPORTED),
        ("below", 0.6, FEW, OPPOSED),
        ("below", 0.49, MANY, UNDECIDED),
    ],
)
def test_a_finding_is_what_the_world_is(test: str, mean: float, spread: float, status: Status) -> None:
    assert found(test, mean, spread) is status


def test_a_null_is_shown_only_by_a_design_that_detects_the_margin() -> None:
    wide = judge(part("no_worse"), Differences((-0.07, -0.05, -0.03), relative=True))
    assert wide.mde is not None
    assert wide.mde > MARGIN.value
    assert wide.status is UNDECIDED
    assert wide.underpowered


# -------------------------------------------------------------------------------- zero variance, bounds, divergence


def test_equal_values_are_tested_by_their_signs() -> None:
    three = judge(part("above"), Differences((1.0, 1.0, 1.0), bounds=(0.0, 1.0)))
    assert (three.status, three.p_for, three.least_p) == (UNDECIDED, 0.125, 0.125)
    five = judge(part("above"), Differences((1.0,) * 5, bounds=(0.0, 1.0)))
    assert (five.status, five.p_for) == (SUPPORTED, 0.5**5)


def test_pairs_of_the_same_bits_say_that_nothing_was_active() -> None:
    for test in ("higher", "lower", "no_worse", "equivalent"):
        one = judge(part(test), Differences((0.0,) * 6, relative=True))
        assert one.status is UNDECIDED
        assert "not active" in one.reason


def test_one_pair_of_the_same_bits_among_others_is_a_value_like_any() -> None:
    one = judge(part("no_worse"), Differences((0.0, 0.0005, -0.0005, 0.0002), relative=True))
    assert one.status is SUPPORTED


def test_intervals_of_shares_stay_between_0_and_1() -> None:
    one = judge(part("above"), Differences((0.97, 1.0, 0.99), bounds=(0.0, 1.0)))
    assert one.interval is not None
    assert 0.5 < one.interval.low < 0.99 < one.interval.high <= 1.0


def test_divergence_is_worse_than_any_loss() -> None:
    data = Differences((), relative=True, diverged=3)
    assert judge(part("higher"), data).status is SUPPORTED
    assert judge(part("no_worse"), data).status is OPPOSED
    assert judge(part("lower"), data).status is OPPOSED


@pytest.mark.parametrize(
    ("test", "values", "status"),
    [
        ("all_above", (0.6, 0.7), SUPPORTED),
        ("all_above", (0.4, 0.7), OPPOSED),
        ("all_above", (0.5, 0.7), OPPOSED),
        ("all_below", (0.4, 0.3), SUPPORTED),
        ("all_below", (0.4, 0.7), OPPOSED),
        ("all_below", (0.6,), OPPOSED),
    ],
)
def test_an_observation_holds_if_every_trial_is_beyond_the_bound(
    test: str, values: tuple[float, ...], status: Status
) -> None:
    (one,) = comparisons(ControlClaim("C", "", (Part(test, arms=("a",), than=0.5),)))
    assert judge(one, Differences(values)).status is status


# -------------------------------------------------------------------------------- events


def events(*counts: tuple[int, int]) -> Events:
    return Events(tuple(Stratum(f"x{i}", ours, 3, theirs, 3) for i, (ours, theirs) in enumerate(counts)))


def test_events_in_strata_succeed_where_one_stratum_cannot() -> None:
    fewer = part("fewer")
    assert judge(fewer, events((0, 2))).status is UNDECIDED
    assert judge(fewer, events((0, 2), (1, 3), (3, 3))).status is SUPPORTED
    assert judge(fewer, events((2, 0), (3, 1))).status is OPPOSED


def test_all_or_no_event_says_nothing_and_is_left_out_of_the_family() -> None:
    nothing = compare_events([Stratum("all", 3, 3, 3, 3), Stratum("none", 0, 3, 0, 3)])
    assert (nothing.more, nothing.fewer, nothing.least_fewer) == (1.0, 1.0, 1.0)
    assert holm([0.04, 1.0], [0.0, 1.0]) == [0.04, 1.0], "a test that cannot succeed costs the other nothing"
    assert holm([0.04, 1.0]) == [0.08, 1.0]


def test_the_exact_test_of_events_keeps_its_level() -> None:
    generator = np.random.default_rng(0)
    rates = np.array([0.3, 0.5, 0.8])
    p = []
    for _ in range(3000):
        ours, theirs = generator.binomial(3, rates), generator.binomial(3, rates)
        p.append(judge(part("fewer"), events(*zip(ours.tolist(), theirs.tolist(), strict=True))).p_for or 0.0)
    assert np.mean(np.array(p) <= 0.05) < 0.05


# -------------------------------------------------------------------------------- error rates of t tests


@pytest.mark.parametrize("seeds", [3, 4, 6])
@pytest.mark.parametrize(("test", "mean"), [("higher", 0.005), ("lower", -0.005), ("no_worse", 0.005)])
def test_at_the_margin_a_claim_is_supported_no_more_often_than_alpha(test: str, mean: float, seeds: int) -> None:
    values = mean + 0.001 * np.random.default_rng(seeds).standard_normal((1000, seeds))
    comparison = part(test)
    wrong = [judge(comparison, Differences(tuple(row), relative=True)).status is SUPPORTED for row in values]
    assert np.mean(wrong) < 0.05 + 0.02


@pytest.mark.parametrize("seeds", [3, 4, 6])
@pytest.mark.parametrize("factor", [1.0, 2.0, 4.0])
def test_a_pooled_spread_is_no_licence_for_an_arm_that_spreads_further(seeds: int, factor: float) -> None:
    """The whole table, with 6 to 14 arms, is in docs/measured/pooling.md."""
    generator = np.random.default_rng(int(10 * factor) + seeds)
    pooled = Spread(1.0, 12 * (seeds - 1))
    spread = np.sqrt((1 + factor**2) / 2)
    values = spread * generator.standard_normal((4000, seeds))
    found = [estimate(row, pooled) for row in values]
    assert np.mean([one is not None and one.p(0.0, Side.ABOVE) < 0.05 for one in found]) < 0.065


def test_the_documents_share_widens_the_interval() -> None:
    values = (0.010, 0.011, 0.012)
    alone, shared = estimate(values), estimate(values, shared=Shared(0.004, 60))
    assert alone is not None
    assert shared is not None
    assert shared.error == pytest.approx(np.hypot(alone.error, 0.004))
    assert alone.df < shared.df <= 62


# -------------------------------------------------------------------------------- verdicts


def claim(name: str = "X", *, covered_at: bool = True, absence: str = "contradicts", control: bool = False) -> Claim:
    return Claim(
        name,
        "",
        (Part("higher", arms=("a",), margin=MARGIN),),
        place="here",
        sentence="so",
        reach="outcome",
        stated=Stated(1e9, 1e12),
        absence=absence,
    )


def finding(status: Status, name: str = "part", p: float = 1e-6, **more: object) -> Finding:
    tested = {SUPPORTED: (p, 1.0, 1.0), OPPOSED: (1.0, p, p), ABSENT: (1.0, 0.4, p), UNDECIDED: (0.5, 0.5, 0.5)}
    p_for, p_against, p_absent = tested.get(status, (None, None, None))
    one = {"absence": "contradicts"} | more
    return Finding(name, status, "", p_for=p_for, p_against=p_against, p_absent=p_absent, **one)  # type: ignore[arg-type]


def outcome(*findings: Finding, covered: bool = True, controls: Iterable[Status] = ()) -> Outcome:
    told = tuple(ControlResult("c", "", (finding(status),)) for status in controls)
    return conclude({"X": Evidence(claim(), findings, told, covered)})["X"].outcome


def test_a_part_that_fails_only_the_correction_is_not_called_unsupported() -> None:
    """Two parts with p 0.04 fail Holm's correction for three tests; their numbers alone support them."""
    parts = (*(finding(SUPPORTED, f"part {p}", p) for p in (1e-6, 0.04, 0.045)), finding(UNDECIDED, "open"))
    verdict = conclude({"X": Evidence(claim(), parts, (), True)})["X"]
    assert (verdict.outcome, verdict.supported) == (Outcome.IN_PART, ("part 1e-06",))
    unsupported = verdict.reason.partition("Not supported: ")[2]
    assert [one.name for one in parts if one.name in unsupported] == ["open"]
    assert all(one.name in verdict.reason for one in parts)


NOT_RUN, OUT = finding(Status.NOT_RUN, "other"), finding(Status.OUT_OF_REACH, "other")


@pytest.mark.parametrize(
    ("findings", "covered", "controls", "expected"),
    [
        ([finding(SUPPORTED)], True, [], Outcome.REPRODUCED),
        ([finding(SUPPORTED)], False, [], Outcome.REPRODUCED),
        ([finding(SUPPORTED), finding(UNDECIDED, "other")], True, [], Outcome.IN_PART),
        ([finding(SUPPORTED), OUT], True, [], Outcome.IN_PART),
        ([finding(SUPPORTED), NOT_RUN], True, [], Outcome.IN_PART),
        ([finding(SUPPORTED), finding(OPPOSED, "other")], True, [], Outcome.CONTRADICTED),
        ([finding(SUPPORTED), finding(OPPOSED, "other")], False, [], Outcome.IN_PART),
        ([finding(OPPOSED)], True, [], Outcome.CONTRADICTED),
        ([finding(OPPOSED)], False, [SUPPORTED], Outcome.NOT_SEEN),
        ([finding(OPPOSED)], False, [], Outcome.INCONCLUSIVE),
        ([finding(ABSENT)], True, [], Outcome.CONTRADICTED),
        ([finding(ABSENT, absence="not-seen")], True, [SUPPORTED], Outcome.NOT_SEEN),
        ([finding(ABSENT)], False, [SUPPORTED], Outcome.NOT_SEEN),
        ([finding(UNDECIDED)], True, [SUPPORTED], Outcome.INCONCLUSIVE),
        ([finding(SUPPORTED)], True, [UNDECIDED], Outcome.INCONCLUSIVE),
        ([finding(SUPPORTED)], True, [SUPPORTED, OPPOSED], Outcome.INCONCLUSIVE),
        ([finding(OPPOSED)], True, [UNDECIDED], Outcome.INCONCLUSIVE),
        ([finding(SUPPORTED, alone=False), finding(UNDECIDED, "other")], True, [SUPPORTED], Outcome.INCONCLUSIVE),
        ([finding(SUPPORTED, alone=False), finding(ABSENT, "other")], False, [SUPPORTED], Outcome.NOT_SEEN),
        ([finding(SUPPORTED)], True, [SUPPORTED, Status.NOT_RUN], Outcome.NOT_RUN),
        ([finding(OPPOSED)], True, [Status.NOT_RUN], Outcome.NOT_RUN),
        ([finding(OPPOSED)], True, [UNDECIDED, Status.NOT_RUN], Outcome.INCONCLUSIVE),
        ([NOT_RUN, OUT], True, [], Outcome.NOT_RUN),
        ([OUT], True, [], Outcome.OUT_OF_REACH),
    ],
)
def test_a_verdict_says_no_more_than_its_parts(
    findings: list[Finding], covered: bool, controls: list[Status], expected: Outcome
) -> None:
    assert outcome(*findings, covered=covered, controls=controls) is expected


@pytest.mark.parametrize("status", [SUPPORTED, OPPOSED, ABSENT])
@pytest.mark.parametrize("reach", ["outcome", "mechanism"])
def test_runs_of_the_scale_smoke_decide_nothing_about_training(status: Status, reach: str) -> None:
    of = Evidence(replace(claim(), reach=reach), (finding(status),))
    (here,), (smoke,) = (conclude({"X": one}).values() for one in (of, replace(of, smoke=True)))
    assert here.outcome.decided
    assert smoke.outcome is (Outcome.INCONCLUSIVE if reach == "outcome" else here.outcome)


def test_a_whole_claim_is_as_uncertain_as_its_weakest_part() -> None:
    parts = finding(SUPPORTED, p=1e-6), finding(SUPPORTED, "other", p=0.04)
    assert Evidence(claim(), parts).p_for == 0.04
    assert Evidence(claim(), (*parts, NOT_RUN)).p_for is None


def test_a_p_value_at_the_level_decides() -> None:
    """Three of three events beside none of three have exactly this p value, and no smaller one is possible."""
    assert outcome(finding(SUPPORTED, p=0.05)) is Outcome.REPRODUCED


def test_many_claims_together_take_a_smaller_p() -> None:
    evidence = {str(i): Evidence(claim(str(i)), (finding(UNDECIDED),)) for i in range(20)}
    evidence["X"] = Evidence(claim(), (finding(SUPPORTED, p=0.01),))
    assert conclude(evidence)["X"].outcome is Outcome.INCONCLUSIVE
    assert conclude({"X": evidence["X"]})["X"].outcome is Outcome.REPRODUCED


def test_over_a_whole_report_a_false_verdict_is_no_likelier_than_alpha() -> None:
    """Twelve claims of two parts in a world at their boundary: nothing holds, nothing is opposed."""
    generator = np.random.default_rng(1)
    comparison = part("higher")
    wrong = 0
    reports = 200
    for _ in range(reports):
        evidence = {}
        for name in range(12):
            told = []
            for which in ("a", "b"):
                values = 0.005 + 0.001 * generator.standard_normal(4)
                one = judge(comparison, Differences(tuple(values), relative=True))
                told.append(Finding(**{**vars(one), "name": which}))
            evidence[str(name)] = Evidence(claim(str(name), absence="not-seen"), tuple(told))
        wrong += any(one.outcome.decided for one in conclude(evidence).values())
    assert wrong / reports < 0.05 + 0.04
