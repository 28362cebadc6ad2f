"""Store the plan of each `fewbits sweep` command as `plans/STUDY-SCALE-HASH8.json` in the store.

HASH8 is the hash of the command's overrides. Only `fewbits sweep` plans; all other commands read the stored plan, so
they also work without the training data, the sweep file or the version of torch that planned. Run folders are named
without the path of the store, which may be mounted elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path, PurePath
from typing import Any

from fewbits.common.atomic import read_json, write_atomically
from fewbits.common.from_dict import from_dict
from fewbits.common.terminal import notice
from fewbits.common.wording import differences, plural
from fewbits.experiments.composition import parse_override
from fewbits.experiments.config_files import SEARCH_PATH
from fewbits.experiments.environment import commit
from fewbits.experiments.storage.run_folder import HASH, RunFolder
from fewbits.experiments.trial import Branch, Runtime, Trial
from fewbits.sweeps.planning.plan import Member, Plan, Planned, plan
from fewbits.sweeps.planning.studies import load_sweeps
from fewbits.sweeps.planning.sweep import Cell, Resources, Sweep
from fewbits.version import __version__

FOLDER = "plans"
RUNS = "runtime.runs"
LOCATIONS = (RUNS, "runtime.cache", SEARCH_PATH)  # keys of paths, which do not select trials
DEFAULT_SCALE = f"scale={Sweep('').scale}"
MULTIRUN, NAME = "hydra.mode=MULTIRUN", "hydra.job.name"  # Hydra's settings: its mode; the name of a multirun


class UnusablePlan(ValueError):
    """Raised if a plan file is damaged, or has a content that this version of fewbits cannot read."""


@dataclass(frozen=True)
class StoredPlan:
    """A plan that was read from the store."""

    plan: Plan
    overrides: tuple[str, ...]  # of the command that made the plan; see `selection`
    time: str  # when the plan was stored, in ISO format


# -------------------------------------------------------------------------------- overrides of a command


def is_location(override: str) -> bool:
    """Tell whether an override sets one of LOCATIONS, the paths that do not affect which trials are selected."""
    return _key(override) in LOCATIONS


def selection(overrides: Sequence[str]) -> tuple[str, ...]:
    """Return the overrides that select trials, sorted; a sweep file, which may lie elsewhere, by its name."""
    chosen: dict[str, str] = {}
    for override in overrides:
        is_file = override.endswith((".yaml", ".yml")) and _key(override) in (override, "file")
        chosen[_key(override)] = PurePath(override.removeprefix("file=")).name if is_file else override
    if "study" in chosen and chosen.get("scale") == DEFAULT_SCALE:
        del chosen["scale"]
    return tuple(sorted(text for key, text in chosen.items() if key not in LOCATIONS))


def selection_hash(overrides: Sequence[str]) -> str:
    """Return HASH8, the hash of the overrides that select trials, which is part of the plan file's name."""
    return hashlib.sha256(json.dumps(list(selection(overrides))).encode()).hexdigest()[:HASH]


def multirun_name(overrides: Sequence[str]) -> str:
    """Return the name of a multirun: the value of `hydra.job.name` or, without it, `multirun-HASH8`."""
    named = [text.partition("=")[2] for text in overrides if _key(text) == NAME]
    if named:
        return named[-1].strip("\"'")
    return f"multirun-{selection_hash([text for text in overrides if text != MULTIRUN])}"


def runs_named(overrides: Sequence[str]) -> str | None:
    """Return the store in the last override `runtime.runs=STORE`, or None if there is no such override."""
    named = [override for override in overrides if _key(override) == RUNS]
    if not named:
        return None
    value = parse_override(named[-1]).value()
    if not value:
        raise ValueError(f"{named[-1]}: expected a folder, as in {RUNS}=runs")
    return str(value)


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+")


# -------------------------------------------------------------------------------- files


def save_plan(plan: Plan, overrides: Sequence[str]) -> Path:
    """Store the plan under the overrides of its command, and return the path of its file."""
    label = "-".join(dict.fromkeys((plan.sweeps[0].study, plan.sweeps[0].scale)))
    path = plan.store / FOLDER / f"{label}-{selection_hash(overrides)}.json"
    now = datetime.now(UTC).isoformat(timespec="seconds")
    content = json.loads(json.dumps({"overrides": selection(overrides), **encoded(plan)}))
    stored = read_json(path) or {}
    if "time" not in stored or {key: stored.get(key) for key in content} != content:  # an equal plan keeps its time
        head = {"fewbits": __version__, "git": commit(), "time": now}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(head | content, ensure_ascii=False, separators=(",", ":")).encode())
    return path


def load_plan(runs: Path, overrides: Sequence[str]) -> StoredPlan | None:
    """Return the plan that the store `runs` contains for these overrides; None if it contains none.

    Raise UnusablePlan if the plan file cannot be used.
    """
    paths = _newest_first(runs, f"*-{selection_hash(overrides)}")
    return _loaded(paths[0], runs.resolve()) if paths else None


def stored_plans(runs: Path, unusable: Callable[[UnusablePlan], None] = lambda _: None) -> Iterator[StoredPlan]:
    """Yield the plans in the store `runs`, the newest first; call `unusable` with the error for each unusable file."""
    for path in _newest_first(runs, "*"):
        try:
            yield _loaded(path, runs.resolve())
        except UnusablePlan as error:
            unusable(error)


