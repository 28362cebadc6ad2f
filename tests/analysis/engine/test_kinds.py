"""Check each statistical test of claims with data whose true effect is known, and the verdicts that follow.

The effects are as stated, opposite, absent, or too small for the number of seeds. Error rates are simulated with few
seeds.
"""

import re
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from fewbits.analysis.engine.claims.findings import ControlResult, Finding, Outcome, Status, Verdict
from fewbits.analysis.engine.claims.schema import Claim, Comparison, ControlClaim, Margin, Part, Stated, comparisons
from fewbits.analysis.engine.claims.tests import judge
from fewbits.analysis.engine.claims.verdicts import Evidence, conclude
from fewbits.analysis.engine.results.data import Differences, Events
from fewbits.analysis.engine.statistics.estimates import Shared, Spread, estimate
from fewbits.analysis.engine.statistics.multiplicity import Stratum, compare_events, holm
from fewbits.analysis.engine.statistics.power import minimum_detectable_effect
from fewbits.analysis.views.claims import shortfall
from tests.messages import names

MARGIN = Margin(0.005, True, "for tests")
SUPPORTED, OPPOSED, ABSENT, UNDECIDED = Status.SUPPORTED, Status.OPPOSED, Status.ABSENT, Status.UNDECIDED
# Standard deviations over seeds: with FEW, tests detect an effect of the margin's size, and with MANY they do not.
FEW, MANY = 0.0005, 0.02


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
    """Check the status that each test gives differences with this mean and this standard deviation over five seeds."""
    assert found(test, mean, spread) is status


def test_a_null_is_shown_only_by_a_design_that_detects_the_margin() -> None:
    """Check that `no_worse` stays undecided if the minimum detectable effect exceeds the margin."""
    wide = judge(part("no_worse"), Differences((-0.07, -0.05, -0.03), relative=True))
    assert wide.mde is not None
    assert wide.mde > MARGIN.value
    assert wide.status is UNDECIDED
    assert wide.underpowered


def test_the_interval_of_a_finding_ends_at_the_margin_that_its_p_value_just_reaches() -> None:
    data = Differences((0.010, 0.011, 0.0135), relative=True)
    interval = judge(part("higher"), data).interval
    assert interval is not None
    at_the_end = replace(part("higher"), margin=Margin(interval.low, True, "for tests"))
    assert judge(at_the_end, data).p_for == pytest.approx(0.05)


def test_without_a_margin_the_sign_of_the_effect_decides() -> None:
    one = judge(replace(part("higher"), margin=None), Differences((0.0010, 0.0011, 0.0012)))
    assert (one.status, one.p_absent) == (SUPPORTED, None)


@pytest.mark.parametrize("test", ["higher", "equivalent", "within"])
def test_two_seeds_are_tested_and_one_is_only_shown(test: str) -> None:
    one = judge(part(test), Differences((0.7,)))
    assert (one.status, one.effect, one.p_for, one.interval) == (UNDECIDED, 0.7, None, None)
    two = judge(part(test), Differences((0.7, 0.7001)))
    assert two.status is (SUPPORTED if test == "higher" else OPPOSED)
    assert two.effect == pytest.approx(0.70005)


@pytest.mark.parametrize(
    ("test", "margin", "bound"), [("within", None, "0.4 to 0.6"), ("above", None, "0.5"), ("higher", MARGIN.value, "")]
)
def test_a_finding_names_its_margin_or_its_bound(test: str, margin: float | None, bound: str) -> None:
    one = judge(part(test), Differences((0.7, 0.71)))
    assert (one.margin, one.bound) == (margin, bound)


def test_a_summary_shows_the_weakest_finding_that_has_an_interval() -> None:
    strong, weak = (judge(part("higher"), Differences((mean, mean + 0.001))) for mean in (0.02, 0.001))
    one_seed = judge(part("higher"), Differences((-3.15,)))
    claim = Claim("X", "It is high.", (part("higher").part,), ours=True)
    shown = [Verdict(claim, Outcome.INCONCLUSIVE, "", some).leading for some in ((strong, one_seed, weak), (one_seed,))]
    assert shown == [weak, one_seed]


