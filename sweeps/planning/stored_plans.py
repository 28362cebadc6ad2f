"""Store plans as `plans/STUDY-SCALE-HASH8.json` in the store: the plan with which a sweep last ran.

There is one file for each set of overrides of `fewbits sweep`; HASH8 is the hash of the set. The file contains the
whole plan: the definition of the sweeps, all their places, and every trial with the settings and versions whose hash is
its id. Therefore the plan can be read on a machine that could not make it: without the data, with another version of
torch, or with the store mounted elsewhere. Paths in the store are written relative to the store. A checksum detects a
file that was edited.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fewbits import __version__
from fewbits.common.atomic import read_json, write_atomically
from fewbits.common.from_dict import from_dict
from fewbits.experiments.composition import spelled
from fewbits.experiments.identity import commit
from fewbits.experiments.storage.run_folder import HASH, RunFolder, plain
from fewbits.experiments.trial import Branch, Runtime, Trial
from fewbits.sweeps.planning.expand import Cell
from fewbits.sweeps.planning.overrides import RUNS, normalised
from fewbits.sweeps.planning.plan import Member, Plan, Planned
from fewbits.sweeps.planning.sweep import Resources, Sweep

FOLDER = "plans"
FORMAT = 3  # the version of the file format; files of other versions are not read, and `fewbits sweep` writes new ones
STORE = f"{RUNS}="  # in a plan file this override has no value, since the file lies in the store itself

Place = tuple[str, tuple[tuple[str, str], ...]]  # (sweep's name, sorted pairs (`arm`, axis or `seed`; value))


class UnusablePlan(ValueError):
    """Raised if a plan file is damaged, belongs to other overrides, or has another format version than FORMAT."""


@dataclass(frozen=True)
class StoredPlan:
    """A plan that was read from the store."""

    plan: Plan
    path: Path  # of the plan file
    overrides: tuple[str, ...]  # of the command that made the plan, normalised
    git: str | None  # the commit of fewbits that made the plan; None: unknown
    time: str  # when the plan was stored, in ISO format


def save_plan(plan: Plan, overrides: Sequence[str]) -> Path:
    """Store the plan under the overrides of its command, unless the same plan is stored already; return its path."""
    selection = normalised(overrides)
    path = plan.store / FOLDER / f"{_label(plan)}-{selection_hash(selection)}.json"
    content = {"overrides": list(selection), **_encoded(plan)}
    checksum = _checksum(content)
    if (read_json(path) or {}).get("checksum") != checksum:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        head = {"format": FORMAT, "fewbits": __version__, "git": commit(), "time": now, "checksum": checksum}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, _text({**head, **content}).encode())
    return path


def load_plan(runs: Path, overrides: Sequence[str]) -> StoredPlan | None:
    """Return the plan that the store `runs` contains for these overrides; None if it contains none.

    The paths of its run folders are those on this machine, wherever the store was mounted when the plan was stored.
    Raise UnusablePlan if the plan file cannot be used.
    """
    selection = normalised(overrides)
    paths = sorted(
        (runs / FOLDER).glob(f"*-{selection_hash(selection)}.json"), key=lambda path: path.stat().st_mtime_ns
    )
    return _loaded(paths[-1], runs.resolve(), selection) if paths else None


def stored_plans(runs: Path, unusable: Callable[[UnusablePlan], None] = lambda _: None) -> Iterator[StoredPlan]:
    """Yield the plans in the store `runs`, the newest first.

    unusable: called with the error for each plan file that cannot be used; this file is then skipped.
    """
    for path in _newest_first(runs, "*"):
        try:
            yield _loaded(path, runs.resolve())
        except UnusablePlan as error:
            unusable(error)


def earlier_runs(plan: Plan) -> dict[Place, str]:
    """Return the places at which a stored plan has another trial than this plan, with that trial's run folder's name.

    With the name, commands can tell why this earlier run is not used: its config or its version of the code differs.
    Only run folders that exist and plans of the same study and scale count. If several stored plans have such a run at
    a place, the run of the newest plan is returned.
    """
    runs, planned = plan.store, {place_of(member): member for member in plan.members}
    earlier: dict[Place, str] = {}
    for path in _newest_first(runs, f"{_label(plan)}-*"):
        try:
            for member, folder in _folders(read_json(path)):
                now = planned.get(place_of(member))
                same = now is None or (now.study, now.scale) != (member.study, member.scale) or now.id == member.id
                if not same and (runs / folder).is_dir():
                    earlier.setdefault(place_of(member), folder)
        except (KeyError, TypeError, ValueError, AttributeError):
            continue  # the plan file is damaged; skip it
    return earlier


def place_of(member: Member) -> Place:
    return member.cell.sweep, tuple(sorted(member.cell.place.items()))


def definition(sweeps: Iterable[Sweep]) -> Any:
    """Return the sweeps as lists and dicts of JSON types, so that a definition can be compared with a stored one."""
    return json.loads(json.dumps([plain(asdict(sweep)) for sweep in sweeps], default=str))


# -------------------------------------------------------------------------------- files


def _label(plan: Plan) -> str:
    return "-".join(dict.fromkeys((plan.sweeps[0].study, plan.sweeps[0].scale)))


def selection_hash(selection: Sequence[str]) -> str:
    """Return HASH8, the hash of these normalised overrides, which is part of their plan file's name."""
    return hashlib.sha256(json.dumps(list(selection)).encode()).hexdigest()[:HASH]


