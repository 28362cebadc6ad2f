"""Test NVFP4's exact claims: they hold for our kernels and training steps, and fail for wrong kernels and steps."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from fewbits.analysis.studies.nvfp4 import exact as arithmetic
from fewbits.analysis.studies.nvfp4 import exact_weights as weights_read
from fewbits.kernels.api import fake_quantize
from fewbits.models.operand_pair import OperandPair

COMPUTED = (
    arithmetic.rounding_errors,
    arithmetic.maxima,
    arithmetic.magnitudes_of_example,
    arithmetic.products,
    arithmetic.biases,
    arithmetic.turned,
    weights_read.consistency,
)


@pytest.fixture(autouse=True)
def _afresh(request: pytest.FixtureRequest) -> Iterator[None]:
    """Clear cached results before and after a test that replaces kernels, so that no other test uses them."""
    broken = "monkeypatch" in request.fixturenames
    for one in COMPUTED * broken:
        one.cache_clear()
    yield
    for one in COMPUTED * broken:
        one.cache_clear()


def test_the_numbers_are_those_that_are_known() -> None:
    """Compare numbers in NVFP4's claims with those that independent code computed from other random values."""
    assert arithmetic.rounding_errors(arithmetic.NVFP4) == pytest.approx((0.00905, 0.01886), rel=0.01)
    assert arithmetic.rounding_errors(arithmetic.MXFP4) == pytest.approx((0.01332, 0.02710), rel=0.01)
    assert arithmetic.maxima(arithmetic.NVFP4).mean == pytest.approx(0.0226, rel=0.05)
    assert arithmetic.magnitudes_of_example(arithmetic.MXFP4) == (0, 0.5, 1, 1.5, 2, 3)
    assert arithmetic.magnitudes_of_example(arithmetic.NVFP4)[1::6] == (0.5, 6)
    assert arithmetic.biases(f"{arithmetic.NVFP4}:stochastic").at_maxima.mean == pytest.approx(-0.011, abs=0.001)
    assert arithmetic.turned().crest == pytest.approx((2.32, 2.03), abs=0.02)
    assert arithmetic.turned().error == pytest.approx((0.0083, 0.0124), rel=0.03)


def test_what_the_paper_says_by_construction_holds() -> None:
    for claim in (arithmetic.n12, arithmetic.n24, arithmetic.n25, arithmetic.n26, arithmetic.s1, arithmetic.s2):
        found = claim()
        assert found.holds, found


def test_layers_that_stay_in_bf16_are_counted_in_the_models_themselves() -> None:
    assert (arithmetic.kept("hybrid-12b", 2, 8), arithmetic.kept("hybrid-8b", 0, 8)) == ((20, 124), (16, 104))


def test_another_share_of_layers_in_bf16_contradicts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetic, "kept", lambda model, first, last: (18, 104))
    assert not arithmetic.n26().holds


def test_kernels_that_are_wrong_contradict_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(x: Tensor, q: Any, **options: Any) -> Tensor:
        return fake_quantize(x, q, **options) * 1.03

    monkeypatch.setattr(arithmetic, "fake_quantize", other)
    for claim in (arithmetic.n24, arithmetic.n25, arithmetic.s1):
        assert not claim().holds


UNSEEN, SEEN, DOWN = (arithmetic.Bias(mean, 0.001) for mean in (0.0, 0.1, -0.1))
FINE = (0.0, 0.5, 4.0, 6.0)
# Name → (claim, the function that it calls, wrong results of this function for NVFP4 and for MXFP4). With them, the
# claim's check has to fail.
WRONG = {
    "n12: no larger": (arithmetic.n12, "rounding_errors", (0.02, 0.01), (0.02, 0.03)),
    "n24: all used": (arithmetic.n24, "magnitudes_of_example", FINE, FINE),
    "n24: few": (
        arithmetic.n24,
        "maxima",
        arithmetic.Maxima(0.03, 0.02, 0.05),
        arithmetic.Maxima(0.03, 0.1, 0.2),
    ),
    "s1: elsewhere": (arithmetic.s1, "biases", arithmetic.Biases(DOWN, SEEN), arithmetic.Biases(UNSEEN, UNSEEN)),
    "s1: upwards": (arithmetic.s1, "biases", arithmetic.Biases(SEEN, UNSEEN), arithmetic.Biases(UNSEEN, UNSEEN)),
    "s1: MXFP4 too": (arithmetic.s1, "biases", arithmetic.Biases(DOWN, UNSEEN), arithmetic.Biases(DOWN, UNSEEN)),
}


@pytest.mark.parametrize("name", WRONG)
def test_each_part_of_a_claim_about_kernels_can_be_wrong_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    claim, asked, nvfp4, mxfp4 = WRONG[name]
    monkeypatch.setattr(arithmetic, asked, lambda spec: mxfp4 if spec.startswith(arithmetic.MXFP4) else nvfp4)
    assert not claim().holds


@pytest.mark.parametrize("side", ["crest", "zeros", "error"])
def test_outliers_that_stay_contradict_what_is_found_of_the_transform(
    side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = arithmetic.Turned((2.3, 2.0), (0.12, 0.06), (0.008, 0.012))
    before, after = getattr(there, side)
    monkeypatch.setattr(arithmetic, "turned", lambda: replace(there, **{side: (after, before)}))
    assert not arithmetic.s2().holds


@pytest.mark.parametrize("wrong", ["same in rows", "unquantized in rows", "unquantized in squares"])
def test_weights_that_are_not_quantized_or_never_differ_show_nothing(
    wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = {"16x16": weights_read.Consistency(8, 8, 8, 0.0), "1x16": weights_read.Consistency(8, 0, 8, 0.13)}
    kind = "1x16" if "rows" in wrong else "16x16"
    there[kind] = replace(there[kind], **({"same": 1} if "same" in wrong else {"quantized": 7}))
    monkeypatch.setattr(weights_read, "consistency", there.__getitem__)
    assert not weights_read.n19().holds


def test_in_a_training_step_both_passes_read_the_same_weights_in_squares_and_others_in_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weights_read, "MICRO_BATCHES", 1)
    found = weights_read.n19()
    assert found.holds, found
    squares, rows = (weights_read.consistency(weights) for weights in ("16x16", "1x16"))
    # A model of 6 blocks with and without autocast, and a model of 13 blocks; the last block of each stays in BF16.
    layers = 2 * 5 * 4 + 12 * 2
    assert squares.reads == rows.reads == layers * weights_read.STEPS * weights_read.MICRO_BATCHES
    assert rows.apart == pytest.approx(0.13, abs=0.01)


def test_a_backward_pass_that_reads_another_weight_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    make = OperandPair.__call__

    def other(self: OperandPair, *words: Any, **options: Any) -> tuple[Tensor, Tensor]:
        first, second = make(self, *words, **options)
        assert isinstance(first, Tensor)
        assert isinstance(second, Tensor)
        return first, -second if self.names[0] == "fprop.w" else second

    monkeypatch.setattr(OperandPair, "__call__", other)
    monkeypatch.setattr(weights_read, "STEPS", 1)
    assert weights_read.consistency("16x16").same == 0, "so N19 does not hold"
