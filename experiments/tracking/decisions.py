"""Add the shares of a mixture's decisions over a whole trial to its result: the key `decisions` of result.json.

They follow from numerics.parquet alone, so training does not compute them, and a trial that was killed between its
result and this addition gets them from the next command.
"""

from __future__ import annotations

from fewbits.common.atomic import write_json
from fewbits.experiments.storage.run_folder import RunFolder

KEY = "decisions"


def add_decisions(folder: RunFolder) -> None:
    """Add the share of each format, such as `{"e4m3": 0.93, "bf16": 0.07}`, to the result of an ended trial.

    A result that has them, and the result of a recipe without mixtures, stay as they are. The caller is the run's
    writer, or the trial has ended.
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
