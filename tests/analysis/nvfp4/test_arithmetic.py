"""What is true by construction is asked of kernels and of a training step, and found wrong where it is made wrong."""

from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor

from fewbits.analysis.frames import Results
from fewbits.analysis.nvfp4 import arithmetic, weights_read
from fewbits.analysis.verdicts import Outcome
from fewbits.kernels.api import fake_quantize
from fewbits.models.two_ways import TwoWays
from fewbits.sweeps.plan import Plan

NOBODY = Results(Plan((), (), {}))
COMPUTED = (
    arithmetic.rounding_errors,
    arithmetic.maxima,
    arithmetic.used,
    arithmetic.products,
    arithmetic.biases,
    arithmetic.turned,
    weights_read.consistency,
)


@pytest.fixture(autouse=True)
def _afresh(request: pytest.FixtureRequest) -> Iterator[None]:
    """Nothing that broken kernels left, and nothing from before they were broken."""
    broken = "monkeypatch" in request.fixturenames
    for one in COMPUTED * broken:
        one.cache_clear()
    yield
    for one in COMPUTED * broken:
        one.cache_clear()


def test_the_numbers_are_those_that_are_known() -> None:
    """Computed once by other code, from other values (facts 1.2.1 and 1.6)."""
    assert arithmetic.rounding_errors(arithmetic.NVFP4) == pytest.approx((0.00905, 0.01886), rel=0.01)
    assert arithmetic.rounding_errors(arithmetic.MXFP4) == pytest.approx((0.01332, 0.02710), rel=0.01)
    assert arithmetic.maxima(arithmetic.NVFP4).mean == pytest.approx(0.0226, rel=0.05)
    assert arithmetic.used(arithmetic.MXFP4).magnitudes == (0, 0.5, 1, 1.5, 2, 3)
    assert arithmetic.used(arithmetic.NVFP4).binades == pytest.approx(3.585, abs=1e-3)
    assert arithmetic.biases(f"{arithmetic.NVFP4}:stochastic").at_maxima.mean == pytest.approx(-0.011, abs=0.001)
    assert arithmetic.turned().crest == pytest.approx((2.32, 2.03), abs=0.02)
    assert arithmetic.turned().error == pytest.approx((0.0083, 0.0124), rel=0.03)


def test_what_the_paper_says_by_construction_holds() -> None:
    for claim in (arithmetic.n12, arithmetic.n24, arithmetic.n25, arithmetic.n26, arithmetic.s1, arithmetic.s2):
        found = claim(NOBODY)
        assert found.outcome is Outcome.REPRODUCED, str(found)


def test_layers_that_stay_in_bf16_are_counted_in_the_models_themselves() -> None:
    assert (arithmetic.kept("hybrid-12b", 2, 8).kept, arithmetic.kept("hybrid-12b", 2, 8).layers) == (20, 124)
    assert (arithmetic.kept("hybrid-8b", 0, 8).kept, arithmetic.kept("hybrid-8b", 0, 8).layers) == (16, 104)


def test_another_share_of_layers_in_bf16_contradicts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetic, "kept", lambda model, first, last: arithmetic.Kept(18, 104))
    assert arithmetic.n26(NOBODY).outcome is Outcome.CONTRADICTED


def test_kernels_that_are_wrong_contradict_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(x: Tensor, q: Any, **options: Any) -> Tensor:
        return fake_quantize(x, q, **options) * 1.03

    monkeypatch.setattr(arithmetic, "fake_quantize", other)
    for claim in (arithmetic.n24, arithmetic.n25, arithmetic.s1):
        assert claim(NOBODY).outcome is Outcome.CONTRADICTED


def test_in_a_training_step_both_passes_read_the_same_weights_in_squares_and_others_in_rows() -> None:
    found = weights_read.n19(NOBODY)
    assert found.outcome is Outcome.REPRODUCED, str(found)
    squares, rows = (weights_read.consistency(weights) for weights in ("16x16", "1x16"))
    layers = 2 * 5 * 4 + 12 * 2  # of a model of 6 blocks, in autocast and not, and of one of 13, the last of each kept
    assert squares.reads == rows.reads == layers * weights_read.STEPS * weights_read.MICRO_BATCHES
    assert rows.apart == pytest.approx(0.13, abs=0.01)


def test_a_backward_pass_that_reads_another_weight_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    make = TwoWays.__call__

    def other(self: TwoWays, *words: Any, **options: Any) -> tuple[Tensor, Tensor]:
        first, second = make(self, *words, **options)
        return first, -second if self.names[0] == "fprop.w" else second

    monkeypatch.setattr(TwoWays, "__call__", other)
    assert weights_read.consistency("16x16").same == 0
    assert weights_read.n19(NOBODY).outcome is Outcome.CONTRADICTED
