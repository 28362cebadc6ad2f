"""Summarize a trial's precision.parquet for MLflow: shares of all parameters, instead of a row for each.

precision/lost, lost_bf16, lost_fp16    updates that were lost, as a share of the updates other than 0
precision/zeros, zeros_dy               gradients of parameters and of linear layers' results that are 0
precision/nonfinite                     gradients of parameters that are infinite or NaN
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    import pandas as pd

LOST = ("lost", "lost_bf16", "lost_fp16")


def metrics_by_step(rows: pd.DataFrame) -> dict[int, dict[str, float]]:
    """Return the metrics of each measured update from the rows of precision.parquet.

    A skipped update has no metrics about lost updates.
    """
    counts = ["values", "zeros", "nonfinite", *(name for name in ("updates", *LOST) if name in rows)]
    sums = rows.groupby(["step", "slot"])[counts].sum()
    metrics: dict[int, dict[str, float]] = {}
    for key, count in sums.iterrows():
        step, slot = cast(tuple[int, str], key)
        of_step = metrics.setdefault(step, {})
        if slot == "dy":
            of_step["precision/zeros_dy"] = float(count["zeros"] / count["values"])
            continue
        of_step |= {f"precision/{name}": float(count[name] / count["values"]) for name in ("zeros", "nonfinite")}
        if count.get("updates"):
            of_step |= {f"precision/{name}": float(count[name] / count["updates"]) for name in LOST}
    return metrics
