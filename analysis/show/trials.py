"""The trials behind numbers: each has a row in the report's last table, and a link there from every number it is in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from fewbits.analysis.engine.frames import Results
from fewbits.analysis.show.markup import boxed, folded, number, plural, tag, words
from fewbits.experiments.storage.run_folder import HASH

HEADS = ("Trial", "Folder", "Stands in", "State", "Step", "Validation loss")


@dataclass(frozen=True)
class Trial:
    """As the report names it: by the first of its places."""

    id: str
    name: str  # block, configuration 1, seed 0
    folder: str
    places: tuple[str, ...]  # with the sweeps
    state: str
    step: str
    loss: str
    note: str

    @property
    def short(self) -> str:
        return self.id[:HASH]

    @property
    def link(self) -> str:
        return tag("a", words(f"{self.name} · {self.short}"), href=f"#trial-{self.short}", title=self.folder)


def trials_of(results: Results) -> dict[str, Trial]:
    found: dict[str, Trial] = {}
    for key, rows in results.trials.groupby("id", sort=False):
        row = rows.iloc[0]
        loss = row.get("validation_loss")
        found[str(key)] = Trial(
            id=str(key),
            name=_place(row),
            folder=Path(row["folder"]).name,
            places=tuple(f"{other['sweep']}: {_place(other)}" for _, other in rows.iterrows()),
            state=str(row["state"]),
            step=f"{row['step']}/{row['steps']}",
            loss="" if loss is None or pd.isna(loss) else number(float(loss), 4),
            note=str(row["note"]),
        )
    return found


def behind(ids: Iterable[str], trials: Mapping[str, Trial]) -> str:
    """Links to their rows."""
    return ", ".join(trials[key].link if key in trials else words(key[:HASH]) for key in ids)


def behind_folded(ids: Iterable[str], trials: Mapping[str, Trial]) -> str:
    ids = tuple(ids)
    return folded(plural(len(ids), "trial"), tag("p", behind(ids, trials)), class_="behind") if ids else ""


def table(trials: Mapping[str, Trial]) -> str:
    rows = [
        tag(
            "tr",
            tag("th", tag("code", trial.short), scope="row"),
            tag("td", tag("code", words(trial.folder))),
            tag("td", "<br>".join(map(words, trial.places))),
            tag("td", words(trial.state), tag("small", f" {words(trial.note)}") if trial.note else ""),
            tag("td", words(trial.step), class_="number"),
            tag("td", words(trial.loss), class_="number"),
            id=f"trial-{trial.short}",
        )
        for trial in trials.values()
    ]
    head = tag("thead", tag("tr", *(tag("th", name, scope="col") for name in HEADS)))
    return boxed(tag("table", head, tag("tbody", *rows), class_="trials"))


def _place(row: Mapping[str, object] | pd.Series) -> str:
    axes: tuple[tuple[str, str], ...] = row["axes"]  # type: ignore[assignment]
    return ", ".join(
        [str(row["arm"] or row["sweep"]), *(f"{axis} {value}" for axis, value in axes), f"seed {row['seed']}"]
    )
