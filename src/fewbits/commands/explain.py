"""Print the differences between two runs, or between a run and what the code would compute now (`fewbits explain`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from fewbits.common.arguments import CommandParser
from fewbits.common.wording import differences

EXAMPLES = """\
examples:
  fewbits explain nemotron-nano-bf16-python-s0-1a2b3c4d 5e6f7a8b     two runs, by folder or by hash
  fewbits explain 1a2b                                               a run and the current sources and config files
  fewbits explain /mnt/other/runs/1a2b3c4d 5e6f7a8b                  a run of another store, by path, and one of this

The command works on any machine that has access to the store, without the training data.
"""
STALE = (
    "the run is stale: other sources computed it, so its bits may differ now; after an edit, undo the edit to find the "
    "run again (comments, messages and docstrings do not count)"
)


def main(argv: Sequence[str]) -> int:
    parser = CommandParser("fewbits explain", __doc__, EXAMPLES)
    parser.add_argument("a", metavar="A", help="a run: its folder, or the first 4 or more digits of its hash")
    parser.add_argument("b", nargs="?", metavar="B", help="another run; default: what the code computes now")
    parser.add_store()
    options = parser.parse_intermixed_args(argv)

    from fewbits.experiments.storage.run_folder import find_run

    runs = [find_run(name, options.runs) for name in (options.a, options.b) if name is not None]
    for name, run in zip((options.a, options.b), runs, strict=False):
        if run.name not in name:
            print(f"{name}: {run.name}")
    lines = differences(_as_computed(runs[0]), _as_computed(runs[1])) if options.b else _changes(runs[0])
    if lines and options.b:
        lines = [*_data_differences(*runs), *lines]
    print("\n".join(lines) or ("the same trial" if options.b else "the current code computes the same trial"))
    if not options.b and any(line.startswith(("numerics version", "edited source")) for line in lines):
        print(STALE)
    return 0


def _as_computed(path: Path) -> dict[str, Any]:
    """Return the values whose hash is a run's id; `parent` is the parent's name and the step, as NAME@STEP."""
    from fewbits.experiments.identity import all_settings
    from fewbits.experiments.storage.run_folder import saved_trial

    provenance = _provenance(path)
    made_of, parent = provenance["identity"], provenance["identity"].get("parent")
    name = parent and f"{Path(provenance.get('parent') or parent.get('id', '')).name}@{parent['step']}"
    fields = {**made_of, "config": all_settings(saved_trial(path)), "parent": name} | _sources(provenance)
    return {key: value for key, value in fields.items() if key not in ("numerics", "edited", "probe")}


def _data_differences(a: Path, b: Path) -> list[str]:
    """Return a line for each setting of the data that differs, if the data do; the id contains only their digest."""
    from fewbits.experiments.storage.run_folder import saved_trial

    if _provenance(a)["identity"].get("data") == _provenance(b)["identity"].get("data"):
        return []
    left, right = ({"data": asdict(saved_trial(path).data)} for path in (a, b))
    return differences(left, right)


def _changes(path: Path) -> list[str]:
    """Return the differences between a run and the trial that its overrides and the sources define now."""
    from fewbits.experiments.config import load_trial
    from fewbits.experiments.identity import all_settings, changed, is_current, numerics, running
    from fewbits.experiments.storage.run_folder import saved_trial

    provenance, was, now = _provenance(path), {}, {}
    if overrides := _overrides(path, provenance):
        trial = saved_trial(path)
        try:
            current, _ = load_trial(overrides)
        except ValueError as error:  # for example because a config file is not on this machine
            return [f"the overrides of the run no longer define a trial: {error}"]
        if current.model.name == trial.model.name:  # the vocabulary depends on the data, which are not read here
            current = replace(current, model=replace(current.model, vocab=trial.model.vocab))
        was, now = ({"config": all_settings(one), "data": asdict(one.data)} for one in (trial, current))
    if not is_current(provenance):
        sources = {file: running().get(file) for file in changed()}
        was, now = was | _sources(provenance), now | _sources({"identity": numerics(), "sources": sources})
    return differences(was, now)


def _overrides(path: Path, provenance: dict[str, Any]) -> Sequence[str]:
    """Return a run's overrides from the newest stored plan that contains it, else from its command `fewbits train`."""
    from fewbits.sweeps.planning.stored_plans import stored_plans

    for stored in stored_plans(path.resolve().parent):
        if cell := next((member.cell for member in stored.plan.members if member.id == provenance["id"]), None):
            return cell.overrides
    _, *command = provenance.get("command") or [""]
    return [text for text in command[1:] if "=" in text and text[0] != "-"] if command[:1] == ["train"] else []


def _sources(provenance: dict[str, Any]) -> dict[str, Any]:
    """Return the numerics version of a run's sources, and the digests of the files that had been edited."""
    version = provenance["identity"].get("numerics")
    edited = provenance.get("sources") or {} if "edited" in provenance["identity"] else {}
    files = {f"edited source {path}": (digest or "removed")[:12] for path, digest in edited.items()}
    return ({} if version is None else {"numerics version": version}) | files


def _provenance(path: Path) -> dict[str, Any]:
    from fewbits.experiments.storage.run_folder import opened

    provenance = opened(path).provenance() or {}
    if not isinstance(provenance.get("identity"), dict):
        raise ValueError(f"{path / 'provenance.json'} has no `identity`: restore the file, or run the trial again")
    return provenance
