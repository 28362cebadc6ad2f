"""Write simulated result files for all trials of a plan, without training, so that the true effects are known.

A World has the true effects of the arms and the size of the noise. Over three seeds, the noise of an arm is -1, 0 and
+1 times its size, in an order that depends on the arm. So the means over seeds are exactly the true effects. The size
of the noise differs slightly between arms, so that no two arms have equal results. If several arms have the same
trials, the trials get the effect of the arm that is first in the plan.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from fewbits.analysis.engine.claims.findings import Outcome, Verdict
from fewbits.analysis.engine.claims.judging import evidence_of, judge_study
from fewbits.analysis.engine.claims.schema import Kind, load_claims
from fewbits.analysis.engine.claims.verdicts import conclude
from fewbits.analysis.engine.results.frames import Files, Results
from fewbits.sweeps.planning.plan import Member, Plan, plan
from fewbits.sweeps.planning.studies import load_sweeps
from tests.analysis.probes import write_probe

SMALL = ("data=synthetic", "data.size=65536", "data.repeat=1000000000", "evaluation.windows=2", "runtime.device=cpu")
STEPS = 20  # the number of rows in metrics.parquet
QUIET = ("bf16", "watched")  # baselines, which have no noise


@dataclass
class World:
    """The true effects in simulated results. A key names an arm: ARM, ARM@VALUE (a value of an axis) or SWEEP/ARM."""

    effect: Mapping[str, float] = field(default_factory=dict)  # relative change of all losses without an own entry
    elsewhere: Mapping[str, float] = field(default_factory=dict)  # relative change of ood_loss
    unquantized: Mapping[str, float] = field(default_factory=dict)  # relative change of validation_loss_unquantized
    maximum: Mapping[str, float] = field(default_factory=dict)  # relative change of loss_max (of a micro-batch)
    norm: Mapping[str, float] = field(default_factory=dict)  # relative change of parameter_norm at half of the steps
    noise: float = 1e-5  # the size of the relative noise of losses
    noises: Mapping[str, float] = field(default_factory=dict)  # the noise of single arms, instead of `noise`
    diverged: frozenset[str] = frozenset()  # arms whose trials diverge after half of the steps
    missing: frozenset[tuple[str, int]] = frozenset()  # (arm, seed) of trials without a run folder

    def numerics(self, of: Plan, member: Member) -> list[dict[str, Any]]:
        """Return the rows for numerics.parquet of the trial at a place `member` of the plan `of`."""
        return []

    def further(self, of: Plan, member: Member, unquantized: float) -> dict[str, float]:
        """Return further numbers for result.json of the trial at a place `member` of the plan `of`.

        unquantized: the trial's validation loss evaluated in BF16.
        """
        return {}


def planned(study: str, folder: Path, cache_folder: Path, *words: str) -> Plan:
    """Return the plan of a study with small synthetic data. folder: contains the store; words: further overrides.

    Axis values that differ in their kind of data get synthetic data with different seeds.
    """
    where = (f"runtime.runs={folder / 'runs'}", f"runtime.cache={cache_folder}")
    sweeps, extra = load_sweeps((f"study={study}", *words, *SMALL, *where))
    return plan([replace(sweep, axes=_synthetic(sweep.axes)) for sweep in sweeps], extra)


def _synthetic(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _synthetic(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_synthetic(each) for each in value]
    name = value.removeprefix("data=") if isinstance(value, str) else ""
    return f"data.seed={['python', 'torch'].index(name)}" if name in ("python", "torch") and name != value else value


def results(of: Plan, world: World) -> Results:
    """Write the result files of all trials of the plan with the effects of `world`, and return the results.

    Result files of an earlier call are replaced. If plan and world are those of the last call, return its results.
    """
    if _LAST and _LAST[0][0] is of and _LAST[0][1] == world:
        return _LAST[0][2]
    names: dict[str, list[str]] = {}
    for member in of.members:
        names.setdefault(member.id, []).extend(_names(member))
    for member in {member.id: member for member in reversed(of.members)}.values():
        path = of.trials[member.id].folder.path
        if any((name, member.cell.seed) in world.missing for name in names[member.id]):
            shutil.rmtree(path, ignore_errors=True)
        else:
            _write(of, member, names[member.id], path, world)
    found = Results(of, files=_FILES)
    _LAST[:] = [(of, world, found)]
    return found


_LAST: list[tuple[Plan, World, Results]] = []
_FILES = Files()  # tables that were read since their files were last written; most files keep their content


def _names(member: Member) -> list[str]:
    """Return the keys under which a World may have values for this place's arm, the most specific key first."""
    arm = member.cell.arm
    return [f"{member.cell.sweep}/{arm}", *(f"{arm}@{value}" for _, value in member.cell.axes), str(arm)]


_THERE: dict[Path, object] = {}  # file → the content it was written with; equal content is not written again


