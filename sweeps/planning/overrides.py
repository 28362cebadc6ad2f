"""Which overrides are the same selection: whatever their order, and wherever the store and the data lie."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from fewbits.experiments.config import spelled
from fewbits.sweeps.planning.sweep import Sweep

RUNS = "runtime.runs"
LOCATIONS = (RUNS, "runtime.cache")  # these say where things lie, and not what is trained
DEFAULT_SCALE = f"scale={Sweep('').scale}"  # of the studies' own sweeps


def normalised(overrides: Sequence[str]) -> tuple[str, ...]:
    """Return the overrides that select trials, sorted, each key once and its last value in one spelling.

    A sweep file is known by its name: on a cluster it lies in another folder. The default scale of a study is left out.
    """
    chosen = {_key(override): _spelled(override) for override in overrides}
    words = {word for key, word in chosen.items() if key not in LOCATIONS}
    if any(word.startswith("study=") for word in words):
        words.discard(DEFAULT_SCALE)
    return tuple(sorted(words))


def runs_named(overrides: Sequence[str]) -> str | None:
    """Return the store that the overrides name, the last one if several do."""
    named = [override for override in overrides if _key(override) == RUNS]
    return str(_value(named[-1])) if named else None


def without_sweep(overrides: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the sweep that `sweep=NAME` chooses of a study, if any, and the other overrides."""
    names = [override.partition("=")[2] for override in overrides if _key(override) == "sweep"]
    return (names[-1] if names else None), [override for override in overrides if _key(override) != "sweep"]


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+")


def _spelled(override: str) -> str:
    if "=" not in override or override.startswith("file="):
        return PurePath(override.removeprefix("file=")).name
    key = _key(override)
    try:
        return f"{key}={spelled(_value(override))}"
    except (HydraException, ValueError):
        return override


def _value(override: str) -> object:
    return OverridesParser.create().parse_override(override).value()
