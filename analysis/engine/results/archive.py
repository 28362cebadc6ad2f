"""Write what reports read of a store into one Parquet file, `results.parquet`, and read such a file like a store.

A report is always made from this file, so it can be made again where the store is gone. The column `table` says what a
row is:

    plan      the stored plan and the overrides that selected it, as JSON in the column `text`
    trials    a trial: state, measured numbers, means over the last steps (`late:METRIC`), and provenance as JSON
    bench     a file of timings of `fewbits bench`, as JSON
    NAME      a row of NAME.parquet in the trial's run folder, reduced by `REDUCTIONS`
    scores    a stored score of a checkpoint: its step, name and value

A file has at most LIMIT bytes: if the rows of a large study need more, they are reduced further (DETAILS). Floats of
run folders' tables keep some of their bits (BITS); the numbers of `trials` are exact.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet

from fewbits.analysis.engine.results.evaluations import DOCUMENTS
from fewbits.analysis.engine.results.frames import METRICS, SCORES, Files, Results
from fewbits.analysis.engine.results.rows import Standing
from fewbits.experiments.probes.errors import WHOLE
from fewbits.experiments.probes.probe_trial import TABLE as PROBE
from fewbits.sweeps.planning.plan import Plan, Planned
from fewbits.sweeps.planning.store import OVER
from fewbits.sweeps.planning.stored_plans import decoded, encoded, is_location

NAME = "results.parquet"
LIMIT = 2 * 2**20  # bytes
BITS = {"numerics.parquet": 12, DOCUMENTS: 15, "": 17}  # of a float's 53 that are kept; "": other tables
WHOLE_NUMBERS = ("step", "tokens", "block", "document")
DENSE = {
    "step": "last",
    "tokens": "last",
    "loss": "mean",
    "loss_max": "mean",
    "loss_average": "mean",
    "loss_max_average": "max",
    "skipped": "sum",
    "loss_scale": "last",
}
SPARSE = ("validation_loss", "ood_loss", "parameter_norm")  # measured at a few steps, which are all kept
UNREAD = ("saturated", "capped", "lost", "weight_norm", "gradient_norm", "gradient_cosine")  # numerics no report reads
LATE = "late:"


@dataclass(frozen=True)
class Detail:
    """How many rows of a trial are kept."""

    points: int  # of its curves
    windows: int  # windows of steps of its numerics, with the first and the last


DETAILS = (Detail(200, 50), Detail(200, 4), Detail(200, 2), Detail(100, 2), Detail(50, 1), Detail(25, 1))


def archived(results: Results, overrides: Sequence[str], limit: int = LIMIT) -> bytes:
    """Return the content of results.parquet; raise ValueError if the least detail needs more than `limit` bytes."""
    rows, tables = _of_plan(results, overrides), dict(_joined(results))
    for detail in DETAILS:
        content = _written(rows, tables, detail)
        if len(content) <= limit:
            return content
    raise ValueError(f"{NAME} would have {len(content):,} bytes; at most {limit:,} are allowed")


def _of_plan(results: Results, overrides: Sequence[str]) -> pd.DataFrame:
    plan, files = results.plan, results.files
    kept = [text for text in overrides if not is_location(text)]
    text = json.dumps({"overrides": kept, **encoded(plan)}, sort_keys=True)
    rows: list[dict[str, Any]] = [{"table": "plan", "text": text}]
    late = {name: results.late(name) for name in ("loss", "loss_max") if name in results.table_of(METRICS)}
    for key, planned in plan.trials.items():
        at = files.standing(planned)
        row: dict[str, Any] = {"table": "trials", "id": key, "folder": planned.folder.path.name}
        row |= {"state": at.state, "step": at.step, "note": at.note}
        row["text"] = json.dumps({"computed": at.computed, **files.provenance(planned)})
        rows.append(row | dict(at.numbers) | {LATE + name: means[key] for name, means in late.items() if key in means})
    rows += [{"table": "bench", "name": n, "text": json.dumps(b)} for n, b in sorted(files.benches(plan).items())]
    return pd.DataFrame(rows)


def _joined(results: Results) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield the rows of each table that some trial has, with the trial's id."""
    for table in REDUCTIONS:
        read = {key: results.files.table(planned, table) for key, planned in results.plan.trials.items()}
        found = {key: frame for key, frame in read.items() if frame is not None and len(frame)}
        if found:
            ids = np.repeat(list(found), [len(frame) for frame in found.values()])
            yield table, pd.concat(found.values(), ignore_index=True).assign(id=ids)


