"""Python hooks of claims: numbers that no result file has, measured for a study. A hook never makes a verdict.

@metric("mor", "fallback_share", bounds=(0, 1))
def fallback_share(results: Results) -> Mapping[str, float]: …           # a number of each trial, by id

@metric("mor", "norm_distance")
def norm_distance(results: Results) -> Callable[[str, str], float | None]: …  # of two trials, ours and the baseline

@exact("mor", "M1")
def m1() -> Mapping[str, Exact]: …                                       # what arithmetic shows, part by part, or whole

@measure("gaussws", "S1")
def s1(results: Results) -> Mapping[str, Measured]: …                    # data of parts that name them (`data:`)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, TypeVar, cast

from fewbits.analysis.engine.arms import STUDIES as FOLDER
from fewbits.analysis.engine.data import Exact, Measured
from fewbits.analysis.engine.frames import Results

Numbers = Mapping[str, float]
Between = Callable[[str, str], float | None]


@dataclass(frozen=True)
class MetricHook:
    name: str
    compute: Callable[[Results], Numbers | Between]
    bounds: tuple[float, float] | None


@dataclass
class Hooks:
    """What a study's modules have registered."""

    metrics: dict[str, MetricHook] = field(default_factory=dict)
    exact: dict[str, Callable[[], Mapping[str, Exact] | Exact]] = field(default_factory=dict)
    measures: dict[str, Callable[[Results], Mapping[str, Measured]]] = field(default_factory=dict)


_HOOKS: dict[str, Hooks] = {}
F = TypeVar("F", bound=Callable[..., object])


def hooks_of(study: str) -> Hooks:
    return _HOOKS.setdefault(study, Hooks())


def load_hooks(study: str) -> None:
    """Import the modules of a study's folder that register hooks, if it has any; the others are tables and figures."""
    for pattern in ("metrics*.py", "exact*.py"):
        for path in sorted((FOLDER / study).glob(pattern)):
            import_module(f"fewbits.analysis.studies.{study}.{path.stem}")


def metric(study: str, name: str, bounds: tuple[float, float] | None = None) -> Callable[[F], F]:
    """Register a number of each trial, or of each pair of trials. bounds: (0, 1) of a share."""

    def register(compute: F) -> F:
        _put(hooks_of(study).metrics, name, MetricHook(name, cast(Callable[[Results], Any], compute), bounds))
        return compute

    return register


def exact(study: str, claim: str) -> Callable[[F], F]:
    """Register what arithmetic shows of a claim."""

    def register(compute: F) -> F:
        _put(hooks_of(study).exact, claim, cast(Callable[[], Mapping[str, Exact] | Exact], compute))
        return compute

    return register


def measure(study: str, claim: str) -> Callable[[F], F]:
    """Register data that no pairing of arms gives."""

    def register(compute: F) -> F:
        _put(hooks_of(study).measures, claim, cast(Callable[[Results], Mapping[str, Measured]], compute))
        return compute

    return register


V = TypeVar("V")


def _put(registered: dict[str, V], name: str, value: V) -> None:
    if name in registered:
        raise ValueError(f"{name} is registered twice")
    registered[name] = value
