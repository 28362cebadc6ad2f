"""Compute the share of each format in a mixture's decisions from the table numerics.parquet.

After training, `add_decisions` adds the shares over a whole trial to result.json, under the key `decisions`. If a trial
is killed after its result was written and before the shares are added, a later command adds them.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from fewbits.common.atomic import write_json
from fewbits.experiments.storage.run_folder import RunFolder

if TYPE_CHECKING:
    import pandas as pd

KEY = "decisions"
SHARE = "share_"  # column `share_i`: the share of a mixture's decisions for its i-th quantizer, from 0


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

    columns = [name for name in pq.read_schema(table).names if name.startswith(SHARE)]
    if not columns:
        return
    shares = decision_shares(pd.read_parquet(table, columns=["step", "slot", "quantizer", *columns]))
    if shares is not None:
        formats = shares.drop(columns=["step", "slot"])
        means = {str(name): math.fsum(values) / len(values) for name, values in formats.items()}
        write_json(folder.path / "result.json", result | {KEY: means})


def decision_shares(rows: pd.DataFrame) -> pd.DataFrame | None:
    """Return the shares of formats in mixtures' decisions, with a row for each window, layer and slot.

    rows: those of numerics.parquet. If none of them is about a mixture, return None.

    Columns: `step`, `slot`, and for each format of any mixture its share, 0 if the slot's mixture does not have it.
    """
    import pandas as pd

    columns = [column for column in map(str, rows) if column.startswith(SHARE)]
    if not columns or (decided := rows[rows[columns[0]].notna()]).empty:
        return None
    named = []
    for mixture, of_mixture in decided.groupby("quantizer"):
        # Only the first four quantizers of a mixture have columns.
        names = dict(zip(columns, entry_names(str(mixture)), strict=False))
        named.append(of_mixture[["step", "slot", *columns]].rename(columns=names))
    return pd.concat(named).drop(columns=columns, errors="ignore").fillna(0.0)


def entry_names(mixture: str) -> list[str]:
    """Return a name for each quantizer of a mixture: its format, or its whole text if another one has the same format.

    >>> entry_names("e4m3:128x128:gam @ error<0.045 | bf16 ; per=block")
    ['e4m3', 'bf16']
    """
    entries = [entry.partition(" @ ")[0].strip() for entry in mixture.partition(" ; ")[0].split(" | ")]
    formats = [entry.partition(":")[0] for entry in entries]
    count = Counter(formats)
    return [name if count[name] == 1 else entry for name, entry in zip(formats, entries, strict=True)]
