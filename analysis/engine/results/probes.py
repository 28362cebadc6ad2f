"""Compute the metrics of probe trials, whose names are `probe:VARIANT:MEASURE` or, for a ratio, `probe:A/B:MEASURE`.

A variant is a recipe of which only some operands are quantized; a measure is a column of the probe's table.

    probe:only wgrad:error           the whole gradient's relative error if only wgrad's operands are quantized
    probe:only fprop.x:increase      the increase of the loss if only fprop.x is quantized
    probe:only fprop/only dgrad:error    the ratio of two variants' errors

A value is the mean over the batches of a trial. experiments/README.md lists the variants and measures.
"""

from __future__ import annotations

import pandas as pd

from fewbits.analysis.engine.results.frames import Results
from fewbits.experiments.probes.probe_trial import TABLE
from fewbits.experiments.probes.tables import WHOLE

PREFIX = "probe:"


def probe_numbers(results: Results, metric: str) -> dict[str, float]:
    """Return {trial id: number} for a metric with a name `probe:VARIANT:MEASURE`.

    Trials without the variant have no entry. If VARIANT is a ratio of two variants, trials in which the second one is
    missing or 0 have no entry, either.
    """
    _, variant, measure = metric.split(":")
    rows = whole_model_rows(results)
    if rows.empty or measure not in rows:
        return {}
    above, *below = (_means(rows, name, measure) for name in variant.split("/"))
    if not below:
        return above
    return {trial: value / below[0][trial] for trial, value in above.items() if below[0].get(trial)}


def _means(rows: pd.DataFrame, variant: str, measure: str) -> dict[str, float]:
    means = rows[rows["variant"] == variant].groupby("id")[measure].mean().dropna()
    return {str(trial): float(value) for trial, value in means.items()}


def whole_model_rows(results: Results) -> pd.DataFrame:
    """Return those rows of all probes' tables that describe the whole model (loss and full gradient), not one layer.

    The columns are those of a probe's table, and the labels and state of its place. The returned table is empty if
    there are no probes.
    """
    table = results.table_of(TABLE)
    return table if table.empty else table[table["layer"] == WHOLE]
