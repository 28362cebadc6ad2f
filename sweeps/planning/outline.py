"""A sweep whose data are not here: what its arms are, what they take, and how to get the data.

A plan knows each trial by its id, and the id by the data's fingerprint: without the data there is none. What would be
trained is in the config overrides alone. Sizes of collections that are not here are those that are published of them.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

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
from fewbits.sweeps.running.progress import clock
from fewbits.sweeps.running.trial_status import table

DOCUMENTS = 10_000_000  # the least part of a collection that is worth preparing
SPARE = 0.1  # of tokens, since numbers of tokens are estimates

MARK = "*"
LEGEND = f"{MARK} assumed: the paper does not state it"
COLUMNS: dict[
    str, tuple[str, Callable[[Trial], str]]
] = {  # what is shown of each trial: the setting that may be assumed, and its words
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
    """A place of a sweep with what would be trained there, without the ids that a plan has."""

    cell: Cell
    trial: Trial
    runtime: Runtime
    resources: Resources
    assumed: tuple[str, ...]
    parent: Outlined | None  # what it branches from
    step: int | None  # and at which step

    @property
    def key(self) -> Hashable:
        """Return what is equal for places that are the same computation."""
        return self.trial, self.step, self.parent and self.parent.key

    @property
    def earlier_tokens(self) -> int:
        if self.parent is None or self.step is None:
            return 0
        return tokens_until(self.parent.trial, self.step) + self.parent.earlier_tokens


def missing_data(sweeps: Sequence[Sweep], extra: tuple[str, ...] = ()) -> list[Path]:
    """Return the folders of data that trials name and that are not here."""
    return list(_missing(outline(sweeps, extra)))


def _missing(outlined: Sequence[Outlined]) -> dict[Path, list[Outlined]]:
    """Return the folders of data that are not here, with the trials that read them."""
    found: dict[Path, list[Outlined]] = {}
    for one in outlined:
        if (folder := _data(one)) is not None and not folder.is_dir():
            found.setdefault(folder, []).append(one)
    return found


def _data(outlined: Outlined) -> Path | None:
    """Return where its data are looked for; None of data that are made where they are missing."""
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
        trial, runtime = load_trial(cell.words)
        parent = None if cell.parent is None else _outlined(cell.parent, sweep, made)
        step = None if parent is None else branch_step(cell, parent.trial)
        runtime, resources = on_a_device(runtime, sweep.resources)
        made[sweep.name, cell] = Outlined(cell, trial, runtime, resources, sweep.assumed, parent, step)
    return made[sweep.name, cell]


def describe(sweeps: Sequence[Sweep], extra: tuple[str, ...] = (), parallel: int | None = None) -> str:
    """Return the settings of each arm, those marked that the paper leaves open, what it takes, and what to prepare.

    ValueError where a trial would read its data more often than `data.repeat` allows.
    """
    found = outline(sweeps, extra)
    missing = _missing(found)
    needs = {folder: max(tokens_of(one.trial) + one.earlier_tokens for one in ones) for folder, ones in missing.items()}
    keep = _kept(found)
    shares = [_share(one, needs, keep.get(one.key, set())) for one in found]
    legend = [LEGEND] if any(outlined.assumed for outlined in found) else []
    lines = [*_settings(found), "", *legend, "", *arm_table(shares), "", *_totals(found, shares, parallel)]
    lines.append(f"data to be had before it can run: {', '.join(map(str, missing))}")
    return "\n".join([*lines, *_preparations(missing, needs)])


def _settings(found: Sequence[Outlined]) -> list[str]:
    by_place = {(one.cell.sweep, one.cell.arm, one.cell.axes): one for one in reversed(found)}  # of all seeds the first
    return table([("sweep", "place", *COLUMNS), *(_row(one) for one in reversed(by_place.values()))])


def _totals(found: Sequence[Outlined], shares: Sequence[Share], parallel: int | None) -> list[str]:
    work = {one.key: work_of(one.trial) for one in found}
    times = {share.key: share.seconds for share in shares}
    known = [seconds for seconds in times.values() if seconds is not None]
    lines = [f"{len(work)} trials, {sum(work.values()):.2e} FLOPs"]
    if len(known) == len(times):
        slots = parallel or 1
        lines.append(f"about {clock(sum(known) / slots)}, {slots} at a time, {ASSUMED} unless measured here")
    lines.append(f"{sum({share.key: share.disk for share in shares}.values()) / 1e9:.1f} GB of checkpoints")
    return lines


def _kept(found: Sequence[Outlined]) -> dict[Hashable, set[int]]:
    """Return the steps of each trial whose checkpoints others start from."""
    keep: dict[Hashable, set[int]] = {}
    for one in found:
        if one.parent is not None and one.step is not None:
            keep.setdefault(one.parent.key, set()).add(one.step)
    return keep


def _share(one: Outlined, needs: Mapping[Path, int], keep: set[int]) -> Share:
    folder, data = _data(one), one.trial.data
    if folder is None or folder not in needs:
        corpus_tokens = training_tokens(data, one.runtime.cache)
    elif data.kind in COLLECTIONS:
        corpus_tokens = _prepared(COLLECTIONS[data.kind], needs[folder])[1]
    else:
        corpus_tokens = None
    if corpus_tokens is not None:
        try:
            check_repeats(one.trial, one.earlier_tokens, corpus_tokens)
        except ValueError as error:
            place = ", ".join(f"{key} {value}" for key, value in one.cell.place.items())
            raise ValueError(f"sweep {one.cell.sweep}, {place}: {error}") from None
    seconds = Speeds(Path(one.runtime.runs).expanduser()).seconds_on(
        device_asked_for(one.runtime, one.resources), one.trial
    )
    if seconds is None:
        seconds = assumed_seconds(one.trial, one.resources)
    size = disk_of(one.trial, one.runtime, keep)
    return Share(one.cell, one.trial, one.key, one.earlier_tokens, corpus_tokens, seconds, size)


def _prepared(collection: Collection, tokens: int) -> tuple[int | None, int]:
    """Return how many documents to prepare (None: all), and about how many tokens they have.

    They hold what the longest trial reads, once. Their number goes in wide steps, so that studies that share a
    collection ask for the same.
    """
    documents = DOCUMENTS
    while documents * collection.tokens < tokens * collection.documents * (1 + SPARE):
        documents *= 2
    if documents >= collection.documents:
        return None, collection.tokens
    return documents, documents * collection.tokens // collection.documents


def _preparations(missing: Mapping[Path, Sequence[Outlined]], needs: Mapping[Path, int]) -> Iterator[str]:
    """Yield the commands that make the data, each with its size."""
    for folder, ones in missing.items():
        kind = ones[0].trial.data.kind
        if kind not in COLLECTIONS:
            continue
        collection = COLLECTIONS[kind]
        documents, tokens = _prepared(collection, needs[folder])
        size = tokens * np.dtype(smallest_dtype(ones[0].trial.model.vocab)).itemsize
        words = ["fewbits data prepare", kind, *([f"--documents {documents}"] if documents else [])]
        words += [] if folder == default_cache() / kind else [f"--out {shlex.quote(str(folder))}"]
        assumed = f"; assumed: {collection.assumed}" if collection.assumed else ""
        yield f"{' '.join(words)}    # about {tokens / 1e9:.1f} G tokens, {size / 1e9:.0f} GB{assumed}"


def _tokens(count: int) -> str:
    return f"{count / 1e12:.3f} T" if count >= 1e11 else f"{count / 1e9:.3f} G"


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
    place = " ".join(f"{key}={value}" for key, value in outlined.cell.place.items() if key != SEED)
    shown = (f"{say(outlined.trial)}{MARK if key in outlined.assumed else ''}" for key, say in COLUMNS.values())
    return (outlined.cell.sweep, place, *shown)
