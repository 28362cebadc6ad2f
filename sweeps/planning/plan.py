"""Plan sweeps: compute the id and the run folder of each trial, and its places in the sweeps.

Trials that are the same computation are planned once, however many sweeps or arms contain them. The ids of branches
follow from their parents' ids, so the whole plan is known before anything has run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from fewbits.experiments.config import load_trial
from fewbits.experiments.data.corpus import Corpus
from fewbits.experiments.identity import ParentPoint, identity, meaning
from fewbits.experiments.setup import check, check_data, corpus_model
from fewbits.experiments.storage import run_folder
from fewbits.experiments.storage.branches import find_parent
from fewbits.experiments.storage.run_folder import RunFolder
from fewbits.experiments.trial import Branch, Runtime, Trial
from fewbits.sweeps.planning.data import check_repeats, corpus_of, tokens_until
from fewbits.sweeps.planning.expand import Cell, expand
from fewbits.sweeps.planning.sweep import Resources, Sweep


@dataclass
class Planned:
    """A trial of the plan."""

    folder: RunFolder
    trial: Trial
    runtime: Runtime
    made_of: dict[str, Any]  # the settings that its id is a hash of
    resources: Resources
    parent: str | None = None  # the id of the trial that it branches from
    keep: set[int] = field(default_factory=set)  # steps from whose checkpoints other trials start
    earlier_tokens: int = 0  # tokens read before it starts, by its parent up to the branch and by the parent's parents

    @property
    def id(self) -> str:
        return self.folder.id


@dataclass(frozen=True)
class Member:
    """A trial's place in a sweep."""

    study: str
    scale: str
    cell: Cell
    id: str


@dataclass(frozen=True)
class Plan:
    """The trials of one or more sweeps, and the places in these sweeps that each trial has."""

    sweeps: tuple[Sweep, ...]
    members: tuple[Member, ...]
    trials: dict[str, Planned]  # by id; parents before the trials that branch from them

    @property
    def store(self) -> Path:
        """The store: the folder that contains the run folders."""
        return next(iter(self.trials.values())).folder.path.parent


def plan(sweeps: Sequence[Sweep], extra: tuple[str, ...] = (), *, with_data: bool = True) -> Plan:
    """Plan whole sweeps. Raise ValueError, which names the cell, if one of the trials is invalid.

    with_data: False does not read the data. Then ids and folders are placeholders, models have the vocabulary sizes of
    their presets, and trials are not checked.
    """
    plans = [plan_cells(sweep, cells, with_data=with_data) for sweep in sweeps if (cells := expand(sweep, extra))]
    if not plans:
        names = ", ".join(f"{sweep.name} at scale {sweep.scale}" for sweep in sweeps)
        raise ValueError(f"nothing to run: {names} has no trials")
    trials: dict[str, Planned] = {}
    for part in plans:
        for key, planned in part.trials.items():
            trials.setdefault(key, planned).keep.update(planned.keep)
    return Plan(tuple(sweeps), tuple(member for part in plans for member in part.members), trials)


def plan_cells(sweep: Sweep, cells: Sequence[Cell], *, with_data: bool = True) -> Plan:
    """Plan these cells of one sweep. Raise ValueError, which names the cell, if one of the trials is invalid."""
    trials: dict[str, Planned] = {}
    made: dict[Cell, Planned] = {}

    def planned(cell: Cell) -> Planned:
        """Plan the cell's parent, then the cell, and add both to `trials` unless they are there already."""
        if cell not in made:
            parent = None if cell.parent is None else planned(cell.parent)
            try:
                new = _planned(cell, sweep.resources, parent, with_data)
            except ValueError as error:
                raise ValueError(f"{cell.title}: {error}") from error
            made[cell] = trials.setdefault(new.id, new)
        return made[cell]

    members = [Member(sweep.study, sweep.scale, cell, planned(cell).id) for cell in cells]
    return Plan((sweep,), tuple(members), trials)


