"""Frames: what the store holds of a plan, as tables to compute with, and the pairs that verdicts are made of.

One row stands for each place of a sweep, whether or not there is a result: what is missing, running, failed or stale
is a row that says so. Nothing is read before it is asked for.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import pandas as pd

from fewbits.analysis.alike import usual_kind, why_not_compared
from fewbits.analysis.statistics import Pools, differences, pooled_by_kind
from fewbits.analysis.verdicts import Differences, NoData
from fewbits.common.from_dict import one_of
from fewbits.experiments.identity import computed_by_todays_sources
from fewbits.kernels.quantizer import Mixture
from fewbits.models.recipe import Recipe, Slot
from fewbits.sweeps.planning.cost import parameters_of
from fewbits.sweeps.planning.plan import Member, Plan
from fewbits.sweeps.planning.stored_plans import Place, place_of
from fewbits.sweeps.running import store
from fewbits.sweeps.running.machine_kinds import computed, is_mixed

LABELS = ("study", "scale", "sweep", "arm", "axes", "seed", "id")  # of a place; each axis has a column of its own too
STANDING = ("folder", "state", "step", "steps", "stale", "note", "model", "parameters", "recipe", "computed")
EVALUATED = ("validation_loss", "ood_loss", "parameter_norm")  # there from a trial's first evaluation on
LATE_STEPS = 4  # at least
OTHER_CODE = "computed by other code than today's"
COARSE = 8  # bits of a format: with fewer, arms spread further
_NO_NUMBERS = ("id", "name", "status", "step", "evaluated")  # of result.json

Metric = str | Mapping[str, float]  # a number of result.json, `ood_cloze.accuracy` say; or one of each trial's, by id
Row = Mapping[str, Any]
T = TypeVar("T")


class Damaged(ValueError):
    """A file of a trial that cannot be read: nothing is said of the others as if it were not there."""


@dataclass(frozen=True)
class Results:
    """Of a plan, or of some of its sweeps."""

    plan: Plan
    earlier: Mapping[Place, str] = field(default_factory=dict)  # run folders of other trials: `plans.earlier_runs`

    @staticmethod
    def of(plan: Plan, earlier: Mapping[Place, str] | None = None) -> Results:
        return Results(plan, earlier or {})

    def of_sweep(self, name: str) -> Results:
        """Of one sweep of the plan alone: its arms' names are its own."""
        one_of("sweep", name, dict.fromkeys(sweep.name for sweep in self.plan.sweeps))
        if name not in self._parts:
            sweeps = tuple(sweep for sweep in self.plan.sweeps if sweep.name == name)
            members = tuple(member for member in self.members if member.cell.sweep == name)
            self._parts[name] = self._part(replace(self.plan, sweeps=sweeps, members=members))
        return self._parts[name]

    def of_places(self, members: tuple[Member, ...]) -> Results:
        """Of these places alone; there may be none."""
        return self._part(replace(self.plan, members=members))

    def _part(self, plan: Plan) -> Results:
        part = Results(plan, self.earlier)
        part.__dict__["_cache"] = self._cache
        return part

    @cached_property
    def _parts(self) -> dict[str, Results]:
        return {}

    @property
    def members(self) -> tuple[Member, ...]:
        return self.plan.members

    @cached_property
    def trials(self) -> pd.DataFrame:
        """A row for each place: what it is, how it stands, and every number of its result."""
        earlier = self.earlier
        rows = [_labels(member) | self._standing(member, earlier.get(place_of(member), "")) for member in self.members]
        return pd.DataFrame(rows)

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of `trials`."""
        return cast(list[dict[str, Any]], self.trials.to_dict("records"))

    @cached_property
    def scale(self) -> str:
        """How big what was trained is, as a verdict says it: `3.3 M parameters`."""
        return self.scale_of(())

    def scale_of(self, trials: Iterable[str]) -> str:
        """The same of some of them; of all where the plan has none of these."""
        some = [trial for trial in dict.fromkeys(trials) if trial in self.plan.trials]
        chosen = some or {member.id for member in self.members}
        sizes = sorted({parameters_of(self.plan.trials[trial].trial.model) for trial in chosen})
        return " and ".join(dict.fromkeys(map(_size, sizes))) + " parameters"

    @property
    def scale_name(self) -> str:
        """As it was asked for: `cpu`."""
        return " and ".join(dict.fromkeys(sweep.scale for sweep in self.plan.sweeps))

    @property
    def flags(self) -> tuple[str, ...]:
        """Name the places without a result, one line each: a reader must know them before any number."""
        several = len({row["sweep"] for row in self.rows}) > 1
        return tuple(
            f"{row['sweep'] + ', ' if several else ''}{_place(row)}: {row['note'] or row['state']}"
            for row in self.rows
            if row["state"] not in store.OVER
        )

    def metrics(self) -> list[str]:
        """Numbers that results have."""
        axes = {axis for member in self.members for axis, _ in member.cell.axes}
        return [str(c) for c in self.trials.columns if c not in {*LABELS, *STANDING, *axes}]

    # -------------------------------------------------------------------------------- over steps

    def curves(self, metric: str) -> pd.DataFrame:
        """Labels of each place, state, step, tokens, value; of unfinished trials as far as they have got."""
        frame = self._tables("metrics.parquet")
        if frame.empty or (metric in EVALUATED and metric not in frame):
            return pd.DataFrame(columns=[*LABELS, "state", "step", "tokens", "value"])
        valid = [c for c in frame.columns if c not in {*LABELS, "state", "step", "tokens"}]
        one_of("metric", metric, valid)
        frame = frame.dropna(subset=[metric]).rename(columns={metric: "value"})
        return frame[[*LABELS, "state", "step", "tokens", "value"]].reset_index(drop=True)

    def late(self, metric: str, part: float = 0.1) -> dict[str, float]:
        """Of each trial, by id, the mean over that last part of its steps, four at least: of one, a loss is noisy."""
        return self.remembered(f"late {metric} {part}", lambda: self._late(metric, part))

    def _late(self, metric: str, part: float) -> dict[str, float]:
        found = {}
        for key, curve in self.curves(metric).drop_duplicates(["id", "step"]).groupby("id"):
            steps = self.plan.trials[str(key)].trial.training.steps
            found[str(key)] = float(curve["value"][curve["step"] >= min(steps - LATE_STEPS, steps * (1 - part))].mean())
        return found

    def numerics(self) -> pd.DataFrame:
        """What quantization did, by window of steps, layer and slot (see the observer), with the places' labels."""
        return self._tables("numerics.parquet")

    def remembered(self, name: str, make: Callable[[], T]) -> T:
        """What many tables and claims are made of, made once. Nobody changes it."""
        if name not in self._memory:
            self._memory[name] = make()
        return cast(T, self._memory[name])

    @cached_property
    def _memory(self) -> dict[str, Any]:
        return {}

    def _tables(self, name: str) -> pd.DataFrame:
        return self.remembered(name, lambda: self._joined(name))

    def _joined(self, name: str) -> pd.DataFrame:
        tables, labels = [], []
        for member in self.members:
            folder = self.plan.trials[member.id].folder
            path = folder.path / name
            if path.is_file():
                tables.append(self._read(path))
                labels.append(_labels(member) | {"state": str(store.state(folder))})
        if not tables:
            return pd.DataFrame()
        of_rows = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
        labelled = pd.DataFrame(labels).take(of_rows).reset_index(drop=True)
        return pd.concat([pd.concat(tables, ignore_index=True), labelled], axis=1)

    def _read(self, path: Path) -> pd.DataFrame:
        """Once, though several places may share a trial."""
        if path not in self._cache:
            try:
                self._cache[path] = pd.read_parquet(path)
            except (OSError, ValueError) as error:
                reason = str(error).partition("\n")[0]
                raise Damaged(f"{path} is damaged ({reason}): remove its folder, and it is made again") from None
        return self._cache[path]

    @cached_property
    def _cache(self) -> dict[Path, pd.DataFrame]:
        return {}

    # -------------------------------------------------------------------------------- comparisons

    @cached_property
    def usual_kind(self) -> str | None:
        """The kind of machine that computed most of these trials."""
        return usual_kind(self.rows)

    def paired(
        self, metric: Metric, arm: str, baseline: str, where: Mapping[str, str] | None = None, *, relative: bool = True
    ) -> Differences | NoData:
        """Arm minus baseline, seed by seed; a baseline that leaves axes out is shared by all of their values.

        where: values of axes, as many as it takes to leave one combination: the seeds alone replicate.
        """

        def difference(row: Row, other: Row) -> float | list[str]:
            ours, theirs = self._value(row, metric), self._value(other, metric)
            if isinstance(ours, str) or isinstance(theirs, str):
                return [value for value in (ours, theirs) if isinstance(value, str)]
            return float(differences([ours], [theirs], relative=relative)[0])

        return self._pairs(difference, arm, baseline, where, relative)

    def distances(
        self,
        between: Callable[[str, str], float | None],
        arm: str,
        baseline: str,
        where: Mapping[str, str] | None = None,
        *,
        relative: bool = True,
    ) -> Differences | NoData:
        """As `paired`, of what no number of one trial holds: between(arm's id, baseline's id), curves' greatest
        distance say."""

        def difference(row: Row, other: Row) -> float | list[str]:
            found = between(row["id"], other["id"])
            return [f"{_place(row)}: no number"] if found is None else found

        return self._pairs(difference, arm, baseline, where, relative)

    def _pairs(
        self,
        difference: Callable[[Row, Row], float | list[str]],
        arm: str,
        baseline: str,
        where: Mapping[str, str] | None,
        relative: bool,
    ) -> Differences | NoData:
        """difference: of the rows of a pair; or why there is none."""
        rows, others = self._arm(arm, where), self._arm(baseline, None, shared=True)
        found, used, notes = [], [], []
        events = {"ours": 0, "baseline": 0}
        for row in rows:
            fitting = [o for o in others if o["seed"] == row["seed"] and set(o["axes"]) <= set(row["axes"])]
            if len(fitting) != 1:
                notes.append(f"{_place(row)}: {len(fitting) or 'no'} places of {baseline} to pair it with")
                continue
            (other,) = fitting
            used += [row["id"], other["id"]]
            names = (treatment(row["arm"], row["axes"]), treatment(other["arm"], other["axes"]))
            if unlike := why_not_compared(row, names, other, self.usual_kind):
                notes.append(unlike)
                continue
            diverged = [r["state"] == store.State.DIVERGED for r in (row, other)]
            if all(diverged):
                notes.append(f"{_place(row)}: both diverged")
            elif any(diverged) and all(r["state"] in store.OVER for r in (row, other)):
                events["ours" if diverged[0] else "baseline"] += 1
            elif unfinished := [self._undone(r) for r in (row, other) if r["state"] != store.State.DONE]:
                notes += unfinished
            elif isinstance(one := difference(row, other), list):
                notes += one
            else:
                found.append(one)
        if not found and not any(events.values()):
            return NoData("; ".join(notes), tuple(used))
        return Differences(
            tuple(found),
            relative,
            tuple(dict.fromkeys(used)),
            tuple(dict.fromkeys(notes)),
            diverged=events["ours"],
            baseline_diverged=events["baseline"],
        )

    def pooled(
        self, metric: Metric, baseline: str, where: Mapping[str, str] | None = None, without: Collection[str] = ()
    ) -> Pools | None:
        """How far pairs of a relative difference spread, from all arms there that are trained as the baseline is: as
        long, at the same rates, of the same model, and from the same parents; each kind of arms by itself. None of
        fewer than two seeds. without: arms that are bad on purpose."""
        axes = set((where or {}).items())
        rows = [row for row in self.rows if axes <= set(row["axes"]) and row["arm"] not in without]
        logs: dict[str, dict[int, float]] = {}
        kinds: dict[str, str] = {}
        like = {self._start(row) for row in rows if row["arm"] == baseline}
        for row in rows:
            value = self._value(row, metric)
            if is_mixed(row["computed"]):
                continue
            if self._start(row) in like and isinstance(value, float) and value > 0:
                name = treatment(row["arm"], row["axes"])
                logs.setdefault(name, {})[row["seed"]] = math.log(value)
                kinds[name] = kind(self.plan.trials[row["id"]].trial.recipe)
        sets = Counter(frozenset(one) for one in logs.values())
        seeds = max(sets, key=lambda one: (len(one), sets[one]), default=frozenset())  # most, and of most arms
        whole = {name: [one[seed] for seed in sorted(seeds)] for name, one in logs.items() if one.keys() == seeds}
        return pooled_by_kind(whole, kinds) if len(seeds) > 1 else None

    def _start(self, row: Row) -> tuple[Any, ...]:
        planned = self.plan.trials[row["id"]]
        trained = (planned.trial.optimizer, planned.trial.schedule, planned.parent)
        return row["seed"], row["model"], row["steps"], row["computed"], *trained

    def sample(self, metric: Metric, arm: str, where: Mapping[str, str] | None = None) -> Differences | NoData:
        """The arm's own numbers, one of each seed: for shares and levels, which no baseline is taken from."""
        rows = self._arm(arm, where)
        values = [self._value(row, metric) for row in rows]
        notes = tuple(value for value in values if isinstance(value, str))
        numbers = tuple(value for value in values if not isinstance(value, str))
        ids = tuple(row["id"] for row in rows)
        return Differences(numbers, False, ids, notes) if numbers else NoData("; ".join(notes), ids)

    def has(self, arm: str, where: Mapping[str, str] | None = None) -> bool:
        """Whether the arm is run at this scale, there."""
        axes = set((where or {}).items())
        return any(member.cell.arm == arm and axes <= set(member.cell.axes) for member in self.members)

    def _arm(self, arm: str, where: Mapping[str, str] | None, *, shared: bool = False) -> list[dict[str, Any]]:
        one_of("arm", arm, dict.fromkeys(member.cell.arm for member in self.members))
        rows = [row for row in self.rows if row["arm"] == arm and set((where or {}).items()) <= set(row["axes"])]
        rows = [row for i, row in enumerate(rows) if row["id"] not in {r["id"] for r in rows[:i]}]  # shared by sweeps
        combinations = list(dict.fromkeys(row["axes"] for row in rows))
        if len(combinations) == 1 or shared:
            return rows
        chosen = " ".join(f"{axis}={value}" for axis, value in (where or {}).items()) or "nothing"
        there = "; ".join(" ".join(f"{a}={v}" for a, v in c) for c in combinations)
        raise ValueError(f"arm {arm}, of its axes {chosen} chosen: {there or 'no place'} is left, and one is expected")

    def _value(self, row: Mapping[str, Any], metric: Metric) -> float | str:
        """The number, or why there is none."""
        if row["state"] != store.State.DONE:
            return self._undone(row)
        if isinstance(metric, str):
            one_of("metric", metric, self.metrics())
            value = row[metric]
        else:
            value = metric.get(row["id"])
        return f"{_place(row)}: no number" if value is None or pd.isna(value) else float(value)

    @staticmethod
    def _undone(row: Row) -> str:
        return f"{_place(row)}: {row['note'] or row['state']}"

    def _standing(self, member: Member, old: str) -> dict[str, Any]:
        planned = self.plan.trials[member.id]
        state = store.state(planned.folder)
        over = state in store.OVER
        result = (planned.folder.result() or {}) if over else {}
        failure = store.failure(planned.folder) if state is store.State.FAILED else None
        note = failure.reason if failure else ""
        stale = old if old and not over else ""
        if stale:
            note = f"stale: {old} was computed by other code or another config"
        elif over and not computed_by_todays_sources(planned.folder.provenance() or {}):
            note = OTHER_CODE
        elif state is store.State.PLANNED:
            note = "missing: not run, or not to its end"
        model = planned.trial.model
        standing = {
            "folder": str(planned.folder.path),
            "state": str(state),
            "step": int(result.get("step", store.reached(planned.folder))),
            "steps": planned.trial.training.steps,
            "stale": stale,
            "note": note,
            "model": model.name,
            "parameters": parameters_of(model),
            "recipe": planned.trial.recipe.name,
            "computed": computed(planned.folder),
        }
        return standing | dict(_numbers({k: v for k, v in result.items() if k not in _NO_NUMBERS}))


