"""Verdicts are right by construction: synthetic paired results of known truth give them at known rates."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from fewbits.analysis.engine.data import Differences, NoData
from fewbits.analysis.engine.statistics import Spread
from fewbits.analysis.verdicts import (
    Control,
    Outcome,
    Verdict,
    controlled,
    corrected,
    equivalent,
    every,
    exact,
    higher,
    lower,
    no_worse,
    not_run,
    ordering,
    out_of_reach,
    share_within,
)

REPRODUCED, CONTRADICTED, INCONCLUSIVE = Outcome.REPRODUCED, Outcome.CONTRADICTED, Outcome.INCONCLUSIVE
MARGIN = 0.005  # a relative loss change of 0.5 %
QUIET, LOUD = 0.0008, 0.02  # spreads of paired differences: of branches, and of nano models from scratch
RUNS = 300
CHANCE = 4 * (0.05 * 0.95 / RUNS) ** 0.5  # what a rate of 5 % may be off by


def found(*values: float) -> Differences:
    return Differences(values, relative=True, trials=("aaaa", "bbbb"))


def rates(decide: Callable[[Differences], Verdict], effect: float, sd: float, n: int) -> dict[Outcome, float]:
    samples = np.random.default_rng(n).normal(effect, sd, (RUNS, n))
    counts = Counter(decide(found(*row)).outcome for row in samples.tolist())
    return {outcome: counts[outcome] / RUNS for outcome in Outcome}


# -------------------------------------------------------------------------------- spreads


@pytest.mark.parametrize("decide", [no_worse, equivalent])
def test_a_verdict_is_read_off_the_spread_that_more_than_its_pairs_tell(decide: Callable[..., Verdict]) -> None:
    quiet = found(0.0001, 0.0001, 0.0001)  # by chance
    loud = replace(quiet, spread=Spread(0.008, 20))
    assert decide(quiet, MARGIN).outcome is REPRODUCED
    verdict = decide(loud, MARGIN)
    assert verdict.outcome is INCONCLUSIVE
    assert verdict.mde is not None
    assert verdict.mde == pytest.approx(0.0119, abs=1e-4)
    few = decide(found(0.003, -0.003, 0.0), MARGIN)
    assert few.outcome is INCONCLUSIVE
    assert decide(replace(found(0.003, -0.003, 0.0), spread=Spread(0.0005, 20)), MARGIN).outcome is REPRODUCED


# -------------------------------------------------------------------------------- nulls


@pytest.mark.parametrize("decide", [no_worse, equivalent])
def test_a_null_is_reproduced_where_the_noise_is_small(decide: Callable[..., Verdict]) -> None:
    found = rates(lambda d: decide(d, MARGIN), 0.0, QUIET, 3)
    assert found[REPRODUCED] > 0.95
    assert found[CONTRADICTED] == 0


@pytest.mark.parametrize("decide", [no_worse, equivalent])
def test_an_effect_below_the_margin_is_none_that_counts(decide: Callable[..., Verdict]) -> None:
    found = rates(lambda d: decide(d, MARGIN), MARGIN / 5, QUIET / 2, 4)
    assert found[REPRODUCED] > 0.95


@pytest.mark.parametrize("decide", [no_worse, equivalent])
@pytest.mark.parametrize("n", [2, 3, 5])
def test_an_underpowered_null_is_inconclusive_never_reproduced(decide: Callable[..., Verdict], n: int) -> None:
    """The spread is four times the margin. A sample may look quiet by luck; few of them do."""
    found = rates(lambda d: decide(d, MARGIN), 0.0, LOUD, n)
    assert found[REPRODUCED] <= 0.05 + CHANCE
    assert found[CONTRADICTED] < 0.05 + CHANCE
    assert found[INCONCLUSIVE] > 0.85


def test_what_the_design_could_not_find_is_inconclusive_however_small_it_turned_out() -> None:
    verdict = no_worse(found(0.0045, -0.0045, 0.0), MARGIN)
    assert verdict.outcome is INCONCLUSIVE
    assert verdict.mde is not None
    assert verdict.mde > MARGIN
    assert "underpowered: 3 seeds find a difference of" in verdict.reason
    assert "about " in verdict.reason
    assert "underpowered" in equivalent(found(0.02, -0.02, 0.0), MARGIN).reason


def test_a_design_just_short_of_the_margin_is_underpowered_though_its_test_succeeds() -> None:
    """At three seeds equivalence needs a spread below 0.59 margins, finding the margin one below 0.45."""
    sd = 0.5 * MARGIN
    values = np.array([-1.0, 0.0, 1.0]) * sd
    verdict = no_worse(found(*values), MARGIN)
    assert verdict.p_for is not None
    assert verdict.p_for < 0.05
    assert verdict.outcome is INCONCLUSIVE
    assert no_worse(found(*(values * 0.8)), MARGIN).outcome is REPRODUCED


@pytest.mark.parametrize("decide", [no_worse, equivalent])
def test_a_difference_beyond_the_margin_contradicts_a_null(decide: Callable[..., Verdict]) -> None:
    found = rates(lambda d: decide(d, MARGIN), 3 * MARGIN, QUIET, 3)
    assert found[CONTRADICTED] > 0.95
    assert found[REPRODUCED] == 0


def test_equality_is_falsely_contradicted_no_oftener_for_having_two_sides() -> None:
    samples = np.random.default_rng(8).normal(0.0, LOUD, (2000, 4)).tolist()
    wrong = [equivalent(found(*row), MARGIN / 10).outcome is CONTRADICTED for row in samples]
    assert np.mean(wrong) <= 0.05 + 4 * (0.05 * 0.95 / 2000) ** 0.5


def test_better_is_no_worse_but_not_equal() -> None:
    better = found(-0.021, -0.020, -0.0205)
    assert no_worse(better, MARGIN).outcome is REPRODUCED
    assert equivalent(better, MARGIN).outcome is CONTRADICTED


@pytest.mark.parametrize("decide", [no_worse, equivalent])
def test_at_the_margin_itself_a_false_verdict_of_either_kind_is_rare(decide: Callable[..., Verdict]) -> None:
    found = rates(lambda d: decide(d, MARGIN), MARGIN, QUIET, 4)
    assert found[REPRODUCED] <= 0.05 + CHANCE
    assert found[CONTRADICTED] <= 0.05 + CHANCE


# -------------------------------------------------------------------------------- directions


def test_an_effect_in_the_direction_is_reproduced_and_in_the_other_contradicted() -> None:
    for decide, sign in ((higher, 1), (lower, -1)):
        assert rates(decide, sign * 0.01, QUIET, 3)[REPRODUCED] > 0.95
        assert rates(decide, sign * -0.01, QUIET, 3)[CONTRADICTED] > 0.95


@pytest.mark.parametrize("n", [2, 3, 6])
def test_without_an_effect_a_direction_is_mostly_left_open(n: int) -> None:
    found = rates(higher, 0.0, LOUD, n)
    assert found[REPRODUCED] <= 0.05 + CHANCE
    assert found[CONTRADICTED] <= 0.05 + CHANCE


def test_a_real_effect_that_noise_hides_is_almost_never_contradicted() -> None:
    assert rates(higher, 0.004, LOUD, 3)[CONTRADICTED] < 0.05 + CHANCE


def test_an_effect_below_the_margin_does_not_reproduce_a_direction() -> None:
    rate = rates(lambda d: higher(d, MARGIN), MARGIN / 3, QUIET, 4)
    assert rate[REPRODUCED] == 0
    assert rate[CONTRADICTED] < 0.01, "it points where it should"
    verdict = higher(found(0.0011, 0.0010, 0.0012), MARGIN)
    assert "shown to be smaller than the margin" in verdict.reason


def test_a_claim_of_a_size_is_contradicted_by_its_absence() -> None:
    small = found(0.0011, 0.0010, 0.0012)
    assert higher(small, MARGIN).outcome is INCONCLUSIVE
    assert higher(small, MARGIN, absence_contradicts=True).outcome is CONTRADICTED
    assert rates(lambda d: lower(d, MARGIN, absence_contradicts=True), 0.0, LOUD, 3)[CONTRADICTED] < 0.05 + CHANCE


def test_an_order_needs_all_neighbours_and_falls_with_one() -> None:
    down, up, open_ = found(0.02, 0.021, 0.019), found(-0.02, -0.021, -0.019), found(0.01, -0.012, 0.003)
    assert ordering({"a > b": down, "b > c": down}).outcome is REPRODUCED
    wrong = ordering({"a > b": down, "b > c": up})
    assert wrong.outcome is CONTRADICTED
    assert wrong.reason.startswith("b > c: ")
    left = ordering({"a > b": down, "b > c": open_})
    assert left.outcome is INCONCLUSIVE
    assert [name for name, _ in left.parts] == ["a > b", "b > c"]
    assert left.trials == ("aaaa", "bbbb")


def test_a_false_order_is_contradicted_no_oftener_for_having_many_parts() -> None:
    generator = np.random.default_rng(1)
    samples = generator.normal(0, 1, (RUNS, 6, 4)).tolist()
    outcomes = [ordering({str(i): found(*row) for i, row in enumerate(rows)}).outcome for rows in samples]
    assert outcomes.count(CONTRADICTED) / RUNS <= 0.05 + CHANCE
    assert outcomes.count(REPRODUCED) == 0


# -------------------------------------------------------------------------------- shares, arithmetic, what is not there


def test_a_share_is_judged_by_its_seeds() -> None:
    assert share_within(Differences((0.95, 0.96, 0.955)), 0.93, 0.97).outcome is REPRODUCED
    assert share_within(Differences((0.85, 0.86, 0.855)), 0.93, 0.97).outcome is CONTRADICTED
    assert share_within(Differences((0.90, 0.99, 0.95)), 0.93, 0.97).outcome is INCONCLUSIVE
    assert share_within(Differences((0.95,)), 0.93, 0.97).outcome is INCONCLUSIVE
    with pytest.raises(ValueError, match="the first must be the smaller"):
        share_within(Differences((0.95, 0.96)), 1.0, 0.5)


def test_arithmetic_decides_without_p() -> None:
    assert exact(True, "31 of 31 bits").outcome is REPRODUCED
    wrong = exact(False, "30 of 31 bits")
    assert (wrong.outcome, wrong.p_for, wrong.p_against) == (CONTRADICTED, None, None)
    assert every({"a": exact(True, "x"), "b": wrong}).outcome is CONTRADICTED


def test_one_seed_decides_nothing_whatever_it_shows() -> None:
    for verdict in (no_worse(found(0.0), MARGIN), higher(found(0.5)), equivalent(found(0.0), MARGIN)):
        assert verdict.outcome is INCONCLUSIVE
        assert verdict.interval is None
        assert verdict.mde is None
        assert verdict.n == 1
        assert "one seed" in verdict.reason
    assert higher(found(0.5)).effect == 0.5


def test_identical_arms_are_equal() -> None:
    assert equivalent(found(0.0, 0.0), MARGIN).outcome is REPRODUCED
    assert higher(found(0.0, 0.0)).outcome is INCONCLUSIVE


def test_no_data_and_not_run_are_values() -> None:
    verdict = no_worse(NoData("3 of 3 trials missing", ("cccc",)), MARGIN)
    assert (verdict.outcome, verdict.reason) == (INCONCLUSIVE, "no data: 3 of 3 trials missing")
    assert verdict.trials == ("cccc",)
    assert no_worse(Differences(()), MARGIN).outcome is INCONCLUSIVE
    assert str(not_run("smoke")) == "out of reach: not run at this scale (smoke)"
    assert str(out_of_reach("needs MMLU")) == "out of reach: needs MMLU"
    assert every({"a": not_run("cpu"), "b": not_run("cpu")}).outcome is Outcome.OUT_OF_REACH
    assert every({"a": not_run("cpu"), "b": exact(True, "x")}).outcome is INCONCLUSIVE
    with pytest.raises(ValueError, match="no comparison at all"):
        every({})


def test_a_verdict_says_its_scale() -> None:
    verdict = replace(equivalent(found(0.0001, -0.0001, 0.0), MARGIN), scale="3 M parameters")
    assert str(verdict).startswith("reproduced at 3 M parameters: ")


# -------------------------------------------------------------------------------- divergence


def test_divergence_is_judged_by_how_often_it_happens() -> None:
    assert higher(Differences((), diverged=3)).outcome is REPRODUCED
    assert no_worse(Differences((), diverged=3), MARGIN).outcome is CONTRADICTED
    assert lower(Differences((), baseline_diverged=3)).outcome is REPRODUCED
    assert no_worse(Differences((), baseline_diverged=3), MARGIN).outcome is REPRODUCED
    assert equivalent(Differences((), baseline_diverged=4), MARGIN).outcome is CONTRADICTED
    assert higher(Differences((), diverged=2)).outcome is INCONCLUSIVE
    assert higher(Differences((0.1, 0.1), diverged=1)).outcome is INCONCLUSIVE
    assert "ours diverged in 1 and the baseline in 0" in higher(Differences((0.1, 0.1), diverged=1)).reason


# -------------------------------------------------------------------------------- controls and many claims


def test_a_failed_control_leaves_a_claim_open_and_says_so() -> None:
    good, bad = exact(True, "found"), higher(found(0.001, -0.002, 0.001))
    for decided in (equivalent(found(0.0001, -0.0001, 0.0), MARGIN), lower(found(0.1, 0.11, 0.12))):
        assert controlled(decided, Control.of("e2m1 per tensor", good)).outcome is decided.outcome
        open_ = controlled(decided, Control.of("e2m1 per tensor", bad))
        assert open_.outcome is INCONCLUSIVE
        assert "its control failed (e2m1 per tensor: " in open_.reason
        assert open_.control is not None
        assert not open_.control.passed
    assert controlled(not_run("cpu"), Control.of("x", bad)).outcome is Outcome.OUT_OF_REACH


def test_a_control_of_one_seed_was_not_tested_and_has_not_failed() -> None:
    decided = equivalent(found(0.0001, -0.0001, 0.0), MARGIN)
    for verdict, tested in (
        (higher(found(0.02)), False),
        (higher(NoData("not trained")), False),
        (not_run("paper"), False),
        (higher(found(0.02, -0.03)), True),
        (exact(False, "not found"), True),
    ):
        control = Control.of("e2m1 per tensor", verdict)
        assert control.tested is tested
        assert not control.passed
        open_ = controlled(decided, control)
        assert open_.outcome is INCONCLUSIVE
        assert ("its control failed" if tested else "its control was not tested") in open_.reason


def test_of_many_null_claims_hardly_one_is_found_in_a_whole_report() -> None:
    generator = np.random.default_rng(3)
    false = 0
    for rows in generator.normal(0, 1, (RUNS, 12, 3)).tolist():
        report = corrected({str(i): higher(found(*row)) for i, row in enumerate(rows)})
        false += any(v.outcome is CONTRADICTED for v in report.values())
    assert false / RUNS <= 0.05 + CHANCE


def test_a_claim_that_many_others_outweigh_is_left_open_with_both_p() -> None:
    weak, rest = higher(found(0.010, 0.004, 0.013)), higher(found(0.01, -0.012, 0.003))
    assert weak.outcome is REPRODUCED
    assert corrected({"weak": weak})["weak"].outcome is REPRODUCED
    report = corrected({"weak": weak} | {str(i): rest for i in range(9)} | {"U": exact(True, "x")})
    assert report["weak"].outcome is INCONCLUSIVE
    assert "not among 10 claims tested together" in report["weak"].reason
    assert report["U"].outcome is REPRODUCED, "what arithmetic decides is no test"
    strong = higher(found(0.0100, 0.01001, 0.00999))
    assert corrected({"strong": strong} | {str(i): rest for i in range(9)})["strong"].outcome is REPRODUCED


def test_a_margin_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="margin 0: a positive number"):
        no_worse(found(0.0, 0.0), 0)
    with pytest.raises(ValueError, match="margin -1: 0 or more"):
        higher(found(0.0, 0.0), -1)
