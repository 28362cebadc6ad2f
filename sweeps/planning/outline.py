"""Describe a sweep whose data are not on this machine: its arms, their cost, and the commands that prepare the data.

A plan needs each trial's id, and an id needs the fingerprint of the data, so without the data there is no plan. The
settings of the trials follow from the config overrides alone. For missing collections the published sizes are used.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fewbits.common.progress import clock
from fewbits.experiments.config import load_trial
from fewbits.experiments.data.folder import smallest_dtype
from fewbits.experiments.data.once import default_cache
from fewbits.experiments.data.web import COLLECTIONS, Collection
from fewbits.experiments.trial import Runtime, Trial
from fewbits.models.recipe import Sampler
from fewbits.sweeps.commands.dry_run import ASSUMED
from fewbits.sweeps.planning.arms import Share, arm_table
from fewbits.sweeps.planning.cost import (
    Speeds,
    assumed_seconds,
    device_asked_for,
    disk_of,
    parameters_of,
    tokens_of,
    work_of,
)
from fewbits.sweeps.planning.epochs import check_repeats, tokens_until, training_tokens
from fewbits.sweeps.planning.expand import Cell, expand
from fewbits.sweeps.planning.plan import branch_step, on_a_device
from fewbits.sweeps.planning.sweep import SEED, Resources, Sweep
from fewbits.sweeps.running.trial_status import table

DOCUMENTS = 10_000_000  # the smallest part of a collection that is prepared
SPARE = 0.1  # extra share of tokens, since the published numbers of tokens are estimates

MARK = "*"
LEGEND = f"{MARK} assumed: the paper does not state it"
COLUMNS: dict[
    str, tuple[str, Callable[[Trial], str]]
] = {  # column: the setting whose value may be assumed, and a function that returns the column's text
    "recipe": ("recipe", lambda t: t.recipe.name),
    "model": ("model", lambda t: f"{t.model.name}, {parameters_of(t.model) / 1e9:.2f} B"),
    "tokens": ("training.tokens", lambda t: _tokens(tokens_of(t))),
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
    """A place of a sweep with its trial, without the id that a plan would have."""

    cell: Cell
    trial: Trial
    runtime: Runtime
    resources: Resources
    assumed: tuple[str, ...]
    parent: Outlined | None  # the trial that it branches from
    step: int | None  # the step of its parent at which it starts

    @property
    def key(self) -> Hashable:
        """A key that is equal for places that are the same computation."""
        return self.trial, self.step, self.parent and self.parent.key

    @property
    def earlier_tokens(self) -> int:
        if self.parent is None or self.step is None:
            return 0
        return tokens_until(self.parent.trial, self.step) + self.parent.earlier_tokens


def missing_data(sweeps: Sequence[Sweep], extra: tuple[str, ...] = ()) -> list[Path]:
    """Return the folders of data that trials name and that do not exist here."""
    return list(_missing(outline(sweeps, extra)))


def _missing(outlined: Sequence[Outlined]) -> dict[Path, list[Outlined]]:
    """Return the folders of data that do not exist here, with the trials that read them."""
    readers: dict[Path, list[Outlined]] = {}
    for each in outlined:
        if (folder := _data(each)) is not None and not folder.is_dir():
            readers.setdefault(folder, []).append(each)
    return readers


def _data(outlined: Outlined) -> Path | None:
    """Return the folder of the trial's data; None for data that are generated when they are missing."""
    data, cache = outlined.trial.data, outlined.runtime.cache
    if data.path:
        return Path(data.path).expanduser()
    if data.kind not in COLLECTIONS:
        return None
    return (Path(cache).expanduser() if cache else default_cache()) / data.kind


def outline(sweeps: Sequence[Sweep], extra: tuple[str, ...] = ()) -> list[Outlined]:
    """Return every place of the sweeps, in their order."""
    made: dict[tuple[str, Cell], Outlined] = {}
    return [_outlined(cell, sweep, made) for sweep in sweeps for cell in expand(sweep, extra)]


def _outlined(cell: Cell, sweep: Sweep, made: dict[tuple[str, Cell], Outlined]) -> Outlined:
    if (sweep.name, cell) not in made:
        trial, runtime = load_trial(cell.overrides)
        parent = None if cell.parent is None else _outlined(cell.parent, sweep, made)
        step = None if parent is None else branch_step(cell, parent.trial)
        runtime, resources = on_a_device(runtime, sweep.resources)
        made[sweep.name, cell] = Outlined(cell, trial, runtime, resources, sweep.assumed, parent, step)
    return made[sweep.name, cell]


def describe(sweeps: Sequence[Sweep], extra: tuple[str, ...] = (), parallel: int | None = None) -> str:
    """Return each arm's settings (assumed ones marked) and cost, and the commands that prepare the missing data.

    Raise ValueError if a trial would read its data more often than `data.repeat` allows.
    """
    places = outline(sweeps, extra)
    missing = _missing(places)
    needs = {
        folder: max(tokens_of(each.trial) + each.earlier_tokens for each in readers)
        for folder, readers in missing.items()
    }
    keep = _kept(places)
    shares = [_share(each, needs, keep.get(each.key, set())) for each in places]
    legend = [LEGEND] if any(outlined.assumed for outlined in places) else []
    lines = [*_settings(places), "", *legend, "", *arm_table(shares), "", *_totals(places, shares, parallel)]
    lines.append(f"data that are missing here: {', '.join(map(str, missing))}")
    return "\n".join([*lines, *_preparations(missing, needs)])


