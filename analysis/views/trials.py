"""Show the trials behind a report's numbers: a report's last table lists all trials, and numbers link to its rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from markupsafe import Markup

from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.views.html import render
from fewbits.analysis.views.numbers import number
from fewbits.experiments.storage.run_folder import HASH


@dataclass(frozen=True)
class Trial:
    """A trial as a report shows it; all fields are text."""

    id: str
    name: str  # the trial's first place, for example "block, configuration 1, seed 0"
    folder: str  # the name of the run folder
    places: tuple[str, ...]  # all places of the trial, for example "SWEEP: block, configuration 1, seed 0"
    state: str
    step: str  # steps done / steps planned
    loss: str  # the validation loss
    note: str

    @property
    def short(self) -> str:
        """The first characters of the id."""
        return self.id[:HASH]


Trials = Mapping[str, Trial]  # by id


def trials_of(results: Results) -> dict[str, Trial]:
    """Return {trial id: trial} for all trials of the results."""
    trials: dict[str, Trial] = {}
    for key, rows in results.trials.groupby("id", sort=False):
        row = rows.iloc[0]
        loss = row.get("validation_loss")
        trials[str(key)] = Trial(
            id=str(key),
            name=_place(row),
            folder=Path(row["folder"]).name,
            places=tuple(f"{other['sweep']}: {_place(other)}" for _, other in rows.iterrows()),
            state=str(row["state"]),
            step=f"{row['step']}/{row['steps']}",
            loss="" if loss is None or pd.isna(loss) else number(float(loss), 4),
            note=str(row["note"]),
        )
    return trials


def trial_table(trials: Trials) -> Markup:
    """Return the table of all trials as HTML; each row has an id, to which numbers in the report link."""
    return render("trials", trials=trials.values())


def _place(row: Mapping[str, object] | pd.Series) -> str:
    axes: tuple[tuple[str, str], ...] = row["axes"]  # type: ignore[assignment]
    return ", ".join(
        [str(row["arm"] or row["sweep"]), *(f"{axis} {value}" for axis, value in axes), f"seed {row['seed']}"]
    )
