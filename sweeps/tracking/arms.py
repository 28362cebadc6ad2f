"""Show the arms of sweeps in MLflow: a top-level run for each arm, below which the runs of its trials are nested.

An arm's metrics are means over the trials that have ended, or while none has, over those that have steps. MLflow cannot
delete points, so when this set of trials changes, the arm's run is deleted and created again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fewbits.experiments.storage.run_folder import RunFolder, plain
from fewbits.experiments.trial import Branch, Trial
from fewbits.sweeps.planning.plan import Plan
from fewbits.sweeps.planning.sweep import SEED, Sweep
from fewbits.sweeps.running import store
from fewbits.sweeps.running.store import State
from fewbits.sweeps.running.trial_status import trial_statuses
from fewbits.sweeps.tracking import connection
from fewbits.sweeps.tracking.points import arm_points, began, ended, key_of
from fewbits.sweeps.tracking.runs import (
    FOLDER,
    KIND,
    NOTE,
    SENT,
    STATUS,
    TRIAL,
    last_sent,
    make,
    note,
    only,
    search,
    send_points,
    send_trial,
    set_status,
    set_tags,
    stamp_of,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

ARM, SWEEP, SCALE = "fewbits.arm", "fewbits.sweep", "fewbits.scale"  # tags of the runs of arms and their trials
VARIANT, TRIALS = "fewbits.variant", "fewbits.trials"  # a hash of a trial's settings; a hash of an arm's trials
PARENT, SOURCE = "mlflow.parentRunId", "mlflow.source.name"
SELECTION = {"study", "sweep", "scale", "seeds", "only", "axes", "runtime", "hydra", "file"}  # keys not in labels
LONG = 40  # the most characters of overrides in a label
FEW = 4  # up to this number of arms, one request for each arm is faster than one for all runs of the experiment


class Row(NamedTuple):
    """A trial of an arm, and its state."""

    folder: RunFolder
    state: State

    @property
    def begun(self) -> bool:
        return self.state not in (State.PLANNED, State.BLOCKED) or (self.folder.path / "config.yaml").exists()


@dataclass
class Arm:
    """The trials of a sweep that differ only in their seed."""

    study: str
    name: str  # the arm and the values of its axes
    label: str  # the name with the sweep, the scale and overrides of the command: unique in the study
    sweep: Sweep
    trial: Trial  # any of its trials
    params: dict[str, str]
    rows: dict[str, Row] = field(default_factory=dict)  # by seed

    @property
    def variant(self) -> str:
        """A hash of the settings that the trials have in common; trials with other settings are of an edited sweep."""
        common = replace(self.trial, seed=0, branch=Branch(None, self.trial.branch.step))
        return _hash(json.dumps(plain(common.to_dict()), sort_keys=True, default=str))

    @property
    def stamp(self) -> str:
        """A hash of the states and files of the trials."""
        return _hash(*(stamp_of(*row) for row in self.rows.values()))


def about(trial: Trial) -> dict[str, str]:
    """Return the parameters that every trial has in MLflow: model, recipe, data and seed."""
    names = {"model": trial.model.name, "recipe": trial.recipe.label, "data": trial.data.kind}
    return {**names, SEED: str(trial.seed)}


def arms_of(plan: Plan, overrides: Sequence[str] = ()) -> list[Arm]:
    """Return the arms of a plan. overrides: those of its command, which the labels contain if they change trials."""
    sweeps = {(sweep.study, sweep.name, sweep.scale): sweep for sweep in plan.sweeps}
    statuses, arms, extra = trial_statuses(plan), dict[tuple[str, str], Arm](), _extra(overrides)
    for member in plan.members:
        cell, planned = member.cell, plan.trials[member.id]
        sweep = sweeps[member.study, cell.sweep, member.scale]
        axes = [axis for axis, _ in cell.axes]
        last = [axis.rpartition(".")[2] for axis in axes]
        short = [name if last.count(name) == 1 else axis for axis, name in zip(axes, last, strict=True)]
        values = [f"{name}={value}" for name, (_, value) in zip(short, cell.axes, strict=True)]
        name = " ".join([*([cell.arm] if cell.arm else []), *values]) or planned.trial.recipe.label
        where = ", ".join([*([sweep.name] if sweep.name != sweep.study else []), sweep.scale, *extra])
        label = f"{name} ({where})".translate(dict.fromkeys(map(ord, "'\"`")))  # MLflow's queries cannot contain quotes
        params = {key_of(key): value[:6000] for key, value in {**about(planned.trial), **cell.place}.items()}
        del params[SEED]
        arm = arms.setdefault((sweep.study, label), Arm(sweep.study, name, label, sweep, planned.trial, params))
        arm.rows[str(cell.seed)] = Row(planned.folder, statuses[member.id].state)
    return list(arms.values())


def _extra(overrides: Sequence[str]) -> list[str]:
    """Return a short text for the overrides that change trials, or nothing if there are none."""
    keys = {text: text.lstrip("+~").partition("=")[0].partition(".")[0] for text in overrides}
    text = " ".join(sorted(text for text, key in keys.items() if "=" in text and key not in SELECTION))
    return [text if len(text) <= LONG else f"overrides {_hash(text)[:4]}"] if text else []


def write_arms(client: MlflowClient, uri: str, runs: Path, owner: dict[str, str], arms: Iterable[Arm]) -> int:
    """Write what MLflow does not have yet of the arms of one store; return how many trials were sent."""
    by_study: dict[str, list[Arm]] = {}
    for arm in arms:
        if any(row.begun for row in arm.rows.values()):
            by_study.setdefault(arm.study, []).append(arm)
    sent = 0
    for study, of_study in by_study.items():
        experiment = connection.experiment(client, study, runs, uri)
        keys = [owner | {ARM: arm.label} for arm in of_study] if len(of_study) <= FEW else [owner]
        found: dict[str, list[Run]] = {}
        for run in (run for key in keys for run in search(client, experiment, key)):
            found.setdefault(run.data.tags.get(ARM, ""), []).append(run)
        for arm in of_study:
            sent += _write(client, experiment, runs, owner, arm, found.get(arm.label, []))
    return sent


def _write(
    client: MlflowClient, experiment: str, runs: Path, owner: dict[str, str], arm: Arm, found: Sequence[Run]
) -> int:
    """Write an arm; found: the runs that MLflow has of it. Return how many trials were sent."""
    children = _children(client, runs, arm, [run for run in found if run.data.tags.get(KIND) == "trial"])
    shown = {seed: row for seed, row in sorted(arm.rows.items()) if row.begun or seed in children}
    over = [row.folder for row in shown.values() if row.folder.over]
    steps = [row.folder for row in shown.values() if (row.folder.path / "timing.parquet").exists()]
    counted = over or steps
    tags = {SWEEP: arm.sweep.name, SCALE: arm.sweep.scale, TRIALS: _hash(*(folder.id for folder in counted))}
    key = {**owner, ARM: arm.label, KIND: "arm"}
    head = only(client, (run for run in found if run.data.tags.get(KIND) == "arm"))
    if head and (head.data.tags.get(TRIALS) != tags[TRIALS] or head.data.params != arm.params):
        client.delete_run(head.info.run_id)
        head = None
    start = min((began(row.folder) for row in shown.values()), default=time.time())
    head = head or make(client, experiment, key, arm.label, arm.params, start)
    notes = [arm.sweep.about, *(f"seed {seed}: {text}" for seed, row in shown.items() if (text := note(*row)))]
    set_tags(client, head, {**tags, NOTE: "\n\n".join(filter(None, notes)), SOURCE: "fewbits sweep"})
    sent = 0
    for seed, row in shown.items():
        with _naming_damage(client, children.get(seed), row):
            of_trial = owner | {ARM: arm.label, KIND: "trial", TRIAL: row.folder.id}
            name, params = f"{arm.name}, seed {seed}", arm.params | {SEED: seed}
            child = children.get(seed) or make(client, experiment, of_trial, name, params, began(row.folder))
            more = {PARENT: head.info.run_id, SWEEP: arm.sweep.name, SCALE: arm.sweep.scale, VARIANT: arm.variant}
            sent += send_trial(client, child, row.folder, row.state, {**more, SOURCE: "fewbits sweep"})
    set_status(
        client, head, _status([row.state for row in arm.rows.values()]), max(map(ended, over), default=time.time())
    )
    stamp, (last, of_last) = _hash(*(stamp_of(folder, State.DONE) for folder in counted)), last_sent(head)
    if counted and stamp != of_last:
        with contextlib.suppress(ValueError):  # a damaged file, which `_naming_damage` has named
            points = list(arm_points(counted, last, arm.trial.training.steps))
            send_points(client, head, points)
            client.set_tag(head.info.run_id, SENT, f"{max([last, *(point.step for point in points)])} {stamp}")
    return sent


def _children(client: MlflowClient, runs: Path, arm: Arm, found: Sequence[Run]) -> dict[str, Run]:
    """Return the trials' runs by seed, and delete those of other settings, versions of the code, or duplicates.

    Seeds that another command trains with the same settings are added to the arm.
    """
    children: dict[str, Run] = {}
    for run in found:
        tags, seed = run.data.tags, run.data.params.get(SEED, "")
        row, folder = arm.rows.get(seed), RunFolder(runs / Path(tags.get(FOLDER, "")).name, tags[TRIAL])
        params = arm.params | {SEED: seed}
        valid = tags.get(VARIANT) == arm.variant and run.data.params == params and seed not in children
        if not valid or (row is not None and row.folder.id != folder.id):
            client.delete_run(run.info.run_id)
            continue
        children[seed] = run
        arm.rows.setdefault(seed, Row(folder, store.state(folder)))
    return children


@contextlib.contextmanager
def _naming_damage(client: MlflowClient, run: Run | None, row: Row) -> Iterator[None]:
    """Warn and continue if the `with` block, which sends a trial, raises ValueError because a file is damaged."""
    try:
        yield
    except ValueError as error:
        warnings.warn(f"{row.folder.path.name} was not sent to MLflow: {error}", RuntimeWarning, stacklevel=4)
        if run is not None:
            set_status(client, run, STATUS[row.state], ended(row.folder))


def _status(states: Sequence[State]) -> str:
    """Return MLflow's status of an arm from the states of its trials."""
    if State.RUNNING in states:
        return "RUNNING"
    if set(states) & {State.FAILED, State.BLOCKED, State.DIVERGED}:
        return "FAILED"
    return "SCHEDULED" if State.PLANNED in states else "FINISHED"


def _hash(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]
