"""Check statistics by independent computations, and their error rates and coverage by simulations."""

import math
import statistics as standard
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import ArrayLike
from scipy import stats

from fewbits.analysis.engine.statistics.estimates import (
    ALPHA,
    Interval,
    Side,
    Spread,
    Summary,
    checked,
    differences,
    estimate,
    median_interval,
    pooled,
    pooled_by_kind,
    pseudo_values,
    summary,
)
from fewbits.analysis.engine.statistics.multiplicity import Stratum, compare_events, holm
from fewbits.analysis.engine.statistics.power import (
    detectable,
    minimum_detectable_effect,
    planned_effect,
    power,
    required_n,
    seeds_needed,
)
from tests.messages import naming

FEW = [0.31, 0.12, 0.45, -0.02, 0.27]
T_975_4 = 2.776445105  # Student's t, from printed tables
T_95_4 = 2.131846786


def t_test(values: ArrayLike, against: float = 0.0, spread: Spread | None = None) -> float | None:
    """Return the two-sided p value of a t test: twice the smaller of the two one-sided p values, at most 1.

    Return None for fewer than two values. against: the mean under the null hypothesis.
    """
    found = estimate(values, spread)
    return None if found is None else min(1.0, 2 * min(found.p(against, side) for side in Side))


def equivalence(values: ArrayLike, margin: float) -> float:
    """Return the p value of an equivalence test: the greater p value of its two one-sided tests."""
    found = estimate(values)
    assert found is not None
    return max(found.p(-margin, Side.ABOVE), found.p(margin, Side.BELOW))


def more_events(ours: int, of_ours: int, theirs: int, of_theirs: int) -> float:
    return compare_events([Stratum("all", ours, of_ours, theirs, of_theirs)]).more


# -------------------------------------------------------------------------------- samples and pairs


def test_pseudo_values_of_a_linear_number_are_the_seeds_own() -> None:
    rows = [{"a": a, "b": 2 - a * a} for a in FEW]
    found = pseudo_values(rows, lambda row: 3 * row["a"] - row["b"] + 1)
    assert found == pytest.approx([3 * row["a"] - row["b"] + 1 for row in rows])
    assert pseudo_values(rows[:1], lambda row: row["a"]) == FEW[:1]


def test_two_seeds_have_the_pseudo_values_of_the_whole_and_of_the_other_seed() -> None:
    rows = [{"a": 1.0, "b": 2.0}, {"a": 3.0, "b": 4.0}]
    found = pseudo_values(rows, lambda row: row["a"] / row["b"])
    assert found == pytest.approx([2 * 4 / 6 - 3 / 4, 2 * 4 / 6 - 1 / 2])


@pytest.mark.parametrize(("seeds", "spread"), [(3, 0.07), (4, 0.07), (18, 0.10)])
def test_the_interval_of_a_quotient_of_noisy_costs_covers_the_true_one_as_often_as_it_says(
    seeds: int, spread: float
) -> None:
    """The 90 % interval of a quotient of noisy costs contains the true quotient in 85 to 95 % of the simulations.

    The true quotient is 0.36 % / 0.15 % = 2.4.

    spread: the standard deviation over seeds of numerator and denominator, in percent.
    """
    random = np.random.default_rng(1)
    covered, own = 0, []
    for _ in range(400):
        costs = random.normal((0.15, 0.36), spread, (seeds, 2))
        rows = [{"small": small, "large": large} for small, large in costs.tolist()]
        found = estimate(pseudo_values(rows, lambda row: row["large"] / row["small"]))
        assert found is not None
        interval = found.interval(0.90)
        covered += interval.low <= 2.4 <= interval.high
        own.append(np.mean([row["large"] / row["small"] for row in rows if row["small"] > 0]))
    assert 0.85 * 400 <= covered <= 0.95 * 400
    assert seeds < 18 or np.median(own) > 3.0, "the mean of single seeds' quotients would be far from 2.4"


def test_differences_are_pair_by_pair() -> None:
    assert differences([1.5, 2.0], [1.0, 2.5]).tolist() == [0.5, -0.5]
    assert differences([1.5, 2.0], [1.0, 2.5], relative=True).tolist() == [0.5, -0.2]
    assert differences([-1.0], [-2.0], relative=True).tolist() == [0.5], "positive, because -1 is higher than -2"


