"""Test the claims about time: disturbed turns are not used, and with too many of them the claims stay undecided.

A turn is one measurement of all variants; it is disturbed if other processes used the machine in the meantime.
"""

from collections.abc import Mapping
from typing import Any

import pytest

from fewbits.analysis.engine.claims.findings import Status
from fewbits.analysis.engine.claims.schema import comparisons, load_claims
from fewbits.analysis.engine.claims.tests import judge
from fewbits.analysis.engine.results.data import Differences, Measured, NoData
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.studies.gaussws import metrics_timing
from fewbits.analysis.studies.gaussws.metrics_timing import Bench, Timed
from fewbits.sweeps.planning.plan import Plan

EMPTY = Results(Plan((), (), {}))
STILL, DISTURBED = (0.01,) * 8, (0.01, 0.5, *(0.01,) * 6)
SHAPES = ((2048, 512), (2048, 2048))


def timed(seconds: float, others: tuple[float | None, ...] = STILL) -> Timed:
    return Timed(1000, tuple(seconds * (1 + 0.001 * (turn % 3)) for turn in range(8)), others)


def generators(box_muller: Mapping[tuple[int, int], float], others: tuple[float | None, ...] = STILL) -> Bench:
    arms = {"bitwise": 1.0, "torch": 4.0}
    return Bench(
        "a GPU",
        "cuda",
        {
            shape: {("forward", arm): timed(s, others) for arm, s in {**arms, "box-muller": of_shape}.items()}
            for shape, of_shape in box_muller.items()
        },
    )


def measured(monkeypatch: pytest.MonkeyPatch, found: Bench | None) -> Mapping[str, Measured]:
    monkeypatch.setattr(metrics_timing, "bench", lambda *_: found)
    return metrics_timing.g18(EMPTY)


def statuses(claim: str, data: Mapping[str, Measured]) -> list[Status]:
    parts = comparisons(load_claims("gaussws").claim(claim))
    margins = [one.margin.value if one.margin else None for one in parts]
    return [judge(one, data[one.part.data], margin).status for one, margin in zip(parts, margins, strict=True)]


def test_the_shape_that_gains_least_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    both = dict.fromkeys(SHAPES, 1.5)
    assert statuses("G18", measured(monkeypatch, generators(both))) == [
        Status.SUPPORTED,
        Status.SUPPORTED,
        Status.OPPOSED,
    ]
    slow = measured(monkeypatch, generators(both | {SHAPES[1]: 0.9}))
    assert statuses("G18", slow) == [Status.OPPOSED, Status.SUPPORTED, Status.OPPOSED]


def test_disturbed_turns_are_dropped_and_turns_are_the_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(monkeypatch, generators(dict.fromkeys(SHAPES, 1.5), DISTURBED))["box-muller"]
    assert isinstance(found, Differences)
    assert (len(found.values), found.unit) == (7, "turn")


@pytest.mark.parametrize("others", [(0.5,) * 5 + (0.01,) * 3, (), (None,) * 8])
def test_a_bench_that_was_disturbed_or_did_not_measure_it_decides_nothing(
    monkeypatch: pytest.MonkeyPatch, others: tuple[Any, ...]
) -> None:
    found = measured(monkeypatch, generators(dict.fromkeys(SHAPES, 0.5), others))
    assert all(isinstance(one, NoData) for one in found.values())
    assert set(statuses("G18", found)) == {Status.UNDECIDED}
