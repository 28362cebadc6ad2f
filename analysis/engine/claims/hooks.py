"""Register Python hooks of claims: functions of a study that compute numbers which no result file contains.

# Return {trial id: number}.
@metric("mor", "fallback_share", bounds=(0, 1))
def fallback_share(results: Results) -> Mapping[str, float]: …

# Return a function of two trial ids, our arm's and the baseline's, that returns their difference.
@metric("mor", "norm_distance")
def norm_distance(results: Results) -> Callable[[str, str], float | None]: …

# Return {name of the finding: result of an arithmetic check} for the claim M1.
@exact("mor", "M1")
def m1() -> Mapping[str, Exact]: …

# Return {key: data} for the claim S1; a part of the claim chooses its data by the key in `data: KEY`.
@measure("gaussws", "S1")
def s1(results: Results) -> Mapping[str, Measured]: …
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, TypeVar, cast

from fewbits.analysis.engine.results.data import Exact, Measured
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.paper import STUDIES as FOLDER

Numbers = Mapping[str, float]
Between = Callable[[str, str], float | None]


@dataclass(frozen=True)
class MetricHook:
    """A metric that a study has registered with the decorator `metric`."""

    name: str
    compute: Callable[[Results], Numbers | Between]
    bounds: tuple[float, float] | None  # the limits of a value


@dataclass
class Hooks:
    """The functions that a study's modules have registered with the decorators `metric`, `exact` and `measure`.

    metrics: name of a metric → the function that computes it for each trial or pair of trials. exact: claim id → the
    function that checks the claim by arithmetic. measures: claim id → the function that computes the claim's data.
    """

    metrics: dict[str, MetricHook] = field(default_factory=dict)
    exact: dict[str, Callable[[], Mapping[str, Exact] | Exact]] = field(default_factory=dict)
    measures: dict[str, Callable[[Results], Mapping[str, Measured]]] = field(default_factory=dict)


_HOOKS: dict[str, Hooks] = {}
F = TypeVar("F", bound=Callable[..., object])


def hooks_of(study: str) -> Hooks:
    """Return the study's hooks. Hooks that are registered later are added to the same object."""
    return _HOOKS.setdefault(study, Hooks())


def load_hooks(study: str) -> None:
    """Import the modules metrics*.py and exact*.py of the study's folder; the import registers their hooks."""
    for pattern in ("metrics*.py", "exact*.py"):
        for path in sorted((FOLDER / study).glob(pattern)):
            import_module(f"fewbits.analysis.studies.{study}.{path.stem}")


def metric(study: str, name: str, bounds: tuple[float, float] | None = None) -> Callable[[F], F]:
    """Return a decorator that registers a function of Results as the study's metric of this name.

    The function returns either {trial id: number}, or a function of two trial ids (the arm's and the baseline's) that
    returns their difference. bounds: the limits of a value, for example (0, 1) for a share.
    """

    def register(compute: F) -> F:
        _put(hooks_of(study).metrics, name, MetricHook(name, cast(Callable[[Results], Any], compute), bounds))
        return compute

    return register


def exact(study: str, claim: str) -> Callable[[F], F]:
    """Return a decorator for the function that checks the claim with this id by arithmetic, without runs.

    The decorator registers the function, which returns one result, or {name of the finding: result}.
    """

    def register(compute: F) -> F:
        _put(hooks_of(study).exact, claim, cast(Callable[[], Mapping[str, Exact] | Exact], compute))
        return compute

    return register


def measure(study: str, claim: str) -> Callable[[F], F]:
    """Return a decorator that registers a function of Results, which computes data for the claim with this id.

    The function returns {key: data}; a part of the claim chooses its data by `data: KEY`. Such a function is needed if
    the data are not one number for each trial, or for each pair of a trial of the arm and one of the baseline.
    """

    def register(compute: F) -> F:
        _put(hooks_of(study).measures, claim, cast(Callable[[Results], Mapping[str, Measured]], compute))
        return compute

    return register


V = TypeVar("V")


def _put(registered: dict[str, V], name: str, value: V) -> None:
    if name in registered:
        raise ValueError(f"{name} is registered twice; a metric or claim can have only one hook of each type")
    registered[name] = value