def _newest_first(runs: Path, pattern: str) -> list[Path]:
    paths = (runs / FOLDER).glob(f"{pattern}.json")
    return sorted(paths, key=lambda path: path.stat().st_mtime_ns, reverse=True)


def _checksum(content: Mapping[str, Any]) -> str:
    """Return the hash of the keys `sweeps`, `members` and `trials` of a plan file's content."""
    parts = [content.get(key) for key in ("sweeps", "members", "trials")]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _text(data: Mapping[str, Any]) -> str:
    """Return the content of a plan file as JSON text with one line for each item of a list, such as a trial."""
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


def _encoded(plan: Plan) -> dict[str, Any]:
    return {
        "sweeps": definition(plan.sweeps),
        "members": [asdict(replace(member, cell=_with_runs_override(member.cell, STORE))) for member in plan.members],
        "trials": [_trial(planned, plan.store) for planned in plan.trials.values()],
    }


def _trial(planned: Planned, runs: Path) -> dict[str, Any]:
    trial = planned.trial
    if planned.parent is not None:  # `_decoded` sets the path of the parent's folder again
        trial = replace(trial, branch=Branch(None, trial.branch.step))
    return {
        "id": planned.id,
        "folder": os.path.relpath(planned.folder.path, runs),
        "trial": trial.to_dict(),
        "runtime": asdict(replace(planned.runtime, runs="")),
        "made_of": planned.made_of,
        "resources": asdict(planned.resources),
        "parent": planned.parent,
        "keep": sorted(planned.keep),
        "earlier_tokens": planned.earlier_tokens,
    }


def _with_runs_override(cell: Cell, override: str) -> Cell:
    """Return the cell with `override` in place of its override `runtime.runs=…`, likewise in its parents.

    override: `runtime.runs=PATH`, or `runtime.runs=` in a plan file, which does not contain the path since the store
    may be mounted elsewhere.
    """
    overrides = tuple(override if text.startswith(STORE) else text for text in cell.overrides)
    return replace(cell, overrides=overrides, parent=cell.parent and _with_runs_override(cell.parent, override))


# -------------------------------------------------------------------------------- from JSON to plans


def _loaded(path: Path, runs: Path, selection: tuple[str, ...] | None = None) -> StoredPlan:
    data = read_json(path)
    if data is None or "format" not in data:
        raise UnusablePlan(f"{path} is damaged or is not a plan file")
    if data["format"] != FORMAT:
        raise UnusablePlan(f"{path} has format {data['format']}, but this version of fewbits reads format {FORMAT}")
    if selection is not None and data.get("overrides") != list(selection):
        raise UnusablePlan(f"{path} belongs to other overrides: {data.get('overrides')}")
    if data.get("checksum") != _checksum(data):
        raise UnusablePlan(f"{path} is damaged: its content does not match its checksum")
    try:
        return StoredPlan(_decoded(data, runs), path, tuple(data["overrides"]), data["git"], data["time"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"it has no key {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise UnusablePlan(f"{path} cannot be read by this version of fewbits ({reason})") from None


def _decoded(data: Mapping[str, Any], runs: Path) -> Plan:
    folders = {name[-HASH:]: name for name in os.listdir(runs)} if runs.is_dir() else {}
    trials: dict[str, Planned] = {}
    for row in data["trials"]:
        trial, parent = Trial.from_dict(row["trial"]), row["parent"]
        if parent is not None:
            trial = replace(trial, branch=Branch(str(trials[parent].folder.path), trial.branch.step))
        # The same trial may have been trained under another name since; then its folder has this other name.
        name = folders.get(row["id"][:HASH], row["folder"])
        trials[row["id"]] = Planned(
            RunFolder(Path(os.path.normpath(runs / name)), row["id"]),
            trial,
            replace(from_dict(Runtime, row["runtime"]), runs=str(runs)),
            row["made_of"],
            from_dict(Resources, row["resources"]),
            parent,
            set(row["keep"]),
            row["earlier_tokens"],
        )
    here = f"{STORE}{spelled(str(runs))}"
    members = [from_dict(Member, row) for row in data["members"]]
    return Plan(
        tuple(from_dict(Sweep, sweep) for sweep in data["sweeps"]),
        tuple(replace(member, cell=_with_runs_override(member.cell, here)) for member in members),
        trials,
    )


def _folders(data: Mapping[str, Any] | None) -> Iterator[tuple[Member, str]]:
    """Yield each member in a plan file's content, with the name of its trial's run folder, without decoding the trials.

    A member is a place of the plan with the id of its trial. Because trials are not decoded, the function also works
    for plan files whose trials this version of fewbits cannot decode. data: the content; None: the file is unreadable.
    For None, and for another format version than FORMAT, nothing is yielded.
    """
    if data is not None and data["format"] == FORMAT:
        folders = {row["id"]: row["folder"] for row in data["trials"]}
        yield from ((from_dict(Member, row), folders[row["id"]]) for row in data["members"])
