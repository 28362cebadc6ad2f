"""Read the trials of a plan and their results, in the store or in an archive, as DataFrames (`Results`).

The table of trials has one row for each place, which is a cell of a sweep's grid: an arm, values of its axes and a
seed. A place without a result also has a row; the columns `state` and `note` say why there is none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import pandas as pd
from pyarrow.parquet import ParquetFile

from fewbits.analysis.engine.results.rows import (
    LABELS,
    STANDING,
    Standing,
    columns,
    labels,
    place_name,
    standing,
    usual_kind,
)
from fewbits.common.from_dict import one_of
from fewbits.common.store_folder import BENCH
from fewbits.common.wording import amount, enumeration
from fewbits.experiments.environment import environments
from fewbits.experiments.identity import is_current, label
from fewbits.experiments.storage.results import scores_over_training
from fewbits.sweeps.planning import store
from fewbits.sweeps.planning.cost import parameters_of
from fewbits.sweeps.planning.plan import Member, Plan, Planned

EVALUATED = ("validation_loss", "ood_loss", "parameter_norm")  # columns that are missing before the first evaluation
ENVIRONMENT = ("kind", "processor", "backend", "torch", "python")  # what a report says about a trial's machine
METRICS = "metrics.parquet"
# By column of METRICS, the weight of a step in its moving average, which is added as the column COLUMN_average. The
# weights are those of GaussWS's Figures 4 and F.1.
MOVING = {"loss": 1 / 16, "loss_max": 1 / 128}
CURVE = [*LABELS, "state", "step", "tokens", "value"]  # the columns of `Results.curves`
SCORES = "scores"  # the table of a trial's stored scores: step, name and value
LATE_STEPS = 4  # `late` takes the mean over at least this many steps

T = TypeVar("T")


class Damaged(ValueError):
    """The error for a file that cannot be read; if it counted as missing, results would change without notice."""


def read_table(path: Path) -> pd.DataFrame:
    """Return the table of a Parquet file; raise Damaged if it cannot be read."""
    try:
        # For thousands of small files, this is three times faster than pandas.read_parquet.
        return ParquetFile(path).read(use_threads=False).to_pandas(use_threads=False)
    except (OSError, ValueError) as error:
        raise Damaged(
            f"{path} is damaged ({str(error).partition(chr(10))[0]}): remove the run folder that contains this file, "
            "and run the sweep again"
        ) from None


@dataclass
class Files:
    """Read the run folders of a store; each file once, since several places of a plan may have the same trial."""

    tables: dict[Path, pd.DataFrame] = field(default_factory=dict)

    def read(self, path: Path) -> pd.DataFrame:
        """Return the table of a Parquet file, with the averages that MOVING names."""
        if path not in self.tables:
            frame = read_table(path)
            for name in MOVING if path.name == METRICS else ():
                if name in frame:
                    frame[f"{name}_average"] = frame[name].ewm(alpha=MOVING[name], adjust=False).mean()
            self.tables[path] = frame
        return self.tables[path]

    def standing(self, planned: Planned) -> Standing:
        return standing(planned.folder)

    def table(self, planned: Planned, name: str) -> pd.DataFrame | None:
        """Return the table NAME of the trial's run folder, such as metrics.parquet or SCORES; None if it has none."""
        if name == SCORES:
            stored = scores_over_training(planned.folder.path)
            return stored if len(stored) else None
        path = planned.folder.path / name
        return self.read(path) if path.is_file() else None

    def late(self, results: Results, metric: str) -> dict[str, float]:
        """Return {trial id: mean of the metric over the last tenth of the steps} for the trials of these results."""
        means = {}
        for key, curve in results.curves(metric).drop_duplicates(["id", "step"]).groupby("id"):
            steps = results.plan.trials[str(key)].trial.training.steps
            last = curve["step"] >= min(steps - LATE_STEPS, steps * 0.9)
            means[str(key)] = float(curve["value"][last].mean())
        return means

    def provenance(self, planned: Planned) -> dict[str, Any]:
        """Return what a report says about the origin of a finished trial: `Provenance` in views lists the keys."""
        record = planned.folder.provenance() or {}
        return {
            **{key: record.get(key) for key in ("git", "git_dirty", "products")},
            "sources": label(record.get("identity", {})),
            "current": is_current(record),
            "environments": [{key: one.get(key) for key in ENVIRONMENT} for one in environments(record)],
        }

    def benches(self, plan: Plan) -> dict[str, Any]:
        """Return the timings of `fewbits bench` in the plan's store, by the names of their files."""
        found = {}
        for path in sorted((plan.store / BENCH).glob("*.json")):
            try:
                found[path.stem] = json.loads(path.read_text("utf-8"))
            except (OSError, ValueError) as error:
                raise Damaged(f"{path} is damaged ({error}): delete the file, and measure again") from None
        return found