def test_what_is_not_finite_is_refused_by_its_place() -> None:
    with pytest.raises(ValueError, match=r"baseline\[1\] is nan"):
        differences([1.0, 2.0], [1.0, math.nan])
    with pytest.raises(ValueError, match=r"ours\[0\] is inf"):
        differences([math.inf, 2.0], [1.0, 2.0])
    with pytest.raises(ValueError, match=r"values\[2\] is nan"):
        summary([1, 2, math.nan])


def test_what_does_not_pair_is_refused() -> None:
    with pytest.raises(ValueError, match="3 values of ours and 2 of the baseline"):
        differences([1, 2, 3], [1, 2])
    with pytest.raises(ValueError, match=r"baseline\[1\] is 0"):
        differences([1, 2], [1, 0], relative=True)
    with pytest.raises(ValueError, match="1 or more numbers"):
        checked([])


def test_a_summary_is_the_mean_its_error_and_students_interval() -> None:
    s = summary(FEW)
    error = standard.stdev(FEW) / math.sqrt(5)
    assert s.mean == pytest.approx(standard.mean(FEW))
    assert s.sd == pytest.approx(standard.stdev(FEW))
    assert s.interval is not None
    assert s.interval.low == pytest.approx(s.mean - T_975_4 * error)
    assert s.interval.high == pytest.approx(s.mean + T_975_4 * error)
    assert s.interval.level == 0.95


def test_one_value_has_a_mean_alone() -> None:
    assert summary([3.0]) == Summary(3.0, None, None)
    assert estimate([3.0]) is None


@pytest.mark.parametrize("level", [-0.5, 0.0, 1.0, 1.5])
def test_a_level_that_is_not_between_0_and_1_is_refused(level: float) -> None:
    with pytest.raises(ValueError, match=naming("level", level)):
        summary(FEW, level)


def test_equal_values_have_an_interval_that_is_a_point() -> None:
    s = summary([0.1, 0.1, 0.1])  # their computed mean is not exactly 0.1, so a naive spread would not be 0
    assert s.sd == 0
    assert s.interval == Interval(s.mean, s.mean, 0.95)
    assert t_test([0.0, 0.0]) == 1.0
    assert t_test([0.1, 0.1, 0.1]) == 2 * 0.5**3, "a test of signs"
    equal = estimate([0.1, 0.1, 0.1])
    assert equal is not None
    assert equal.p(0.0, Side.BELOW) == 1.0
    assert equivalence([0.1, 0.1], 0.2) == 0.5**2
    assert equivalence([0.3, 0.3], 0.2) == 1.0
    assert minimum_detectable_effect(0.0, 2) == 0.0


@pytest.mark.parametrize("n", [2, 3, 5, 12])
def test_the_interval_covers_the_truth_as_often_as_it_says(n: int) -> None:
    generator = np.random.default_rng(n)
    hits = 0
    for row in generator.normal(0.7, 3.0, (2000, n)):
        interval = summary(row, 0.9).interval
        assert interval is not None
        hits += interval.low <= 0.7 <= interval.high
    assert hits / 2000 == pytest.approx(0.9, abs=4 * math.sqrt(0.09 / 2000))


# -------------------------------------------------------------------------------- tests


@given(st.lists(st.floats(-5, 5).map(lambda x: round(x, 3)), min_size=2, max_size=8), st.floats(-1, 1))
def test_the_t_test_is_scipys(values: list[float], against: float) -> None:
    if max(values) - min(values) < 1e-3:
        return
    found = estimate(values)
    assert found is not None
    assert found.error == pytest.approx(standard.stdev(values) / math.sqrt(len(values)))
    for side in Side:
        expected = stats.ttest_1samp(values, against, alternative=str(side)).pvalue
        assert found.p(against, side) == pytest.approx(expected, abs=1e-9)


def test_equivalence_at_a_level_is_an_interval_within_the_margin() -> None:
    interval = summary(FEW, 0.9).interval
    assert interval is not None
    assert interval.high == pytest.approx(standard.mean(FEW) + T_95_4 * standard.stdev(FEW) / math.sqrt(5))
    for margin in np.linspace(0.2, 0.6, 41):
        assert (equivalence(FEW, float(margin)) < 0.05) == (-margin < interval.low and interval.high < margin)


