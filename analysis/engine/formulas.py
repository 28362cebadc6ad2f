"""A number of several arms of one seed, by a formula that the data of a claim states: a ratio of costs, an interaction.

    formula: (mxfp4 - bf16) / (nvfp4 - bf16)
    of: {mxfp4: recipe/mxfp4, nvfp4: recipe/nvfp4, bf16: recipe/bf16}

Each name stands for a metric of one arm, written `SWEEP/ARM`, or `SWEEP/ARM METRIC` for another metric than the part's.
A quotient whose denominator is not positive is no number: a share of a cost means nothing where there is no cost.
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
    """The formula has no value for these numbers."""


@dataclass(frozen=True)
class Place:
    """Where one name of a formula finds its number."""

    sweep: str
    arm: str
    metric: str

    @classmethod
    def parse(cls, text: str, metric: str) -> Place:
        place, _, own = text.partition(" ")
        sweep, slash, arm = place.partition("/")
        if not (sweep and slash and arm):
            raise ValueError(f"{text!r}: SWEEP/ARM is expected, perhaps with a metric after a space")
        return cls(sweep, arm, own or metric)


def check(formula: str, names: Mapping[str, object]) -> None:
    """Raise ValueError if the formula is not made of these names, numbers, + - * / and parentheses."""
    evaluate(formula, dict.fromkeys(names, 1.0), strict=False)
    used = {node.id for node in ast.walk(ast.parse(formula, mode="eval")) if isinstance(node, ast.Name)}
    if unused := set(names) - used:
        raise ValueError(f"formula {formula}: it does not use {', '.join(sorted(unused))}")


def evaluate(formula: str, values: Mapping[str, float], *, strict: bool = True) -> float:
    """Return the formula's value; raise NotANumber where it divides by a number that is not positive."""

    def value(node: ast.expr) -> float:
        match node:
            case ast.Constant(value=int() | float() as constant) if not isinstance(constant, bool):
                return float(constant)
            case ast.Name(id=name) if name in values:
                return values[name]
            case ast.BinOp(left=left, op=ast.Div(), right=right):
                denominator = value(right)
                if strict and denominator <= 0:
                    raise NotANumber(f"{ast.unparse(right)} is {denominator:.4g}, and nothing is a share of that")
                return value(left) / denominator if denominator else 0.0
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](value(left), value(right))
        raise ValueError(f"formula {formula}: {ast.unparse(node)} is neither a name of `of` nor an operation + - * /")

    return value(ast.parse(formula, mode="eval").body)
