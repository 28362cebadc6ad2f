"""Normalise the overrides of a command, so that overrides that select the same trials compare equal.

The order of the overrides does not matter, nor do the paths of the store, the data and the user's config folders.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from fewbits.experiments.composition import spelled
from fewbits.experiments.config_files import SEARCH_PATH
from fewbits.sweeps.planning.sweep import Sweep

RUNS = "runtime.runs"
# Keys whose values are paths: of the store, the prepared data and the user's config folders. They do not select trials.
LOCATIONS = (RUNS, "runtime.cache", SEARCH_PATH)
DEFAULT_SCALE = f"scale={Sweep('').scale}"  # the scale of a study's sweeps if no override sets it


def normalised(overrides: Sequence[str]) -> tuple[str, ...]:
    """Return the overrides that select trials: sorted, each key once, and equal values written in the same way.

    Overrides of paths are left out. If a study is selected, an override that sets the default scale is left out, too.
    The path of a sweep file is replaced by the file's name, since the file is in another folder on a cluster.
    """
    chosen = {_key(override): _canonical(override) for override in overrides}
    selection = {override for key, override in chosen.items() if key not in LOCATIONS}
    if any(override.startswith("study=") for override in selection):
        selection.discard(DEFAULT_SCALE)
    return tuple(sorted(selection))


def is_location(override: str) -> bool:
    """Tell whether an override sets one of LOCATIONS, the paths that do not affect which trials are selected."""
    return _key(override) in LOCATIONS


def runs_named(overrides: Sequence[str]) -> str | None:
    """Return the store in the last override `runtime.runs=STORE`, or None if there is no such override."""
    named = [override for override in overrides if _key(override) == RUNS]
    if not named:
        return None
    try:
        value = _value(named[-1])
    except HydraException as error:
        raise ValueError(f"{named[-1]}: {' '.join(str(error).split())}") from None
    if not value:
        raise ValueError(f"{named[-1]}: expected a folder, as in {RUNS}=runs")
    return str(value)


def without_sweep(overrides: Sequence[str]) -> tuple[str | None, list[str]]:
    """Split off the override `sweep=NAME`: return NAME, or None if there is none, and the other overrides."""
    names = [override.partition("=")[2] for override in overrides if _key(override) == "sweep"]
    return (names[-1] if names else None), [override for override in overrides if _key(override) != "sweep"]


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+")


def _canonical(override: str) -> str:
    if "=" not in override or override.startswith("file="):
        return PurePath(override.removeprefix("file=")).name
    key = _key(override)
    try:
        return f"{key}={spelled(_value(override))}"
    except (HydraException, ValueError):
        return override


def _value(override: str) -> object:
    return OverridesParser.create().parse_override(override).value()