@pytest.mark.parametrize("n", [2, 3, 6])
def test_equivalence_is_wrongly_found_no_oftener_than_its_level(n: int) -> None:
    """An equivalence test has 5 % false positives, its level, if the true effect equals the margin and noise is small.

    At the margin they are most frequent. With much noise, their rate does not exceed 5 %.
    """
    generator = np.random.default_rng(n)
    p = [equivalence(row, 1.0) for row in generator.normal(1.0, 0.05, (2000, n))]
    rate = float(np.mean([value is not None and value < 0.05 for value in p]))
    assert rate == pytest.approx(0.05, abs=4 * math.sqrt(0.05 * 0.95 / 2000))
    p = [equivalence(row, 1.0) for row in generator.normal(1.0, 3.0, (2000, n))]
    assert np.mean([value is not None and value < 0.05 for value in p]) < 0.06


def test_three_of_three_beside_none_of_three_is_one_in_twenty() -> None:
    """The p value for more events in one sample, such as 3 of 3 against 0 of 3, is that of Fisher's exact test."""
    assert more_events(3, 3, 0, 3) == 1 / 20
    for counts in ((2, 5, 1, 4), (0, 3, 0, 3), (4, 4, 4, 4), (5, 6, 1, 9)):
        ours, of_ours, theirs, of_theirs = counts
        table = [[ours, of_ours - ours], [theirs, of_theirs - theirs]]
        assert more_events(*counts) == pytest.approx(stats.fisher_exact(table, "greater").pvalue)
    assert more_events(0, 3, 3, 3) == 1.0
    with pytest.raises(ValueError, match="4 of 3"):
        more_events(4, 3, 0, 3)


@pytest.mark.parametrize(("share", "pooled_is_used"), [(0.79, False), (0.81, True)])
def test_a_pooled_spread_is_widened_and_used_unless_the_values_spread_further(
    share: float, pooled_is_used: bool
) -> None:
    """An estimate uses the larger of two standard deviations: that of its values, and 1.25 times the pooled one.

    share: the standard deviation pooled over arms, divided by that of the values.
    """
    own = standard.stdev(FEW)
    found = estimate(FEW, Spread(share * own, 20))
    assert found is not None
    assert found.own is not pooled_is_used
    assert found.spread.sd == pytest.approx(1.25 * share * own if pooled_is_used else own)
    assert (found.spread.df, found.df) == ((20, 20) if pooled_is_used else (4, 4))


# -------------------------------------------------------------------------------- power


@pytest.mark.parametrize("n", [2, 3, 5, 10])
def test_the_minimum_detectable_effect_is_found_four_times_in_five(n: int) -> None:
    sd = 0.4
    effect = minimum_detectable_effect(sd, n)
    assert power(effect, sd, n) == pytest.approx(0.8, abs=1e-6)
    samples = np.random.default_rng(n).normal(effect, sd, (2000, n))
    p = [one.p(0.0, Side.ABOVE) for row in samples if (one := estimate(row)) is not None]
    assert np.mean([value < 0.05 for value in p]) == pytest.approx(0.8, abs=0.03)


def test_power_is_that_of_printed_tables() -> None:
    """The numbers of pairs that a test needs agree with printed tables.

    For example, one-sided tests at a level of 5 % with a power of 80 % need 27 pairs for an effect of 0.5 standard
    deviations, and 8 pairs for an effect of 1 standard deviation.
    """
    assert required_n(1.0, 0.5) == 27
    assert required_n(1.0, 1.0) == 8
    assert required_n(2.0, 1.0) == 27
    assert required_n(1.0, 0.8) == 12
    assert power(0.5, 1.0, 27) == pytest.approx(0.8118, abs=1e-4)


def test_power_is_scipys_noncentral_t_where_that_has_one() -> None:
    for n, effect in ((3, 0.5), (5, 1.5), (12, 0.7), (200, 0.2)):
        expected = stats.nct.sf(stats.t.isf(0.05, n - 1), n - 1, effect * math.sqrt(n))
        assert power(effect, 1.0, n) == pytest.approx(expected, abs=1e-8)
    assert power(8.0, 1.0, 2) == pytest.approx(0.92, abs=0.01), "scipy's noncentral t gives NaN here"


