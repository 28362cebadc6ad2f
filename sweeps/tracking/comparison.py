"""Build the comparison view of a sweep in MLflow's page: a row for each arm and axis value, averaged over the seeds.

MLflow's page stores views for its own "share" button as tags of an experiment, `mlflow.sharedViewState.<key>`; fewbits
writes such a tag. Its format is not documented. MLflow 3.10 to 3.18 are tested; other versions ignore unknown fields.
With later versions than 3.18, links also contain the documented parameters `searchFilter` and `orderByKey`: then a page
that cannot read the view still shows the sweep's runs, in the order of the swept values.

The charts of the losses come first. For each other metric, the page itself adds a chart under a heading, which is the
part of the metric's name before the slash. The table always has the columns Created and Duration; no view can hide
them.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any
from urllib.parse import quote, urlencode

from fewbits.experiments.tracking.numerics import entry_names
from fewbits.experiments.tracking.owner import Owner
from fewbits.experiments.tracking.points import key_of
from fewbits.kernels.quantizer import Mixture
from fewbits.models.recipe import Recipe
from fewbits.sweeps.planning.expand import Cell
from fewbits.sweeps.planning.sweep import Sweep

UI = "http://127.0.0.1:5000"  # the default address of `fewbits ui`
TAG = "mlflow.sharedViewState."
KEY = "fewbits-"  # prefix of the keys of fewbits' views
SWEEP, SCALE, CURRENT = "fewbits.sweep", "fewbits.scale", "fewbits.current"  # names of tags of runs
KIND = "fewbits.kind"  # a tag of runs that are not trials; its value is `sweep` or `report`
COMPARED = "compared"  # the parameter of runs by which the view groups them: runs with the same value share a row
METRICS = ("validation_loss", "ood_loss", "loss")
FOLDED = 100  # the number of rows that show only the mean until the user unfolds their seeds
DEFLATE = "deflate;"  # MLflow's prefix of a compressed view; MLflow 3.10 limits the value of a tag to 5,000 characters
SECTION, OTHERS = "fewbits-losses", ("optimizer", "speed")  # ids of sections of charts: that of the losses, and others
COMPLETE = {  # if one of these fields is missing, the page of MLflow 3.10 shows an error
    "startTime": "ALL",
    "lifecycleFilter": "Active",
    "modelVersionFilter": "All Runs",
    "datasetsFilter": [],
    "runsExpanded": {},
    "runsPinned": [],
    "runsHidden": [],
    "runsVisibilityMap": {},
}
TESTED = (3, 18)  # the last version of MLflow whose page was tested with these views
ORDER = f"params.`{COMPARED}`"


@dataclass(frozen=True)
class View:
    """A comparison view that is stored in MLflow."""

    name: str
    experiment: str  # the id of the experiment whose tag stores the view
    key: str  # the key of the view, at the end of the tag's name
    filter: str  # the search filter, in MLflow's syntax, that selects the runs of the view

    def link(self, base: str = UI) -> str:
        """Return the URL of the view's table in MLflow's page. base: the server's address."""
        # workflowType: hides the page's features for applications of language models
        parameters = {"viewStateShareKey": self.key, "workflowType": "machine_learning"}
        if _later_than_tested():
            parameters |= {"searchFilter": self.filter, "orderByKey": ORDER, "orderByAsc": "true"}
        page = f"{base.rstrip('/')}/#/experiments/{self.experiment}/runs"
        return f"{page}?{urlencode(parameters, quote_via=quote)}"


def _later_than_tested() -> bool:
    major, minor, *_ = metadata.version("mlflow").split(".")
    return (int(major), int(minor)) > TESTED


def group_of(sweep: Sweep) -> str:
    """Return STUDY/NAME/SCALE of a sweep: its key in the cache file of what was sent to MLflow (see sent.py)."""
    return f"{sweep.study}/{sweep.name}/{sweep.scale}"


def view_of(sweep: Sweep, experiment: str, owner: Owner) -> View:
    """Return the view that shows those runs of a sweep that belong to this owner and have `fewbits.current` = `yes`.

    A driver changes this tag to `no` when it sends another trial with the same place in the sweep. experiment: the id
    of the study's experiment in MLflow. owner: a store and a user.
    """
    key = f"{KEY}{sweep.name}-{sweep.scale}-{owner.name}"
    return View(f"{sweep.name} at scale {sweep.scale}", experiment, key, _filter(sweep, owner))


