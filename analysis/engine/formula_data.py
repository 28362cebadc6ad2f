"""Values of a claim's formula over several arms, one for each seed that all of these arms share."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fewbits.analysis.engine.alike import why_not_compared
from fewbits.analysis.engine.data import Differences, Measured, NoData, NotPlanned
from fewbits.analysis.engine.formulas import NotANumber, Place, evaluate
from fewbits.analysis.engine.frames import Results
from fewbits.analysis.engine.pairing import Metric, arm_rows, number
from fewbits.analysis.engine.rows import Row, place_name, treatment


def by_formula(
    results: Results,
    formula: str,
    places: Mapping[str, Place],
    numbers: Callable[[Results, str], Metric],
    *,
    relative: bool,
) -> Measured:
    """Return the formula's value for each seed that has ended in every arm. numbers: resolves a metric's name."""
    planned = {(member.cell.sweep, member.cell.arm) for member in results.members}
    if not all((place.sweep, place.arm) in planned for place in places.values()):
        return NotPlanned(f"not run at this scale ({results.scale_name})")
    sweeps = {name: results.of_sweep(place.sweep) for name, place in places.items()}
    rows = {name: {row["seed"]: row for row in arm_rows(sweeps[name], place.arm)} for name, place in places.items()}
    metrics = {name: numbers(results, place.metric) for name, place in places.items()}
    for name, metric in metrics.items():
        if isinstance(metric, str) and metric not in sweeps[name].metrics():
            return NoData(f"no trial has recorded {metric}")
    values: list[float] = []
    notes: list[str] = []
    for seed in sorted(set.intersection(*(set(by_seed) for by_seed in rows.values()))):
        of_seed = {name: rows[name][seed] for name in places}
        found = {name: number(sweeps[name], of_seed[name], metric) for name, metric in metrics.items()}
        missing = [reason for reason in found.values() if isinstance(reason, str)]
        missing = missing or _unlike(list(of_seed.values()), results.usual_kind)
        if missing:
            notes += missing
            continue
        try:
            values.append(evaluate(formula, {name: float(one) for name, one in found.items()}))
        except NotANumber as error:
            notes.append(f"{place_name(next(iter(of_seed.values())))}: {error}")
    trials = tuple(dict.fromkeys(row["id"] for by_seed in rows.values() for row in by_seed.values()))
    told = tuple(dict.fromkeys(notes))
    if not values:
        return NoData("; ".join(told) or "no seed has ended in every arm", trials)
    return Differences(tuple(values), relative, trials, told)


def _unlike(rows: list[Row], usual: str | None) -> list[str]:
    """Return why these trials of one seed are not compared, if other kinds of machines computed some of them."""
    first, *others = rows
    reasons = (
        why_not_compared(
            first, (treatment(first["arm"], first["axes"]), treatment(row["arm"], row["axes"])), row, usual
        )
        for row in others
    )
    return [reason for reason in reasons if reason]
