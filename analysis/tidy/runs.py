"""Read runs as DataFrames: the runs of one sweep (`read`) or all runs of a store (`runs`).

    sweep = read("my-sweep.yaml")                              # or read("mor", scale="cpu")
    sweep.trials                                               # a row for each place of the sweep
    sweep.metrics.query("metric == 'validation_loss'")         # a row for each evaluation of each place
    sweep.places[0].axes["recipe.threshold"]                   # 0.03, a float
    sweep.export("my-data", "csv")

Both functions only read the store and never train. tidy/long.py documents the columns.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from markupsafe import escape

from fewbits.analysis.engine.results.archive import Archive, read_archive
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.rows import Standing, columns, standing
from fewbits.analysis.tidy.export import write_export
from fewbits.analysis.tidy.long import LABELS, TABLES, long_frame
from fewbits.analysis.tidy.selection import PathLike, selection, whole_store
from fewbits.experiments.composition import parse_override, spelled
from fewbits.experiments.storage.run_folder import RunFolder, opened, saved_trial
from fewbits.experiments.trial import Trial
from fewbits.sweeps.planning.expand import Cell
from fewbits.sweeps.planning.plan import Plan
from fewbits.sweeps.planning.store import OVER
from fewbits.sweeps.planning.stored_plans import find_plan

if TYPE_CHECKING:
    from fewbits.analysis.report.study_report import StudyReport
    from fewbits.analysis.views.shown_frame import ShownFrame


class UnreadableRunWarning(UserWarning):
    """The warning that a run is missing from the frames, because its config or provenance cannot be read."""


@dataclass(frozen=True)
class Place:
    """One place of a sweep and its run. For the runs of a whole store, study, scale, sweep, arm and axes are empty."""

    study: str
    scale: str
    sweep: str
    arm: str
    axes: Mapping[str, Any]  # axis → value: a number, a boolean, a list or text
    seed: int
    folder: Path  # the folder of the run; it exists after the run has started
    state: str  # planned, running, done, failed or diverged
    result: Mapping[str, Any] | None  # the content of result.json; None if the run is not finished


@dataclass(frozen=True, eq=False)
class Runs:
    """The runs of a sweep or of a store, as DataFrames.

    A file is read when a frame first needs it, and its content is kept. To see later changes of the store, call `read`
    or `runs` again.
    """

    store: Path
    places: tuple[Place, ...]
    trials: pd.DataFrame  # a row for each place: run, axes, labels, state, measured numbers, and all settings
    plan: Plan | None = None  # the sweep's plan; None for a whole store
    archive: Archive | None = None  # the results.parquet from which the runs were read, instead of a store
    overrides: tuple[str, ...] = ()  # the overrides that select the sweep

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of all axes of the places, in the order in which they first occur."""
        return _axes_of(self.places)

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """Losses, gradient norms and learning rates by step, in long form (one row per number; see long.py)."""
        return self.long("metrics")

    @cached_property
    def numerics(self) -> pd.DataFrame:
        """Statistics of quantization by window of steps, layer and operand slot, in long form (one row per number)."""
        return self.long("numerics")

    @cached_property
    def precision(self) -> pd.DataFrame:
        """Counts of lost weight updates and of zero gradients by step and parameter or layer, in long form.

        An update is lost if, because of rounding, it leaves the weight unchanged.
        """
        return self.long("precision")

    @cached_property
    def evaluation(self) -> pd.DataFrame:
        """Losses at the end of training by held-out document, in long form (one row per number)."""
        return self.long("evaluation")

    @cached_property
    def timing(self) -> pd.DataFrame:
        """Seconds and tokens per second by step, in long form (one row per number)."""
        return self.long("timing")

    def long(self, *tables: str) -> pd.DataFrame:
        """Return these tables as one frame in long form (one row per number); without arguments, all TABLES."""
        if self.archive is not None:
            raise ValueError("the tables of runs are in the store; a report's results.parquet has only parts of them")
        labels = self.trials[list(dict.fromkeys([*LABELS, *self.axes]))]
        return long_frame([place.folder for place in self.places], labels, tables or TABLES)

    def export(self, folder: PathLike, form: str = "parquet") -> Path:
        """Write the frame of trials and all long frames into a new folder, and return the folder's path.

        form: `parquet`, `csv`, or `huggingface` for a folder that `datasets.load_dataset(FOLDER, TABLE)` can load.
        """
        return write_export({"trials": self.trials, **{name: self.long(name) for name in TABLES}}, Path(folder), form)

    def judge(self, claims: PathLike) -> ShownFrame:
        """Compute the verdicts of the user's own claims about these runs, by the rules that apply to studies.

        claims: a YAML file with the keys `claims` and `controls`; analysis/engine/claims/schema.py documents them.
        Return a frame with a row for each comparison, which includes the claim's verdict; Jupyter shows the verdicts in
        full. Raise ValueError for the runs of a whole store.
        """
        from fewbits.analysis.tidy.own_claims import judged

        if self.plan is None:
            raise ValueError(
                "claims compare the arms of one sweep, but these are the runs of a whole store; read a sweep instead: "
                "fewbits.read('my-sweep.yaml')"
            )
        return judged(Path(claims).expanduser(), self._results())

    @cached_property
    def report(self) -> StudyReport:
        """The report with the study's tables, figures and claims; raise ValueError if the runs are not of a study."""
        from fewbits.analysis.report.study_report import report_of

        if self.plan is None:
            raise ValueError(
                "a whole store has no report; read a study instead: fewbits.read('mor', scale='cpu').report"
            )
        return report_of(self.plan, self._results(), self.overrides)

    def _results(self) -> Results:
        assert self.plan is not None
        return Results(self.plan, self.archive) if self.archive is not None else Results(self.plan)

    def __repr__(self) -> str:
        finished = sum(place.state in OVER for place in self.places)
        sweeps = ", ".join(dict.fromkeys(place.sweep for place in self.places if place.sweep))
        axes = f" over {', '.join(self.axes)}" if self.axes else ""
        name = f"{sweeps}{axes}: " if sweeps else ""
        return f"<{name}{finished} of {len(self.places)} runs finished, in {self.store}>"

    def _repr_html_(self) -> str:
        return f"<p>{escape(repr(self)[1:-1])}</p>{self.trials.to_html(max_rows=10, max_cols=20, index=False)}"


