"""Add to result.json, under the key `decisions`, the share of each format in a mixture's choices over a whole trial.

The shares are computed from numerics.parquet after training. If a trial is killed after its result was written and
before the shares are added, a later command adds them.
"""

from __future__ import annotations

from fewbits.common.atomic import write_json
from fewbits.experiments.storage.run_folder import RunFolder

KEY = "decisions"


def add_decisions(folder: RunFolder) -> None:
    """Add the share of each format, such as `{"e4m3": 0.93, "bf16": 0.07}`, to the trial's result, if it has one.

    A result that already has these shares, and the result of a recipe without mixtures, are not changed. Do not call
    this while another process trains the trial.
    """
    table, result = folder.path / "numerics.parquet", folder.result()
    if result is None or KEY in result or not table.is_file():
        return
    import pandas as pd
    import pyarrow.parquet as pq

    columns = [name for name in pq.read_schema(table).names if name.startswith("share_")]
    if not columns:
        return
    from fewbits.experiments.tracking.numerics import mean_decisions

    if shares := mean_decisions(pd.read_parquet(table, columns=["step", "slot", "quantizer", *columns])):
        write_json(folder.path / "result.json", result | {KEY: shares})
