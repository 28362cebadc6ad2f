"""Formulas in the data of claims, for numbers of several arms: a ratio of costs, an interaction.

    formula: (mxfp4 - bf16) / (nvfp4 - bf16)
    of: {mxfp4: recipe/mxfp4, nvfp4: recipe/nvfp4, bf16: recipe/bf16}

Each name stands for a metric of one arm, written `SWEEP/ARM`, or `SWEEP/ARM METRIC` for another metric than the part's.
A formula takes means over seeds, and its error is the jackknife's. A quotient whose denominator is not positive has no
value: without a cost, a share of that cost means nothing.
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
    """The error of a formula that has no value for these numbers."""


@dataclass(frozen=True)
class Place:
    """The sweep, arm and metric that one name of a formula stands for."""

    sweep: str
    arm: str
    metric: str

    @classmethod
    def parse(cls, text: str, metric: str) -> Place:
        place, _, own = text.partition(" ")
        sweep, slash, arm = place.partition("/")
        if not (sweep and slash and arm):
            raise ValueError(f"{text!r}: expected SWEEP/ARM or SWEEP/ARM METRIC")
        return cls(sweep, arm, own or metric)


def check(formula: str, names: Mapping[str, object]) -> None:
    """Raise ValueError unless the formula uses all of these names, and else only numbers, + - * / and parentheses."""
    evaluate(formula, dict.fromkeys(names, 1.0), strict=False)
    used = {node.id for node in ast.walk(ast.parse(formula, mode="eval")) if isinstance(node, ast.Name)}
    if unused := set(names) - used:
        raise ValueError(f"formula {formula}: it does not use {', '.join(sorted(unused))}")


def evaluate(formula: str, values: Mapping[str, float], *, strict: bool = True) -> float:
    """Return the formula's value; if strict, raise NotANumber if it divides by a number that is not positive."""

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
        raise ValueError(f"formula {formula}: {ast.unparse(node)} is neither a name of `of` nor an operation + - * /")

    return value(ast.parse(formula, mode="eval").body)
