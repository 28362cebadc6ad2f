"""Test the formulas of claims, such as (a - c) / (b - c), which compute one number from numbers of several arms."""

import pytest

from fewbits.analysis.engine.claims.formulas import NotANumber, Term, check, evaluate

NUMBERS = {"a": 6.0, "b": 3.0, "c": 1.0}


@pytest.mark.parametrize(
    ("formula", "value"),
    [("a - b", 3.0), ("(a - c) / (b - c)", 2.5), ("a / b / c - 1", 1.0), ("2 * a + c", 13.0), ("a - b - c", 2.0)],
)
def test_a_formula_has_the_value_of_its_operations(formula: str, value: float) -> None:
    assert evaluate(formula, NUMBERS) == value


def test_a_share_of_no_cost_is_no_number() -> None:
    for denominator in ("c - b", "c - c"):
        with pytest.raises(NotANumber, match=denominator):
            evaluate(f"a / ({denominator})", NUMBERS)


@pytest.mark.parametrize(
    "formula", ["a +", "a + d", "a ** b", "a if b else c", "max(a, b)", "a.real", "'a'", "True + a + b + c"]
)
def test_a_formula_of_anything_else_is_refused(formula: str) -> None:
    with pytest.raises(ValueError, match="formula"):
        check(formula, NUMBERS)


def test_a_name_without_use_is_refused() -> None:
    with pytest.raises(ValueError, match=r"does not use .*: c"):
        check("a - b", NUMBERS)


def test_a_place_names_sweep_arm_and_perhaps_a_metric() -> None:
    assert Term.parse("gpt2/bf16", "loss") == Term("gpt2", "bf16", "loss")
    assert Term.parse("gpt2/bf16 ood_loss", "loss") == Term("gpt2", "bf16", "ood_loss")
    for wrong in ("bf16", "/bf16", "gpt2/", ""):
        with pytest.raises(ValueError, match="SWEEP/ARM"):
            Term.parse(wrong, "loss")