def _written(rows: pd.DataFrame, tables: Mapping[str, pd.DataFrame], detail: Detail) -> bytes:
    parts = [_rounded(REDUCTIONS[name](frame, detail), name).assign(table=name) for name, frame in tables.items()]
    whole = pd.concat([rows, *parts], ignore_index=True)
    whole = whole.astype({name: "Int64" for name in WHOLE_NUMBERS if name in whole})
    schema = pa.Schema.from_pandas(whole, preserve_index=False)
    floats = [field.name for field in schema if pa.types.is_floating(field.type)]
    texts = [field.name for field in schema if pa.types.is_large_string(field.type) or pa.types.is_string(field.type)]
    out = io.BytesIO()
    parquet.write_table(
        pa.Table.from_pandas(whole, schema, preserve_index=False),
        out,
        compression="zstd",
        compression_level=9,
        use_dictionary=texts,
        column_encoding=dict.fromkeys(floats, "BYTE_STREAM_SPLIT"),
    )
    return out.getvalue()


# -------------------------------------------------------------------------------- reductions


def _thinned(frame: pd.DataFrame, detail: Detail) -> pd.DataFrame:
    """Average the losses of metrics.parquet over windows of steps; steps with an evaluation keep a row of their own."""
    sparse = [name for name in SPARSE if name in frame]
    dense = {name: how for name, how in DENSE.items() if name in frame}
    place, count = frame.groupby("id").cumcount(), frame.groupby("id")["step"].transform("size")
    window = (place * detail.points // count).where(count > detail.points, place)
    averaged = frame.groupby(["id", window], sort=False).agg(dense).reset_index("id")
    evaluated = frame.loc[frame[sparse].notna().any(axis=1), ["id", "step", "tokens", *sparse]]
    merged = averaged.merge(evaluated, how="outer", on=["id", "step", "tokens"])
    return merged.sort_values(["id", "step"], kind="stable", ignore_index=True)


def _windows(frame: pd.DataFrame, detail: Detail) -> pd.DataFrame:
    """Keep some windows of steps of numerics.parquet, which are evenly spaced; the last one is always kept."""
    place = frame.groupby("id")["step"].rank("dense", ascending=False) - 1  # 0: the last window
    last = place.groupby(frame["id"]).transform("max")
    kept = [place == last * k // max(detail.windows - 1, 1) for k in range(detail.windows)]
    return frame[pd.concat(kept, axis=1).any(axis=1)].drop(columns=[name for name in UNREAD if name in frame])


def _summed(frame: pd.DataFrame, detail: Detail) -> pd.DataFrame:
    """Add the counts of precision.parquet over steps and layers, for each slot."""
    groups = frame.groupby(["id", "slot"])
    rows = groups.sum(numeric_only=True)
    if "histogram" in frame:
        rows["histogram"] = groups["histogram"].agg(lambda counted: np.stack(counted.to_list()).sum(0))
    return rows.reset_index().assign(step=0, layer="all")


def _documents(frame: pd.DataFrame, detail: Detail) -> pd.DataFrame:
    """Sort the losses of evaluation.parquet by document: similar numbers that are neighbours take less room."""
    return frame.sort_values(["text", "document"], kind="stable", ignore_index=True)


Reduce = Callable[[pd.DataFrame, Detail], pd.DataFrame]
REDUCTIONS: dict[str, Reduce] = {
    METRICS: _thinned,
    "numerics.parquet": _windows,
    DOCUMENTS: _documents,
    PROBE: lambda frame, _: frame[frame["layer"] == WHOLE],
    "precision.parquet": _summed,
    SCORES: lambda frame, _: frame,
}


def _rounded(frame: pd.DataFrame, table: str) -> pd.DataFrame:
    """Round floats to the table's BITS, so that they take less room."""
    floats, bits = frame.select_dtypes("float"), BITS.get(table, BITS[""])
    mantissas, exponents = np.frexp(floats.to_numpy(float))
    scaled = np.ldexp(np.round(np.ldexp(mantissas, bits)), exponents - bits)
    return frame.assign(**dict(zip(map(str, floats), scaled.T, strict=True)))


# -------------------------------------------------------------------------------- reading


class Archive(Files):
    """The content of a results.parquet, which `Results` reads like a store."""

    def __init__(self, content: bytes, name: str = NAME) -> None:
        """Read the file. name: for messages. Raise ValueError if it is no results.parquet of this version."""
        super().__init__()
        try:
            self._whole = parquet.read_table(io.BytesIO(content))
            (plan,) = self._rows("plan")
            record = json.loads(plan["text"])
            self.overrides = tuple(record["overrides"])
            self.plan: Plan = decoded(record, Path())
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{name} is no file of results of this version of fewbits: {error}") from None

    def _rows(self, table: str) -> list[dict[str, Any]]:
        return [{k: v for k, v in row.items() if v is not None} for row in self._of(table).to_pylist()]

    def _of(self, table: str) -> pa.Table:
        """Return the rows of a table, without the columns that only other tables have."""
        rows = self._whole.filter(pc.equal(self._whole["table"], table))
        return rows.select([name for name in rows.column_names if rows[name].null_count < len(rows)])

    @cached_property
    def _trials(self) -> dict[str, dict[str, Any]]:
        return {row["id"]: row for row in self._rows("trials")}

    @cached_property
    def _tables(self) -> dict[str, dict[str, pd.DataFrame]]:
        tables = {}
        for name in REDUCTIONS:
            frame = self._of(name).to_pandas().drop(columns="table", errors="ignore")
            groups = frame.groupby("id", sort=False) if len(frame) else ()
            tables[name] = {str(key): rows.drop(columns="id").reset_index(drop=True) for key, rows in groups}
        return tables

    def has_finished(self, planned: Planned) -> bool:
        return planned.id in self._trials and self._trials[planned.id]["state"] in OVER

    def standing(self, planned: Planned) -> Standing:
        row = self._trials[planned.id]
        own = ("table", "id", "folder", "state", "step", "note", "text")
        numbers = {k: float(v) for k, v in row.items() if k not in own and not k.startswith(LATE)}
        computed = tuple(tuple(part) for part in json.loads(row["text"])["computed"])
        return Standing(row["state"], int(row["step"]), row["note"], computed, numbers)

    def table(self, planned: Planned, name: str) -> pd.DataFrame | None:
        return self._tables[name].get(planned.id)

    def late(self, results: Results, metric: str) -> dict[str, float]:
        rows = {member.id: self._trials.get(member.id, {}) for member in results.members}
        return {key: row[LATE + metric] for key, row in rows.items() if LATE + metric in row}

    def provenance(self, planned: Planned) -> dict[str, Any]:
        return {k: v for k, v in json.loads(self._trials[planned.id]["text"]).items() if k != "computed"}

    def benches(self, plan: Plan) -> dict[str, Any]:
        return {row["name"]: json.loads(row["text"]) for row in self._rows("bench")}


class Joined(Files):
    """A store, and archives with results of trials that are not finished there; the first that has one counts."""

    def __init__(self, archives: Sequence[Archive]) -> None:
        super().__init__()
        self._own, self._archives = Files(), archives
        self._places: dict[str, Files] = {}

    def _place(self, planned: Planned) -> Files:
        if planned.id not in self._places:
            others = () if self._own.standing(planned).state in OVER else self._archives
            self._places[planned.id] = next((one for one in others if one.has_finished(planned)), self._own)
        return self._places[planned.id]

    def standing(self, planned: Planned) -> Standing:
        return self._place(planned).standing(planned)

    def table(self, planned: Planned, name: str) -> pd.DataFrame | None:
        return self._place(planned).table(planned, name)

    def late(self, results: Results, metric: str) -> dict[str, float]:
        means = super().late(results, metric)
        for archive in self._archives:
            own = archive.late(results, metric).items()
            means |= {key: mean for key, mean in own if self._place(results.plan.trials[key]) is archive}
        return means

    def provenance(self, planned: Planned) -> dict[str, Any]:
        return self._place(planned).provenance(planned)


def read_archive(path: Path) -> Archive:
    """Return the archive in a file; raise ValueError if the file is missing or is no archive."""
    try:
        return Archive(path.read_bytes(), str(path))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
