"""Plan sweeps: compute the id and the run folder of each trial, and its places in the sweeps.

If several arms or sweeps contain the same computation, the plan has one trial for all of them. The id of a branch is
computed from its parent's settings, so all ids are known before any trial has run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from fewbits.experiments.config import load_trial
from fewbits.experiments.data.corpus import Corpus, DataConfig
from fewbits.experiments.data.load import load
from fewbits.experiments.data.once import default_cache
from fewbits.experiments.identity import ParentPoint, identity
from fewbits.experiments.setup import check, check_data, corpus_model
from fewbits.experiments.storage import run_folder
from fewbits.experiments.storage.run_folder import RunFolder, check_start, find_parent, spelled_data
from fewbits.experiments.trial import Branch, Runtime, Trial
from fewbits.sweeps.planning.sweep import Cell, Resources, Sweep, expand, sweep_of

Place = tuple[str, tuple[tuple[str, str], ...]]  # (sweep's name, sorted pairs (`arm`, axis or `seed`; value))


@dataclass
class Planned:
    """A trial of the plan, with its run folder and resources."""

    folder: RunFolder
    trial: Trial
    runtime: Runtime
    made_of: dict[str, Any]  # the settings and versions whose hash is the trial's id
    resources: Resources
    parent: str | None = None  # the id of the trial of the plan from which this trial branches; None: no such trial
    keep: set[int] = field(default_factory=set)  # steps at which other trials of the plan branch from this one
    earlier_tokens: int = 0  # training tokens that this trial's chain of parents read before this trial starts

    @property
    def id(self) -> str:
        return self.folder.id


@dataclass(frozen=True)
class Member:
    """A place in a sweep, with the id of the trial there."""

    study: str
    scale: str
    cell: Cell
    id: str  # of the trial; several members have the same id if their trials are the same computation

    @property
    def place(self) -> Place:
        return self.cell.sweep, tuple(sorted(self.cell.place.items()))


@dataclass(frozen=True)
class Plan:
    """The trials of one or more sweeps, and the members: the places in these sweeps, each with its trial's id."""

    sweeps: tuple[Sweep, ...]
    members: tuple[Member, ...]
    trials: dict[str, Planned]  # by id; parents before the trials that branch from them

    @property
    def store(self) -> Path:
        """The store: the folder that contains the run folders."""
        return next(iter(self.trials.values())).folder.path.parent


def plan(sweeps: Sequence[Sweep], extra: tuple[str, ...] = (), *, with_data: bool = True) -> Plan:
    """Return the plan of all cells of these sweeps. Raise ValueError, which names the cell, if a trial is invalid.

    extra: further overrides for every trial. with_data: if False, the data are not read. Then ids and folders are
    placeholders, models have the vocabulary sizes of their presets, and trials are not checked.
    """
    plans = [plan_cells(sweep, cells, with_data=with_data) for sweep in sweeps if (cells := expand(sweep, extra))]
    if not plans:
        names = ", ".join(f"{sweep.name} at scale {sweep.scale}" for sweep in sweeps)
        raise ValueError(f"nothing to run: no trial belongs to sweep {names}: see its keys scales, only and exclude")
    trials: dict[str, Planned] = {}
    for part in plans:
        for key, planned in part.trials.items():
            trials.setdefault(key, planned).keep.update(planned.keep)
    return Plan(tuple(sweeps), tuple(member for part in plans for member in part.members), trials)


def plan_cells(sweep: Sweep, cells: Sequence[Cell], *, with_data: bool = True) -> Plan:
    """Return the plan of these cells of one sweep. Raise ValueError, which names the cell, if a trial is invalid.

    with_data: if False, the data are not read, and ids and folders are placeholders (see `plan`).
    """
    trials: dict[str, Planned] = {}
    made: dict[Cell, Planned] = {}

    def planned(cell: Cell) -> Planned:
        """Return the cell's trial; the first call for a cell makes it, after its parent, and stores it in `made`."""
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


def joined(earlier: Plan | None, now: Plan) -> Plan:
    """Return a multirun's plan with the places and trials of both plans; at a place of both, the trial of `now`."""
    if earlier is None:
        return now
    members = {member.place: member for plan in (earlier, now) for member in plan.members}
    wanted = {member.id for member in members.values()}
    trials = {key: planned for plan in (earlier, now) for key, planned in plan.trials.items() if key in wanted}
    sweep = sweep_of(now.sweeps[0].name, [member.cell for member in members.values()])
    return replace(now, sweeps=(sweep,), members=tuple(members.values()), trials=trials)


def _planned(cell: Cell, resources: Resources, parent: Planned | None, with_data: bool) -> Planned:
    trial, runtime = load_trial(cell.overrides)
    runtime, resources = _on_a_device(runtime, resources)
    fingerprint = f"missing: {spelled_data(trial.data)}"
    if with_data:
        corpus = corpus_of(trial.data, runtime.cache)
        trial, fingerprint = corpus_model(trial, corpus), corpus.fingerprint
    start, earlier_tokens = None, 0
    if parent is not None:
        step = _branch_step(cell, parent.trial)
        check_start(trial, fingerprint, parent.trial, parent.made_of["data"], parent.folder.path)
        parent.keep.add(step)
        start = ParentPoint(parent.id, step)
        earlier_tokens = parent.earlier_tokens + tokens_until(parent.trial, step)
        trial = replace(trial, branch=Branch(str(parent.folder.path), step))
    elif with_data and (outside := find_parent(trial.branch, Path(runtime.runs).expanduser())) is not None:
        start = outside.point  # the overrides name a run outside the sweep as parent, such as an imported model
        trial = replace(trial, branch=Branch(str(outside.folder.path.resolve()), outside.step))
    made_of = identity(trial, fingerprint, runtime.device, ranks=resources.ranks, threads=runtime.threads, parent=start)
    folder = run_folder.find(Path(runtime.runs).expanduser().resolve(), trial.name, made_of)
    if with_data and not folder.over:
        _checked(trial, resources.ranks, corpus)
        check_repeats(trial, earlier_tokens, fresh_tokens(trial, earlier_tokens, corpus))
    parent_id = parent.id if parent else None
    return Planned(folder, trial, runtime, made_of, resources, parent_id, earlier_tokens=earlier_tokens)


