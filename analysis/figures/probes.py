"""The figure of probes: how much quantizing an operand, a GEMM or a block of layers changes the gradient and the loss.

It has two heat maps, of the gradient's error and of the loss's increase, with a row for each operand, GEMM and block.
Each arm has two columns: only the operand, GEMM or block of the row is quantized (`alone`), or everything except it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from matplotlib.figure import Figure

from fewbits.analysis.engine.results.arms import arm_table
from fewbits.analysis.engine.results.data import NoData
from fewbits.analysis.engine.results.evaluations import whole_model_rows
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.places import not_planned, sweep_places
from fewbits.analysis.figures.heat_map import HeatMap, HeatRow, heat_map_figure
from fewbits.analysis.report.items import FigureResult, Picture

ALL = "all"
# Labels by the first word of a variant's name in the probes' tables; the other words name the operand, GEMM or block.
KINDS = {"only": "alone", "without": "all but it"}
MEASURES = {  # title of the map: the measure and the factor by which it is shown
    "Error of the gradient, %": ("error", 100.0),
    "Increase of the loss, millinats per token": ("increase", 1000.0),
}


@dataclass(frozen=True)
class ProbesFigure:
    """A figure of some arms of a sweep of probes, as figures.yaml declares it."""

    id: str
    title: str = "Which operands change the gradient and the loss"
    sweep: str = "probes"
    arms: tuple[str, ...] = ()
    where: dict[str, str] = field(default_factory=dict)  # selected values of the sweep's axes


def probes_figure(results: Results, study: str, of: ProbesFigure) -> Picture:
    """Return the figure of probes that `of` declares, with a row for each operand, GEMM and block of layers."""
    part = sweep_places(results, of.sweep, of.where)
    if not isinstance(part, Results) or not any(part.has(arm, of.where) for arm in of.arms):
        return not_planned(results)
    rows = whole_model_rows(part)
    rows = rows[rows["arm"].isin(of.arms)] if len(rows) else rows
    if rows.empty:
        return NoData("no probe is finished")
    arms, label = [arm for arm in of.arms if arm in set(rows["arm"])], arm_table(study).label
    columns = [(arm, kind) for arm in arms for kind in KINDS]
    targets = dict.fromkeys(name.partition(" ")[2] for name in rows["variant"] if name != ALL)
    means = rows.groupby(["arm", "variant"])[[name for name, _ in MEASURES.values()]].mean()

    def heat_map(title: str) -> HeatMap:
        measure, factor = MEASURES[title]
        found = (factor * means[measure]).to_dict()
        lines = [HeatRow("everything", np.array([found[arm, ALL] if k == "only" else math.nan for arm, k in columns]))]
        for target in targets:
            values = np.array([found.get((arm, f"{kind} {target}"), math.nan) for arm, kind in columns])
            lines.append(HeatRow(target, values))
        most = max(0.0, float(np.nanmax([row.values for row in lines]))) or 1.0
        names = tuple(KINDS[k] if len(arms) == 1 else f"{label(arm)}: {KINDS[k]}" for arm, k in columns)
        title = title if len(arms) > 1 else f"{label(arms[0])}: {title[0].lower()}{title[1:]}"
        return HeatMap(tuple(lines), names, title, most=most, spell=_spell, columns_above=True)

    def draw() -> Figure:
        return heat_map_figure([heat_map(title) for title in MEASURES], room=0.0 if len(arms) == 1 else 0.5)

    notes = (
        "Means over batches and seeds. `Alone`: only this operand, GEMM or block is quantized as the recipe says; `all "
        "but it`: everything except it is quantized. An operand that two GEMMs share is shown under the first of them. "
        "Increases below 0 are not shaded.",
    )
    return FigureResult(draw, tuple(dict.fromkeys(rows["id"])), notes)


def _spell(value: float) -> str:
    return (f"{value:.1f}" if abs(value) >= 1 else f"{value:.2f}").replace("-", "−")
