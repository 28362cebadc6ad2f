"""Frames: the trials of a plan and their results in the store, as tables.

The table of trials has one row for each place, which is a cell of a sweep's grid: an arm, values of its axes and a
seed. A place without a result (its trial is missing, running, failed or stale) has a row, too, whose state and note say
so. Files are read when they are first needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import pandas as pd
from pyarrow.parquet import ParquetFile

from fewbits.analysis.engine.results.alike import usual_kind
from fewbits.analysis.engine.results.amounts import amount
from fewbits.analysis.engine.results.rows import LABELS, STANDING, labels, place_name, standing
from fewbits.common.from_dict import one_of
from fewbits.common.wording import enumeration
from fewbits.sweeps.planning.cost import parameters_of
from fewbits.sweeps.planning.plan import Member, Plan
from fewbits.sweeps.planning.stored_plans import Place, place_of
from fewbits.sweeps.running import store

EVALUATED = ("validation_loss", "ood_loss", "parameter_norm")  # missing until a trial's first evaluation
LATE_STEPS = 4  # the least number of steps that `late` takes the mean over

T = TypeVar("T")


class Damaged(ValueError):
    """The error for a trial's file that cannot be read. It ends the analysis: the file never counts as missing."""


@dataclass
class Files:
    """A cache of the tables in run folders: several places and parts of a plan share a trial's tables."""

    tables: dict[Path, pd.DataFrame] = field(default_factory=dict)

    def read(self, path: Path) -> pd.DataFrame:
        if path not in self.tables:
            try:
                # Three times faster than pandas' reader, for thousands of small tables.
                self.tables[path] = ParquetFile(path).read(use_threads=False).to_pandas(use_threads=False)
            except (OSError, ValueError) as error:
                reason = str(error).partition("\n")[0]
                raise Damaged(f"{path} is damaged ({reason}): remove its run folder and run the sweep again") from None
        return self.tables[path]