def test_power_without_an_effect_is_the_level() -> None:
    assert power(0.0, 1.0, 5) == pytest.approx(0.05)


def test_the_required_number_is_the_least_that_suffices() -> None:
    for effect in (0.3, 0.7, 1.1, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 8.0):
        n = required_n(1.0, effect)
        assert n is not None
        assert power(effect, 1.0, n) >= 0.8
        assert n == 2 or power(effect, 1.0, n - 1) < 0.8
    assert required_n(1.0, 0.01, most=200) is None
    assert required_n(0.0, 0.1) == 2


def test_an_estimate_detects_what_its_spread_and_seeds_detect() -> None:
    for values in (FEW, FEW[:2]):
        found, sd = estimate(values), standard.stdev(values)
        assert found is not None
        assert detectable(found) == pytest.approx(minimum_detectable_effect(sd, len(values)))
        assert seeds_needed(found, sd) == 8, "the number in printed tables for an effect of one standard deviation"
        assert seeds_needed(found, sd / 100) is None
    equal = estimate([0.1, 0.1, 0.1])
    assert equal is not None
    assert (detectable(equal), seeds_needed(equal, 0.2)) == (None, 3)


def test_with_a_pooled_spread_every_seed_adds_as_many_degrees_of_freedom_as_the_seeds_before() -> None:
    found = estimate(FEW, Spread(1.0, 20))  # 20 degrees of freedom for 5 seeds: 5 for each seed after the first
    assert found is not None
    assert detectable(found) == pytest.approx(minimum_detectable_effect(1.25, 5, 20))
    least = minimum_detectable_effect(1.25, 2, 5)
    assert (seeds_needed(found, 1.001 * least), seeds_needed(found, 0.999 * least)) == (2, 3)


def test_a_design_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="n 1"):
        power(1, 1, 1)
    with pytest.raises(ValueError, match=naming("sd", 0)):
        power(1, 0, 3)


def test_power_with_a_better_known_spread_is_that_of_its_degrees_of_freedom() -> None:
    shift = 1.5 * math.sqrt(3)
    assert power(1.5, 1.0, 3, df=20) == pytest.approx(stats.nct.sf(stats.t.isf(0.05, 20), 20, shift), abs=1e-8)
    assert power(1.5, 1.0, 3, df=20) > power(1.5, 1.0, 3)
    assert minimum_detectable_effect(1.0, 3, df=2) == minimum_detectable_effect(1.0, 3)
    n = required_n(1.0, 1.2, each=10)
    assert n is not None
    assert power(1.2, 1.0, n, df=10 * (n - 1)) >= 0.8 > power(1.2, 1.0, n - 1, df=10 * (n - 2))


# -------------------------------------------------------------------------------- one spread of many arms


def layout(arms: int, seeds: int, sd: float, generator: np.random.Generator) -> dict[str, list[float]]:
    """Return {arm: values by seed}: the sum of a random level of the arm, a random level of the seed, and noise."""
    level = generator.normal(0, 5, (arms, 1)) + generator.normal(0, 50, (1, seeds))
    return {f"arm {i}": row.tolist() for i, row in enumerate(level + generator.normal(0, sd, (arms, seeds)))}


def test_the_pooled_spread_is_the_mean_square_over_all_pairs_of_arms() -> None:
    arms = layout(6, 4, 1.0, np.random.default_rng(1))
    found = pooled(arms)
    assert found is not None
    pairs = [differences(arms[a], arms[b]).var(ddof=1) for a in arms for b in arms if a < b]
    assert found.spread.sd == pytest.approx(math.sqrt(np.mean(pairs)))
    assert found.spread.df == 5 * 3
    assert found.arms == arms.keys()


def test_tests_with_the_pooled_spread_err_no_more_often_than_they_say() -> None:
    generator, wrong = np.random.default_rng(2), 0
    for _ in range(1000):
        noise = {f"arm {i}": row.tolist() for i, row in enumerate(generator.normal(0, 1, (8, 3)))}
        found = pooled(noise)
        assert found is not None
        if {"arm 0", "arm 1"} <= found.arms:
            p = t_test(differences(noise["arm 0"], noise["arm 1"]), spread=found.spread)
            wrong += p is not None and p < 0.05
    assert wrong / 1000 < 0.05


