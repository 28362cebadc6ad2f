"""Make the tables of arms that `studies/STUDY/tables.yaml` declares: a row for each arm, a column for each number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from fewbits.analysis.engine.claims.judging import resolve
from fewbits.analysis.engine.claims.pairs import LATE
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.places import (
    BASELINE,
    ArmTable,
    Where,
    arm_table,
    family_places,
    not_planned,
    trial_ids,
)
from fewbits.analysis.report.items import Table, TableCell, TableResult, TableRow
from fewbits.analysis.tables.cells import BLANK, PERCENT, cell, change, own_numbers

LOSSES = {"Training loss": f"loss{LATE}", "Validation loss": "validation_loss", "Loss on other text": "ood_loss"}


@dataclass(frozen=True)
class ArmsColumn:
    """A column: each arm's mean of a metric or, if the column has a baseline, each arm's change from it in percent."""

    title: str
    metric: str
    baseline: str = ""  # the name of the baseline arm
    percent: bool = False  # show the arms' own numbers in percent; metrics with bounds (shares) are always in percent


@dataclass(frozen=True)
class ArmsTable:
    """One table that tables.yaml declares, with a row for each arm and combination of its axis values."""

    id: str
    title: str
    sweeps: tuple[str, ...]  # the sweeps with the arms; numbers are those of the first sweep's family (ArmTable.family)
    arms: tuple[str, ...] = ()  # if empty, all arms of the sweeps
    needs: str = ""  # the table is shown only if this arm is planned; if empty, the arm in `losses`, or else bf16
    where: dict[str, str] = field(default_factory=dict)  # axis → value: show only trials with these axis values
    losses: str = ""  # the baseline of three columns with changes of LOSSES; if empty, there are no such columns
    losses_title: str = "{}"  # the titles of these three columns; {} is the name of the loss
    columns: tuple[ArmsColumn, ...] = ()  # further columns
    row: str = ""  # the titles of rows, with {} for each axis value and {arm}; if empty, the arms' titles
    titles: dict[str, str] = field(default_factory=dict)  # arm → title, instead of the title in arms.yaml
    unit: str = "%"
    notes: tuple[str, ...] = ()

    @property
    def all_columns(self) -> tuple[ArmsColumn, ...]:
        losses = LOSSES.items() if self.losses else ()
        return *(ArmsColumn(self.losses_title.format(t), m, self.losses) for t, m in losses), *self.columns


def arms_table(results: Results, study: str, of: ArmsTable) -> Table:
    """Return the table that `of` declares; NotPlanned if the scale lacks the arm `of.needs`.

    Of arms with the same trials only the first has a row; the arm `of.losses` has none, because it is the baseline.
    """
    table, rows = arm_table(study), []
    part = family_places(results, table, of.sweeps[0])
    if not part.has(of.needs or of.losses or BASELINE, of.where):
        return not_planned(results)
    seen, uneven = {_trials(part, of.losses, of.where)} if of.losses else set(), False
    for arm, where in _places(results, table, of):
        trials = _trials(part, arm, where)
        if trials in seen:
            continue
        seen.add(trials)
        cells = [_cell(part, study, column, arm, where) for column in of.all_columns]
        uneven |= bool(of.losses) and cells[0] is BLANK
        title = of.titles.get(arm, table.title(arm))
        title = of.row.format(*map(_number, where.values()), arm=title) if of.row else title
        rows.append(TableRow(title, tuple(cells), of.unit))
    notes = (
        "The training loss is a mean over the last tenth of a run; it is blank for arms whose runs do not have the "
        "baseline's length",
    )
    return TableResult(tuple(c.title for c in of.all_columns), tuple(rows), (*of.notes, *(notes if uneven else ())))


def _places(results: Results, table: ArmTable, of: ArmsTable) -> Iterator[tuple[str, Where]]:
    """Yield (arm, axis values) for each row: those of `of.arms` or, if this is empty, of all arms but trunks."""
    members = [m for sweep in of.sweeps for m in results.members if m.cell.sweep == sweep]
    there = dict.fromkeys((str(m.cell.arm), m.cell.axes) for m in members if set(of.where.items()) <= set(m.cell.axes))
    for arm in of.arms or dict.fromkeys(arm for arm, _ in there if arm not in table.trunks):
        yield from ((name, dict(axes)) for name, axes in there if name == arm)


def _cell(part: Results, study: str, column: ArmsColumn, arm: str, where: Where) -> TableCell:
    if arm == column.baseline:
        return BLANK
    numbers = resolve(study, part, column.metric)
    assert not callable(numbers.values)
    if not column.baseline:
        return cell(own_numbers(part, numbers.values, arm, where), PERCENT if numbers.bounds or column.percent else 1.0)
    if column.metric.endswith(LATE) and _steps(part, arm, where) != _steps(part, column.baseline, {}):
        return BLANK
    return change(part, column.metric, arm, column.baseline, where)


def _trials(part: Results, arm: str, where: Where) -> tuple[str, ...]:
    return tuple(trial_ids(part, arm, where).values())


def _steps(part: Results, arm: str, where: Mapping[str, str]) -> set[int]:
    return {part.plan.trials[trial].trial.training.steps for trial in _trials(part, arm, where)}


def _number(value: str) -> float | str:
    return float(value) if value.replace(".", "", 1).isdigit() else value