def _settings(places: Sequence[Outlined]) -> list[str]:
    by_place = {(one.cell.sweep, one.cell.arm, one.cell.axes): one for one in reversed(places)}  # keeps the first seed
    return table([("sweep", "place", *COLUMNS), *(_row(one) for one in reversed(by_place.values()))])


def _totals(places: Sequence[Outlined], shares: Sequence[Share], parallel: int | None) -> list[str]:
    work = {place.key: work_of(place.trial) for place in places}
    times = {share.key: share.seconds for share in shares}
    known = [seconds for seconds in times.values() if seconds is not None]
    lines = [f"{len(work)} trials, {sum(work.values()):.2e} FLOPs"]
    if len(known) == len(times):
        slots = parallel or 1
        lines.append(f"about {clock(sum(known) / slots)}, {slots} at a time, {ASSUMED} unless measured here")
    lines.append(f"{sum({share.key: share.disk for share in shares}.values()) / 1e9:.1f} GB of checkpoints")
    return lines


def _kept(places: Sequence[Outlined]) -> dict[Hashable, set[int]]:
    """Return, for each trial, the steps from whose checkpoints other trials start."""
    keep: dict[Hashable, set[int]] = {}
    for place in places:
        if place.parent is not None and place.step is not None:
            keep.setdefault(place.parent.key, set()).add(place.step)
    return keep


def _share(outlined: Outlined, needs: Mapping[Path, int], keep: set[int]) -> Share:
    folder, data = _data(outlined), outlined.trial.data
    if folder is None or folder not in needs:
        corpus_tokens = training_tokens(data, outlined.runtime.cache)
    elif data.kind in COLLECTIONS:
        corpus_tokens = _prepared(COLLECTIONS[data.kind], needs[folder])[1]
    else:
        corpus_tokens = None
    if corpus_tokens is not None:
        try:
            check_repeats(outlined.trial, outlined.earlier_tokens, corpus_tokens)
        except ValueError as error:
            place = ", ".join(f"{key} {value}" for key, value in outlined.cell.place.items())
            raise ValueError(f"sweep {outlined.cell.sweep}, {place}: {error}") from None
    seconds = Speeds(Path(outlined.runtime.runs).expanduser()).seconds_on(
        device_asked_for(outlined.runtime, outlined.resources), outlined.trial
    )
    if seconds is None:
        seconds = assumed_seconds(outlined.trial, outlined.resources)
    size = disk_of(outlined.trial, outlined.runtime, keep)
    return Share(outlined.cell, outlined.trial, outlined.key, outlined.earlier_tokens, corpus_tokens, seconds, size)


def _prepared(collection: Collection, tokens: int) -> tuple[int | None, int]:
    """Return how many documents to prepare (None: all), and about how many tokens they have.

    They are enough for the longest trial to read each once. Their number is doubled until then, so that studies that
    share a collection ask for the same number.
    """
    documents = DOCUMENTS
    while documents * collection.tokens < tokens * collection.documents * (1 + SPARE):
        documents *= 2
    if documents >= collection.documents:
        return None, collection.tokens
    return documents, documents * collection.tokens // collection.documents


def _preparations(missing: Mapping[Path, Sequence[Outlined]], needs: Mapping[Path, int]) -> Iterator[str]:
    """Yield the commands that prepare the missing data, each with the size of the result."""
    for folder, readers in missing.items():
        kind = readers[0].trial.data.kind
        if kind not in COLLECTIONS:
            continue
        collection = COLLECTIONS[kind]
        documents, tokens = _prepared(collection, needs[folder])
        size = tokens * np.dtype(smallest_dtype(readers[0].trial.model.vocab)).itemsize
        command = ["fewbits data prepare", kind, *([f"--documents {documents}"] if documents else [])]
        command += [] if folder == default_cache() / kind else [f"--out {shlex.quote(str(folder))}"]
        assumed = f"; assumed: {collection.assumed}" if collection.assumed else ""
        yield f"{' '.join(command)}    # about {tokens / 1e9:.1f} G tokens, {size / 1e9:.0f} GB{assumed}"


def _tokens(count: int) -> str:
    return f"{count / 1e12:.3f} T" if count >= 1e11 else f"{count / 1e9:.3f} G"


def _operands(trial: Trial) -> str:
    """Return the distinct quantizers of the GEMM operands, and the sampler's noise."""
    specs = dict.fromkeys(str(slot.spec or "high") for _, slot in trial.recipe.operands.items())
    return "; ".join(filter(None, (" / ".join(specs), _noise(trial.recipe.sampler))))


def _noise(sampler: Sampler) -> str:
    if sampler.kind == "none":
        return ""
    parts = "" if sampler.parts == ("all",) else f" of {', '.join(sampler.parts)}"
    return f"{sampler.kind} noise on weights{parts}, {sampler.init:g} to {sampler.target:g} bits"


def _row(outlined: Outlined) -> tuple[str, ...]:
    place = " ".join(f"{key}={value}" for key, value in outlined.cell.place.items() if key != SEED)
    cells = (f"{text(outlined.trial)}{MARK if key in outlined.assumed else ''}" for key, text in COLUMNS.values())
    return (outlined.cell.sweep, place, *cells)
