"""Prepare a trial to run: its data, its run folder, its parent, and what reports its progress."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fewbits.common.atomic import remove_folder
from fewbits.experiments import devices
from fewbits.experiments.data.corpus import Corpus, describe
from fewbits.experiments.data.load import load
from fewbits.experiments.data.once import default_cache
from fewbits.experiments.environment import computed, describe_kinds, environment, segment
from fewbits.experiments.identity import identity, provenance
from fewbits.experiments.setup import check, corpus_model
from fewbits.experiments.storage import lease, run_folder
from fewbits.experiments.storage.checkpoints import steps
from fewbits.experiments.storage.run_folder import Parent, RunFolder, find_parent
from fewbits.experiments.trial import Runtime, Trial
from fewbits.models.execution import check_device


@dataclass(frozen=True)
class Progress:
    """The progress of a trial after a step of training or a batch of a probe."""

    step: int  # number of steps done
    steps: int  # number of steps of the whole trial
    loss: float  # training loss of this step
    tokens_per_second: float
    seconds_a_step: float
    evaluated: float | None = None  # validation loss, if this step was followed by an evaluation


class Events:
    """Subclasses report what happens; `begin` and `stopping` are called on every rank, the others on rank 0."""

    def begin(self, folder: RunFolder, identity: Mapping[str, Any]) -> None:
        """Refuse a trial by an exception before anything is written. identity: the values that its id hashes."""

    def saved(self, folder: RunFolder) -> None:
        """React to a config, a checkpoint or a result that was just written in the run folder."""

    def step(self, progress: Progress) -> None:
        """Report a step of training or a batch of a probe, before its checkpoint is saved."""

    def stopping(self) -> bool:
        """Return whether the trial shall end after the present step; it saves a checkpoint, then KeyboardInterrupt."""
        return False

    def message(self, text: str) -> None:
        """Report that the trial is resumed, evaluated again or already done."""


@dataclass(frozen=True)
class Session:
    """One process's attempt to run a trial. `lost` tells whether the lease of the run folder is lost."""

    trial: Trial
    runtime: Runtime  # `keep_steps` also has the steps of the checkpoints that the folder keeps already
    corpus: Corpus
    folder: RunFolder
    parent: Parent | None
    identity: Mapping[str, Any]
    world: devices.World
    events: Events
    lost: Callable[[], bool] = lambda: False

    @property
    def leads(self) -> bool:
        return not self.world.rank

    @property
    def finished(self) -> bool:
        """True if the trial has a result and all checkpoints that it has to keep."""
        return self.folder.result() is not None and (self.trial.is_probe or self.folder.has(self.runtime.keep_steps))

    def begin(self) -> None:
        """Write the config and provenance, and remove what has to be computed again. Call it on rank 0."""
        self.folder.rewind(self.runtime.keep_steps)
        self._discard_unlike()
        parent = self.parent and str(self.parent.folder.path)
        facts = {"data": describe(self.corpus), "parent": parent, "products": self.trial.recipe.execute}
        self.folder.begin(self.trial, provenance(self.identity, facts))
        self.events.saved(self.folder)

    def _discard_unlike(self) -> None:
        """Remove the run's checkpoints, with a warning, if an environment that may round differently computed them."""
        before, now = self.folder.computed(), computed([environment(self.world.device)])
        places = [path for place in (self.folder.checkpoints, self.folder.kept) for path in steps(place).values()]
        if not places or not before or before == now:
            return
        for path in places:
            remove_folder(path)
        kinds = f"{describe_kinds(before, [now])}, and this machine is {describe_kinds(now, [before])}"
        warnings.warn(f"{self.folder.path.name} starts again: its checkpoints are from {kinds}", stacklevel=2)

    def add_segment(self, step: int) -> None:
        self.folder.add_segment(segment(step, self.world.device))

    def stopping(self) -> bool:
        return self.events.stopping() or (self.leads and lease.stop_requested(self.folder.path))


def prepare(trial: Trial, runtime: Runtime, world: devices.World, events: Events) -> Session:
    """Load the data, check the trial, and find its parent and its folder; write nothing."""
    trial, corpus = with_data(trial, runtime)
    check(trial, world.ranks)
    check_device(trial.recipe, world.device)
    parent = find_parent(trial.branch, Path(runtime.runs).expanduser())
    folder, made_of = _find(trial, corpus, runtime, parent)
    keep = tuple(sorted({*runtime.keep_steps, *steps(folder.kept)}))
    return Session(trial, replace(runtime, keep_steps=keep), corpus, folder, parent, made_of, world, events)


def with_data(trial: Trial, runtime: Runtime) -> tuple[Trial, Corpus]:
    """Load the trial's corpus; return the trial, with a vocabulary large enough for the corpus, and the corpus."""
    corpus = load(trial.data, Path(runtime.cache).expanduser() if runtime.cache else default_cache())
    return corpus_model(trial, corpus), corpus


def find_folder(trial: Trial, runtime: Runtime) -> RunFolder:
    """Return the run folder of a trial, which need not exist yet; nothing is trained."""
    trial, corpus = with_data(trial, runtime)
    folder, _ = _find(trial, corpus, runtime, find_parent(trial.branch, Path(runtime.runs).expanduser()))
    return folder


def _find(trial: Trial, corpus: Corpus, runtime: Runtime, parent: Parent | None) -> tuple[RunFolder, Mapping[str, Any]]:
    made_of = identity(
        trial,
        corpus.fingerprint,
        devices.kind_of_device(runtime),
        ranks=devices.rank_count(),
        threads=runtime.threads,
        parent=parent.point if parent else None,
    )
    return run_folder.find(Path(runtime.runs).expanduser(), trial.name, made_of), made_of
