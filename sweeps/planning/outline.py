"""Print what a sweep would do (`--dry-run`): states of trials, cost and memory of arms, data that have to be prepared.

Trial ids contain a fingerprint of the data. Without the data there is only a plan with placeholders for the ids, but
all settings follow from the overrides, and the size of a missing collection of web text from its published size.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from fewbits.common.store_folder import size
from fewbits.common.terminal import notice, print_table
from fewbits.common.wording import clock, plural
from fewbits.experiments.data.folder import smallest_dtype
from fewbits.experiments.data.once import default_cache
from fewbits.experiments.data.web_text import COLLECTIONS, Collection
from fewbits.experiments.distributed.memory import MARGIN, complaint, estimate
from fewbits.experiments.trial import Trial
from fewbits.sweeps.planning import store
from fewbits.sweeps.planning.cost import Speeds, disk, parameters_of, remaining, slots_of, tokens_of, work_of
from fewbits.sweeps.planning.plan import Member, Plan, Planned, cache_at, check_repeats, corpus_of, fresh_tokens, plan
from fewbits.sweeps.planning.store import HALF_DONE, TrialStatus, counted, trial_statuses, unfinished
from fewbits.sweeps.planning.studies import load_sweeps
from fewbits.sweeps.planning.sweep import SEED, spell

DOCUMENTS = 10_000_000  # the least number of documents of a collection that the printed command prepares
SPARE = 0.1  # the share of tokens to prepare in addition, since the published numbers of tokens are estimates
MARK = "*"
LEGEND = f"{MARK} assumed: the paper does not state it"
# Column → the setting that is marked if the sweep's `assumed` names it, and a function that returns the text.
SETTINGS: dict[str, tuple[str, Callable[[Trial], str]]] = {
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
COSTS = (
    *("sweep", "arm", "model", "data", "tokens", "with trunk's", "epochs"),
    *("trials", "time each", "total time", "disk"),
)
FEW = 40  # plans with more places list their trials only with --trials
PARTS = ("weights", "gradients", "states", "gathered", "quantized", "activations")

Missing = Mapping[Path, Sequence[Planned]]  # folder of data that does not exist on this machine → trials that read it


def plan_or_outline(overrides: Sequence[str]) -> Plan:
    """Return the plan of these overrides; if data are missing on this machine, a plan with placeholders for ids."""
    sweeps, extra = load_sweeps(overrides)
    try:
        return plan(sweeps, extra)
    except ValueError:
        planned = plan(sweeps, extra, with_data=False)
        if not missing_data(planned):
            raise
        return planned


# -------------------------------------------------------------------------------- arms


def cost_rows(plan: Plan, corpus_tokens: Mapping[str, int | None]) -> Iterator[tuple[str, ...]]:
    """Yield a row with the values of COSTS for each arm; several rows if its trials differ in model, tokens or data.

    A trial of several arms is counted only in the first of them. corpus_tokens: the result of that function.
    """
    speeds = Speeds(plan.store)
    seconds = {key: speeds.estimate(planned)[0] for key, planned in plan.trials.items()}
    arms: dict[Hashable, list[Member]] = {}
    first: dict[str, Member] = {}  # by trial id: the first place of the trial, in whose arm the trial is counted
    for member in plan.members:
        planned, cell = plan.trials[member.id], member.cell
        model, read = planned.trial.model, (tokens_of(planned.trial), planned.earlier_tokens)
        key = model.name, parameters_of(model), planned.trial.data, corpus_tokens[member.id], read
        arms.setdefault((cell.sweep, cell.arm, key), []).append(member)
        first.setdefault(member.id, member)
    for members in arms.values():
        head, planned = members[0].cell, plan.trials[members[0].id]
        trial, earlier, corpus = planned.trial, planned.earlier_tokens, corpus_tokens[planned.id]
        tokens = tokens_of(trial)
        own = [member.id for member in members if first[member.id] is member]
        shared = first[planned.id].cell
        yield (
            head.sweep,
            head.arm or "-",
            f"{trial.model.name}, {_short(parameters_of(trial.model)).replace('G', 'B')}",
            trial.data.kind,
            _short(tokens),
            _short(tokens + earlier) if earlier else "-",
            f"{(tokens + earlier) / corpus:.2g}" if corpus else "?",
            _count(members),
            _time([seconds[member.id] for member in members], len(members)),
            _time([seconds[key] for key in own]) if own else f"in {shared.sweep}/{shared.arm or '-'}",
            f"{_short(disk(plan.trials[key] for key in own))}B" if own else "-",
        )


def memory_rows(plan: Plan, device_bytes: float) -> Iterator[tuple[tuple[str, ...], str | None]]:
    """Yield a row (sweep, arm, model, ranks, GB, PARTS) for each arm and model on GPUs, and a complaint or None.

    The numbers are those of one rank. device_bytes: the memory of a GPU.
    """
    # For each arm and model, the first member: it overwrites later ones.
    keys = {(m.cell.sweep, m.cell.arm or "-", plan.trials[m.id].trial.model): m.id for m in reversed(plan.members)}
    for (sweep, arm, _), key in reversed(keys.items()):
        planned = plan.trials[key]
        if planned.resources.gpus:
            ranks = planned.resources.ranks
            memory = estimate(planned.trial, ranks)
            sizes = (memory.total, *(getattr(memory, part) for part in PARTS))
            too_large = memory.total > MARGIN * device_bytes
            reason = f"{sweep}/{arm}: {complaint(planned.trial, ranks, device_bytes)}" if too_large else None
            yield (sweep, arm, planned.trial.model.name, str(ranks), *(f"{part / 1e9:.1f}" for part in sizes)), reason


def setting_rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    """Yield a row for each arm and combination of axis values: sweep, place without seed, then SETTINGS as text."""
    assumed = {(sweep.name, sweep.scale): sweep.assumed for sweep in plan.sweeps}
    # For each arm and combination of axis values, the member with the first seed: it overwrites those of other seeds.
    places = {(m.cell.sweep, m.cell.arm, m.cell.axes): m for m in reversed(plan.members)}
    for member in reversed(places.values()):
        trial, marked = plan.trials[member.id].trial, assumed[member.cell.sweep, member.scale]
        place = {key: value for key, value in member.cell.place.items() if key != SEED}
        cells = (f"{text(trial)}{MARK if key in marked else ''}" for key, text in SETTINGS.values())
        yield (member.cell.sweep, spell(place), *cells)


def _time(times: Sequence[float | None], divided_by: int = 1) -> str:
    known = [seconds for seconds in times if seconds is not None]
    return clock(sum(known) / divided_by) if len(known) == len(times) else "?"


def _count(members: Sequence[Member]) -> str:
    """Return an arm's number of trials as text: `2 x 3 seeds` for two combinations of axis values with three seeds."""
    seeds = len({member.cell.seed for member in members})
    places = len({member.cell.axes for member in members})
    if places * seeds != len(members):  # the sweep excludes some combinations
        return str(len(members))
    return f"{f'{places} x ' if places > 1 else ''}{seeds} seed{'s' if seeds > 1 else ''}"