def test_an_arm_that_spreads_more_than_chance_is_left_out_and_gains_nothing() -> None:
    generator = np.random.default_rng(3)
    arms = layout(8, 3, 1.0, generator) | {"wild": generator.normal(0, 100, 3).tolist()}
    found = pooled(arms)
    assert found is not None
    assert found.unlike == {"wild"}
    assert "wild" not in found.arms
    assert found.spread.sd < 3


def test_of_arms_that_spread_alike_one_is_left_out_as_often_as_is_said() -> None:
    """If all arms have equal noise, an arm is wrongly left out of the pooled standard deviation in 5 % of cases."""
    generator = np.random.default_rng(8)
    drawn = ({f"arm {i}": row.tolist() for i, row in enumerate(generator.normal(0, 1, (4, 3)))} for _ in range(2000))
    found = [pooled(arms) for arms in drawn]
    assert np.mean([one is not None and bool(one.unlike) for one in found]) == pytest.approx(0.05, abs=0.015)


def test_of_three_arms_one_that_spreads_more_leaves_the_pair() -> None:
    """An arm with far more noise is left out; the standard deviation is then pooled over the other two arms."""
    arms = layout(2, 4, 1.0, np.random.default_rng(5))
    found = pooled(arms | {"wild": [0.0, 3000.0, -2000.0, 500.0]})
    assert found is not None
    assert found.unlike == {"wild"}
    assert found.spread.df == 3
    assert found.spread.sd == pytest.approx(differences(arms["arm 0"], arms["arm 1"]).std(ddof=1))


def test_an_arm_that_is_another_one_counts_once() -> None:
    """Check that an arm with the same values as another one does not change the pooled standard deviation."""
    arms = layout(4, 3, 1.0, np.random.default_rng(4))
    found, alone = pooled(arms | {"twin": arms["arm 0"]}), pooled(arms)
    assert found is not None
    assert alone is not None
    assert found.spread == alone.spread
    assert "twin" in found.arms


def kinds_of(arms: Mapping[str, object]) -> dict[str, str]:
    return {name: name.split()[0] for name in arms}


def quiet_and_loud(quiet: int, loud: int) -> dict[str, list[float]]:
    """Return {arm: values by seed}: a random level of each seed plus noise, which is ten times as large for loud arms.

    quiet, loud: the number of arms of each kind.
    """
    generator = np.random.default_rng(6)
    levels = generator.normal(0, 50, 4)
    sizes = {"quiet": (quiet, 1.0), "loud": (loud, 10.0)}
    return {
        f"{kind} {i}": (levels + generator.normal(0, sd, 4)).tolist()
        for kind, (number, sd) in sizes.items()
        for i in range(number)
    }


def test_each_kind_of_arms_has_a_spread_of_its_own() -> None:
    arms = quiet_and_loud(4, 7)
    found = pooled_by_kind(arms, kinds_of(arms))
    assert found is not None
    of = {
        kind: pooled({name: row for name, row in arms.items() if name.startswith(kind)}) for kind in ("quiet", "loud")
    }
    assert found.of_kinds == of
    quiet, loud = found.of("quiet 0", "quiet 3"), found.of("loud 0", "loud 1")
    assert quiet is not None
    assert loud is not None
    assert quiet.sd < 3 < loud.sd
    assert found.of("loud 0", "nobody") is None
    assert found.arms == arms.keys()


def test_a_pair_of_two_kinds_spreads_as_seeds_move_the_kinds_and_as_arms_do_in_theirs() -> None:
    arms = quiet_and_loud(4, 7)
    push = {"loud": (100, -100, 100, -100), "quiet": (0, 0, 0, 0)}
    moved = {name: (np.array(row) + push[name.split()[0]]).tolist() for name, row in arms.items()}
    still, pushed = (pooled_by_kind(one, kinds_of(one)) for one in (arms, moved))
    assert still is not None
    assert pushed is not None
    before, after = still.of("loud 2", "quiet 1"), pushed.of("loud 2", "quiet 1")
    assert before is not None
    assert after is not None
    assert 7 < before.sd < 14
    assert 110 < after.sd < 125
    assert after.df == 3 < before.df, "the difference of the kinds' means has 4 seeds, so 3 degrees of freedom"
    assert after == pushed.of("quiet 1", "loud 2")
    within = (pools.of("loud 0", "loud 1") or before for pools in (still, pushed))
    assert len({round(spread.sd, 6) for spread in within}) == 1


