"""MoR's Tables 1 to 4: the paper's numbers beside ours."""

from __future__ import annotations

from functools import partial

from fewbits.analysis.engine.arms import BASELINE
from fewbits.analysis.engine.frames import Results
from fewbits.analysis.engine.paper import paper
from fewbits.analysis.engine.places import trial_ids
from fewbits.analysis.report.items import TableResult
from fewbits.analysis.report.registry import table
from fewbits.analysis.studies.mor.tensors import ONE, TWO
from fewbits.analysis.tables.losses import paper_losses
from fewbits.analysis.tables.settings import UNSTATED, SettingsColumn, settings_table
from fewbits.analysis.views.numbers import plural

MODEL = "Nemotron-3 8B"

for _name in ("Table 2", "Table 3", "Table 4"):
    table("mor", _name)(partial(paper_losses, study="mor", name=_name))


@table("mor", "Table 1")
def table_1(results: Results) -> TableResult:
    """Compare the settings: ours are those of the BF16 arms' own configs."""
    columns = [SettingsColumn(MODEL, results, BASELINE, where) for where in (ONE, TWO)]
    seeds = plural(len(trial_ids(results, BASELINE, ONE)), "seed")
    notes = (f"The paper ran each arm once; ours, with {seeds}",)
    return settings_table(paper("mor").table("Table 1"), columns, UNSTATED, notes)