@pytest.mark.parametrize(("test", "sign"), [("higher", 1), ("lower", -1), ("no_worse", -1), ("equivalent", 0)])
def test_a_finding_with_a_pooled_spread_says_what_its_own_pairs_would(test: str, sign: int) -> None:
    values = tuple(0.01 * sign + noise for noise in (-0.0001, 0.0, 0.0002))
    alone, pooled = (judge(part(test), Differences(values, spread=spread)) for spread in (None, Spread(0.001, 30)))
    assert alone.p_own is None
    assert pooled.p_own == pytest.approx(alone.p_for)
    assert pooled.p_for != pytest.approx(alone.p_for)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_two_sided_statement_is_opposed_at_twice_the_better_sides_p(sign: int) -> None:
    values = tuple(sign * value for value in (0.004, 0.009, 0.006, 0.008))
    side = "greater" if sign > 0 else "less"
    expected = 2 * stats.ttest_1samp(values, sign * MARGIN.value, alternative=side).pvalue
    assert judge(part("equivalent"), Differences(values)).p_against == pytest.approx(expected)


@pytest.mark.parametrize(("test", "value"), [("equivalent", 0.001), ("within", 0.5)])
def test_equal_values_between_the_bounds_oppose_them_with_a_p_value_of_1(test: str, value: float) -> None:
    assert judge(part(test), Differences((value,) * 5)).p_against == 1.0


# -------------------------------------------------------------------------------- zero variance, bounds, divergence


def test_equal_values_are_tested_by_their_signs() -> None:
    three = judge(part("above"), Differences((1.0, 1.0, 1.0), bounds=(0.0, 1.0)))
    assert (three.status, three.p_for, three.least_p) == (UNDECIDED, 0.125, 0.125)
    five = judge(part("above"), Differences((1.0,) * 5, bounds=(0.0, 1.0)))
    assert (five.status, five.p_for) == (SUPPORTED, 0.5**5)


def test_pairs_of_the_same_bits_say_that_nothing_was_active() -> None:
    for test in ("higher", "lower", "no_worse", "equivalent"):
        one = judge(part(test), Differences((0.0,) * 6, relative=True))
        assert (one.status, one.effect) == (UNDECIDED, 0.0)
        assert "not active" in one.reason


def test_one_pair_of_the_same_bits_among_others_is_a_value_like_any() -> None:
    one = judge(part("no_worse"), Differences((0.0, 0.0005, -0.0005, 0.0002), relative=True))
    assert one.status is SUPPORTED


def test_intervals_of_shares_stay_between_0_and_1() -> None:
    one = judge(part("above"), Differences((0.97, 1.0, 0.99), bounds=(0.0, 1.0)))
    assert one.interval is not None
    assert 0.5 < one.interval.low < 0.99 < one.interval.high <= 1.0


@pytest.mark.parametrize("values", [(0.97, 1.0, 0.99), (0.0, 0.03, 0.01), (0.4, 0.5, 0.7)])
def test_shares_are_tested_and_shown_by_their_arcsines(values: tuple[float, ...]) -> None:
    angles = np.arcsin(np.sqrt(values))
    one = judge(part("above"), Differences(values, bounds=(0.0, 1.0)))
    against = np.arcsin(np.sqrt(0.5))
    assert one.p_for == pytest.approx(stats.ttest_1samp(angles, against, alternative="greater").pvalue)
    low, high = stats.t.interval(0.9, 2, angles.mean(), stats.sem(angles))
    assert one.interval is not None
    assert one.interval.low == pytest.approx(np.sin(max(low, 0.0)) ** 2)
    assert one.interval.high == pytest.approx(np.sin(min(high, np.pi / 2)) ** 2)


def test_a_share_that_rounding_moved_beyond_1_is_1() -> None:
    """Check that a share above 1 by a rounding error is tested as if it were 1."""
    beyond, at = ((value, 0.9, 0.95) for value in (1 + 1e-15, 1.0))
    assert judge(part("above"), Differences(beyond, bounds=(0.0, 1.0))).p_for == pytest.approx(
        judge(part("above"), Differences(at, bounds=(0.0, 1.0))).p_for
    )


@pytest.mark.parametrize(("values", "ends"), [((0.97, 0.5, -0.9), (-1.0, 1.0)), ((0.1, 0.11, 0.12), (0.093, 0.127))])
def test_an_interval_stays_within_the_limits_of_its_values(
    values: tuple[float, ...], ends: tuple[float, float]
) -> None:
    one = judge(part("higher"), Differences(values, bounds=(-1.0, 1.0)))
    assert one.interval is not None
    assert (one.interval.low, one.interval.high) == pytest.approx(ends, abs=5e-4)