def _short(count: float) -> str:
    """Return a count with three digits and a unit (k, M, G or T), for example `1.47 G`."""
    for unit, least in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= least:
            return f"{count / least:.3g} {unit}"
    return f"{count:.0f}"


def _tokens(count: int) -> str:
    return f"{count / 1e12:.3f} T" if count >= 1e11 else f"{count / 1e9:.3f} G"


def _operands(trial: Trial) -> str:
    """Return as text the different quantizers and mixtures of the GEMM operands, and the noise of the sampler."""
    specs = " / ".join(str(spec or "high") for spec in trial.recipe.specs)
    sampler = trial.recipe.sampler
    if sampler.kind == "none":
        return specs
    parts = "" if sampler.parts == ("all",) else f" of {', '.join(sampler.parts)}"
    return f"{specs}; {sampler.kind} noise on weights{parts}, {sampler.init:g} to {sampler.target:g} bits"


# -------------------------------------------------------------------------------- data


def missing_data(plan: Plan) -> dict[Path, list[Planned]]:
    """Return each folder of data that does not exist on this machine, with the trials of the plan that read it.

    It is a file for `data=text`. Data that are generated, such as `synthetic`, need no folder.
    """
    readers: dict[Path, list[Planned]] = {}
    for planned in plan.trials.values():
        data = planned.trial.data
        folders = [Path(path).expanduser() for path in (data.path, *(phase.path for phase in data.phases)) if path]
        if not folders and data.kind in COLLECTIONS:
            folders = [cache_at(planned.runtime.cache) / data.kind]
        for folder in folders:
            if not folder.exists():
                readers.setdefault(folder, []).append(planned)
    return readers


def corpus_tokens(plan: Plan, missing: Missing) -> dict[str, int | None]:
    """Return by trial id the number of tokens in the trial's training split; None if unknown.

    For a missing collection of web text, it is the number that the command from `preparations` would prepare. Raise
    ValueError if a trial would read such data more often than `data.repeat` allows; a plan with data has been checked
    already. missing: the result of `missing_data`.
    """
    tokens: dict[str, int | None] = {}
    for readers in missing.values():
        collection = COLLECTIONS.get(readers[0].trial.data.kind)
        size = _prepared(collection, readers)[1] if collection is not None else None
        tokens |= dict.fromkeys((planned.id for planned in readers), size)
    for member in plan.members:
        planned = plan.trials[member.id]
        if member.id not in tokens:
            corpus = corpus_of(planned.trial.data, planned.runtime.cache)
            tokens[member.id] = fresh_tokens(planned.trial, planned.earlier_tokens, corpus)
        if missing and (size := tokens[member.id]) is not None:
            try:
                check_repeats(planned.trial, planned.earlier_tokens, size)
            except ValueError as error:
                raise ValueError(f"{member.cell.title}: {error}") from None
    return tokens


