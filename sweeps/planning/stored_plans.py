"""Store plans as `plans/STUDY-SCALE-HASH8.json` in the store: the plan with which a sweep last ran.

There is one file per selection of overrides; HASH8 is the hash of the overrides, whatever their order. The file holds
the whole plan: the definition of the sweeps, all their places, and every trial with the settings that its id is a hash
of. So it can be read where the sweep cannot be planned: without its data, with another torch, or with the store mounted
elsewhere. Paths in the store are kept relative to it. Equal parts of trials are written once, in `values`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from fewbits import __version__
from fewbits.common.atomic import write_atomically
from fewbits.common.from_dict import from_dict
from fewbits.experiments.config import spelled
from fewbits.experiments.identity import commit
from fewbits.experiments.storage.run_folder import HASH, RunFolder, plain
from fewbits.experiments.trial import Branch, Runtime, Trial
from fewbits.sweeps.planning.expand import Cell
from fewbits.sweeps.planning.overrides import RUNS, normalised
from fewbits.sweeps.planning.plan import Member, Plan, Planned
from fewbits.sweeps.planning.sweep import Resources, Sweep

FOLDER = "plans"
FORMAT = 3  # files of formats 1 and 2 are not read: `fewbits sweep` writes a new one
STORE = f"{RUNS}="  # in a plan file this override has no value: the store is the one that holds the file
_ABOUT = ("fewbits", "git", "time")  # which version wrote a plan, and when: equal plans may differ in these
_HINTS = get_type_hints(Trial)

Place = tuple[str, tuple[tuple[str, str], ...]]  # a sweep's name, and the cell's arm, axes and seed
T = TypeVar("T")


class UnusablePlan(ValueError):
    """The error for a plan file that is damaged, of another selection or of another format."""


@dataclass(frozen=True)
class StoredPlan:
    """A plan that was read from the store."""

    plan: Plan
    path: Path
    overrides: tuple[str, ...]
    git: str | None
    time: str


def save_plan(plan: Plan, overrides: Sequence[str]) -> Path:
    """Store the plan of a selection, unless an equal plan is stored already; return the path of its file."""
    runs = store_of(plan)
    selection = normalised(overrides)
    path = runs / FOLDER / f"{_label(plan)}-{_hash(selection)}.json"
    content = {"format": FORMAT, "overrides": list(selection), **_encoded(plan, runs)}
    if _without_about(_json(path)) != json.loads(json.dumps(content)):
        now = datetime.now(UTC).isoformat(timespec="seconds")
        about = dict(zip(_ABOUT, (__version__, commit(), now), strict=True))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, _text(about | content).encode())
    return path


def load_plan(runs: Path, overrides: Sequence[str]) -> StoredPlan | None:
    """Return the plan that is stored for these overrides, with paths in the store as it is mounted here.

    Raise UnusablePlan, with a message of one line, if its file cannot be used.
    """
    selection = normalised(overrides)
    paths = sorted((runs / FOLDER).glob(f"*-{_hash(selection)}.json"), key=lambda path: path.stat().st_mtime_ns)
    return _loaded(paths[-1], runs.resolve(), selection) if paths else None


def stored_plans(runs: Path) -> Iterator[StoredPlan]:
    """Yield the usable plans of the store, the newest first."""
    for path in _newest_first(runs, "*"):
        try:
            yield _loaded(path, runs.resolve())
        except UnusablePlan:
            continue


def earlier_runs(plan: Plan) -> dict[Place, str]:
    """Return, for places of the plan, the name of the run folder of another trial that a stored plan has there.

    That trial had another config, or was computed by other code. The newest plan counts.
    """
    runs, planned = store_of(plan), {place_of(member): member for member in plan.members}
    earlier: dict[Place, str] = {}
    for path in _newest_first(runs, f"{_label(plan)}-*"):
        try:
            for member, folder in _folders(_json(path), runs):
                now = planned.get(place_of(member))
                same = now is None or (now.study, now.scale) != (member.study, member.scale) or now.id == member.id
                if not same and (runs / folder).is_dir():
                    earlier.setdefault(place_of(member), folder)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError):
            continue  # the plan file is damaged
    return earlier


def place_of(member: Member) -> Place:
    return member.cell.sweep, tuple(sorted(member.cell.place.items()))


def store_of(plan: Plan) -> Path:
    return next(iter(plan.trials.values())).folder.path.parent


def has_format_1(runs: Path, sweeps: Iterable[Sweep]) -> bool:
    """Tell whether an earlier fewbits has stored a plan of one of the sweeps."""
    return any((runs / FOLDER / f"{sweep.study}-{sweep.name}-{sweep.scale}.json").exists() for sweep in sweeps)


def definition(sweeps: Iterable[Sweep]) -> Any:
    """Return the composed sweeps in the form that JSON gives them, for comparisons."""
    return json.loads(json.dumps([plain(asdict(sweep)) for sweep in sweeps], default=str))


# -------------------------------------------------------------------------------- files


def _label(plan: Plan) -> str:
    return "-".join(dict.fromkeys((plan.sweeps[0].study, plan.sweeps[0].scale)))


def _hash(selection: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(list(selection)).encode()).hexdigest()[:HASH]


def _newest_first(runs: Path, pattern: str) -> list[Path]:
    paths = (runs / FOLDER).glob(f"{pattern}.json")
    return sorted(paths, key=lambda path: path.stat().st_mtime_ns, reverse=True)


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None


def _without_about(data: Any) -> Any:
    return {key: value for key, value in data.items() if key not in _ABOUT} if isinstance(data, dict) else data


def _text(data: Mapping[str, Any]) -> str:
    """Format JSON with one line for each item of a list, such as a trial or a cell."""
    parts = []
    for key, value in data.items():
        if isinstance(value, list) and value:
            items = ",\n".join(_dump(item) for item in value)
            parts.append(f'"{key}": [\n{items}\n]')
        else:
            parts.append(f'"{key}": {_dump(value)}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


# -------------------------------------------------------------------------------- from plans to JSON


class _Pool:
    """A list of values that many trials share, with each value once."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._at: dict[str, int] = {}

    def at(self, value: Any) -> int:
        at = self._at.setdefault(_dump(value), len(self.values))
        if at == len(self.values):
            self.values.append(value)
        return at