def test_numbers_have_a_minimum_detectable_effect_and_shares_have_none() -> None:
    values = (0.6, 0.65, 0.72)
    expected = minimum_detectable_effect(float(np.std(values, ddof=1)), 3)
    assert judge(part("above"), Differences(values)).mde == pytest.approx(expected)
    assert judge(part("above"), Differences(values, bounds=(0.0, 1.0))).mde is None


def test_divergence_is_worse_than_any_loss() -> None:
    data = Differences((), relative=True, diverged=3)
    assert judge(part("higher"), data).status is SUPPORTED
    assert judge(part("no_worse"), data).status is OPPOSED
    assert judge(part("lower"), data).status is OPPOSED
    one = judge(part("higher"), data)
    assert (one.effect, one.relative, one.n) == (None, True, 3)


@pytest.mark.parametrize(
    ("ours", "theirs", "p_against", "status"),
    [
        (4, 0, 2 / 70, OPPOSED),
        (0, 4, 2 / 70, OPPOSED),
        (3, 0, 2 / 20, UNDECIDED),
        (1, 1, 1.0, UNDECIDED),
    ],
)
def test_divergence_can_oppose_equivalence_and_never_supports_it(
    ours: int, theirs: int, p_against: float, status: Status
) -> None:
    one = judge(part("equivalent"), Differences((), relative=True, diverged=ours, baseline_diverged=theirs))
    assert (one.status, one.p_for, one.least_p) == (status, 1.0, 1.0)
    assert one.p_against == pytest.approx(p_against)


def test_trials_that_diverged_have_no_number_of_their_own() -> None:
    one = judge(part("above"), Differences((), diverged=3))
    assert (one.status, one.effect, one.p_for) == (UNDECIDED, None, None)
    assert judge(part("above"), Differences((0.6, 0.61, 0.62), diverged=3)).status is SUPPORTED


@pytest.mark.parametrize(
    ("test", "values", "status"),
    [
        ("all_above", (0.6, 0.7), SUPPORTED),
        ("all_above", (0.4, 0.7), OPPOSED),
        ("all_above", (0.5, 0.7), OPPOSED),
        ("all_below", (0.4, 0.3), SUPPORTED),
        ("all_below", (0.4, 0.7), OPPOSED),
        ("all_below", (0.4, 0.5), OPPOSED),
        ("all_below", (0.6,), OPPOSED),
    ],
)
def test_an_observation_holds_if_every_trial_is_beyond_the_bound(
    test: str, values: tuple[float, ...], status: Status
) -> None:
    (one,) = comparisons(ControlClaim("C", "", (Part(test, arms=("a",), than=0.5),)))
    found = judge(one, Differences(values))
    assert found.status is status
    assert found.effect == pytest.approx(np.mean(values))
    assert names(found.reason, f"{test.removeprefix('all_')} 0.5")


# -------------------------------------------------------------------------------- events


def events(*counts: tuple[int, int]) -> Events:
    return Events(tuple(Stratum(f"x{i}", ours, 3, theirs, 3) for i, (ours, theirs) in enumerate(counts)))


def test_events_in_strata_succeed_where_one_stratum_cannot() -> None:
    fewer = part("fewer")
    assert judge(fewer, events((0, 2))).status is UNDECIDED
    assert judge(fewer, events((0, 2), (1, 3), (3, 3))).status is SUPPORTED
    assert judge(fewer, events((2, 0), (3, 1))).status is OPPOSED


def test_the_effect_of_events_is_the_difference_of_their_shares() -> None:
    one = judge(part("fewer"), Events((Stratum("all", 1, 2, 1, 4),)))
    assert (one.effect, one.relative, one.n, one.unit) == (1 / 2 - 1 / 4, False, 2, "trial")


@pytest.mark.parametrize("stratum", [Stratum("all", 0, 0, 1, 3), Stratum("all", 1, 3, 0, 0)])
def test_without_trials_of_both_arms_events_are_not_tested(stratum: Stratum) -> None:
    one = judge(part("fewer"), Events((stratum,)))
    assert (one.status, one.p_for, one.effect) == (UNDECIDED, None, None)


