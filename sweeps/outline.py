"""What a sweep's arms are, in numbers of their papers: of a scale whose data lie elsewhere, before anybody gets them.

A plan knows each trial by its id, and the id by the data's fingerprint: without the data there is none. What would be
trained stands in the words alone, and this is made of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fewbits.experiments.config import load_trial
from fewbits.experiments.data.once import default_cache
from fewbits.experiments.data.web import COLLECTIONS
from fewbits.experiments.trial import Trial
from fewbits.models.recipe import Sampler
from fewbits.models.registry import parameters
from fewbits.sweeps.cost import tokens_of, work_of
from fewbits.sweeps.expand import Cell, expand
from fewbits.sweeps.sweep import Sweep

MARK = "*"
LEGEND = f"{MARK} assumed: the paper does not state it"
COLUMNS: dict[
    str, tuple[str, Callable[[Trial], str]]
] = {  # what is shown of each trial: the setting that may be assumed, and its words
    "recipe": ("recipe", lambda t: t.recipe.name),
    "model": ("model", lambda t: f"{t.model.name}, {parameters(t.model) / 1e9:.2f} B"),
    "tokens": ("training.tokens", lambda t: f"{tokens_of(t) / 1e12:.3f} T"),
    "steps": ("training.steps", lambda t: f"{t.training.steps:,}"),
    "batch": ("training.batch", lambda t: f"{t.training.batch:,}"),
    "length": ("training.length", lambda t: f"{t.training.length:,}"),
    "learning rate": ("optimizer.lr", lambda t: f"{t.optimizer.lr:g}"),
    "schedule": ("schedule.kind", lambda t: t.schedule.kind),
    "warm-up": ("schedule.warmup_steps", lambda t: f"{t.schedule.warmup_steps:,}"),
    "down to": ("schedule.final_ratio", lambda t: f"{t.schedule.final_ratio:g}"),
    "optimizer": ("optimizer.kind", lambda t: t.optimizer.kind),
    "FLOPs": ("flops", lambda t: f"{work_of(t):.2e}"),
    "operands": ("recipe", lambda t: _operands(t)),
}


@dataclass(frozen=True)
class Outlined:
    cell: Cell
    trial: Trial
    assumed: tuple[str, ...]
    cache: str | None  # where data are kept, if not in the usual folder


def missing_data(sweeps: Sequence[Sweep], extra: tuple[str, ...] = ()) -> list[Path]:
    """Folders of data that trials name and that are not here."""
    found = dict.fromkeys(folder for outlined in outline(sweeps, extra) if (folder := _data(outlined)) is not None)
    return [folder for folder in found if not folder.is_dir()]


def _data(outlined: Outlined) -> Path | None:
    """Where its data are looked for; None of data that are made where they are missing."""
    data, cache = outlined.trial.data, outlined.cache
    if data.path:
        return Path(data.path).expanduser()
    if data.kind not in COLLECTIONS:
        return None
    return (Path(cache).expanduser() if cache else default_cache()) / data.kind


def outline(sweeps: Sequence[Sweep], extra: tuple[str, ...] = ()) -> list[Outlined]:
    """Every place of the sweeps, in their order."""
    found = []
    for sweep in sweeps:
        for cell in expand(sweep, extra):
            trial, runtime = load_trial(cell.words)
            found.append(Outlined(cell, trial, sweep.assumed, runtime.cache))
    return found


def describe(sweeps: Sequence[Sweep], extra: tuple[str, ...] = ()) -> str:
    """A row for each place; what the paper leaves open is marked."""
    found = outline(sweeps, extra)
    head = ("sweep", "place", *COLUMNS)
    rows = [head, *(_row(outlined) for outlined in found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = ["  ".join(f"{text:{width}}" for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    distinct = {outlined.trial: work_of(outlined.trial) for outlined in found}
    folders = ", ".join(map(str, missing_data(sweeps, extra)))
    total = f"{len(distinct)} trials, {sum(distinct.values()):.2e} FLOPs"
    legend = [LEGEND] if any(outlined.assumed for outlined in found) else []
    return "\n".join([*lines, "", *legend, total, f"data to be had before it can run: {folders}"])


def _operands(trial: Trial) -> str:
    """What the GEMMs get, one spelling where all are alike; and a sampler's noise."""
    spelled = dict.fromkeys(str(slot.spec or "high") for _, slot in trial.recipe.operands.items())
    return "; ".join(filter(None, (" / ".join(spelled), _noise(trial.recipe.sampler))))


def _noise(sampler: Sampler) -> str:
    if sampler.kind == "none":
        return ""
    of = "" if sampler.parts == ("all",) else f" of {', '.join(sampler.parts)}"
    return f"{sampler.kind} noise on weights{of}, {sampler.init:g} to {sampler.target:g} bits"


def _row(outlined: Outlined) -> tuple[str, ...]:
    place = " ".join(f"{key}={value}" for key, value in outlined.cell.place.items())
    shown = (f"{say(outlined.trial)}{MARK if key in outlined.assumed else ''}" for key, say in COLUMNS.values())
    return (outlined.cell.sweep, place, *shown)