@dataclass(frozen=True, eq=False)
class Results:
    """The results of a plan, or of some of its sweeps or places, which are read when needed, and cached."""

    plan: Plan
    files: Files = field(default_factory=Files)  # shared with the Results of single sweeps and places
    computed: dict[str, Any] = field(default_factory=dict)  # the cache of `remembered`

    def remembered(self, name: str, make: Callable[[], T]) -> T:
        """Return the value that is cached under this name and must not be changed; the first call makes it."""
        if name not in self.computed:
            self.computed[name] = make()
        return cast(T, self.computed[name])

    def of_sweep(self, name: str) -> Results:
        """Return the results of one sweep of the plan; an arm's name is unique only within a sweep."""
        one_of("sweep", name, dict.fromkeys(sweep.name for sweep in self.plan.sweeps))
        sweeps = tuple(sweep for sweep in self.plan.sweeps if sweep.name == name)
        members = tuple(member for member in self.members if member.cell.sweep == name)
        of = replace(self.plan, sweeps=sweeps, members=members)
        return self.remembered(f"sweep {name}", lambda: Results(of, self.files))

    def of_places(self, members: tuple[Member, ...]) -> Results:
        """Return the results of these places only; for (), results without rows."""
        return Results(replace(self.plan, members=members), self.files)

    @property
    def members(self) -> tuple[Member, ...]:
        """The places of the plan, each with the id of its trial."""
        return self.plan.members

    @cached_property
    def trials(self) -> pd.DataFrame:
        """A table with a row for each place; the columns are those of `labels` and `columns` (rows.py)."""
        rows = ((member, self.plan.trials[member.id]) for member in self.members)
        return pd.DataFrame(
            [labels(member) | columns(of.folder, of.trial, self.files.standing(of)) for member, of in rows]
        )

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        return cast(list[dict[str, Any]], self.trials.to_dict("records"))

    @cached_property
    def scale(self) -> str:
        """The numbers of parameters of all models as text, for example `3.3 M parameters`."""
        sizes = sorted({parameters_of(self.plan.trials[member.id].trial.model) for member in self.members})
        return enumeration(map(amount, sizes)) + " parameters"

    @property
    def scale_name(self) -> str:
        return enumeration(sweep.scale for sweep in self.plan.sweeps)

    @cached_property
    def starts(self) -> dict[str, int]:
        """Trial id → the number of steps that its parents trained before its branch."""

        def start(trial: str) -> int:
            planned = self.plan.trials[trial]
            return 0 if planned.parent is None else start(planned.parent) + (planned.trial.branch.step or 0)

        return {member.id: start(member.id) for member in self.members}

    @cached_property
    def usual_kind(self) -> str | None:
        return usual_kind(self.rows)

    @property
    def flags(self) -> tuple[str, ...]:
        """A line of text for each place without a result, with the reason; reports show these lines at the top."""
        several = len({row["sweep"] for row in self.rows}) > 1
        return tuple(
            f"{row['sweep'] + ', ' if several else ''}{place_name(row)}: {row['note'] or row['state']}"
            for row in self.rows
            if row["state"] not in store.OVER
        )

    def metrics(self) -> list[str]:
        """Return the names of the columns of `trials` that are measured numbers."""
        axes = {axis for member in self.members for axis, _ in member.cell.axes}
        others = {*LABELS, *STANDING, *axes}
        return self.remembered("metrics", lambda: [str(column) for column in self.trials if column not in others])

    def numbers(self, metric: str) -> dict[str, float]:
        """Return {trial id: number} of a metric for the trials that are done; trials without the number are missing."""
        if metric not in self.trials:
            return {}
        done = self.trials[self.trials["state"] == store.State.DONE].dropna(subset=[metric])
        return {str(trial): float(value) for trial, value in zip(done["id"], done[metric], strict=True)}

    def has(self, arm: str, where: Mapping[str, str] | None = None) -> bool:
        axes = set((where or {}).items())
        return any(member.cell.arm == arm and axes <= set(member.cell.axes) for member in self.members)

    # -------------------------------------------------------------------------------- over steps

    def curves(self, metric: str) -> pd.DataFrame:
        """Return a metric by training step: a row for each place and step, with the columns CURVE."""
        frame = self.table_of(METRICS)
        if frame.empty or (metric in EVALUATED and metric not in frame):
            return pd.DataFrame(columns=CURVE)
        one_of("metric", metric, [name for name in frame if name not in CURVE])
        return frame.dropna(subset=[metric]).rename(columns={metric: "value"})[CURVE].reset_index(drop=True)

    def late(self, metric: str) -> dict[str, float]:
        """Return {trial id: mean of the metric over the last tenth of the steps, at least LATE_STEPS of them}."""
        return self.remembered(f"late {metric}", lambda: self.files.late(self, metric))

    def numerics(self) -> pd.DataFrame:
        """Return statistics of quantization: a row for each place, window of steps, layer and operand slot."""
        return self.table_of("numerics.parquet")

    def table_of(self, name: str) -> pd.DataFrame:
        """Return the rows of the tables of this name in all run folders, each with its place's labels and state."""
        return self.remembered(name, lambda: self._joined(name))

    def _joined(self, name: str) -> pd.DataFrame:
        tables, of_tables = [], []
        for member, row in zip(self.members, self.rows, strict=True):
            if (table := self.files.table(self.plan.trials[member.id], name)) is not None:
                tables.append(table)
                of_tables.append(labels(member) | {"state": row["state"]})
        if not tables:
            return pd.DataFrame()
        places = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
        labelled = pd.DataFrame(of_tables).take(places).reset_index(drop=True)
        return pd.concat([pd.concat(tables, ignore_index=True), labelled], axis=1)


def last_windows(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows that belong to the last window of steps of their trial. rows: as `Results.numerics` has them."""
    return rows[rows["step"] == rows.groupby("id")["step"].transform("max")]