def find_plan(overrides: Sequence[str]) -> Plan:
    """Return the stored plan of these overrides, for a command that reads results.

    If the store has none that can be used, say so and return the plan that `fewbits sweep` would store now, which needs
    the data.
    """
    runs = Path(runs_named(overrides) or "runs").expanduser()
    problem = f"{runs} has no plan of `{' '.join(['fewbits sweep', *selection(overrides)])}`, which has not run here"
    try:
        if (stored := load_plan(runs, overrides)) is not None:
            return stored.plan
    except UnusablePlan as error:
        problem = str(error)
    planned = plan(*load_sweeps(overrides))
    notice(f"{problem}; this is what it would run")
    return planned


def _newest_first(runs: Path, pattern: str) -> list[Path]:
    paths = (runs / FOLDER).glob(f"{pattern}.json")
    return sorted(paths, key=lambda path: path.stat().st_mtime_ns, reverse=True)


def _loaded(path: Path, runs: Path) -> StoredPlan:
    data = read_json(path)
    try:
        if data is None:
            raise ValueError("no JSON object")
        return StoredPlan(decoded(data, runs), tuple(data["overrides"]), data["time"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"no key {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise UnusablePlan(
            f"{path} is damaged or of another version of fewbits ({reason}); `fewbits sweep` with the same arguments "
            "writes a new one"
        ) from None


def changes(overrides: Sequence[str], new: Plan) -> list[str]:
    """Return lines that say how a new plan of these overrides differs from the stored one, or why that is unusable."""
    try:
        stored = load_plan(new.store, overrides)
    except UnusablePlan as error:
        return [str(error)]
    if stored is None:
        return []
    before, after = ({one.place: plan.trials[one.id] for one in plan.members} for plan in (stored.plan, new))
    pairs = [(before[place], after[place]) for place in after if place in before]
    changed = [(old, now) for old, now in pairs if old.id != now.id]
    counts = {"added": len(after) - len(pairs), "removed": len(before) - len(pairs), "changed": len(changed)}
    parts = [f"{plural(count, 'trial')} {what}" for what, count in counts.items() if count]
    lines = [f"since the plan of {stored.time}: {', '.join(parts)}"] if parts else []
    if changed:
        of_all = (differences(old.made_of, json.loads(json.dumps(now.made_of))) for old, now in changed)
        keys = Counter(line.partition(":")[0] for one in of_all for line in one)
        finished = sum(old.folder.over for old, _ in changed)
        unused = f"; {plural(finished, 'result')} of the old plan not used" if finished else ""
        lines.append(f"changed: {', '.join(f'{key} ({count} x)' for key, count in keys.most_common(5))}{unused}")
    return lines


# -------------------------------------------------------------------------------- JSON


def encoded(plan: Plan) -> dict[str, Any]:
    """Return a plan as the content of JSON, without the path of its store."""
    return {
        "sweeps": [asdict(sweep) for sweep in plan.sweeps],
        "members": [asdict(replace(member, cell=_without_store(member.cell))) for member in plan.members],
        "trials": [_trial(planned) for planned in plan.trials.values()],
    }


def _without_store(cell: Cell) -> Cell:
    overrides = tuple(text for text in cell.overrides if _key(text) != RUNS)
    return replace(cell, overrides=overrides, parent=cell.parent and _without_store(cell.parent))


def _trial(planned: Planned) -> dict[str, Any]:
    trial = planned.trial
    if planned.parent is not None:  # `decoded` sets the path of the parent's folder again
        trial = replace(trial, branch=Branch(None, trial.branch.step))
    changed: dict[str, Any] = {"trial": trial.to_dict(), "runtime": asdict(replace(planned.runtime, runs=""))}
    changed |= {"resources": asdict(planned.resources), "keep": sorted(planned.keep)}
    same = {key: getattr(planned, key) for key in ("id", "made_of", "parent", "earlier_tokens")}
    return {"folder": planned.folder.path.name, **same, **changed}


def decoded(data: Mapping[str, Any], runs: Path) -> Plan:
    """Return the plan that `encoded` has described, over the store `runs`."""
    folders = {name[-HASH:]: name for name in os.listdir(runs)} if runs.is_dir() else {}
    trials: dict[str, Planned] = {}
    for row in data["trials"]:
        trial, parent = Trial.from_dict(row["trial"]), row["parent"]
        if parent is not None:
            trial = replace(trial, branch=Branch(str(trials[parent].folder.path), trial.branch.step))
        # The same trial may have been trained under another name since; then its folder has this other name.
        trials[row["id"]] = Planned(
            folder=RunFolder(runs / folders.get(row["id"][:HASH], row["folder"]), row["id"]),
            trial=trial,
            runtime=replace(from_dict(Runtime, row["runtime"]), runs=str(runs)),
            made_of=row["made_of"],
            resources=from_dict(Resources, row["resources"]),
            parent=parent,
            keep=set(row["keep"]),
            earlier_tokens=row["earlier_tokens"],
        )
    sweeps = tuple(from_dict(Sweep, sweep) for sweep in data["sweeps"])
    return Plan(sweeps, tuple(from_dict(Member, row) for row in data["members"]), trials)
