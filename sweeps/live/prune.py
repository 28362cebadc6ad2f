"""List what can be removed from a store and what that frees; remove it only on request (`fewbits prune`)."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fewbits.common.arguments import CommandParser, existing
from fewbits.common.atomic import remove_folder
from fewbits.common.from_dict import one_of
from fewbits.common.store_folder import runs_option, store_folder
from fewbits.common.tables import print_table
from fewbits.common.terminal import notice
from fewbits.experiments.identity import computed_by_todays_sources
from fewbits.experiments.storage import checkpoints
from fewbits.experiments.storage.run_folder import Busy, RunFolder, opened
from fewbits.sweeps.live.disk_space import bytes_below, free_bytes, size
from fewbits.sweeps.planning.replacing import FOLDER as REPLACED
from fewbits.sweeps.planning.stored_plans import UnusablePlan, stored_plans
from fewbits.sweeps.running import store

KINDS = {
    "leftovers": "unfinished files of processes that were killed",
    "checkpoints": "of trials that have ended: all but the last checkpoint and those from which branches start",
    "replaced": "old runs that `fewbits sweep --like` has moved away",
    "stale": "whole runs that another version of the code computed, and that no stored plan and no other run needs",
}
OLD = 3600.0  # seconds after which no process still writes an unfinished file of the store itself
NAMED_ONLY = ("stale",)  # removing them loses results
EXAMPLES = """\
examples:
  fewbits prune                          what can go; nothing is removed
  fewbits prune --delete                 remove it
  fewbits prune stale                    runs of older versions of the code, which are listed only by this name
  fewbits prune checkpoints --delete

kinds:
""" + "\n".join(f"  {kind:12} {about}" for kind, about in KINDS.items())


@dataclass(frozen=True)
class Item:
    """A file or folder that can be removed."""

    kind: str
    path: Path
    run: RunFolder | None = None  # the run that it is a part of

    @property
    def bytes(self) -> int:
        return bytes_below(self.path) if self.path.is_dir() else self.path.stat().st_size


def main(argv: Sequence[str]) -> int:
    parser = CommandParser("fewbits prune", __doc__, EXAMPLES)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"only these: {', '.join(KINDS)}")
    parser.add_argument("--delete", action="store_true", help="remove what is listed")
    parser.add_argument("--json", action="store_true", help="print a JSON list of objects")
    parser.add_argument("--runs", metavar="DIR", help="the store (default: runs)")
    options = parser.parse_intermixed_args(argv)
    for kind in options.kinds:
        one_of("prune", kind, KINDS)
    runs = store_folder(existing(options.runs) or "runs")
    kinds = options.kinds or [kind for kind in KINDS if kind not in NAMED_ONLY]
    items = [(item, item.bytes) for item in removable(runs) if item.kind in kinds]
    if options.delete:
        items = [(item, count) for item, count in items if _remove(item)]
    if options.json:
        rows = [{"kind": item.kind, "path": str(item.path), "bytes": count} for item, count in items]
        print(json.dumps(rows, indent=2))
        return 0
    shown = ((item.kind, str(item.path.relative_to(runs)), size(count)) for item, count in items)
    if items:
        print_table(("kind", "path", "size"), shown, right=("size",))
        print()
    total = size(sum(count for _, count in items))
    if options.delete:
        print(f"{len(items)} removed, {total} freed; {size(free_bytes(runs))} are free now")
    else:
        again = f"; `fewbits prune{''.join(f' {kind}' for kind in options.kinds)} --delete{runs_option(runs)}` removes"
        print(f"{len(items)} can go, which frees {total}" + (f"{again} them" if items else ""))
    return 0


def removable(runs: Path) -> Iterator[Item]:
    """Yield what can be removed from a store, without that of trials that run."""
    started = [*_started(runs)]
    needs = _needs(runs, started)
    for run in started:
        if store.holder(run) is not None:
            continue
        for folder in (run.path, run.checkpoints, run.kept):
            yield from (Item("leftovers", file, run) for file in sorted(folder.glob(".*.partial")))
        if needs is None or not _has_ended(run):
            continue
        needed, planned = needs
        if run.path.name not in planned and run.path.name not in needed and _is_stale(run):
            yield Item("stale", run.path, run)
        else:
            older = [*checkpoints.steps(run.checkpoints).items()][:-1]
            steps = needed.get(run.path.name, set())
            yield from (Item("checkpoints", folder, run) for step, folder in older if step not in steps)
    for file in sorted(runs.glob(".*.partial")):
        if time.time() - file.stat().st_mtime > OLD:
            yield Item("leftovers", file)
    yield from (Item("replaced", folder) for folder in sorted((runs / REPLACED).glob("*")))


def _started(runs: Path) -> Iterator[RunFolder]:
    """Yield the runs of a store; a line names each one that cannot be read."""
    for path in sorted(runs.glob("*/provenance.json")):
        try:
            yield opened(path.parent)
        except (OSError, ValueError) as error:
            notice(f"{error}; {path.parent.name} is left out")


def _has_ended(run: RunFolder) -> bool:
    """Tell whether a run has an intact result: one that is damaged has to be repaired from the checkpoints."""
    try:
        return run.result() is not None
    except ValueError:
        return False


def _needs(runs: Path, started: Sequence[RunFolder]) -> tuple[dict[str, set[int]], set[str]] | None:
    """Return the steps from which branches start, by run folder, and the run folders of stored plans.

    Return None if a plan cannot be read, since it may need any run.
    """
    needed: dict[str, set[int]] = {}
    planned: set[str] = set()
    unusable: list[UnusablePlan] = []
    for stored in stored_plans(runs, unusable.append):
        for trial in stored.plan.trials.values():
            planned.add(trial.folder.path.name)
            needed.setdefault(trial.folder.path.name, set()).update(trial.keep, trial.runtime.keep_steps)
    for error in unusable:
        notice(f"{error}: runs and checkpoints that it may need are kept; run its sweep again, or remove the file")
    for run in started:
        provenance = run.provenance() or {}
        parent = (provenance.get("identity") or {}).get("parent")
        if parent and provenance.get("parent"):
            needed.setdefault(Path(provenance["parent"]).name, set()).add(int(parent["step"]))
    return None if unusable else (needed, planned)


def _is_stale(run: RunFolder) -> bool:
    return not computed_by_todays_sources(run.provenance() or {})


def _remove(item: Item) -> bool:
    """Remove an item, and tell whether it is gone.

    Parts of a run that another process uses are kept, and so is a run's last intact checkpoint.
    """
    try:
        if item.run is None:
            _discard(item.path)
        else:
            with item.run.alone():
                if item.kind == "checkpoints" and not _has_later_checkpoint(item.run, item.path):
                    notice(f"{item.path} is not removed: no later checkpoint is intact")
                    return False
                _discard(item.path)
    except Busy as error:
        notice(f"{error}: {item.path.name} is not removed")
        return False
    return True


def _has_later_checkpoint(run: RunFolder, path: Path) -> bool:
    """Tell whether a run has an intact checkpoint that is newer than the one at the path."""
    for later in reversed(checkpoints.steps(run.checkpoints).values()):
        if later == path:
            return False
        try:
            checkpoints.load(later)
        except checkpoints.DamagedCheckpoint as error:
            notice(error)
        else:
            return True
    return False


def _discard(path: Path) -> None:
    if path.name.startswith(".") and path.is_dir():
        shutil.rmtree(path)
    elif path.is_dir():
        remove_folder(path)
    else:
        path.unlink()
