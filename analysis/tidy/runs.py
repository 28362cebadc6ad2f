"""Read runs as DataFrames: the runs of one sweep (`read`) or all runs of a store (`runs`); nothing is trained.

LABELS and COLUMNS, at the end of this file, name the columns of long frames, which have a row for each measured number:
these columns in this order, and then one for each axis of the sweep. So frames of several tables, sweeps and stores can
be concatenated. A column that does not apply to a row is empty.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from markupsafe import Markup

from fewbits.analysis.engine.results.archive import Archive, read_archive
from fewbits.analysis.engine.results.frames import Results, read_table
from fewbits.analysis.engine.results.rows import Standing, columns, standing
from fewbits.common.atomic import folder_atomically
from fewbits.common.from_dict import one_of
from fewbits.common.store_folder import store_folder
from fewbits.common.wording import flat
from fewbits.experiments.composition import parse_override, spelled
from fewbits.experiments.storage.run_folder import RunFolder, opened, saved_trial
from fewbits.experiments.trial import Trial
from fewbits.sweeps.planning.store import OVER
from fewbits.sweeps.planning.stored_plans import FOLDER as PLANS
from fewbits.sweeps.planning.stored_plans import RUNS, find_plan, runs_named
from fewbits.sweeps.planning.studies import SWEPT, load_sweeps

if TYPE_CHECKING:
    from fewbits.analysis.report.study_report import StudyReport
    from fewbits.analysis.views.shown import ShownFrame

PathLike = str | os.PathLike[str]
STORE = "runs"  # the default name of a store's folder


def _long(table: str) -> cached_property[pd.DataFrame]:
    """Return a property of Runs: this table in long form (one row per number; see long.py)."""
    return cached_property(lambda runs: runs.long(table))


@dataclass(frozen=True, eq=False)
class Runs:
    """The runs of a sweep or of a store, as DataFrames.

    To see later changes of the store, call `read` or `runs` again.
    """

    store: Path
    trials: pd.DataFrame  # a row for each place: run, axes, labels, state, measured numbers, and all settings
    axes: tuple[str, ...] = ()  # the names of all axes of the sweep; their columns have numbers, booleans or text
    results: Results | None = None  # of the sweep's plan; None for a whole store
    overrides: tuple[str, ...] = ()  # the overrides that select the sweep

    metrics = _long("metrics")  # losses, gradient norms and learning rates by step
    numerics = _long("numerics")  # statistics of quantization by window of steps, layer and operand slot
    precision = _long("precision")  # counts of weight updates lost to rounding and of zero gradients by step and layer
    evaluation = _long("evaluation")  # losses at the end of training by held-out document
    timing = _long("timing")  # seconds and tokens per second by step

    def long(self, *tables: str) -> pd.DataFrame:
        """Return these tables as one frame in long form (one row per number); without arguments, all TABLES."""
        if self.results is not None and isinstance(self.results.files, Archive):
            raise ValueError("the tables of runs are in the store; a report's results.parquet has only parts of them")
        return long_frame(self.trials, self.axes, tables or TABLES)

    def export(self, folder: PathLike, form: str = "parquet") -> Path:
        """Write the frame of trials and each long frame to a new folder, and return the folder's absolute path.

        form: `parquet` or `csv`. Raise ValueError if the folder exists. It appears only when all files are complete.
        """
        one_of("form", form, ("parquet", "csv"))
        folder = Path(folder).expanduser().absolute()
        if folder.exists():
            raise ValueError(f"{folder} exists; export into a new folder")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder_atomically(folder) as partial:
            for name in ("trials", *TABLES):
                frame = self.trials if name == "trials" else self.long(name)
                # Write categories as strings: some programs would read the numbers that pandas stores for them.
                texts = frame.astype(dict.fromkeys(frame.select_dtypes("category"), "string"))
                path = partial / f"{name}.{form}"
                texts.to_csv(path, index=False) if form == "csv" else texts.to_parquet(path, index=False)
        return folder

    def judge(self, claims: PathLike) -> ShownFrame:
        """Judge the claims in the user's YAML file (docs/claims-file.md); return a row for each comparison."""
        from fewbits.analysis.engine.claims.judging import judge_file
        from fewbits.analysis.views.shown import finding_row, shown_frame
        from fewbits.analysis.views.tables import card

        verdicts = judge_file(Path(claims).expanduser(), self._of_sweep, self.overrides)
        rows = [finding_row(verdict, finding) for verdict in verdicts.values() for finding in verdict.findings]
        return shown_frame(rows, ", ".join(verdicts), Markup().join(map(card, verdicts.values())))

    @cached_property
    def report(self) -> StudyReport:
        """The report with the study's tables, figures and claims; raise ValueError if the runs are not of a study."""
        from fewbits.analysis.report.study_report import report_of

        return report_of(self._of_sweep, self.overrides)

    @property
    def _of_sweep(self) -> Results:
        if self.results is None:
            raise ValueError(
                "a whole store has no arms to compare and no report; read a sweep instead: "
                "fewbits.read('mor', scale='cpu') or fewbits.read('my-sweep.yaml')"
            )
        return self.results

    def __repr__(self) -> str:
        sweeps = "" if self.results is None else ", ".join(sweep.name for sweep in self.results.plan.sweeps)
        axes = f" over {', '.join(self.axes)}" if self.axes else ""
        finished = int(self.trials["state"].isin(OVER).sum()) if len(self.trials) else 0
        return f"<{f'{sweeps}{axes}: ' * bool(sweeps)}{finished} of {len(self.trials)} runs finished, in {self.store}>"


