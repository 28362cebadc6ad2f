"""Test NVFP4's exact claims: they hold for our kernels and training steps, and fail for wrong kernels and steps."""

from functools import cache
from typing import Any

import pytest
from torch import Tensor

from fewbits.analysis.studies.nvfp4 import exact as arithmetic
from fewbits.analysis.studies.nvfp4 import metrics as weights_read
from fewbits.analysis.studies.nvfp4.exact import MXFP4, NVFP4, Bias
from fewbits.kernels.api import fake_quantize
from fewbits.models.operand_pair import OperandPair


def test_the_numbers_are_those_that_are_known() -> None:
    """Compare numbers in NVFP4's claims with those that independent code computed from other random values."""
    assert arithmetic.rounding_errors(NVFP4) == pytest.approx((0.00905, 0.01886), rel=0.01)
    assert arithmetic.rounding_errors(MXFP4) == pytest.approx((0.01332, 0.02710), rel=0.01)
    assert arithmetic.errors_at_maxima(NVFP4)[0] == pytest.approx(0.0226, rel=0.05)
    assert arithmetic.magnitudes_of_example(MXFP4) == (0, 0.5, 1, 1.5, 2, 3)
    assert arithmetic.magnitudes_of_example(NVFP4)[1::6] == (0.5, 6)
    assert arithmetic.biases(f"{NVFP4}:stochastic")[0].mean == pytest.approx(-0.011, abs=0.001)
    assert arithmetic.turned()["crest"] == pytest.approx((2.32, 2.03), abs=0.02)
    assert arithmetic.turned()["error"] == pytest.approx((0.0083, 0.0124), rel=0.03)
    assert (arithmetic.kept("hybrid-12b", 2, 8), arithmetic.kept("hybrid-8b", 0, 8)) == ((20, 124), (16, 104))


def test_what_the_paper_says_by_construction_holds() -> None:
    for claim in (arithmetic.n12, arithmetic.n24, arithmetic.n25, arithmetic.n26, arithmetic.s1, arithmetic.s2):
        found = claim()
        assert found.holds, found


def test_kernels_that_are_wrong_contradict_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(x: Tensor, q: Any, **options: Any) -> Tensor:
        return fake_quantize(x, q, **options) * 1.03

    monkeypatch.setattr(arithmetic, "fake_quantize", other)
    for claim in (arithmetic.n24, arithmetic.n25, arithmetic.s1):
        assert not claim().holds


UNSEEN, SEEN, DOWN = (Bias(mean, 0.001) for mean in (0.0, 0.1, -0.1))
FINE = (0.0, 0.5, 4.0, 6.0)
TURNED = {"crest": (2.3, 2.0), "zeros": (0.12, 0.06), "error": (0.008, 0.012)}
# The claim, the function that it calls, and wrong results of this function, by its argument; others have those of None.
# With them, the claim's check has to fail.
WRONG: dict[str, tuple[Any, str, dict[str | None, object]]] = {
    "n12: no larger": (arithmetic.n12, "rounding_errors", {NVFP4: (0.02, 0.01), MXFP4: (0.02, 0.03)}),
    "n24: all used": (arithmetic.n24, "magnitudes_of_example", {None: FINE}),
    "n24: MXFP4 too": (arithmetic.n24, "errors_at_maxima", {None: (0.02, 0.05)}),
    "n24: large": (arithmetic.n24, "errors_at_maxima", {None: (0.1, 0.2)}),
    "n26: another share": (arithmetic.n26, "kept", {None: (18, 104)}),
    "s1: elsewhere": (arithmetic.s1, "biases", {f"{NVFP4}:stochastic": (DOWN, SEEN), None: (UNSEEN, UNSEEN)}),
    "s1: upwards": (arithmetic.s1, "biases", {f"{NVFP4}:stochastic": (SEEN, UNSEEN), None: (UNSEEN, UNSEEN)}),
    "s1: MXFP4 too": (arithmetic.s1, "biases", {None: (DOWN, UNSEEN)}),
} | {f"s2: {side}": (arithmetic.s2, "turned", {None: {**TURNED, side: TURNED[side][::-1]}}) for side in TURNED}


@pytest.mark.parametrize("name", WRONG)
def test_each_part_of_a_claim_about_kernels_can_be_wrong_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    claim, asked, wrong = WRONG[name]
    monkeypatch.setattr(arithmetic, asked, lambda spec=None, *_: wrong.get(spec, wrong.get(None)))
    assert not claim().holds


@pytest.fixture
def afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test compare weights with a cache of its own."""
    monkeypatch.setattr(weights_read, "consistency", cache(weights_read.consistency.__wrapped__))


@pytest.mark.usefixtures("afresh")
def test_in_a_training_step_both_passes_read_the_same_weights_in_squares_and_others_in_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weights_read, "MICRO_BATCHES", 1)
    found = weights_read.n19()
    assert found.holds, found
    squares, rows = (weights_read.consistency(weights) for weights in ("16x16", "1x16"))
    # A model of 6 blocks with and without autocast, and a model of 13 blocks; the last block of each stays in BF16.
    layers = 2 * 5 * 4 + 12 * 2
    assert squares.reads == rows.reads == layers * weights_read.STEPS
    assert rows.apart == pytest.approx(0.13, abs=0.01)


@pytest.mark.usefixtures("afresh")
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