def _encoded(plan: Plan, runs: Path) -> dict[str, Any]:
    pool = _Pool()
    cells: dict[Cell, int] = {}
    rows: list[dict[str, Any]] = []

    def cell_at(cell: Cell) -> int:
        if cell not in cells:
            parent = None if cell.parent is None else cell_at(cell.parent)
            overrides = [pool.at(STORE if text.startswith(STORE) else text) for text in cell.overrides]
            axes = [list(axis) for axis in cell.axes]
            rows.append({**vars(cell), "axes": axes, "overrides": overrides, "parent": parent})
            cells[cell] = len(rows) - 1
        return cells[cell]

    members = [{"study": m.study, "scale": m.scale, "cell": cell_at(m.cell), "trial": m.id} for m in plan.members]
    trials = [_trial(planned, runs, pool) for planned in plan.trials.values()]
    sweeps = definition(plan.sweeps)
    return {"sweeps": sweeps, "members": members, "cells": rows, "trials": trials, "values": pool.values}


def _trial(planned: Planned, runs: Path, pool: _Pool) -> dict[str, Any]:
    trial = plain(planned.trial.to_dict())
    if planned.parent is not None:
        trial["branch"]["parent"] = None  # it follows from the parent's folder
    made_of = plain(planned.made_of)
    return {
        "id": planned.id,
        "folder": os.path.relpath(planned.folder.path, runs),
        "trial": {key: pool.at(value) for key, value in trial.items()},
        "runtime": pool.at(plain(asdict(replace(planned.runtime, runs="")))),
        "made_of": {key: pool.at(value) for key, value in made_of.items() if key != "config"},
        "config": {key: pool.at(value) for key, value in made_of["config"].items()},
        "resources": pool.at(asdict(planned.resources)),
        "parent": planned.parent,
        "keep": sorted(planned.keep),
    }


