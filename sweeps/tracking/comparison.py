"""Build the comparison view of a sweep in MLflow's page: a row for each swept value, averaged over the seeds.

The page keeps such views as tags of an experiment, `mlflow.sharedViewState.<key>`, for its own "share" button. Their
format is not documented; it is that of MLflow 3.17 (other versions ignore unknown fields). The charts of the losses
come first. The page adds a chart for each other metric, under the first part of the metric's name as heading.
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

UI = "http://127.0.0.1:5000"  # the default address of `fewbits ui`
TAG = "mlflow.sharedViewState."
KEY = "fewbits-"  # prefix of the keys of fewbits' views
SWEEP, SCALE, CURRENT = "fewbits.sweep", "fewbits.scale", "fewbits.current"  # tags of runs
COMPARED = "compared"  # the parameter by which runs are grouped to rows
METRICS = ("validation_loss", "ood_loss", "loss")
FOLDED = 100  # rows whose seeds are hidden at first; a tag has no space for more
SECTION, OTHERS = "fewbits-losses", ("optimizer", "speed")  # of the charts


@dataclass(frozen=True)
class View:
    """A comparison view that is stored in MLflow."""

    name: str
    experiment: str  # its id
    key: str

    def link(self, base: str = UI) -> str:
        """Return the URL of the view's table."""
        page = f"{base.rstrip('/')}/#/experiments/{self.experiment}/runs?viewStateShareKey={quote(self.key)}"
        return f"{page}&workflowType=machine_learning"  # without the page's features for language model applications

    def charts(self, base: str = UI) -> str:
        """Return the URL of the view's charts."""
        return f"{self.link(base)}&compareRunsMode=CHART"


def group_of(sweep: Sweep) -> str:
    """Return a key that is unique among the sweeps of a plan."""
    return f"{sweep.study}/{sweep.name}/{sweep.scale}"


def view_of(sweep: Sweep, experiment: str, owner: Owner) -> View:
    """Return the view that shows the owner's runs of a sweep. An experiment has one such view for each owner."""
    return View(f"{sweep.name} at scale {sweep.scale}", experiment, f"{KEY}{sweep.name}-{sweep.scale}-{owner.name}")


def compared(sweep: Sweep, cell: Cell) -> str:
    """Return the name of a cell's row: its arm and its axis values, without the seed."""
    axes = [axis for group in sweep.groups for axis in group]
    last = [axis.rpartition(".")[2] for axis in axes]
    short = {axis: name if last.count(name) == 1 else axis for axis, name in zip(axes, last, strict=True)}
    return " ".join([*([cell.arm] if cell.arm else []), *(f"{short[axis]}={value}" for axis, value in cell.axes)])


def view_state(sweep: Sweep, rows: Sequence[str], owner: Owner) -> str:
    """Return the JSON text of the tag that holds a sweep's view. rows: the names of its rows."""
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
            "isAccordionReordered": True,  # keep the sections in this order
            "hideEmptyCharts": True,
        }
    )


def _section(uuid: str, name: str) -> dict[str, Any]:
    return {"uuid": uuid, "name": name, "display": True, "isReordered": True, "deleted": False, "isGenerated": True}


def _chart(metric: str) -> dict[str, Any]:
    """Return a chart of the metric over steps, with a line for each row."""
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
    """Return all comparison views of a tracking store."""
    views = []
    for experiment in client.search_experiments():
        for tag in experiment.tags:
            if tag.startswith(TAG + KEY):
                name = f"{experiment.name}: {tag.removeprefix(TAG + KEY)}"
                views.append(View(name, experiment.experiment_id, tag.removeprefix(TAG)))
    return views
