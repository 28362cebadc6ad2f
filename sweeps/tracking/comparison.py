"""The comparison view of a sweep in MLflow's page: a row for each swept value, with averages over the seeds.

The page keeps such views as tags of an experiment, `mlflow.sharedViewState.<key>`, for its own "share" button; their
form is documented nowhere, and is that of MLflow 3.17 (older and newer ones ignore fields that they do not know).
The losses' charts come first; the page adds one for each other metric, below the heading that its name begins with.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from fewbits.experiments.tracking.owner import Owner
from fewbits.sweeps.planning.expand import Cell
from fewbits.sweeps.planning.sweep import Sweep

UI = "http://127.0.0.1:5000"  # where `fewbits ui` is, unless it is told otherwise
TAG = "mlflow.sharedViewState."
KEY = "fewbits-"  # which of the shared views are ours
SWEEP, SCALE, CURRENT = "fewbits.sweep", "fewbits.scale", "fewbits.current"  # tags of runs
COMPARED = "compared"  # the parameter that tells rows apart
METRICS = ("validation_loss", "ood_loss", "loss")
FOLDED = 100  # rows whose seeds are not shown until one asks for them; a tag has room for so many
SECTION, OTHERS = "fewbits-losses", ("optimizer", "speed")  # of the charts


@dataclass(frozen=True)
class View:
    name: str
    experiment: str  # its id
    key: str

    def link(self, base: str = UI) -> str:
        page = f"{base.rstrip('/')}/#/experiments/{self.experiment}/runs?viewStateShareKey={quote(self.key)}"
        return f"{page}&workflowType=machine_learning"  # without what the page has for language model applications

    def charts(self, base: str = UI) -> str:
        return f"{self.link(base)}&compareRunsMode=CHART"


def group_of(sweep: Sweep) -> str:
    """What a plan's sweeps are told apart by."""
    return f"{sweep.study}/{sweep.name}/{sweep.scale}"


def view_of(sweep: Sweep, experiment: str, owner: Owner) -> View:
    """Return the view of the owner's runs of a sweep; an experiment has one for each owner."""
    return View(f"{sweep.name} at scale {sweep.scale}", experiment, f"{KEY}{sweep.name}-{sweep.scale}-{owner.name}")


def compared(sweep: Sweep, cell: Cell) -> str:
    """Of a cell, what its row is called: its arm and its values, the seed aside."""
    axes = [axis for group in sweep.groups for axis in group]
    last = [axis.rpartition(".")[2] for axis in axes]
    short = {axis: name if last.count(name) == 1 else axis for axis, name in zip(axes, last, strict=True)}
    return " ".join([*([cell.arm] if cell.arm else []), *(f"{short[axis]}={value}" for axis, value in cell.axes)])


def view_state(sweep: Sweep, rows: Sequence[str], owner: Owner) -> str:
    """Return the tag's value. rows: what is compared."""
    wanted = ((SWEEP, sweep.name), (SCALE, sweep.scale), *owner.key.items(), (CURRENT, "yes"))
    return json.dumps(
        {
            "searchFilter": " and ".join(f'tags.`{tag}` = "{value}"' for tag, value in wanted),
            "orderByKey": f"params.`{COMPARED}`",
            "orderByAsc": True,
            "groupBy": {"aggregateFunction": "average", "groupByKeys": [{"mode": "param", "groupByData": COMPARED}]},
            "groupsExpanded": {f"param.{COMPARED}.{row}": False for row in rows[:FOLDED]},
            "useGroupedValuesInCharts": True,
            "runsHiddenMode": "SHOW_ALL",
            "selectedColumns": [*(f"metrics.`{name}`" for name in METRICS), "params.`seed`"],
            "columnOrder": ["attributes.`Run Name`"],
            "columnWidths": {"attributes.`Run Name`": 360},
            "compareRunSections": [_section(SECTION, "Model metrics"), *(_section(name, name) for name in OTHERS)],
            "compareRunCharts": [_chart(name) for name in METRICS],
            "isAccordionReordered": True,  # the sections stay in this order
            "hideEmptyCharts": True,
        }
    )


def _section(uuid: str, name: str) -> dict[str, Any]:
    return {"uuid": uuid, "name": name, "display": True, "isReordered": True, "deleted": False, "isGenerated": True}


def _chart(metric: str) -> dict[str, Any]:
    """By steps, with a line for each row."""
    return {
        "uuid": f"{KEY}{metric}",
        "type": "LINE",
        "metricSectionId": SECTION,
        "metricKey": metric,
        "selectedMetricKeys": [metric],
        "deleted": False,
        "isGenerated": True,
        "runsCountToCompare": 10,
        "lineSmoothness": 0,
        "scaleType": "linear",
        "xAxisScaleType": "linear",
        "xAxisKey": "step",
        "selectedXAxisMetricKey": "",
        "yAxisKey": "metric",
        "yAxisExpressions": [],
        "range": {},
        "ignoreOutliers": False,
        "useGlobalXaxisKey": True,
        "useGlobalLineSmoothing": True,
    }


def views_in(client: Any) -> list[View]:
    """All that there are in a tracking store."""
    found = []
    for experiment in client.search_experiments():
        for tag in experiment.tags:
            if tag.startswith(TAG + KEY):
                name = f"{experiment.name}: {tag.removeprefix(TAG + KEY)}"
                found.append(View(name, experiment.experiment_id, tag.removeprefix(TAG)))
    return found