# -------------------------------------------------------------------------------- from JSON to plans


def _loaded(path: Path, runs: Path, selection: tuple[str, ...] | None = None) -> StoredPlan:
    data = _json(path)
    if not isinstance(data, dict) or "format" not in data:
        raise UnusablePlan(f"{path} is damaged, or no plan")
    if data["format"] != FORMAT:
        raise UnusablePlan(f"{path} has format {data['format']}, but this fewbits reads format {FORMAT}")
    if selection is not None and data.get("overrides") != list(selection):
        raise UnusablePlan(f"{path} is the plan of other overrides: {data.get('overrides')}")
    try:
        plan = _decoded(data, runs)
        return StoredPlan(plan, path, tuple(data["overrides"]), data["git"], data["time"])
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise UnusablePlan(f"{path} cannot be read by this fewbits ({reason})") from None


def _decoded(data: Mapping[str, Any], runs: Path) -> Plan:
    values, made = data["values"], {}

    def build(kind: type[T], at: int) -> T:
        if (kind, at) not in made:
            made[kind, at] = from_dict(kind, values[at])
        value: T = made[kind, at]
        return value

    folders = {name[-HASH:]: name for name in os.listdir(runs)} if runs.is_dir() else {}
    trials: dict[str, Planned] = {}
    for row in data["trials"]:
        settings = {
            key: build(_HINTS[key], at) if is_dataclass(_HINTS.get(key)) else values[at]
            for key, at in row["trial"].items()
        }
        name = folders.get(row["id"][:HASH], row["folder"])  # an equal trial of another name may have run first
        parent = row["parent"]
        if parent is not None:
            settings["branch"] = Branch(str(trials[parent].folder.path), settings["branch"].step)
        trials[row["id"]] = Planned(
            folder=RunFolder(Path(os.path.normpath(runs / name)), row["id"]),
            trial=Trial.from_dict(settings),
            runtime=replace(build(Runtime, row["runtime"]), runs=str(runs)),
            made_of={
                **{key: values[at] for key, at in row["made_of"].items()},
                "config": {key: values[at] for key, at in row["config"].items()},
            },
            resources=build(Resources, row["resources"]),
            parent=parent,
            keep=set(row["keep"]),
        )
    cells = _cells(data, runs)
    members = tuple(Member(row["study"], row["scale"], cells[row["cell"]], row["trial"]) for row in data["members"])
    if not trials or not all(member.id in trials for member in members):
        raise ValueError("it names trials that it does not contain")
    return Plan(tuple(from_dict(Sweep, sweep) for sweep in data["sweeps"]), members, trials)


def _cells(data: Mapping[str, Any], runs: Path) -> list[Cell]:
    cells: list[Cell] = []
    values = [f"{STORE}{spelled(str(runs))}" if value == STORE else value for value in data["values"]]
    for row in data["cells"]:
        axes = tuple((axis, value) for axis, value in row["axes"])
        overrides = tuple(values[at] for at in row["overrides"])
        parent = None if row["parent"] is None else cells[row["parent"]]
        cells.append(Cell(**{**row, "axes": axes, "overrides": overrides, "parent": parent}))
    return cells


def _folders(data: Any, runs: Path) -> Iterator[tuple[Member, str]]:
    """Yield the places of a plan file, each with the name of its run folder."""
    if data["format"] != FORMAT:
        return
    cells, folders = _cells(data, runs), {row["id"]: row["folder"] for row in data["trials"]}
    for row in data["members"]:
        yield Member(row["study"], row["scale"], cells[row["cell"]], row["trial"]), folders[row["trial"]]
