"""Find where a branch starts: another trial's checkpoint, with its weights, its optimizer and its position in the data.

A branch differs from its parent in its recipe, its length and its learning rates. The checkpoint fits only a
trial with the same model, the same data in the same order, and the same kind of optimizer. An imported checkpoint has
read no data and has no optimizer, so its branches choose their seed, length of sequences and optimizer themselves. A
parent is identified by its id and the step, not by its path.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from fewbits.common.atomic import checked_json
from fewbits.experiments.data.config import DataConfig
from fewbits.experiments.data.corpus import Corpus
from fewbits.experiments.identity import IMPORTED, ParentPoint, parent_point
from fewbits.experiments.storage import checkpoints
from fewbits.experiments.storage.run_folder import RunFolder, find_run, opened, saved_trial
from fewbits.experiments.trial import Branch, Trial

IMPORTED_MODEL = "imported:"  # stands before the model's name in branch.parent


@dataclass(frozen=True)
class Parent:
    """The parent of a branch: a run, and the step of the checkpoint to start from."""

    folder: RunFolder
    step: int

    @cached_property
    def point(self) -> ParentPoint:
        return parent_point(self.folder.provenance() or {}, self.step)

    @cached_property
    def checkpoint(self) -> checkpoints.Checkpoint:
        """The checkpoint, read and checked at first access; not needed once the branch has a checkpoint of its own."""
        return self.folder.checkpoint(self.step)

    def check(self, trial: Trial, corpus: Corpus) -> None:
        """Raise ValueError if the trial cannot start from this checkpoint."""
        saved = saved_trial(self.folder.path)
        data = self.checkpoint.state["data"]
        other_data = data["fingerprint"] != corpus.fingerprint
        if other_data and spelled_data(trial.data) != spelled_data(saved.data):
            raise ValueError(
                f"a branch reads the data of its parent, and {self.folder.path} was trained with "
                f"{spelled_data(saved.data)}, not with {spelled_data(trial.data)}"
            )
        own, theirs = dict(self._inherited(trial)), dict(self._inherited(saved))
        differing = [f"{key} {value!r}, not {theirs[key]!r}" for key, value in own.items() if value != theirs[key]]
        if other_data:
            differing.append("the same settings give other data here than where the parent trained")
        if differing:
            hint = "; to draw other noise, set training.rounding_seed" if trial.seed != saved.seed else ""
            raise ValueError(
                f"a branch of {self.folder.path} must have its parent's model and data: {'; '.join(differing)}{hint}"
            )
        corpus.check(data["fingerprint"], data)

    def _inherited(self, trial: Trial) -> Iterator[tuple[str, object]]:
        """Yield the settings that a branch must share with its parent, except those of the data."""
        for key, value in asdict(trial.model).items():
            if key != "name":
                yield f"model.{key}", value
        if IMPORTED not in (self.folder.provenance() or {}).get("identity", {}):
            yield "seed", trial.seed  # it decides the order of the data
            yield "training.length", trial.training.length  # a position in the data is counted in such sequences
            yield "optimizer.kind", trial.optimizer.kind


def _imported_run(model: str, runs: Path) -> Path:
    """Return the folder of the only imported run of this model in the store; raise ValueError if there is none."""
    found = [
        file.parent
        for file in sorted(runs.glob(f"{model}-*/provenance.json"))
        if IMPORTED in (checked_json(file) or {}).get("identity", {}) and saved_trial(file.parent).model.name == model
    ]
    if len(found) != 1:
        several = f"{len(found)} imported runs, " + ", ".join(path.name for path in found) if found else "none"
        raise ValueError(
            f"{IMPORTED_MODEL}{model} needs one imported run of this model in {runs}, and there are {several}: "
            "`fewbits import --help` shows how to import a model; or name a run"
        )
    return found[0]


def find_parent(branch: Branch, runs: Path) -> Parent | None:
    """Return the parent of a branch; None for other trials.

    The parent is named like any run of the store `runs`; `imported:MODEL` is the imported run of this model.
    """
    if branch.parent is None:
        if branch.step is not None:
            raise ValueError(f"branch.step {branch.step} needs branch.parent, a run folder")
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
        raise ValueError(f"branch.parent {path} has not finished: set branch.step to one of its checkpoints")
    return Parent(folder, max({**checkpoints.steps(folder.kept), **checkpoints.steps(folder.checkpoints)}, default=0))


def spelled_data(data: DataConfig) -> str:
    """Return the overrides that choose the data, as `data=python data.size=200000`."""
    default = DataConfig()
    changed = {key: value for key, value in asdict(data).items() if key not in ("kind", "repeat")}
    fields = (shlex.quote(f"data.{key}={value}") for key, value in changed.items() if value != getattr(default, key))
    return " ".join([f"data={data.kind}", *fields])
