"""Python hooks of claims: functions of a study that supply numbers which no result file has. They make no verdicts.

# Return a number for each trial, by id.
@metric("mor", "fallback_share", bounds=(0, 1))
def fallback_share(results: Results) -> Mapping[str, float]: …

# Return a function of the ids of two trials, our arm's and the baseline's.
@metric("mor", "norm_distance")
def norm_distance(results: Results) -> Callable[[str, str], float | None]: …

# Return the results of checks by arithmetic, by the name of the finding.
@exact("mor", "M1")
def m1() -> Mapping[str, Exact]: …

# Return the data of the claim's parts, by the name that a part gives in `data:`.
@measure("gaussws", "S1")
def s1(results: Results) -> Mapping[str, Measured]: …
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, TypeVar, cast

from fewbits.analysis.engine.results.arms import STUDIES as FOLDER
from fewbits.analysis.engine.results.data import Exact, Measured
from fewbits.analysis.engine.results.frames import Results

Numbers = Mapping[str, float]
Between = Callable[[str, str], float | None]


@dataclass(frozen=True)
class MetricHook:
    """A metric that a study registers."""

    name: str
    compute: Callable[[Results], Numbers | Between]
    bounds: tuple[float, float] | None


@dataclass
class Hooks:
    """The hooks that a study's modules have registered; claims' hooks by the claim's id."""

    metrics: dict[str, MetricHook] = field(default_factory=dict)
    exact: dict[str, Callable[[], Mapping[str, Exact] | Exact]] = field(default_factory=dict)
    measures: dict[str, Callable[[Results], Mapping[str, Measured]]] = field(default_factory=dict)


_HOOKS: dict[str, Hooks] = {}
F = TypeVar("F", bound=Callable[..., object])


def hooks_of(study: str) -> Hooks:
    """Return the hooks of a study; there may be none."""
    return _HOOKS.setdefault(study, Hooks())


def load_hooks(study: str) -> None:
    """Import the modules with the hooks of a study's claims, if there are any; others define tables and figures."""
    for pattern in ("metrics*.py", "exact*.py"):
        for path in sorted((FOLDER / study).glob(pattern)):
            import_module(f"fewbits.analysis.studies.{study}.{path.stem}")


def metric(study: str, name: str, bounds: tuple[float, float] | None = None) -> Callable[[F], F]:
    """Register a metric: a function of results that returns a number for each trial, or a function of two trials.

    bounds: the limits of its values, for example (0, 1) for a share.
    """

    def register(compute: F) -> F:
        _put(hooks_of(study).metrics, name, MetricHook(name, cast(Callable[[Results], Any], compute), bounds))
        return compute

    return register


def exact(study: str, claim: str) -> Callable[[F], F]:
    """Register a function that checks a claim by arithmetic, without runs."""

    def register(compute: F) -> F:
        _put(hooks_of(study).exact, claim, cast(Callable[[], Mapping[str, Exact] | Exact], compute))
        return compute

    return register


def measure(study: str, claim: str) -> Callable[[F], F]:
    """Register a function that computes data for a claim's parts, for cases that pairs of trials cannot express."""

    def register(compute: F) -> F:
        _put(hooks_of(study).measures, claim, cast(Callable[[Results], Mapping[str, Measured]], compute))
        return compute

    return register


V = TypeVar("V")


def _put(registered: dict[str, V], name: str, value: V) -> None:
    if name in registered:
        raise ValueError(f"{name} is registered twice")
    registered[name] = value