def test_the_spread_across_kinds_is_the_mean_square_over_all_pairs_of_their_arms() -> None:
    arms = quiet_and_loud(4, 7)
    found = pooled_by_kind(arms, kinds_of(arms))
    assert found is not None
    spread = found.of("loud 0", "quiet 0")
    assert spread is not None
    quiet, loud = (np.array([row for name, row in arms.items() if name.startswith(kind)]) for kind in ("quiet", "loud"))
    pairs = [differences(ours, theirs).var(ddof=1) for ours in loud for theirs in quiet]
    assert spread.sd == pytest.approx(math.sqrt(np.mean(pairs)))
    parts = [(differences(loud.mean(axis=0), quiet.mean(axis=0)).var(ddof=1), 3)]
    parts += [((rows - rows.mean(axis=0)).var(axis=1, ddof=1).mean(), 3 * (len(rows) - 1)) for rows in (quiet, loud)]
    assert spread.df == int(spread.sd**4 / sum(part**2 / df for part, df in parts)), "Satterthwaite's formula"


def test_kinds_of_arms_that_differ_by_constants_have_no_spread() -> None:
    levels = {"quiet 0": 0, "quiet 1": 1, "loud 0": 10, "loud 1": 12}
    arms = {name: [level + seed for seed in (1.0, 2.0, 4.0, 5.0)] for name, level in levels.items()}
    found = pooled_by_kind(arms, kinds_of(arms))
    assert found is not None
    assert found.of("quiet 0", "loud 1") == Spread(0.0, 3)


@pytest.mark.parametrize("unit", [1e-4, 1e4])
def test_which_arms_are_left_out_does_not_depend_on_the_unit(unit: float) -> None:
    arms = layout(6, 4, 1.0, np.random.default_rng(1))
    for some in (arms, arms | {"wild": [0.0, 300.0, -200.0, 50.0]}):
        found = pooled({name: (unit * np.array(row)).tolist() for name, row in some.items()})
        assert found is not None
        assert found.unlike == some.keys() - arms.keys()


def test_the_only_arm_of_its_kind_speaks_for_itself() -> None:
    """There is no pooled standard deviation for an arm that is the only one of its kind, here the only quiet arm."""
    arms = quiet_and_loud(1, 5)
    found = pooled_by_kind(arms, kinds_of(arms))
    assert found is not None
    assert found.of("quiet 0", "loud 0") is None
    assert found.arms == arms.keys() - {"quiet 0"}
    twins = arms | {"quiet twin": arms["quiet 0"]}
    assert pooled_by_kind(twins, kinds_of(twins)) == found, "two arms with equal values count as one"


@pytest.mark.parametrize("moved", [0.0, 0.5, 2.0])
def test_tests_across_kinds_and_within_them_err_no_more_often_than_they_say(moved: float) -> None:
    """Tests between two arms of one kind, or of different kinds, have at most 5 % false positives, within a tolerance.

    The kinds are fine and coarse; coarse arms have five times the noise of fine arms.

    moved: the standard deviation over seeds of a random shift that all coarse arms share.
    """
    generator, wrong = np.random.default_rng(7), {"fine 0": 0, "coarse 1": 0}
    for _ in range(1000):
        whole = generator.normal(0, moved, 3)
        noise = {f"fine {i}": row.tolist() for i, row in enumerate(generator.normal(0, 0.2, (4, 3)))}
        noise |= {f"coarse {i}": (row + whole).tolist() for i, row in enumerate(generator.normal(0, 1, (8, 3)))}
        found = pooled_by_kind(noise, kinds_of(noise))
        assert found is not None
        for other in wrong:
            if spread := found.of("coarse 0", other):
                p = t_test(differences(noise["coarse 0"], noise[other]), spread=spread)
                wrong[other] += p is not None and p < 0.05
    assert wrong["coarse 1"] / 1000 < 0.05 + 0.02
    assert wrong["fine 0"] / 1000 < 0.05 + 0.03