def read(sweep: PathLike, *overrides: str, scale: str | None = None, runs: PathLike | None = None) -> Runs:
    """Return the runs of a sweep, with every place of the sweep, including places without a result.

    sweep: a study (`mor`), a sweep file (`my-sweep.yaml`), the name of a multirun, or the file `results.parquet` of a
        report, which needs no store.
    overrides: as for `fewbits sweep`, for example `seeds=[0,1]`.
    scale: the scale of a study, for example `cpu`.
    runs: the store. By default it is the store that the sweep file names, or else the folder `runs` in the working
        directory or in the nearest parent directory that has one.
    """
    if os.fspath(sweep).endswith(".parquet"):
        archive = read_archive(Path(sweep).expanduser())
        results, selected = Results(archive.plan, archive), archive.overrides
    else:
        name = f"study={sweep}" if sweep in SWEPT else os.fspath(sweep)
        selected = (name, *overrides, *([f"scale={scale}"] if scale else []))
        store = Path(runs) if runs else None if _names_store(selected) else _nearest_store()
        if store:
            selected += (f"{RUNS}={spelled(str(store_folder(str(store)).absolute()))}",)
        results = Results(find_plan(selected))
    plan = results.plan
    axes = tuple(dict.fromkeys(axis for member in plan.members for axis, _ in member.cell.axes))
    rows = []
    for member in plan.members:
        planned, cell = plan.trials[member.id], member.cell
        labels = {"study": member.study, "scale": member.scale, "sweep": cell.sweep, "arm": cell.arm}
        values = {axis: _typed(text) for axis, text in cell.axes}
        rows.append(_row(planned.folder, planned.trial, results.files.standing(planned), labels, values))
    trials = pd.DataFrame(rows)
    return Runs(plan.store, trials[list(dict.fromkeys(["run", *axes, *trials]))], axes, results, selected)


def runs(store: PathLike | None = None) -> Runs:
    """Return all runs of a store that have started; a warning names each run that cannot be read.

    store: the store's folder. By default it is the folder `runs` in the working directory or in the nearest parent
        directory that has one.
    """
    folder = store_folder(os.fspath(store)).absolute() if store else _nearest_store()
    if folder is None or not folder.is_dir():
        raise ValueError(
            f"no store: {folder or f'neither {Path.cwd()} nor a folder above it has a folder {STORE}/ with runs'}; "
            "pass the path of the store"
        )
    rows, labels = [], dict.fromkeys(("study", "scale", "sweep", "arm"), "")
    for path in sorted(path.parent for path in folder.glob("*-*/provenance.json")):
        try:
            run, trial = opened(path), saved_trial(path)
        except (OSError, ValueError) as error:
            warnings.warn(f"{error}; this run is missing from the frames", stacklevel=2)
            continue
        rows.append(_row(run, trial, standing(run), labels, {}))
    return Runs(folder, pd.DataFrame(rows, columns=None if rows else [*LABELS, "folder"]))


