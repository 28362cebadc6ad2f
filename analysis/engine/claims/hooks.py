"""Register Python hooks of claims: functions of a study that compute numbers which no result file contains.

@metric("mor", "fallback_share", bounds=(0, 1))  # Results → {trial id: number}, or → a function of two trial ids
@exact("mor", "M1")  # → {name of the finding: the result of an arithmetic check}
@measure("gaussws", "S1")  # Results → {key: data}; a part of the claim chooses its data by `data: KEY`
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any, TypeVar

from fewbits.analysis.engine.results.data import Exact, Measured
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.pairing import Between as Between
from fewbits.analysis.engine.results.paper import STUDIES

Bounds = tuple[float, float] | None  # the limits of a value, for example (0, 1) for a share


@dataclass
class Hooks:
    """The functions that a study's modules have registered, by the names of metrics and the ids of claims."""

    metrics: dict[str, tuple[Callable[[Results], Mapping[str, float] | Between], Bounds]] = field(default_factory=dict)
    exact: dict[str, Callable[[], Mapping[str, Exact] | Exact]] = field(default_factory=dict)
    measures: dict[str, Callable[[Results], Mapping[str, Measured]]] = field(default_factory=dict)


_REGISTERED: dict[str, Hooks] = defaultdict(Hooks)  # by study
F = TypeVar("F", bound=Callable[..., object])


@cache
def hooks_of(study: str) -> Hooks:
    """Return the study's hooks: import the modules metrics*.py and exact*.py of its folder, which register them."""
    for pattern in ("metrics*.py", "exact*.py"):
        for path in sorted((STUDIES / study).glob(pattern)):
            import_module(f"fewbits.analysis.studies.{study}.{path.stem}")
    return _REGISTERED[study]


def metric(study: str, name: str, bounds: Bounds = None) -> Callable[[F], F]:
    """Return a decorator that registers a function of Results as the study's metric of this name."""
    return _registering(_REGISTERED[study].metrics, name, lambda compute: (compute, bounds))


def exact(study: str, claim: str) -> Callable[[F], F]:
    """Return a decorator that registers the function that checks the claim with this id without runs."""
    return _registering(_REGISTERED[study].exact, claim, lambda compute: compute)


def measure(study: str, claim: str) -> Callable[[F], F]:
    """Return a decorator that registers a function of Results, which computes data for the claim with this id."""
    return _registering(_REGISTERED[study].measures, claim, lambda compute: compute)


def _registering(registered: dict[str, Any], name: str, entry: Callable[[Any], object]) -> Callable[[F], F]:
    def register(compute: F) -> F:
        if name in registered:
            raise ValueError(f"{name} is registered twice; a metric or claim can have only one hook of each type")
        registered[name] = entry(compute)
        return compute

    return register
