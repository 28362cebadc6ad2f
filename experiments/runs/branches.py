"""Where a branch starts: another trial's checkpoint, with its weights, its optimizer and its place in the data.

A branch differs from its parent in its recipe, and in how long and at which rates it goes on. What the checkpoint's
contents mean must not change under it: the model, the data and their order, the kind of optimizer. A parent is known by
its id and the step, not by where it lies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from fewbits.experiments.runs import checkpoints
from fewbits.experiments.data.corpus import Corpus
from fewbits.experiments.identity import ParentPoint, parent_point
from fewbits.experiments.runs.run_folder import RunFolder, opened, saved_trial
from fewbits.experiments.trial import Branch, Trial


@dataclass(frozen=True)
class Parent:
    folder: RunFolder
    step: int

    @cached_property
    def point(self) -> ParentPoint:
        return parent_point(self.folder.provenance() or {}, self.step)

    @cached_property
    def checkpoint(self) -> checkpoints.Checkpoint:
        """Read and checked once, and only where the branch has none of its own yet."""
        return self.folder.checkpoint(self.step)

    def check(self, trial: Trial, corpus: Corpus) -> None:
        """ValueError where the trial cannot go on from here."""
        theirs = dict(_inherited(saved_trial(self.folder.path)))
        differing = [
            f"{key} {value!r}, not {theirs[key]!r}" for key, value in _inherited(trial) if value != theirs[key]
        ]
        if differing:
            hint = "; other noise is training.rounding_seed" if trial.seed != theirs["seed"] else ""
            raise ValueError(
                f"a branch of {self.folder.path} has its parent's model and data: {'; '.join(differing)}{hint}"
            )
        data = self.checkpoint.state["data"]
        corpus.check(data["fingerprint"], data)


def find_parent(branch: Branch, runs: Path) -> Parent | None:
    """The parent that a trial names, by a path or by the name of a folder in `runs`."""
    if branch.parent is None:
        if branch.step is not None:
            raise ValueError(f"branch.step {branch.step} without branch.parent: the run folder that it is a step of")
        return None
    path = next((p for p in (Path(branch.parent).expanduser(), runs / branch.parent) if p.is_dir()), None)
    if path is None:
        raise ValueError(f"branch.parent {branch.parent}: no such run folder, here or in {runs}")
    folder = opened(path)
    if branch.step is not None:
        return Parent(folder, branch.step)
    if folder.result() is None:
        raise ValueError(f"branch.parent {path} has not finished: say by branch.step which of its checkpoints is meant")
    return Parent(folder, max({**checkpoints.steps(folder.kept), **checkpoints.steps(folder.checkpoints)}, default=0))


def _inherited(trial: Trial) -> Iterator[tuple[str, object]]:
    for key, value in asdict(trial.model).items():
        if key != "name":
            yield f"model.{key}", value
    yield "seed", trial.seed  # the order of the data is the seed's
    yield "training.length", trial.training.length  # and a place in it is counted in sequences
    yield "optimizer.kind", trial.optimizer.kind