def _filter(sweep: Sweep, owner: Owner) -> str:
    wanted = ((SWEEP, sweep.name), (SCALE, sweep.scale), *owner.key.items(), (CURRENT, "yes"))
    return " and ".join(f'tags.`{tag}` = "{value}"' for tag, value in wanted)


def compared(sweep: Sweep, cell: Cell) -> str:
    """Return the name of a cell's row in the view, for example `mor threshold=0.03`: arm and axis values without seed.

    An axis is named by the last part of its key, such as `threshold` of `recipe.threshold`; if another axis has the
    same last part, by the whole key.
    """
    axes = [axis for group in sweep.groups for axis in group]
    last = [axis.rpartition(".")[2] for axis in axes]
    short = {axis: name if last.count(name) == 1 else axis for axis, name in zip(axes, last, strict=True)}
    return " ".join([*([cell.arm] if cell.arm else []), *(f"{short[axis]}={value}" for axis, value in cell.axes)])


def view_state(sweep: Sweep, rows: Sequence[str], owner: Owner, numerics: Sequence[str] = ()) -> str:
    """Return the value of the tag that stores a sweep's view, in MLflow's compressed format.

    rows: the names of the view's rows (see `compared`). owner: the store and user whose runs the view shows. numerics:
    names of metrics that the view shows besides the losses.
    """
    shown = (*METRICS, *numerics)
    text = json.dumps(
        {
            "searchFilter": _filter(sweep, owner),
            "orderByKey": ORDER,
            "orderByAsc": True,
            "groupBy": {"aggregateFunction": "average", "groupByKeys": [{"mode": "param", "groupByData": COMPARED}]},
            **COMPLETE,
            "groupsExpanded": {f"param.{COMPARED}.{row}": False for row in rows[:FOLDED]},
            "useGroupedValuesInCharts": True,
            "runsHiddenMode": "SHOW_ALL",
            "selectedColumns": [*(f"metrics.`{name}`" for name in shown), "params.`seed`"],
            "columnOrder": ["attributes.`Run Name`"],
            "columnWidths": {"attributes.`Run Name`": 360},
            "compareRunSections": [_section(SECTION, "Model metrics"), *(_section(name, name) for name in OTHERS)],
            "compareRunCharts": [_chart(name) for name in shown],
            "isAccordionReordered": True,  # keep the sections in this order
            "hideEmptyCharts": True,
        }
    )
    return DEFLATE + base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def read_state(value: str) -> dict[str, Any]:
    """Return the fields of a view from the value of its tag, which older versions of fewbits did not compress."""
    if value.startswith(DEFLATE):
        value = zlib.decompress(base64.b64decode(value.removeprefix(DEFLATE))).decode()
    return dict(json.loads(value))


def numerics_shown(recipes: Iterable[Recipe]) -> tuple[str, ...]:
    """Return the names of metrics, besides losses, with which to compare these recipes.

    A recipe with mixtures adds the share of each of a mixture's choices; a recipe with quantizers or mixtures adds the
    error of weight gradients; a recipe with a sampler adds the mean bit width.
    """
    shown: dict[str, None] = {}
    for recipe in recipes:
        specs = [slot.spec for slot in recipe.operands.values() if slot.spec is not None]
        mixtures = dict.fromkeys(str(spec) for spec in specs if isinstance(spec, Mixture))
        shown |= dict.fromkeys(key_of(f"decisions/{name}") for spec in mixtures for name in entry_names(spec))
        shown |= {"weight_gradient/error": None} if specs else {}
        shown |= {"bits/mean": None} if recipe.sampler.kind != "none" else {}
    return tuple(shown)


def _section(uuid: str, name: str) -> dict[str, Any]:
    return {"uuid": uuid, "name": name, "display": True, "isReordered": True, "deleted": False, "isGenerated": True}


def _chart(metric: str) -> dict[str, Any]:
    """Return MLflow's description of a line chart of the metric over steps, with a line for each row."""
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
    """Return all comparison views that fewbits has stored in the MLflow to which the client is connected."""
    views = []
    for experiment in client.search_experiments():
        for tag, value in experiment.tags.items():
            if tag.startswith(TAG + KEY):
                name, runs = f"{experiment.name}: {tag.removeprefix(TAG + KEY)}", read_state(value)["searchFilter"]
                views.append(View(name, experiment.experiment_id, tag.removeprefix(TAG), runs))
    return views