def preparations(missing: Missing) -> Iterator[str]:
    """Yield the commands `fewbits data …` for the missing collections, each with a comment on the size."""
    for folder, readers in missing.items():
        kind = readers[0].trial.data.kind
        if (collection := COLLECTIONS.get(kind)) is None:  # such as a user's own text file
            continue
        documents, tokens = _prepared(collection, readers)
        size = tokens * np.dtype(smallest_dtype(readers[0].trial.model.vocab)).itemsize
        command = ["fewbits data", kind, *([f"--documents {documents}"] if documents else [])]
        command += [] if folder == default_cache() / kind else [f"--out {shlex.quote(str(folder))}"]
        assumed = f"; assumed: {collection.assumed}" if collection.assumed else ""
        yield f"{' '.join(command)}    # about {tokens / 1e9:.1f} G tokens, {size / 1e9:.0f} GB{assumed}"


def _prepared(collection: Collection, readers: Sequence[Planned]) -> tuple[int | None, int]:
    """Return how many documents to prepare for these trials, and how many tokens they have by the published size.

    The number of documents is DOCUMENTS, doubled until the tokens suffice, so that studies that share a collection
    usually get the same number; None means the whole collection.
    """
    tokens, documents = max(tokens_of(reader.trial) + reader.earlier_tokens for reader in readers), DOCUMENTS
    while documents * collection.tokens < tokens * collection.documents * (1 + SPARE):
        documents *= 2
    if documents >= collection.documents:
        return None, collection.tokens
    return documents, documents * collection.tokens // collection.documents


# -------------------------------------------------------------------------------- the dry run


def print_plan(plan: Plan, parallel: int | None = None, backend: str = "ray", trials: bool = False) -> None:
    """Print the trials with their states, the table of arms and the totals; trials: also those of large plans.

    If data are missing on this machine, print the arms' settings instead of the trials, and at the end the commands
    that prepare the data. parallel, backend: the values of `--parallel` and `--backend`, for the estimate of the time.
    """
    statuses, missing = trial_statuses(plan), missing_data(plan)
    tokens = corpus_tokens(plan, missing)
    if missing:
        print_table(("sweep", "place", *SETTINGS), setting_rows(plan))
        print(f"\n{LEGEND}\n" if any(sweep.assumed for sweep in plan.sweeps) else "")
    elif trials or len(plan.members) <= FEW:
        print_table([""] * 4, _trial_rows(plan, statuses))
        print()
    print_table(COSTS, cost_rows(plan, tokens))
    print("", *_totals(plan, statuses, parallel, backend), sep="\n")
    if missing:
        print(f"{sum(work_of(planned.trial) for planned in plan.trials.values()):.2e} FLOPs")
        print(f"these data are not on this machine: {', '.join(map(str, missing))}")
        print("".join(f"{line}\n" for line in preparations(missing)), end="")


def print_memory(plan: Plan, device_bytes: float) -> int:
    """Print the memory that each arm needs on a GPU of `device_bytes`; return 2 if one does not fit, else 0."""
    arms = list(memory_rows(plan, device_bytes))
    if arms:
        print()
        print_table(("sweep", "arm", "model", "ranks", "GB a rank", *PARTS), [row for row, _ in arms])
    complaints = [reason for _, reason in arms if reason is not None]
    for text in complaints:
        notice(text)
    return 2 if complaints else 0


def _trial_rows(plan: Plan, statuses: Mapping[str, TrialStatus]) -> Iterator[tuple[str, str, str, str]]:
    seen, has_to_run = set(), unfinished(plan)
    for member in plan.members:
        planned = plan.trials[member.id]
        text = _describe_status(planned, statuses[member.id], member.id in has_to_run)
        again = "  (the same trial as above)" if member.id in seen else ""
        seen.add(member.id)
        yield member.cell.sweep, spell(member.cell.place), planned.folder.path.name, text + again


def _describe_status(planned: Planned, status: TrialStatus, has_to_run: bool) -> str:
    state = status.state
    if state is store.State.BLOCKED:
        return f"blocked: {status.why}"
    if not has_to_run:
        return str(state)
    if state in store.OVER:
        return f"{state}, runs again for the checkpoints of steps {', '.join(map(str, sorted(planned.keep)))}"
    step = store.reached(planned.folder)
    if state is store.State.PLANNED and step:
        return f"{HALF_DONE}, resumes from step {step}"
    return f"{state}, resumes from step {step}" if step and state is not store.State.RUNNING else str(state)


def _totals(plan: Plan, statuses: Mapping[str, TrialStatus], parallel: int | None, backend: str) -> list[str]:
    """Return lines with the number of trials in each state, and the time and disk space that the sweep still needs."""
    has_to_run = unfinished(plan)
    missing = [t for key, t in plan.trials.items() if key in has_to_run and not statuses[key].blocked_permanently]
    states = counted(plan, statuses)
    lines = [f"{plural(len(plan.trials), 'trial')}: {states}"]
    if not missing:
        return [*lines, "nothing to run"]
    slots = parallel or slots_of(missing)
    if backend == "local":
        slots = min(slots, slots_of(missing))
    return [*lines, remaining(missing, slots, Speeds(plan.store)), f"{size(disk(missing))} of checkpoints"]