def _on_a_device(runtime: Runtime, resources: Resources) -> tuple[Runtime, Resources]:
    """Return the runtime settings with a definite device, and the resources with definite numbers of CPUs and GPUs.

    The result does not depend on this machine: the device `auto` becomes `cuda` if the resources contain GPUs, else
    `cpu`.
    """
    device, gpus, cpus = runtime.device, resources.gpus, resources.cpus
    if device == "auto":
        device = "cuda" if gpus else "cpu"
    if gpus is None:
        gpus = 1.0 if device == "cuda" else 0.0
    if device == "cuda" and not gpus:
        raise ValueError("resources.gpus is 0, but runtime.device is cuda: set resources.gpus to 1 or a fraction of 1")
    cpus = float(runtime.threads) if cpus is None else cpus
    return replace(runtime, device=device), replace(resources, cpus=cpus, gpus=gpus)


def _branch_step(cell: Cell, parent: Trial) -> int:
    """Return the step of `parent` at which the trial of `cell` starts.

    It follows from `cell.at`: a value of 1 or more is the step itself, a value below 1 is a fraction of the parent's
    steps, and None means the parent's last step. Raise ValueError if the parent has no such step.
    """
    steps = parent.training.steps
    at = 1.0 if cell.at is None else cell.at
    step = round(at * steps) if at < 1 or cell.at is None else int(at)
    if not 1 <= step <= steps:
        raise ValueError(f"at {cell.at}: expected a step of the parent, 1 to {steps}, or a fraction that gives one")
    return step


# -------------------------------------------------------------------------------- data and checks


def cache_at(folder: str | None) -> Path:
    """Return the folder of prepared data. folder: the setting `runtime.cache`; None: the user's cache."""
    return Path(folder).expanduser() if folder else default_cache()


@cache
def corpus_of(data: DataConfig, cache_folder: str | None) -> Corpus:
    """Return the corpus of a trial's data; raise ValueError if the data are missing and cannot be generated."""
    return load(data, cache_at(cache_folder))


def tokens_until(trial: Trial, step: int) -> int:
    """Return how many tokens the trial itself, without its parents, reads in its first `step` steps."""
    return step * trial.training.batch * trial.training.length


def fresh_tokens(trial: Trial, earlier_tokens: int, corpus: Corpus) -> int:
    """Return the number of tokens after which a trial, its parents included, reads text a second time."""
    return corpus.fresh_tokens(trial.training.steps + earlier_tokens // tokens_until(trial, 1))


def check_repeats(trial: Trial, earlier_tokens: int, corpus_tokens: int) -> None:
    """Raise ValueError if a trial and its parents read the training split more often than `data.repeat` allows.

    A model memorises text that it reads many times; up to four times, the default, is about as good as new text (arXiv
    2305.16264). `fewbits train` has no such limit, since a user may want to overfit. earlier_tokens: the tokens that
    the parents read before the trial starts. corpus_tokens: the tokens that it can read once.
    """
    tokens = earlier_tokens + tokens_until(trial, trial.training.steps)
    epochs = tokens / corpus_tokens
    if epochs > trial.data.repeat and not trial.is_probe:  # a probe does not train
        before = f" ({earlier_tokens:,} before it branches)" if earlier_tokens else ""
        raise ValueError(
            f"{trial.name} reads {tokens:,} tokens{before}, which is {epochs:,.1f} epochs: it reads text of "
            f"data.kind={trial.data.kind} a second time after {corpus_tokens:,} tokens; data.repeat allows "
            f"{trial.data.repeat}: use fewer steps, more data, or data.repeat={-(-tokens // corpus_tokens)}"
        )


_seen: set[str] = set()  # settings, as JSON, whose check has passed in this process


def _checked(trial: Trial, ranks: int, corpus: Corpus) -> None:
    """Make the checks that training makes before its first step; they raise ValueError for invalid settings or data.

    The checks build models and read data, which takes seconds. Therefore each check runs only once for all trials that
    differ only in settings that cannot change its result.
    """
    parts = asdict(replace(trial, seed=0, optimizer=type(trial.optimizer)(), branch=Branch()))
    starts = bool(trial.branch.parent), trial.is_probe, bool(trial.data.phases) and trial.training.steps
    of_data = [asdict(trial.evaluation), trial.training.length, corpus.fingerprint, starts]
    if (key := json.dumps([parts, ranks], default=str)) not in _seen:
        check(trial, ranks)
        _seen.add(key)
    if (key := json.dumps(of_data, default=str)) not in _seen:
        check_data(trial, corpus)
        _seen.add(key)
