"""Frames: what the store holds of a plan, as tables.

One row stands for each place of a sweep, whether or not there is a result: what is missing, running, failed or stale
is a row that says so. Nothing is read before it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import pandas as pd

from fewbits.analysis.engine.alike import usual_kind
from fewbits.analysis.engine.amounts import amount
from fewbits.analysis.engine.rows import LABELS, STANDING, labels, place_name, standing
from fewbits.common.from_dict import one_of
from fewbits.sweeps.planning.cost import parameters_of
from fewbits.sweeps.planning.plan import Member, Plan
from fewbits.sweeps.planning.stored_plans import Place, place_of
from fewbits.sweeps.running import store

EVALUATED = ("validation_loss", "ood_loss", "parameter_norm")  # there from a trial's first evaluation on
LATE_STEPS = 4  # at least

T = TypeVar("T")


class Damaged(ValueError):
    """A file of a trial that cannot be read: nothing is said of the others as if it were not there."""


@dataclass
class Files:
    """The tables of run folders, each read once, though several places and parts of a plan share a trial."""

    tables: dict[Path, pd.DataFrame] = field(default_factory=dict)

    def read(self, path: Path) -> pd.DataFrame:
        if path not in self.tables:
            try:
                self.tables[path] = pd.read_parquet(path)
            except (OSError, ValueError) as error:
                reason = str(error).partition("\n")[0]
                raise Damaged(f"{path} is damaged ({reason}): remove its folder, and it is made again") from None
        return self.tables[path]


@dataclass(frozen=True, eq=False)
class Results:
    """What the store holds of a plan, or of some of its sweeps.

    The store does not change while a report is made, so everything that is read or computed of it is kept: files in
    `files`, which the parts of a plan share, and what `remembered` is given in `computed`.
    """

    plan: Plan
    earlier: Mapping[Place, str] = field(default_factory=dict)  # run folders of other trials: `plans.earlier_runs`
    files: Files = field(default_factory=Files)
    computed: dict[str, Any] = field(default_factory=dict)

    def remembered(self, name: str, make: Callable[[], T]) -> T:
        """Return what `make` returned for this name at first. Nobody changes it."""
        if name not in self.computed:
            self.computed[name] = make()
        return cast(T, self.computed[name])

    def of_sweep(self, name: str) -> Results:
        """Return the results of one sweep of the plan alone: its arms' names are its own."""
        one_of("sweep", name, dict.fromkeys(sweep.name for sweep in self.plan.sweeps))
        sweeps = tuple(sweep for sweep in self.plan.sweeps if sweep.name == name)
        members = tuple(member for member in self.members if member.cell.sweep == name)
        return self.remembered(f"sweep {name}", lambda: self._part(replace(self.plan, sweeps=sweeps, members=members)))

    def of_places(self, members: tuple[Member, ...]) -> Results:
        """Return the results of these places alone; there may be none."""
        return self._part(replace(self.plan, members=members))

    def _part(self, plan: Plan) -> Results:
        return Results(plan, self.earlier, self.files)

    @property
    def members(self) -> tuple[Member, ...]:
        return self.plan.members

    @cached_property
    def trials(self) -> pd.DataFrame:
        """A row for each place: what it is, how it stands, and every number of its result."""
        return pd.DataFrame(
            [
                labels(member) | standing(self.plan.trials[member.id], self.earlier.get(place_of(member), ""))
                for member in self.members
            ]
        )

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of `trials`."""
        return cast(list[dict[str, Any]], self.trials.to_dict("records"))

    @cached_property
    def scale(self) -> str:
        """The sizes of what was trained: `3.3 M parameters`."""
        sizes = sorted({parameters_of(self.plan.trials[member.id].trial.model) for member in self.members})
        return " and ".join(dict.fromkeys(map(amount, sizes))) + " parameters"

    @property
    def scale_name(self) -> str:
        """The scale's name: `cpu`."""
        return " and ".join(dict.fromkeys(sweep.scale for sweep in self.plan.sweeps))

    @cached_property
    def starts(self) -> dict[str, int]:
        """The step of the whole line at which each trial begins: 0, or the step of its parent's checkpoint."""

        def start(trial: str) -> int:
            planned = self.plan.trials[trial]
            return 0 if planned.parent is None else start(planned.parent) + (planned.trial.branch.step or 0)

        return {member.id: start(member.id) for member in self.members}

    @cached_property
    def usual_kind(self) -> str | None:
        """The kind of machine that computed most of these trials."""
        return usual_kind(self.rows)

    @property
    def flags(self) -> tuple[str, ...]:
        """Name the places without a result, one line each: a reader must know them before any number."""
        several = len({row["sweep"] for row in self.rows}) > 1
        return tuple(
            f"{row['sweep'] + ', ' if several else ''}{place_name(row)}: {row['note'] or row['state']}"
            for row in self.rows
            if row["state"] not in store.OVER
        )

    def metrics(self) -> list[str]:
        """Return the numbers that results have."""
        axes = {axis for member in self.members for axis, _ in member.cell.axes}
        return [str(c) for c in self.trials.columns if c not in {*LABELS, *STANDING, *axes}]

    def numbers(self, metric: str) -> dict[str, float]:
        """Return a number of every trial that is done, by id."""
        if metric not in self.trials:
            return {}
        done = self.trials[self.trials["state"] == store.State.DONE].dropna(subset=[metric])
        return {str(trial): float(value) for trial, value in zip(done["id"], done[metric], strict=True)}

    def has(self, arm: str, where: Mapping[str, str] | None = None) -> bool:
        """Return whether the arm is run at this scale with these values of axes."""
        axes = set((where or {}).items())
        return any(member.cell.arm == arm and axes <= set(member.cell.axes) for member in self.members)

    # -------------------------------------------------------------------------------- over steps

    def curves(self, metric: str) -> pd.DataFrame:
        """Labels of each place, state, step, tokens, value; of unfinished trials as far as they have got."""
        frame = self.table_of("metrics.parquet")
        if frame.empty or (metric in EVALUATED and metric not in frame):
            return pd.DataFrame(columns=[*LABELS, "state", "step", "tokens", "value"])
        valid = [c for c in frame.columns if c not in {*LABELS, "state", "step", "tokens"}]
        one_of("metric", metric, valid)
        frame = frame.dropna(subset=[metric]).rename(columns={metric: "value"})
        return frame[[*LABELS, "state", "step", "tokens", "value"]].reset_index(drop=True)

    def late(self, metric: str, part: float = 0.1) -> dict[str, float]:
        """Of each trial, by id, the mean over that last part of its steps, four at least: of one, a loss is noisy."""
        return self.remembered(f"late {metric} {part}", lambda: self._late(metric, part))

    def _late(self, metric: str, part: float) -> dict[str, float]:
        found = {}
        for key, curve in self.curves(metric).drop_duplicates(["id", "step"]).groupby("id"):
            steps = self.plan.trials[str(key)].trial.training.steps
            found[str(key)] = float(curve["value"][curve["step"] >= min(steps - LATE_STEPS, steps * (1 - part))].mean())
        return found

    def numerics(self) -> pd.DataFrame:
        """Return what quantization did, by window of steps, layer and slot (see the observer), with places' labels."""
        return self.table_of("numerics.parquet")

    def table_of(self, name: str) -> pd.DataFrame:
        """Return a file that run folders have, of all places together, with the places' labels; empty without any."""
        return self.remembered(name, lambda: self._joined(name))

    def _joined(self, name: str) -> pd.DataFrame:
        tables, of_tables = [], []
        for member in self.members:
            folder = self.plan.trials[member.id].folder
            path = folder.path / name
            if path.is_file():
                tables.append(self.files.read(path))
                of_tables.append(labels(member) | {"state": str(store.state(folder))})
        if not tables:
            return pd.DataFrame()
        of_rows = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
        labelled = pd.DataFrame(of_tables).take(of_rows).reset_index(drop=True)
        return pd.concat([pd.concat(tables, ignore_index=True), labelled], axis=1)


def last_windows(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the last window of each trial."""
    return rows[rows["step"] == rows.groupby("id")["step"].transform("max")]