def _write(of: Plan, member: Member, names: list[str], path: Path, world: World) -> None:
    arm, seed = str(member.cell.arm), member.cell.seed
    steps = of.trials[member.id].trial.training.steps

    def said(what: Mapping[str, float], otherwise: float) -> float:
        return next((what[name] for name in names if name in what), otherwise)

    effect, noise = said(world.effect, 0.0), said(world.noises, world.noise) * wave(arm, seed) * size(arm)
    level = 2.0 + 0.1 * seed
    loss = level * (1 + effect + noise)
    maximum = 1.05 * level * (1 + said(world.maximum, effect) + noise)
    unquantized = 1.1 * level * (1 + said(world.unquantized, effect) + noise)
    other = 3.0 * (1 + said(world.elsewhere, effect) + noise)
    norms = (30.0, 35.0 * (1 + said(world.norm, 0.0) + noise), 40.0)
    result = {"id": of.trials[member.id].folder.id, "name": path.name, "status": "done", "step": steps}
    numbers = {"loss": loss, "loss_max": maximum, "validation_loss": 1.1 * loss, "ood_loss": other}
    numbers |= {"parameter_norm": norms[-1], "validation_loss_unquantized": unquantized}
    numbers |= world.further(of, member, unquantized)
    if world.diverged & set(names):
        result |= {"status": "diverged", "step": steps // 2}
        numbers = {"loss": 9.0}
    path.mkdir(parents=True, exist_ok=True)
    trial = of.trials[member.id].trial
    if trial.is_probe:
        numbers = write_probe(path, arm, trial, noise=1e-3 * wave(arm, seed) * size(arm))
        _write_table(path / "numerics.parquet", rows := world.numerics(of, member), lambda: _columns(rows))
        (path / "result.json").write_text(json.dumps(result | numbers))
        return
    (path / "result.json").write_text(json.dumps(result | numbers))
    curve = (_begun(of, member.id), steps, loss, maximum, other, norms)
    _write_table(path / "metrics.parquet", curve, lambda: _metrics(*curve))
    _write_table(path / "numerics.parquet", rows := world.numerics(of, member), lambda: _columns(rows))


def _write_table(path: Path, content: object, columns: Callable[[], Mapping[str, Any]]) -> None:
    """Write a Parquet file, unless the file exists and was last written with this content.

    columns: makes the columns of the table from the content.
    """
    if path.is_file() and _THERE.get(path) == content:
        return
    # Without encodings, statistics and pandas' description of types, small files are written in half the time.
    table = pa.table(dict(columns()))
    parquet.write_table(table, path, compression="none", use_dictionary=False, write_statistics=False)
    _THERE[path] = content
    _FILES.tables.pop(path, None)


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row.get(name) for row in rows] for name in dict.fromkeys(chain.from_iterable(rows))}


def _begun(of: Plan, trial: str) -> int:
    """Return after how many steps of its parents' training the trial branches; 0 if it has no parent."""
    planned = of.trials[trial]
    return 0 if planned.parent is None else _begun(of, planned.parent) + (planned.trial.branch.step or 0)


def _metrics(
    begun: int, steps: int, loss: float, maximum: float, other: float, norms: tuple[float, float, float]
) -> dict[str, Any]:
    at = np.linspace(0, steps - 1, STEPS).astype(int)
    falling = (steps - 1 - at) / steps
    curve = {"step": at, "tokens": (begun + at + 1) * 2048, "loss": loss + falling, "loss_max": maximum + falling}
    evaluated = {key: [np.nan] * STEPS for key in ("validation_loss", "ood_loss", "parameter_norm")}
    for place, norm in zip((0, STEPS // 2, STEPS - 1), norms, strict=True):
        evaluated["parameter_norm"][place] = norm
    evaluated["validation_loss"][-1], evaluated["ood_loss"][-1] = 1.1 * loss, other
    return curve | evaluated


@cache
def _order(name: str) -> int:
    return sum(name.encode())


def wave(name: str, seed: int) -> float:
    """Return the factor of an arm's noise for a seed: -1, 0 or 1, each for one of three seeds; 0 for arms in QUIET."""
    return 0.0 if name in QUIET else float((seed + _order(name)) % 3 - 1)


@cache
def size(name: str) -> float:
    """Return a factor from 1 to 1.1 for the size of an arm's noise; it differs between arms."""
    return 1 + zlib.crc32(name.encode()) % 1000 / 10_000


def differing(study: str, found: Results, expected: Outcome, **others: Outcome) -> dict[str, tuple[str, str]]:
    """Return the empirical claims whose outcome is not the expected one, with the outcome and its reason.

    others: expected outcomes of single claims.
    """
    return {
        name: (str(one.outcome), one.reason)
        for name, one in judge_study(study, found).items()
        if one.kind is Kind.EMPIRICAL and one.outcome is not others.get(name, expected)
    }


def verdicts(study: str, found: Results, names: Iterable[str]) -> dict[str, Verdict]:
    """Return the verdicts of the named claims of a study."""
    claims = load_claims(study)
    return conclude({name: evidence_of(claims, claims.claim(name), found) for name in names})
