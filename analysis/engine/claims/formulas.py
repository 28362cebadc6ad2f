"""Evaluate formulas over several arms in the YAML files of claims, for example a ratio of two loss increases.

    formula: (mxfp4 - bf16) / (nvfp4 - bf16)
    of: {mxfp4: recipe/mxfp4, nvfp4: recipe/nvfp4, bf16: recipe/bf16}

These two keys belong to a part of a claim. `of` says for each name in the formula which number it stands for: a metric
of one arm. `SWEEP/ARM METRIC` names the arm and the metric; with `SWEEP/ARM`, the metric is the one in the part's key
`metrics` (by default the validation loss).

A formula is computed from means over seeds, and its error is estimated by the jackknife. A quotient whose denominator
is 0 or negative has no value: a ratio to a loss increase means nothing if the loss did not increase.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass

_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


class NotANumber(ValueError):
    """The error for a formula that has no value for the given numbers, because a denominator is 0 or negative."""


@dataclass(frozen=True)
class Term:
    """The sweep, arm and metric whose number replaces one name in a formula."""

    sweep: str
    arm: str
    metric: str

    @classmethod
    def parse(cls, text: str, metric: str) -> Term:
        """Return the sweep, arm and metric in a text of the form `SWEEP/ARM METRIC` or `SWEEP/ARM`.

        metric: the metric if the text names none. Raise ValueError if the text has neither form.
        """
        place, _, own = text.partition(" ")
        sweep, slash, arm = place.partition("/")
        if not (sweep and slash and arm):
            raise ValueError(f"{text!r} in `of` does not have the form SWEEP/ARM or SWEEP/ARM METRIC")
        return cls(sweep, arm, own or metric)


def check(formula: str, names: Mapping[str, object]) -> None:
    """Raise ValueError if the formula is not valid.

    A valid formula uses every key of `names`, no other names, and otherwise only numbers, + - * / and parentheses.
    """
    evaluate(formula, dict.fromkeys(names, 1.0), strict=False)
    used = {node.id for node in ast.walk(_parsed(formula)) if isinstance(node, ast.Name)}
    if unused := set(names) - used:
        raise ValueError(
            f"formula {formula}: it does not use these keys of `of`: {', '.join(sorted(unused))}; remove them from "
            "`of`, or use them in the formula"
        )


def evaluate(formula: str, values: Mapping[str, float], *, strict: bool = True) -> float:
    """Return the formula's value, with the number in `values` for each name.

    If `strict`, a division by 0 or by a negative number raises NotANumber. Without `strict`, negative divisors are
    allowed and x / 0 gives 0. `check` needs this, because it evaluates the formula with arbitrary numbers.
    """

    def value(node: ast.expr) -> float:
        match node:
            case ast.Constant(value=int() | float() as constant) if not isinstance(constant, bool):
                return float(constant)
            case ast.Name(id=name) if name in values:
                return values[name]
            case ast.BinOp(left=left, op=ast.Div(), right=right):
                denominator = value(right)
                if strict and denominator <= 0:
                    raise NotANumber(f"{ast.unparse(right)} is {denominator:.4g}; a divisor must be positive")
                return value(left) / denominator if denominator else 0.0
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](value(left), value(right))
        raise ValueError(
            f"formula {formula}: {ast.unparse(node)} is not valid; a formula may contain only keys of `of`, numbers, "
            "+ - * / and parentheses"
        )

    return value(_parsed(formula))


def _parsed(formula: str) -> ast.expr:
    try:
        return ast.parse(formula, mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"formula {formula}: {error.msg}; write an expression such as (a - b) / (c - b)") from None
