"""Describe in the dry run a sweep whose data are not on this machine: its settings, and commands that prepare the data.

Trial ids contain a fingerprint of the data. Therefore, without the data, there is only a plan with placeholders for the
ids; but the settings of the trials follow from the overrides alone. Numbers of tokens in a missing collection of web
text are computed from its published size.
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

DOCUMENTS = 10_000_000  # the least number of documents of a collection that the printed command prepares
SPARE = 0.1  # the share of tokens to prepare in addition, since the published numbers of tokens are estimates

MARK = "*"
LEGEND = f"{MARK} assumed: the paper does not state it"
SETTINGS: dict[
    str, tuple[str, Callable[[Trial], str]]
] = {  # column → (the setting that is marked if the sweep's `assumed` names it, a function that returns the text)
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


Missing = Mapping[Path, Sequence[Planned]]  # folder of data that does not exist on this machine → trials that read it


def plan_or_outline(overrides: Sequence[str]) -> Plan:
    """Return the plan of these overrides; if data are missing on this machine, a plan with placeholders for ids.

    Raise ValueError if the overrides are invalid, or if no plan can be made for another reason than missing data.
    """
    sweeps, extra = load_sweeps(overrides)
    try:
        return plan(sweeps, extra)
    except ValueError:
        planned = plan(sweeps, extra, with_data=False)
        if not missing_data(planned):
            raise
        return planned


def missing_data(plan: Plan) -> dict[Path, list[Planned]]:
    """Return each folder of data that does not exist on this machine, with the trials of the plan that read it."""
    readers: dict[Path, list[Planned]] = {}
    for planned in plan.trials.values():
        if (folder := missing_folder(planned.trial.data, planned.runtime.cache)) is not None:
            readers.setdefault(folder, []).append(planned)
    return readers


def corpus_tokens(plan: Plan, missing: Missing) -> dict[str, int | None]:
    """Return by trial id the number of tokens in the trial's training split; None if unknown.

    For a missing collection of web text, it is the number of tokens that the command from `preparations` would prepare.
    missing: the result of `missing_data`.

    If any data are missing, the plan was made without a check of how often trials read their data. Then this function
    makes the check: it raises ValueError if a trial would read its data more often than `data.repeat` allows.
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
    """Yield a row for each arm and combination of axis values: sweep, place without seed, then the settings as text.

    The settings are those of the table SETTINGS. MARK is appended to settings that the study's paper does not state.
    """
    assumed = {(sweep.name, sweep.scale): sweep.assumed for sweep in plan.sweeps}
    # For each arm and combination of axis values, the member with the first seed: it overwrites those of other seeds.
    places = {(m.cell.sweep, m.cell.arm, m.cell.axes): m for m in reversed(plan.members)}
    for member in reversed(places.values()):
        cell, trial = member.cell, plan.trials[member.id].trial
        place = {key: value for key, value in cell.place.items() if key != SEED}
        marked = assumed[cell.sweep, member.scale]
        cells = (f"{text(trial)}{MARK if key in marked else ''}" for key, text in SETTINGS.values())
        yield (cell.sweep, spell(place), *cells)


def _needed(readers: Sequence[Planned]) -> int:
    """Return the maximum over trials of the tokens that a trial reads plus those that its parents read before it."""
    return max(tokens_of(reader.trial) + reader.earlier_tokens for reader in readers)


def _prepared(collection: Collection, tokens: int) -> tuple[int | None, int]:
    """Return how many documents to prepare for a trial that reads `tokens` tokens, and how many tokens they have.

    The number of documents is DOCUMENTS, doubled until the documents have at least (1 + SPARE) times `tokens` tokens;
    None means the whole collection. Because the number only doubles, studies that share a collection usually get the
    same number. The tokens of the documents are estimated from the collection's published size.
    """
    documents = DOCUMENTS
    while documents * collection.tokens < tokens * collection.documents * (1 + SPARE):
        documents *= 2
    if documents >= collection.documents:
        return None, collection.tokens
    return documents, documents * collection.tokens // collection.documents


def preparations(missing: Missing) -> Iterator[str]:
    """Yield the commands `fewbits data …` for the missing collections, each with a comment on the size.

    Missing data that are no published collection, such as a user's own text file, get no command.
    """
    for folder, readers in missing.items():
        kind = readers[0].trial.data.kind
        if kind not in COLLECTIONS:
            continue
        collection = COLLECTIONS[kind]
        documents, tokens = _prepared(collection, _needed(readers))
        size = tokens * np.dtype(smallest_dtype(readers[0].trial.model.vocab)).itemsize
        command = ["fewbits data", kind, *([f"--documents {documents}"] if documents else [])]
        command += [] if folder == default_cache() / kind else [f"--out {shlex.quote(str(folder))}"]
        assumed = f"; assumed: {collection.assumed}" if collection.assumed else ""
        yield f"{' '.join(command)}    # about {tokens / 1e9:.1f} G tokens, {size / 1e9:.0f} GB{assumed}"


def _tokens(count: int) -> str:
    return f"{count / 1e12:.3f} T" if count >= 1e11 else f"{count / 1e9:.3f} G"


def _operands(trial: Trial) -> str:
    """Return as text the different quantizers and mixtures of the GEMM operands, and the noise of the sampler."""
    specs = dict.fromkeys(str(slot.spec or "high") for _, slot in trial.recipe.operands.items())
    return "; ".join(filter(None, (" / ".join(specs), _noise(trial.recipe.sampler))))


def _noise(sampler: Sampler) -> str:
    if sampler.kind == "none":
        return ""
    parts = "" if sampler.parts == ("all",) else f" of {', '.join(sampler.parts)}"
    return f"{sampler.kind} noise on weights{parts}, {sampler.init:g} to {sampler.target:g} bits"