def _labels(member: Member) -> dict[str, Any]:
    cell = member.cell
    labels = {
        "study": member.study,
        "scale": member.scale,
        "sweep": cell.sweep,
        "arm": cell.arm,
        "axes": cell.axes,
        "seed": cell.seed,
        "id": member.id,
    }
    return labels | {axis: value for axis, value in cell.axes if axis not in labels}


def _numbers(value: Mapping[str, Any], where: str = "") -> Iterator[tuple[str, float]]:
    for key, item in value.items():
        if isinstance(item, Mapping):
            yield from _numbers(item, f"{where}{key}.")
        elif item is None or isinstance(item, int | float):
            yield f"{where}{key}", float("nan") if item is None else float(item)


def kind(recipe: Recipe) -> str:
    """By what forward passes read: the coarser, the harder chance pushes at a run."""
    if recipe.sampler.kind != "none":
        return "sampled weights"
    forward = min(_bits(recipe.operands["fprop.x"]), _bits(recipe.operands["fprop.w"]))
    return f"{COARSE} bits or more forward" if forward >= COARSE else f"fewer than {COARSE} bits forward"


def _bits(slot: Slot) -> float:
    """Of the coarsest format that the slot may take."""
    if slot.spec is None:
        return math.inf
    return min(q.format.bits for q in (slot.spec.quantizers if isinstance(slot.spec, Mixture) else (slot.spec,)))


def treatment(arm: str | None, axes: Iterable[tuple[str, str]]) -> str:
    """What is done, whatever the seed: an arm, in one combination of its axes."""
    return str(arm) + "".join(f", {axis} {value}" for axis, value in axes)


def _place(row: Mapping[str, Any]) -> str:
    return f"{treatment(row['arm'] or row['sweep'], row['axes'])}, seed {row['seed']}"


def _size(count: int) -> str:
    value, unit = (count / 1e9, "B") if count >= 1e9 else (count / 1e6, "M")
    return f"{value:.0f} {unit}" if value >= 10 else f"{value:.2g} {unit}"
