"""Describe a sweep whose data are not on this machine: its settings, and the commands that prepare the data.

An id needs the fingerprint of the data, so without the data there is no real plan; the settings of the trials follow
from the config overrides alone. The size of a missing collection is the published one.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from fewbits.experiments.data.folder import smallest_dtype
from fewbits.experiments.data.once import default_cache
from fewbits.experiments.data.preparation.web import COLLECTIONS, Collection
from fewbits.experiments.trial import Trial
from fewbits.models.recipe import Sampler
from fewbits.sweeps.planning.cost import parameters_of, tokens_of, work_of
from fewbits.sweeps.planning.data import check_repeats, missing_folder, training_tokens
from fewbits.sweeps.planning.expand import spell
from fewbits.sweeps.planning.plan import Plan, Planned, plan
from fewbits.sweeps.planning.sweep import SEED, load_sweeps

DOCUMENTS = 10_000_000  # documents: the smallest part of a collection to prepare
SPARE = 0.1  # extra share of tokens, since the published numbers of tokens are estimates

MARK = "*"
LEGEND = f"{MARK} assumed: the paper does not state it"
SETTINGS: dict[
    str, tuple[str, Callable[[Trial], str]]
] = {  # column: the setting whose value may be assumed, and a function that returns the column's text
    "recipe": ("recipe", lambda t: t.recipe.label),
    "model": ("model", lambda t: f"{t.model.name}, {parameters_of(t.model) / 1e9:.2f} B"),
    "tokens": ("training.tokens", lambda t: _tokens(tokens_of(t))),
    "steps": ("training.steps", lambda t: f"{t.training.steps:,}"),
    "batch": ("training.batch", lambda t: f"{t.training.batch:,}"),
    "length": ("training.length", lambda t: f"{t.training.length:,}"),
    "learning rate": ("optimizer.lr", lambda t: f"{t.optimizer.lr:g}"),
    "schedule": ("schedule.kind", lambda t: t.schedule.kind),
    "warm-up": ("schedule.warmup_steps", lambda t: f"{t.schedule.warmup_steps:,}"),
    "final lr ratio": ("schedule.final_ratio", lambda t: f"{t.schedule.final_ratio:g}"),
    "optimizer": ("optimizer.kind", lambda t: t.optimizer.kind),
    "FLOPs": ("flops", lambda t: f"{work_of(t):.2e}"),
    "operands": ("recipe", lambda t: _operands(t)),
}


Missing = Mapping[Path, Sequence[Planned]]  # the folders of data that do not exist here, with the trials that read them


def plan_without_missing_data(overrides: Sequence[str]) -> Plan:
    """Return the plan; if data are missing here, from the config overrides alone, as `--dry-run` shows it."""
    sweeps, extra = load_sweeps(overrides)
    try:
        return plan(sweeps, extra)
    except ValueError:
        planned = plan(sweeps, extra, with_data=False)
        if not missing_data(planned):
            raise
        return planned


def missing_data(plan: Plan) -> dict[Path, list[Planned]]:
    """Return the folders of data that trials name and that do not exist here, each with the trials that read it."""
    readers: dict[Path, list[Planned]] = {}
    for planned in plan.trials.values():
        if (folder := missing_folder(planned.trial.data, planned.runtime.cache)) is not None:
            readers.setdefault(folder, []).append(planned)
    return readers


def corpus_tokens(plan: Plan, missing: Missing) -> dict[str, int | None]:
    """Return the number of tokens in each trial's training split, by the trial's id; None if unknown.

    For a missing collection, it is the number of tokens that the command of `preparations` would prepare.
    Raise ValueError if a trial would read missing data more often than `data.repeat` allows.
    """
    tokens = {key: training_tokens(planned.trial.data, planned.runtime.cache) for key, planned in plan.trials.items()}
    for readers in missing.values():
        for planned in readers:
            if (collection := COLLECTIONS.get(planned.trial.data.kind)) is not None:
                tokens[planned.id] = _prepared(collection, _needed(readers))[1]
    for member in plan.members if missing else ():
        planned = plan.trials[member.id]
        if (size := tokens[member.id]) is not None:
            try:
                check_repeats(planned.trial, planned.earlier_tokens, size)
            except ValueError as error:
                raise ValueError(f"{member.cell.title}: {error}") from None
    return tokens


def setting_rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    """Yield a row of settings for each arm and combination of its axis values, with assumed settings marked."""
    assumed = {(sweep.name, sweep.scale): sweep.assumed for sweep in plan.sweeps}
    places = {(m.cell.sweep, m.cell.arm, m.cell.axes): m for m in reversed(plan.members)}  # keeps the first seed
    for member in reversed(places.values()):
        cell, trial = member.cell, plan.trials[member.id].trial
        place = {key: value for key, value in cell.place.items() if key != SEED}
        marked = assumed[cell.sweep, member.scale]
        cells = (f"{text(trial)}{MARK if key in marked else ''}" for key, text in SETTINGS.values())
        yield (cell.sweep, spell(place), *cells)


def _needed(readers: Sequence[Planned]) -> int:
    """Return how many tokens the longest of these trials and its parents read together."""
    return max(tokens_of(reader.trial) + reader.earlier_tokens for reader in readers)


def _prepared(collection: Collection, tokens: int) -> tuple[int | None, int]:
    """Return how many documents to prepare for a trial that reads `tokens` tokens, and how many tokens they have.

    The number of documents (None: all) starts at DOCUMENTS and is doubled until the trial reads no token twice. So
    studies that share a collection usually ask for the same number.
    """
    documents = DOCUMENTS
    while documents * collection.tokens < tokens * collection.documents * (1 + SPARE):
        documents *= 2
    if documents >= collection.documents:
        return None, collection.tokens
    return documents, documents * collection.tokens // collection.documents


def preparations(missing: Missing) -> Iterator[str]:
    """Yield the commands that prepare the missing data, each with the size of the result."""
    for folder, readers in missing.items():
        kind = readers[0].trial.data.kind
        if kind not in COLLECTIONS:
            continue
        collection = COLLECTIONS[kind]
        documents, tokens = _prepared(collection, _needed(readers))
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
