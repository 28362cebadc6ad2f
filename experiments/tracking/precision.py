"""Summarize a trial's precision.parquet for MLflow: shares over all parameters and layers, as metrics.

precision/lost                         share of the weights with a nonzero update whose stored value did not change
precision/lost_bf16, lost_fp16         the same share if weights were stored in BF16 or FP16
                                       (see experiments/optimization/update_records.py)
precision/zeros                        share of the elements of parameters' gradients that are 0
precision/zeros_dy                     share of the elements of the gradients of linear layers' outputs that are 0
precision/nonfinite                    share of the elements of parameters' gradients that are infinite or NaN
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    import pandas as pd

LOST = ("lost", "lost_bf16", "lost_fp16")


def metrics_by_step(rows: pd.DataFrame) -> dict[int, dict[str, float]]:
    """Return the metrics (name: value) of each measured step, by the step. rows: those of precision.parquet.

    A step whose update was skipped, because its gradients overflowed, has no metrics `precision/lost…`.
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
