"""Test the statistics against scipy and statsmodels, and the error rates of verdicts in simulated worlds."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.weightstats import ttost_paired

from fewbits.analysis.engine.claims.findings import Finding, Outcome, Status
from fewbits.analysis.engine.claims.preview import minimum_detectable_effect, required_n
from fewbits.analysis.engine.claims.schema import Claim, Comparison, Margin, Part, Source
from fewbits.analysis.engine.claims.tests import judge
from fewbits.analysis.engine.claims.verdicts import Evidence, conclude
from fewbits.analysis.engine.results.data import Differences
from fewbits.analysis.engine.statistics import (
    Error,
    Interval,
    Side,
    adjusted,
    estimate,
    extra_interval,
    extra_tokens,
    fisher,
    relative_slope,
)

RNG = np.random.default_rng(5)


def test_tests_are_those_of_scipy_and_statsmodels() -> None:
    ours, base = RNG.normal(0.1, 1, 6), RNG.normal(0, 1, 6)
    found = estimate(ours - base)
    assert found is not None
    assert found.p(0.0, Side.ABOVE) == pytest.approx(stats.ttest_rel(ours, base, alternative="greater").pvalue)
    assert found.p(0.3, Side.BELOW) == pytest.approx(stats.ttest_1samp(ours - base, 0.3, alternative="less").pvalue)
    ends = stats.ttest_rel(ours, base).confidence_interval(0.9)
    assert (found.interval(0.9).low, found.interval(0.9).high) == pytest.approx((ends.low, ends.high))
    p, *_ = ttost_paired(ours, base, -0.5, 0.5)
    assert max(found.p(0.5, Side.BELOW), found.p(-0.5, Side.ABOVE)) == pytest.approx(p)
    for method in ("holm", "fdr_bh"):
        assert adjusted([0.01, 0.04, 0.03], method) == pytest.approx(
            multipletests([0.01, 0.04, 0.03], method=method)[1]
        )
    assert fisher(3, 3, 0, 3) == pytest.approx((0.05, 1.0))


def test_shared_errors_are_added_and_one_value_needs_noise() -> None:
    values = (0.1, 0.2, 0.3, 0.2)
    alone, added = estimate(values), estimate(values, Error(0.05, 10))
    assert alone is not None
    assert added is not None
    assert added.error == pytest.approx(math.hypot(alone.error, 0.05))
    assert alone.df == 3 < added.df < 13
    assert estimate([0.1]) is None
    one = estimate([0.1], noise=Error(0.02, 2))
    assert one is not None
    assert (one.error, one.df) == (0.02, 2)
    same = estimate([0.1, 0.1])
    assert same is not None
    assert (same.p(0.0, Side.ABOVE), same.p(0.2, Side.ABOVE)) == (0.0, 1.0)


def test_a_gap_is_worth_the_tokens_that_the_baselines_curve_says() -> None:
    curve = [(float(tokens), 5 - 0.2 * math.log(tokens)) for tokens in range(100, 2001, 100)]
    slope = relative_slope([curve])
    assert slope == pytest.approx(0.2 / curve[-1][1])
    assert slope is not None
    gap = (5 - 0.2 * math.log(1000) - (5 - 0.2 * math.log(1100))) / curve[-1][1]
    assert extra_tokens(gap, slope) == pytest.approx(0.1)
    assert extra_interval(Interval(0.0, gap, 0.9), slope).high == pytest.approx(0.1)
    assert relative_slope([[(1.0, 2.0), (2.0, 2.0), (3.0, 2.1), (4.0, 2.2)]]) is None, "the loss does not fall"


def test_the_minimum_detectable_effect_is_detected_with_the_stated_power() -> None:
    effect = minimum_detectable_effect(2.0, 6)
    draws = RNG.normal(effect, 2.0, (20_000, 6))
    assert (stats.ttest_1samp(draws, 0, axis=1, alternative="greater").pvalue <= 0.05).mean() == pytest.approx(
        0.8, abs=0.01
    )
    assert required_n(2.0, effect) == 6
    assert required_n(1.0, 0.01) is None


# -------------------------------------------------------------------------------- labels

MARGIN = Margin(0.5, False, "r")


def finding(test: str, values: np.ndarray, part: int = 0, margin: float | None = None) -> Finding:
    of = Part(test, f"part {part}", arms=("a",), relative=False, margin=MARGIN if margin else None)
    return replace(judge(Comparison(f"part {part}", of), Differences(tuple(values)), margin), part=part)


def evidence(name: str, *findings: Finding, ours: bool = False, main: bool = False) -> Evidence:
    claim = Claim(name, "s", (Part("higher", arms=("a",)),), None if ours else Source("p", "s"))
    return Evidence(claim, findings, main=main)


def label(*findings: Finding) -> Outcome:
    return conclude({"M1": evidence("M1", *findings)})["M1"].outcome


def test_each_label_occurs_and_opposite_worlds_have_opposite_labels() -> None:
    high, low, none = np.linspace(0.9, 1.1, 6), np.linspace(-1.1, -0.9, 6), np.linspace(-1.0, 1.1, 6)
    assert label(finding("higher", high), finding("equal", 0.1 * none, 1, 0.5)) is Outcome.REPRODUCED
    assert label(finding("higher", low), finding("equal", high, 1, 0.5)) is Outcome.NOT_REPRODUCED
    assert label(finding("higher", 0.01 * none, margin=0.5)) is Outcome.NOT_REPRODUCED, "shown to be below the margin"
    assert label(finding("higher", high), finding("higher", none, 1)) is Outcome.MIXED
    assert label(finding("higher", none)) is Outcome.CANNOT_TELL
    assert label(finding("higher", high[:5])) is Outcome.CANNOT_TELL, "five seeds"
    gone = replace(finding("higher", high), status=Status.NOT_TESTABLE)
    assert label(gone) is Outcome.NOT_TESTABLE
    assert label(gone, finding("higher", high, 1)) is Outcome.CANNOT_TELL, "the primary part is not tested"
    assert label(replace(gone, status=Status.VACUOUS)) is Outcome.CANNOT_TELL
    assert label(replace(gone, status=Status.NOT_RUN)) is Outcome.NOT_RUN


WORLDS, MAIN, OTHERS, OURS = 1000, 7, 10, 4


def worlds(effects: tuple[float, float, float]) -> Counter[str]:
    """Return how often labels occur in WORLDS reports with six seeds: per claim, and `false` for any main claim.

    effects: of main claims, other claims and our own findings, in units of the standard deviation over seeds.
    """
    rng, counts = np.random.default_rng(1), Counter[str]()
    for _ in range(WORLDS):
        made = {}
        for kind, count, effect in zip(("main", "other", "ours"), (MAIN, OTHERS, OURS), effects, strict=True):
            for number in range(count):
                one = finding("higher", rng.normal(effect, 1, 6))
                made[f"{kind} {number}"] = evidence(f"M{kind}{number}", one, ours=kind == "ours", main=kind == "main")
        found = {name: verdict.outcome for name, verdict in conclude(made).items()}
        for kind in ("main", "other", "ours"):
            labels = Counter(outcome for name, outcome in found.items() if name.startswith(kind))
            counts.update({f"{kind} {outcome}": number for outcome, number in labels.items()})
            counts[f"any {kind}"] += labels[Outcome.CANNOT_TELL] < labels.total()
    return counts


@pytest.mark.deep
def test_error_rates_are_as_stated() -> None:
    """Check 1,000 reports of six seeds; docs/measured/statistics.md has this table."""
    none, mixed, real = worlds((0, 0, 0)), worlds((2.5, 0, 0)), worlds((2.5, 2.5, 2.5))
    for counts in (none, mixed, real):
        print({name: round(number / WORLDS, 3) for name, number in sorted(counts.items())})
    assert none["any main"] / WORLDS <= 0.06
    assert none["any other"] / WORLDS <= 0.06
    assert mixed["any other"] / WORLDS <= 0.06, "true main claims do not loosen the tests of the others"
    assert real["main not reproduced"] + real["other not reproduced"] == 0
    assert real["main reproduced"] / WORLDS / MAIN > 0.9
    assert real["other reproduced"] / WORLDS / OTHERS > 0.9


@pytest.mark.parametrize(
    ("test", "effect", "wrong"), [("equal", 1.0, "s"), ("no_worse", 1.0, "s"), ("equal", 1.0, "o")]
)
def test_a_margin_is_passed_by_chance_in_one_of_twenty(test: str, effect: float, wrong: str) -> None:
    """Check the rate of either result if the true effect is exactly the margin, where both are wrong."""
    rng = np.random.default_rng(2)
    found = [finding(test, rng.normal(effect, 0.3, 6), margin=effect).status for _ in range(WORLDS)]
    status = Status.SUPPORTED if wrong == "s" else Status.OPPOSED
    assert found.count(status) / WORLDS <= 0.065