def _planned(cell: Cell, resources: Resources, parent: Planned | None, with_data: bool) -> Planned:
    trial, runtime = load_trial(cell.overrides)
    runtime, resources = _on_a_device(runtime, resources)
    fingerprint = f"missing: {trial.data}"
    if with_data:
        corpus = corpus_of(trial.data, runtime.cache)
        trial, fingerprint = corpus_model(trial, corpus), corpus.fingerprint
    start, earlier_tokens = None, 0
    if parent is not None:
        step = _branch_step(cell, parent.trial)
        parent.keep.add(step)
        start = ParentPoint(meaning(parent.made_of), step, ())
        earlier_tokens = parent.earlier_tokens + tokens_until(parent.trial, step)
        trial = replace(trial, branch=Branch(str(parent.folder.path), step))
    elif with_data and (outside := find_parent(trial.branch, Path(runtime.runs).expanduser())) is not None:
        start = outside.point  # a run outside the sweep, such as an imported model
        trial = replace(trial, branch=Branch(str(outside.folder.path.resolve()), outside.step))
    made_of = identity(trial, fingerprint, runtime.device, ranks=resources.ranks, threads=runtime.threads, parent=start)
    folder = run_folder.find(Path(runtime.runs).expanduser().resolve(), trial.name, made_of)
    if with_data and not folder.over:
        _checked(trial, resources.ranks, corpus)
        check_repeats(trial, earlier_tokens, corpus.tokens_in("train"))
    parent_id = parent.id if parent else None
    return Planned(folder, trial, runtime, made_of, resources, parent_id, earlier_tokens=earlier_tokens)


def _on_a_device(runtime: Runtime, resources: Resources) -> tuple[Runtime, Resources]:
    """Return both with the device, CPUs and GPUs filled in, independent of the machine that plans.

    A trial with device `auto` trains on GPUs if its resources contain GPUs, else on the CPU.
    """
    device = runtime.device
    if device == "auto":
        device = "cuda" if resources.gpus else "cpu"
    gpus = resources.gpus
    if gpus is None:
        gpus = 1.0 if device == "cuda" else 0.0
    if device == "cuda" and not gpus:
        raise ValueError("resources.gpus 0 with runtime.device cuda: set it to 1, or to a fraction of a GPU")
    cpus = float(runtime.threads) if resources.cpus is None else resources.cpus
    return replace(runtime, device=device), replace(resources, cpus=cpus, gpus=gpus)


def _branch_step(cell: Cell, parent: Trial) -> int:
    """Return the step of `parent` at which the branch `cell` starts; raise ValueError if there is no such step."""
    steps = parent.training.steps
    at = 1.0 if cell.at is None else cell.at
    step = round(at * steps) if at < 1 or cell.at is None else int(at)
    if not 1 <= step <= steps:
        raise ValueError(f"at {cell.at}: a step of its parent, 1 to {steps}, or a fraction of them is expected")
    return step


_seen: set[str] = set()


def _checked(trial: Trial, ranks: int, corpus: Corpus) -> None:
    """Make the checks that training makes before it starts.

    They build models and read data, which takes seconds. Therefore each check is made once for all trials that differ
    only in settings that cannot change its result. Finished trials were checked when they ran.
    """
    parts = asdict(replace(trial, seed=0, optimizer=type(trial.optimizer)(), branch=Branch()))
    of_data = [asdict(trial.evaluation), trial.training.length, corpus.fingerprint]
    _once([parts, ranks], lambda: check(trial, ranks))
    _once(of_data, lambda: check_data(trial, corpus))


def _once(settings: object, run_check: Callable[[], None]) -> None:
    key = json.dumps(settings, default=str)
    if key not in _seen:
        run_check()
        _seen.add(key)


def folders(plan: Plan) -> Iterable[RunFolder]:
    return (planned.folder for planned in plan.trials.values())
