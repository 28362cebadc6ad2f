"""Tables of arms as data: `studies/STUDY/tables.yaml` declares a row for each arm and a column for each number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from fewbits.analysis.engine.claims.hooks import load_hooks
from fewbits.analysis.engine.claims.judging import resolve
from fewbits.analysis.engine.claims.pairs import LATE
from fewbits.analysis.engine.results.arms import BASELINE, ArmTable, arm_table
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.places import Where, family_places, not_planned, trial_ids
from fewbits.analysis.report.items import Table, TableCell, TableResult, TableRow
from fewbits.analysis.tables.cells import BLANK, PERCENT, cell, change
from fewbits.analysis.tables.comparing import own_numbers

LOSSES = {"Training loss": f"loss{LATE}", "Validation loss": "validation_loss", "Loss on other text": "ood_loss"}


@dataclass(frozen=True)
class ArmsColumn:
    """A number of each arm: its own (shares and `percent` in percent), or its change from a baseline in percent."""

    title: str
    metric: str
    baseline: str = ""
    percent: bool = False  # show the arm's own number in percent


@dataclass(frozen=True)
class ArmsTable:
    """A table with a row for each combination of axis values of some arms. Declared in tables.yaml."""

    id: str
    title: str
    sweeps: tuple[str, ...]  # the sweeps with the arms, which are compared in the family of the first sweep
    arms: tuple[str, ...] = ()  # if empty, all arms of the sweeps
    needs: str = ""  # the arm without which there is no table; if empty, the baseline of losses
    where: dict[str, str] = field(default_factory=dict)
    losses: str = ""  # the baseline of three columns of losses; if empty, there are no such columns
    losses_title: str = "{}"  # the pattern of their titles, with the loss's name
    columns: tuple[ArmsColumn, ...] = ()
    row: str = ""  # a pattern with the values of axes, for titles of rows instead of the arms' titles
    titles: dict[str, str] = field(default_factory=dict)  # titles of arms instead of those in the table of arms
    unit: str = "%"
    notes: tuple[str, ...] = ()

    @property
    def all_columns(self) -> tuple[ArmsColumn, ...]:
        losses = LOSSES.items() if self.losses else ()
        return *(ArmsColumn(self.losses_title.format(t), m, self.losses) for t, m in losses), *self.columns


def arms_table(results: Results, study: str, of: ArmsTable) -> Table:
    """Return the table. Arms with the same trials have one row, that of the first; trunks have none."""
    load_hooks(study)
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
        title = of.row.format(*map(_number, where.values())) if of.row else of.titles.get(arm, table.title(arm))
        rows.append(TableRow(title, tuple(cells), of.unit))
    notes = (
        "The training loss, a mean over the last tenth of a run, is blank for arms whose runs have another length",
    )
    return TableResult(tuple(c.title for c in of.all_columns), tuple(rows), (*of.notes, *(notes if uneven else ())))


def _places(results: Results, table: ArmTable, of: ArmsTable) -> Iterator[tuple[str, Where]]:
    """Yield the arms with their axis values, in the order of `arms` or, if that is empty, of the sweeps."""
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
