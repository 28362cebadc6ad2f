"""Read the numbers of probe trials by variant of the recipe: metrics with names `probe:VARIANT:MEASURE`.

    probe:only wgrad:error           the whole gradient's relative error if only wgrad's operands are quantized
    probe:only fprop.x:increase      the increase of the loss
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
    """Return a metric of variants by trial; trials without the variant are left out."""
    _, variant, measure = metric.split(":")
    rows = whole_gradients(results)
    if rows.empty or measure not in rows:
        return {}
    above, *below = (_means(rows, name, measure) for name in variant.split("/"))
    if not below:
        return above
    return {trial: value / below[0][trial] for trial, value in above.items() if below[0].get(trial)}


def _means(rows: pd.DataFrame, variant: str, measure: str) -> dict[str, float]:
    means = rows[rows["variant"] == variant].groupby("id")[measure].mean().dropna()
    return {str(trial): float(value) for trial, value in means.items()}


def whole_gradients(results: Results) -> pd.DataFrame:
    """Return the rows of all probes for the loss and its whole gradient, with the places' labels."""
    table = results.table_of(TABLE)
    return table if table.empty else table[table["layer"] == WHOLE]