def _row(
    folder: RunFolder, trial: Trial, at: Standing, labels: Mapping[str, Any], axes: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the row of a run in the frame of trials: labels, axes, state, measured numbers and settings."""
    numbers = columns(folder, trial, at)
    of_run = {"run": folder.path.name, **labels, "seed": trial.seed}
    of_run |= {"model": numbers["model"], "recipe": numbers["recipe"], "data": trial.data.kind}
    # An axis may have the name of a label, for example `recipe`; the label is kept.
    row = {**axes, **of_run, "id": folder.id, **numbers}
    # Settings at the top level, such as the seed, are already in the labels.
    settings = {name: value for name, value in flat(trial.to_dict()) if "." in name and not isinstance(value, Mapping)}
    row |= {name: spelled(value) if isinstance(value, list) else value for name, value in settings.items()}
    del row["computed"]
    return row


def _typed(text: str) -> Any:
    """Return the value of an axis with the type that Hydra gives it, for example 1 for "1"."""
    try:
        return parse_override(f"axis={text}").value()
    except ValueError:  # values of some axes are names of bundles of overrides, which may be any text
        return text


def _names_store(overrides: Sequence[str]) -> bool:
    """Tell whether the overrides, or the definition of the sweep that they select, name a store."""
    if runs_named(overrides) is not None:
        return True
    try:
        sweeps, _ = load_sweeps(overrides)
    except ValueError:  # the name of a multirun, which has no sweep file; other errors are reported later
        return False
    return any(runs_named(sweep.overrides) is not None for sweep in sweeps)


def _nearest_store() -> Path | None:
    """Return the nearest store in or above the working directory; other tools also name their folders `runs`."""
    folders = (folder / STORE for folder in (Path.cwd(), *Path.cwd().parents))
    return next((one for one in folders if (one / PLANS).is_dir() or any(one.glob("*-*/provenance.json"))), None)


# ------------------------------------------------------------------------------------------------ long frames

# The columns that say which run a row belongs to, with their descriptions; the frame of trials has them, too.
LABELS = {
    "run": "the name of the run folder",
    "study": "the study, or the name of the sweep file; empty for the runs of a whole store",
    "scale": "the scale; empty for the runs of a whole store",
    "sweep": "the sweep; empty for the runs of a whole store",
    "arm": "the arm; empty for the runs of a whole store",
    "seed": "the seed of initial weights, data order and noise",
    "model": "the model",
    "recipe": "the recipe",
    "data": "the kind of data",
}
COLUMNS = {
    "table": "metrics, numerics, precision, evaluation or timing: the file of the run folder",
    "step": "the step, counted from 0; for numerics, the last step of a window",
    "tokens": "the tokens trained until this step, including the trunk's; for evaluation, those of the document",
    "layer": "numerics: the name of the linear layer; precision: the name of the parameter or of the linear layer",
    "block": "numerics: the number of the transformer block that contains the layer",
    "part": "numerics: the layer's role in the block: qkv, out, up, down and so on",
    "slot": "the operand slot, such as fprop.x, `weight` for values of the whole layer, or `parameter`",
    "quantizer": "numerics: the quantizer or mixture of the slot",
    "text": "evaluation: validation or ood",
    "document": "evaluation: the number of the document in its text",
    "metric": "the name of the number; `histogram.N` is bin N of a histogram of relative errors or of exponents",
    "value": "the number; unknown numbers (NaN) have no row",
}
TABLES = ("metrics", "numerics", "precision", "evaluation", "timing")
_WHOLE = ("step", "tokens", "block", "document")  # columns of integers


def long_frame(trials: pd.DataFrame, axes: Sequence[str], tables: Sequence[str]) -> pd.DataFrame:
    """Return these tables of all run folders as one frame in long form: a row for each measured number."""
    for table in tables:
        one_of("table", table, TABLES)
    parts, rows = [], []
    for row, folder in enumerate(trials["folder"]):
        for table in tables:
            if (path := Path(folder) / f"{table}.parquet").is_file():
                parts.append(_melted(read_table(path)).assign(table=table))
                rows += [row] * len(parts[-1])
    long = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()
    long = long.reindex(columns=[*COLUMNS]).astype(dict.fromkeys(_WHOLE, "Int64") | {"value": "float64"})
    texts = [name for name in COLUMNS if name not in (*_WHOLE, "value")]
    long = long.astype(dict.fromkeys(texts, "category"))  # a study has millions of rows with few different texts
    labels = trials[[*LABELS]].astype({name: "category" for name in LABELS if name != "seed"})
    labels = labels.join(trials[[axis for axis in axes if axis not in LABELS]]).iloc[rows].reset_index(drop=True)
    return pd.concat([labels[[*LABELS]], long, labels.drop(columns=[*LABELS])], axis=1)


def _melted(frame: pd.DataFrame) -> pd.DataFrame:
    """Convert a run folder's table to long form, one row for each number; a histogram gives one row for each bin."""
    if "histogram" in frame:
        known = frame["histogram"].dropna()
        if not known.empty:
            frame = frame.join(pd.DataFrame(np.stack(known.to_list()), index=known.index).add_prefix("histogram."))
        frame = frame.drop(columns="histogram")
    keys = [name for name in COLUMNS if name in frame]
    return frame.melt(id_vars=keys, var_name="metric", value_name="value").dropna(subset=["value"])