def test_events_that_are_too_few_for_the_level_say_the_least_p() -> None:
    assert names(judge(part("fewer"), events((0, 2))).reason, "0.2")
    enough = judge(part("fewer"), events((1, 2)))
    assert (enough.status, enough.least_p) == (UNDECIDED, 0.05)
    assert not names(enough.reason, "0.05")


def test_all_or_no_event_says_nothing_and_is_left_out_of_the_family() -> None:
    """Check events in all trials or in none: their test cannot be significant, so Holm's correction omits it."""
    nothing = compare_events([Stratum("all", 3, 3, 3, 3), Stratum("none", 0, 3, 0, 3)])
    assert (nothing.more, nothing.fewer, nothing.least_fewer) == (1.0, 1.0, 1.0)
    assert holm([0.04, 1.0], [0.0, 1.0]) == [0.04, 1.0], "a test that cannot be significant is not corrected for"
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
    """Check that a verdict does not call parts unsupported that only Holm's correction makes insignificant.

    Two of the claim's four parts (p 0.04 and 0.045) are significant before the correction, but not after it.
    """
    parts = (*(finding(SUPPORTED, f"part {p}", p) for p in (1e-6, 0.04, 0.045)), finding(UNDECIDED, "open"))
    verdict = conclude({"X": Evidence(claim(), parts, (), True)})["X"]
    assert (verdict.outcome, verdict.supported) == (Outcome.IN_PART, ("part 1e-06",))
    unsupported = verdict.reason.partition("Not supported: ")[2]
    assert [one.name for one in parts if one.name in unsupported] == ["open"]
    assert all(one.name in verdict.reason for one in parts)


def verdict_of(*findings: Finding, more: int = 0, covered: bool = True) -> Verdict:
    """Return the verdict on a claim in a report with `more` other claims, which are undecided.

    covered: the runs are large enough to contradict the other claims, so that these claims count in the correction.
    """
    undecided = {str(i): Evidence(claim(str(i)), (finding(UNDECIDED),), covered=covered) for i in range(more)}
    return conclude(undecided | {"X": Evidence(claim(), findings)})["X"]


def test_a_summary_says_why_a_claim_is_reproduced_only_in_part() -> None:
    """Check that comparisons that fail the correction, and those that are not supported, are counted separately."""
    parts = (*(finding(SUPPORTED, f"part {p}", p) for p in (1e-6, 0.04, 0.045)), finding(UNDECIDED, "open"), OUT)
    verdict = conclude({"X": Evidence(claim(), parts, (), True)})["X"]
    before, undecided, out = shortfall(verdict).split("; ")
    assert before.startswith("2 ")
    assert (undecided, out) == ("1 undecided", "1 out of reach")
    assert shortfall(verdict_of(finding(SUPPORTED))) == ""


def test_the_p_value_before_the_correction_is_that_of_the_weakest_part() -> None:
    """Check that a claim that fails only the correction names the greatest p of its parts and the corrected p.

    The claim is one of ten, so that 0.04 becomes 0.4.
    """
    verdict = verdict_of(finding(SUPPORTED, "one", 0.03), finding(SUPPORTED, "other", 0.04), more=9)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert re.findall(r"0\.\d+", verdict.reason) == ["0.04", "0.4"]


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
    """Check that p = 0.05 is significant; it is the least p value of 3 events in 3 trials compared with 0 in 3."""
    assert outcome(finding(SUPPORTED, p=0.05)) is Outcome.REPRODUCED


def test_many_claims_together_take_a_smaller_p() -> None:
    evidence = {str(i): Evidence(claim(str(i)), (finding(UNDECIDED),)) for i in range(20)}
    evidence["X"] = Evidence(claim(), (finding(SUPPORTED, p=0.01),))
    assert conclude(evidence)["X"].outcome is Outcome.INCONCLUSIVE
    assert conclude({"X": evidence["X"]})["X"].outcome is Outcome.REPRODUCED


def test_contradictions_are_corrected_over_the_claims_that_runs_can_contradict() -> None:
    opposed = finding(OPPOSED, p=0.01)
    assert verdict_of(opposed).outcome is Outcome.CONTRADICTED
    assert verdict_of(finding(OPPOSED, p=0.05)).outcome is Outcome.CONTRADICTED, "p equal to the level is significant"
    many = verdict_of(opposed, more=20)
    assert many.outcome is Outcome.INCONCLUSIVE
    assert names(many.reason, 21, "0.01", "0.21")
    assert verdict_of(opposed, more=20, covered=False).outcome is Outcome.CONTRADICTED