def test_too_little_has_no_pooled_spread() -> None:
    assert pooled_by_kind({}, {}) is None
    assert pooled_by_kind({"a": [1, 2, 3], "b": [2, 3, 5]}, {"a": "x", "b": "y"}) is None
    assert pooled({"a": [1, 2, 3]}) is None
    assert pooled({"a": [1, 2, 3], "b": [1, 2, 3]}) is None
    assert pooled({}) is None
    assert pooled({"a": [1], "b": [2], "c": [3], "d": [4]}) is None
    with pytest.raises(ValueError, match=naming(2, 3)):
        pooled({"a": [1, 2], "b": [1, 2, 3], "c": [2, 3]})


# -------------------------------------------------------------------------------- many tests, medians


def test_holm_corrects_as_in_a_worked_example() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []
    with pytest.raises(ValueError, match=r"p\[1\] is nan"):
        holm([0.1, math.nan])


def test_holm_leaves_out_tests_that_cannot_reach_the_level_of_their_family() -> None:
    assert holm([0.05], [0.05]) == [0.05], "a p value at the level is enough"
    assert holm([0.03, 0.03, 0.04], [0.03, 0.03, 0.0]) == [1.0, 1.0, 0.04], "two tests cannot have p <= 0.05 / 2"
    assert holm([0.025, 0.025], [0.025, 0.025]) == [0.05, 0.05]


@pytest.mark.parametrize("value", [-0.1, 1.5])
def test_holm_takes_numbers_from_0_to_1(value: float) -> None:
    assert holm([0.0, 1.0]) == [0.0, 1.0]
    with pytest.raises(ValueError, match=naming(r"p[1]", value)):
        holm([0.1, value])


def test_a_test_of_events_says_the_least_p_that_it_can_reach() -> None:
    """The comparison of events gives the least p values that it could reach, here with one event in six trials.

    Two of the six trials are ours. Without an effect, the event is in one of them with probability 2/6, and in one of
    the other four with probability 4/6.
    """
    found = compare_events([Stratum("all", 1, 2, 0, 4)])
    assert (found.least_more, found.least_fewer) == (2 / 6, 4 / 6)


def test_holm_keeps_the_chance_of_any_false_finding_at_the_level() -> None:
    generator = np.random.default_rng(0)
    false = [min(holm(list(row))) < 0.05 for row in generator.uniform(size=(4000, 12))]
    assert np.mean(false) == pytest.approx(0.05, abs=4 * math.sqrt(0.05 * 0.95 / 4000))


def test_the_interval_of_a_median_is_of_order_statistics_and_holds_it_as_often_as_it_says() -> None:
    assert median_interval([3.0, 1.0, 2.0]) is None
    found = median_interval(range(1, 21))
    assert found is not None
    assert (found.low, found.high) == (6.0, 15.0), "P(fewer than 6 of 20 below the median) is 2.1 %"
    few = median_interval(range(1, 9))
    assert few is not None
    assert (few.low, few.high) == (1.0, 8.0), "P(fewer than 2 of 8 below the median) is 3.5 %, which exceeds 2.5 %"
    rng = np.random.default_rng(0)
    draws = [median_interval(rng.standard_cauchy(20)) for _ in range(2000)]
    assert np.mean([one is not None and one.low <= 0 <= one.high for one in draws]) == pytest.approx(0.958, abs=0.012)


def test_a_planned_effect_is_detected_as_often_as_it_says() -> None:
    """Check by simulation that a test of three pairs by `estimate` detects the planned effect in 80 % of cases."""
    effect = planned_effect(1.0, 20, 3)
    assert effect is not None
    values = effect + np.random.default_rng(0).standard_normal((10_000, 3))
    estimates = [estimate(row, Spread(1.0, 20)) for row in values]
    detected = np.mean([one is not None and one.p(0.0, Side.ABOVE) <= ALPHA for one in estimates])
    assert detected == pytest.approx(0.80, abs=0.012)
    assert planned_effect(1.0, 20, 1) is None
    assert planned_effect(2.0, 20, 3) == pytest.approx(2 * effect)
    two = planned_effect(1.0, 20, 2)
    assert two is not None
    assert two > effect


def test_planned_pairs_have_at_least_their_own_degrees_of_freedom() -> None:
    one, four, five = (planned_effect(1.0, df, 5) for df in (1, 4, 5))
    assert one == four
    assert four is not None
    assert five is not None
    assert four > five
