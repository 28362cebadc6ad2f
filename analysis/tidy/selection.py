"""Find the sweep and the store that a Python call selects.

If a call does not name the store, it is the folder `runs` in the working directory or in the nearest parent directory
that has one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from fewbits.common.store_folder import store_folder
from fewbits.experiments.composition import spelled
from fewbits.sweeps.planning.stored_plans import FOLDER as PLANS
from fewbits.sweeps.planning.stored_plans import RUNS, runs_named
from fewbits.sweeps.planning.studies import STUDIES, load_sweeps

PathLike = str | os.PathLike[str]
STORE = "runs"  # the default name of a store's folder
_YAML = (".yaml", ".yml")


def selection(sweep: PathLike, overrides: Sequence[str], scale: str | None, runs: PathLike | None) -> list[str]:
    """Return the arguments with which `fewbits sweep` would select this sweep and its store.

    sweep: a study, a sweep file, or the name of a multirun. overrides: further arguments, for example `seeds=[0,1]`.
    scale: the scale of a study. runs: the store. For scale and runs, None or "" means the default.
    """
    name = os.fspath(sweep)
    selected = [f"study={name}" if name in STUDIES else name, *overrides, *([f"scale={scale}"] if scale else [])]
    if runs:
        store = store_folder(os.fspath(runs)).absolute()
    elif _names_store(selected) or (nearest := _nearest_store(selected)) is None:
        return selected
    else:
        store = nearest
    return [*selected, f"{RUNS}={spelled(str(store))}"]


def whole_store(runs: PathLike | None) -> Path:
    """Return the absolute path of a store; raise ValueError if it does not exist.

    runs: the store's folder. If it is None or "", use the nearest store in or above the working directory.
    """
    if not runs:
        if (nearest := _nearest_store(())) is None:
            raise ValueError(
                f"no store: neither {Path.cwd()} nor a folder above it has a folder {STORE}/ with runs; pass the path "
                "of the store"
            )
        return nearest
    store = store_folder(os.fspath(runs)).absolute()
    if not store.is_dir():
        raise ValueError(f"{store}: no such folder; name the folder of the store, for example runs")
    return store


def _names_store(overrides: Sequence[str]) -> bool:
    """Tell whether the overrides, or the definition of the sweep that they select, name a store."""
    if runs_named(overrides) is not None:
        return True
    try:
        sweeps, _ = load_sweeps(overrides)
    except ValueError:  # the name of a multirun, which has no sweep file; other errors are reported later
        return False
    return any(runs_named(sweep.overrides) is not None for sweep in sweeps)


def _nearest_store(overrides: Sequence[str]) -> Path | None:
    """Return the nearest store in or above the working directory; if there is none, in or above a sweep file's folder.

    overrides: the arguments that select the sweep; those that end with .yaml or .yml may be paths of sweep files.
    Return None if there is no store in any of these folders.
    """
    return next(filter(_is_store, _candidates(overrides)), None)


def _candidates(overrides: Sequence[str]) -> Iterator[Path]:
    files = (Path(text.removeprefix("file=")).expanduser().absolute() for text in overrides if text.endswith(_YAML))
    for start in (Path.cwd(), *(file.parent for file in files if file.is_file())):
        yield from (folder / STORE for folder in (start, *start.parents))


def _is_store(folder: Path) -> bool:
    """Tell whether the folder has plans or runs of fewbits; other tools also name their folders `runs`."""
    return (folder / PLANS).is_dir() or any(folder.glob("*-*/provenance.json"))