def test_parts_are_corrected_over_the_parts_of_claims_with_several() -> None:
    other = finding(Status.NOT_RUN, "other")
    for p, more in ((0.01, 20), (0.05, 0)):
        verdict = verdict_of(finding(SUPPORTED, p=p), other, more=more)
        assert (verdict.outcome, verdict.supported) == (Outcome.IN_PART, ("part",))
        assert names(verdict.reason.partition("Not supported: ")[2], "other")


def test_a_claim_that_is_supported_only_before_correction_says_over_how_many_claims() -> None:
    verdict = verdict_of(finding(SUPPORTED, p=0.01), more=20)
    assert (verdict.outcome, verdict.supported) == (Outcome.INCONCLUSIVE, ())
    assert names(verdict.reason, 21, "0.01", "0.21")


def test_a_claim_can_reach_no_smaller_p_than_each_of_its_parts() -> None:
    assert Evidence(claim(), (finding(SUPPORTED), finding(SUPPORTED, "other", least_p=0.125))).least_p == 0.125


def test_the_p_value_against_a_part_is_that_of_absence_where_absence_contradicts() -> None:
    tested = replace(finding(OPPOSED), p_against=0.01, p_absent=0.001)
    for one, p in (
        (tested, 0.001),
        (replace(tested, absence="not-seen"), 0.01),
        (replace(tested, p_absent=None), 0.01),
    ):
        assert Evidence(claim(), (one,)).p_against == p


def test_arithmetic_decides_without_a_correction() -> None:
    """Check that exact checks decide a claim among many others without a correction for multiple tests."""
    holds, fails = (Finding("", status, "2 of 2 codes", "exact") for status in (SUPPORTED, OPPOSED))
    for one, expected in ((holds, Outcome.REPRODUCED), (fails, Outcome.CONTRADICTED)):
        verdict = verdict_of(one, more=20)
        assert (verdict.outcome, verdict.reason) == (expected, "2 of 2 codes")
    both = (replace(fails, name="codes"), finding(OPPOSED, "loss", p=0.04))
    assert verdict_of(*both, more=20).outcome is Outcome.CONTRADICTED


# -------------------------------------------------------------------------------- reasons


def test_a_verdict_gives_the_reason_of_its_only_part_or_counts_its_parts() -> None:
    one = replace(finding(SUPPORTED), reason="0.2 %")
    assert verdict_of(one).reason == "0.2 %"
    assert names(verdict_of(one, replace(one, name="other")).reason, 2)
    opposed = replace(finding(OPPOSED, "loss"), reason="0.2 %")
    assert names(verdict_of(opposed).reason, "loss", "0.2 %")


@pytest.mark.parametrize(("parts", "shown"), [(2, 2), (4, 4), (5, 3), (7, 3)])
def test_of_many_reasons_some_are_given_and_the_others_counted(parts: int, shown: int) -> None:
    reason = verdict_of(*(finding(OPPOSED, f"part {i}") for i in range(parts))).reason
    assert [f"part {i}" in reason for i in range(parts)] == [i < shown for i in range(parts)]
    assert ("more" in reason) == (shown < parts)
    assert shown == parts or names(reason, parts - shown)


def test_parts_that_say_nothing_alone_are_named_beside_what_is_missing() -> None:
    """Check a claim whose supported part has `alone=False`, so that it proves nothing without the other part.

    The other part is out of reach. The verdict is inconclusive, and its reason names the one part as supported and the
    other as not supported.
    """
    verdict = verdict_of(finding(SUPPORTED, "without noise", alone=False), finding(Status.OUT_OF_REACH, "other"))
    supported, _, missing = verdict.reason.partition("Not supported: ")
    assert (verdict.outcome, verdict.supported) == (Outcome.INCONCLUSIVE, ())
    assert names(supported, "without noise")
    assert names(missing, "other")
    assert not names(missing, "without noise")


# -------------------------------------------------------------------------------- a whole report


def test_over_a_whole_report_a_false_verdict_is_no_likelier_than_alpha() -> None:
    """Check that at most 5 % of simulated reports have a wrong verdict, with a tolerance of 4 percentage points.

    A report has twelve claims with two parts each. All true effects equal the margin, so any decided verdict is wrong.
    """
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