@dataclass(frozen=True, eq=False)
class Results:
    """The results of a plan, or of some of its sweeps or places, read from the store.

    The store must not change while a report is made, because results are cached. `files` caches tables that were read
    and is shared by all parts of a plan; `computed` caches the values that `remembered` returns.
    """

    plan: Plan
    earlier: Mapping[Place, str] = field(default_factory=dict)  # as `earlier_runs` of stored_plans.py returns them
    files: Files = field(default_factory=Files)
    computed: dict[str, Any] = field(default_factory=dict)

    def remembered(self, name: str, make: Callable[[], T]) -> T:
        """Return the value that is cached by this name; the first call makes it. Callers must not change the value."""
        if name not in self.computed:
            self.computed[name] = make()
        return cast(T, self.computed[name])

    def of_sweep(self, name: str) -> Results:
        """Return the results of one sweep of the plan; sweeps may use one name for different arms."""
        one_of("sweep", name, dict.fromkeys(sweep.name for sweep in self.plan.sweeps))
        sweeps = tuple(sweep for sweep in self.plan.sweeps if sweep.name == name)
        members = tuple(member for member in self.members if member.cell.sweep == name)
        return self.remembered(f"sweep {name}", lambda: self._part(replace(self.plan, sweeps=sweeps, members=members)))

    def of_places(self, members: tuple[Member, ...]) -> Results:
        """Return the results of these places only; without any place, results without rows."""
        return self._part(replace(self.plan, members=members))

    def _part(self, plan: Plan) -> Results:
        return Results(plan, self.earlier, self.files)

    @property
    def members(self) -> tuple[Member, ...]:
        return self.plan.members

    @cached_property
    def trials(self) -> pd.DataFrame:
        """A table with a row for each place: its labels, the state of its trial and every number of the result."""
        return pd.DataFrame([self._row(member) for member in self.members])

    def _row(self, member: Member) -> dict[str, Any]:
        planned = self.plan.trials[member.id]
        return labels(member) | standing(planned.folder, planned.trial, self.earlier.get(place_of(member), ""))

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of `trials` as dictionaries."""
        return cast(list[dict[str, Any]], self.trials.to_dict("records"))

    @cached_property
    def scale(self) -> str:
        """The sizes of the models as text, for example `3.3 M parameters`."""
        sizes = sorted({parameters_of(self.plan.trials[member.id].trial.model) for member in self.members})
        return enumeration(map(amount, sizes)) + " parameters"

    @property
    def scale_name(self) -> str:
        """The name of the scale, for example `cpu`."""
        return enumeration(sweep.scale for sweep in self.plan.sweeps)

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
        """Lines that name the places without a result; reports show them before any number."""
        several = len({row["sweep"] for row in self.rows}) > 1
        return tuple(
            f"{row['sweep'] + ', ' if several else ''}{place_name(row)}: {row['note'] or row['state']}"
            for row in self.rows
            if row["state"] not in store.OVER
        )

    def metrics(self) -> list[str]:
        """Return the names of the numbers in the results."""
        return self.remembered("metrics", self._metrics)

    def _metrics(self) -> list[str]:
        axes = {axis for member in self.members for axis, _ in member.cell.axes}
        return [str(c) for c in self.trials.columns if c not in {*LABELS, *STANDING, *axes}]

    def numbers(self, metric: str) -> dict[str, float]:
        """Return a number of every trial that is done, by id."""
        if metric not in self.trials:
            return {}
        done = self.trials[self.trials["state"] == store.State.DONE].dropna(subset=[metric])
        return {str(trial): float(value) for trial, value in zip(done["id"], done[metric], strict=True)}

    def has(self, arm: str, where: Mapping[str, str] | None = None) -> bool:
        """Tell whether the plan has the arm with these axis values."""
        axes = set((where or {}).items())
        return any(member.cell.arm == arm and axes <= set(member.cell.axes) for member in self.members)

    # -------------------------------------------------------------------------------- over steps

    def curves(self, metric: str) -> pd.DataFrame:
        """Return a metric over the steps: a row for each place and step, with labels, state, step, tokens and value.

        Unfinished trials have the rows that they have written so far. Raise ValueError for an unknown metric.
        """
        frame = self.table_of("metrics.parquet")
        if frame.empty or (metric in EVALUATED and metric not in frame):
            return pd.DataFrame(columns=[*LABELS, "state", "step", "tokens", "value"])
        valid = [c for c in frame.columns if c not in {*LABELS, "state", "step", "tokens"}]
        one_of("metric", metric, valid)
        frame = frame.dropna(subset=[metric]).rename(columns={metric: "value"})
        return frame[[*LABELS, "state", "step", "tokens", "value"]].reset_index(drop=True)

    def late(self, metric: str, part: float = 0.1) -> dict[str, float]:
        """Return a metric's mean over the last steps by trial, since the loss of a single step is noisy.

        part: the share of the steps to average over; at least LATE_STEPS steps are.
        """
        return self.remembered(f"late {metric} {part}", lambda: self._late(metric, part))

    def _late(self, metric: str, part: float) -> dict[str, float]:
        means = {}
        for key, curve in self.curves(metric).drop_duplicates(["id", "step"]).groupby("id"):
            steps = self.plan.trials[str(key)].trial.training.steps
            means[str(key)] = float(curve["value"][curve["step"] >= min(steps - LATE_STEPS, steps * (1 - part))].mean())
        return means

    def numerics(self) -> pd.DataFrame:
        """Return statistics of quantization by window of steps, layer and operand slot, with the places' labels."""
        return self.table_of("numerics.parquet")

    def table_of(self, name: str) -> pd.DataFrame:
        """Return one table of the run folders' files of this name, with the places' labels; empty if no file exists."""
        return self.remembered(name, lambda: self._joined(name))

    def _joined(self, name: str) -> pd.DataFrame:
        tables, table_labels = [], []
        for member in self.members:
            folder = self.plan.trials[member.id].folder
            path = folder.path / name
            if path.is_file():
                tables.append(self.files.read(path))
                table_labels.append(labels(member) | {"state": str(store.state(folder))})
        if not tables:
            return pd.DataFrame()
        table_of_row = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
        labelled = pd.DataFrame(table_labels).take(table_of_row).reset_index(drop=True)
        return pd.concat([pd.concat(tables, ignore_index=True), labelled], axis=1)


def last_windows(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the last window of each trial."""
    return rows[rows["step"] == rows.groupby("id")["step"].transform("max")]
