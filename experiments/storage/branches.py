"""Find the checkpoint from which a branch starts, and check that the branch can start from it.

A branch takes over weights, optimizer state and position in the data from a checkpoint of another trial, its parent.
It must have the parent's model, the same data in the same order (so the same seed), and the same kind of optimizer;
recipe, dropout, number of steps and learning rates may differ. An imported checkpoint has read no data and has no
optimizer, so a branch from it may have any seed, length and optimizer. A branch's identity contains the parent's id
and step, not its path.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from fewbits.common.atomic import checked_json
from fewbits.experiments.data.corpus import Corpus, DataConfig
from fewbits.experiments.identity import IMPORTED, ParentPoint
from fewbits.experiments.storage import checkpoints
from fewbits.experiments.storage.run_folder import RunFolder, find_run, opened, saved_trial
from fewbits.experiments.trial import Branch, Trial

IMPORTED_MODEL = "imported:"  # branch.parent=imported:MODEL names the imported run of a model


@dataclass(frozen=True)
class Parent:
    """The parent of a branch: a run, and the step of the checkpoint to start from."""

    folder: RunFolder
    step: int

    @cached_property
    def point(self) -> ParentPoint:
        """The parent's id and the step, for the identity of the branch."""
        return ParentPoint(self.folder.id, self.step)

    @cached_property
    def checkpoint(self) -> checkpoints.Checkpoint:
        """The parent's checkpoint, loaded and verified at first access; a branch that resumes does not need it."""
        return self.folder.checkpoint(self.step)

    def check(self, trial: Trial, corpus: Corpus) -> None:
        """Raise ValueError if the trial cannot start from this checkpoint. corpus: the trial's data."""
        imported = IMPORTED in (self.folder.provenance() or {}).get("identity", {})
        path, data = self.folder.path, self.checkpoint.state["data"]
        check_start(trial, corpus.fingerprint, saved_trial(path), data["fingerprint"], path, imported=imported)


def check_start(
    trial: Trial, data: str, parent: Trial, parents_data: str, path: Path, *, imported: bool = False
) -> None:
    """Raise ValueError if the trial, a branch or a probe, cannot start from a checkpoint of the trial `parent`.

    data, parents_data: the fingerprints of the data of both trials. path: the parent's run folder, which need not exist
    yet. imported: the parent is an imported model.
    """
    kind = "probe" if trial.is_probe else "branch"
    if data != parents_data and spelled_data(trial.data) != spelled_data(parent.data):
        raise ValueError(
            f"a {kind} must have the data of its parent: {path} was trained with "
            f"{spelled_data(parent.data)}, not with {spelled_data(trial.data)}"
        )
    trains = not imported and not trial.is_probe
    own, theirs = dict(_inherited(trial, trains)), dict(_inherited(parent, trains))
    differing = [f"{key} {value!r}, not {theirs[key]!r}" for key, value in own.items() if value != theirs[key]]
    if data != parents_data:
        differing.append("the same settings of data give other data here than where the parent trained")
    if differing:
        rounding = "; to change only the seed of rounding and noise, set training.rounding_seed"
        raise ValueError(
            f"a {kind} must have its parent's model and data, but this one differs from {path}: "
            f"{'; '.join(differing)}{rounding if trains and trial.seed != parent.seed else ''}"
        )


def _inherited(trial: Trial, trains: bool) -> Iterator[tuple[str, object]]:
    """Yield the settings (key, value) that must equal the parent's, except those of the data.

    trains: the trial continues the parent's training, with its optimizer state and its order of the data.
    """
    for key, value in asdict(trial.model).items():
        if key != "name" and not (trains and key == "dropout"):  # dropout has no weights
            yield f"model.{key}", value
    if trains:
        yield "seed", trial.seed  # the order of the data depends on it
        yield "training.length", trial.training.length  # the position in the data is a number of such sequences
        yield "optimizer.kind", trial.optimizer.kind
        if trial.data.phases:
            yield "training.batch", trial.training.batch  # phases begin at steps


def _imported_run(model: str, runs: Path) -> Path:
    """Return the folder of the store's imported run of this model; raise ValueError if there is not exactly one."""
    found = [
        file.parent
        for file in sorted(runs.glob(f"{model}-*/provenance.json"))
        if IMPORTED in (checked_json(file) or {}).get("identity", {}) and saved_trial(file.parent).model.name == model
    ]
    if len(found) != 1:
        several = ", ".join(path.name for path in found) or "none"
        raise ValueError(
            f"{IMPORTED_MODEL}{model} needs exactly one imported run of this model in {runs}, and there are {several}: "
            "import the model (fewbits import --help), or set branch.parent to one of the runs"
        )
    return found[0]


def find_parent(branch: Branch, runs: Path) -> Parent | None:
    """Return the parent of a branch; None if the trial has no branch.parent.

    branch.parent is a run's path, name or hash (see `find_run`), or `imported:MODEL` for the imported run of this model
    in the store `runs`. Without branch.step, the parent must have finished, and its last checkpoint is taken.
    """
    if branch.parent is None:
        if branch.step is not None:
            raise ValueError(f"branch.step {branch.step} needs branch.parent: set it to a run")
        return None
    try:
        model = branch.parent.removeprefix(IMPORTED_MODEL)
        path = find_run(branch.parent, runs) if model == branch.parent else _imported_run(model, runs)
    except ValueError as error:
        raise ValueError(f"branch.parent: {error}") from None
    folder = opened(path)
    if branch.step is not None:
        return Parent(folder, branch.step)
    if folder.result() is None:
        raise ValueError(f"branch.parent {path} has not finished: set branch.step to a step of one of its checkpoints")
    return Parent(folder, max({**checkpoints.steps(folder.kept), **checkpoints.steps(folder.checkpoints)}, default=0))


def spelled_data(data: DataConfig) -> str:
    """Return the overrides that select the data, such as `data=python data.size=200000`; defaults are omitted."""
    default = DataConfig()
    changed = {key: value for key, value in asdict(data).items() if key not in ("kind", "repeat")}
    fields = (shlex.quote(f"data.{key}={value}") for key, value in changed.items() if value != getattr(default, key))
    return " ".join([f"data={data.kind}", *fields])