def read(sweep: PathLike, *overrides: str, scale: str | None = None, runs: PathLike | None = None) -> Runs:
    """Return the runs of a sweep, with every place of the sweep, including places without a result.

    sweep: a study (`mor`), a sweep file (`my-sweep.yaml`), the name of a multirun, or the file `results.parquet` of a
        report, which needs no store.
    overrides: as for `fewbits sweep`, for example `seeds=[0,1]`.
    scale: the scale of a study, for example `cpu`.
    runs: the store. By default it is the store that the sweep file names, or else the folder `runs` in the working
        directory or in the nearest parent directory that has one.
    """
    archive = None
    if os.fspath(sweep).endswith(".parquet"):
        archive = read_archive(Path(sweep).expanduser())
        plan, selected = archive.plan, list(archive.overrides)
    else:
        selected = selection(sweep, overrides, scale, runs)
        plan = find_plan(selected)
    places, rows = [], []
    for member in plan.members:
        planned, cell = plan.trials[member.id], member.cell
        at = standing(planned.folder) if archive is None else archive.standing(planned)
        of_sweep = (member.study, member.scale, cell.sweep, cell.arm)
        place = _place(planned.folder, cell.seed, at, of_sweep, _axes(cell))
        places.append(place)
        rows.append(_row(place, planned.folder, planned.trial, at))
    trials = _axes_first(pd.DataFrame(rows), places)
    return Runs(plan.store, tuple(places), trials, plan, archive, tuple(selected))


def runs(store: PathLike | None = None) -> Runs:
    """Return all runs of a store that have started; a warning names each run that cannot be read.

    store: the store's folder. By default it is the folder `runs` in the working directory or in the nearest parent
        directory that has one.
    """
    folder = whole_store(store)
    places, rows = [], []
    for path in sorted(path.parent for path in folder.glob("*-*/provenance.json")):
        try:
            run, trial = opened(path), saved_trial(path)
        except (OSError, ValueError) as error:
            warnings.warn(f"{error}; this run is missing from the frames", UnreadableRunWarning, stacklevel=2)
            continue
        places.append(_place(run, trial.seed, at := standing(run)))
        rows.append(_row(places[-1], run, trial, at))
    return Runs(folder, tuple(places), pd.DataFrame(rows, columns=None if rows else [*LABELS]))


def _place(
    folder: RunFolder,
    seed: int,
    at: Standing,
    of_sweep: tuple[str, str, str, str] = ("", "", "", ""),
    axes: Mapping[str, Any] | None = None,
) -> Place:
    """Return the Place of a run, with its state and result. of_sweep: (study, scale, sweep, arm)."""
    result = folder.result() if at.state in OVER else None
    return Place(*of_sweep, axes or {}, seed, folder.path, at.state, result)


def _axes(cell: Cell) -> dict[str, Any]:
    """Return {axis: value} of a cell; values are converted to the types that Hydra gives them, for example "1" to 1."""
    return {axis: _typed(text) for axis, text in cell.axes}


def _typed(text: str) -> Any:
    try:
        return parse_override(f"axis={text}").value()
    except ValueError:  # values of some axes are names of bundles of overrides, which may be any text
        return text


def _row(place: Place, folder: RunFolder, trial: Trial, at: Standing) -> dict[str, Any]:
    """Return the row of a place in the frame of trials: labels, axes, state, measured numbers and settings."""
    labels = {name: getattr(place, name) for name in ("study", "scale", "sweep", "arm", "seed")}
    measured = {name: value for name, value in columns(folder, trial, at).items() if name != "computed"}
    of_trial = {"model": measured.pop("model"), "recipe": measured.pop("recipe"), "data": trial.data.kind}
    settings = dict(_settings(trial.to_dict()))
    of_run = {**labels, **of_trial}
    # An axis may have the name of a label, for example `recipe`; the label is kept.
    axes = {axis: value for axis, value in place.axes.items() if axis not in of_run}
    return {"run": place.folder.name, **of_run, **axes, "id": folder.id, **measured, **settings}


def _axes_first(trials: pd.DataFrame, places: Sequence[Place]) -> pd.DataFrame:
    """Return the frame of trials with its columns in a new order: run, the axes, then all others."""
    return trials[list(dict.fromkeys(["run", *_axes_of(places), *trials]))]


def _axes_of(places: Sequence[Place]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(axis for place in places for axis in place.axes))


def _settings(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of all nested settings, with dotted names as for `fewbits train`; lists become text.

    values: a nested dictionary of settings. prefix: the dotted name of this dictionary with a final dot.
    """
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _settings(value, f"{prefix}{key}.")
        elif prefix:  # settings at the top level, such as the seed, are already in the labels
            yield f"{prefix}{key}", spelled(value) if isinstance(value, list | tuple) else value
