"""Make the tables that every study has: differences between arms that should be equal, and all arms beside BF16.

The numbers are relative changes of losses in percent, paired by seed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fewbits.analysis.engine.arms import AGAIN, BASELINE, ArmTable
from fewbits.analysis.engine.data import Data, Differences, NotPlanned
from fewbits.analysis.engine.frames import Results
from fewbits.analysis.engine.places import ANYWHERE, Where, not_planned, trial_ids
from fewbits.analysis.engine.statistics import Pools, summary
from fewbits.analysis.report.items import Setting, Table, TableCell, TableResult, TableRow
from fewbits.analysis.tables.cells import BLANK, PERCENT, cell, change, spread
from fewbits.analysis.tables.comparing import compare, own_numbers, pools

VALIDATION = "validation_loss"
LOSSES = ("Training loss", "Validation loss", "Loss on other text")
METRICS = ("loss@late", VALIDATION, "ood_loss")  # the metric of each entry of LOSSES


def noise_table(
    results: Results, table: ArmTable, pairs: Iterable[tuple[str, str]] = ((AGAIN, BASELINE),), where: Where = ANYWHERE
) -> TableResult:
    """Return the table of noise: differences of arms that should be equal, and spreads of single arms and of pairs.

    pairs: arms that should be equal, each with its baseline.
    """
    rows = []
    for arm, baseline in pairs:
        data = [compare(results, metric, arm, baseline, where) for metric in METRICS]
        title = f"{table.title(arm)} minus {table.title(baseline)}"
        rows.append(TableRow(title, tuple(cell(one, PERCENT) for one in data), "%"))
        rows.append(TableRow("    its spread over seeds", tuple(map(spread, data)), "%"))
    levels = tuple(_level_spread(own_numbers(results, metric, BASELINE, where)) for metric in METRICS)
    rows.append(TableRow("Spread of BF16 itself over seeds", levels, "%"))
    known = [pools(results, metric, BASELINE, where) for metric in METRICS]
    kinds = dict.fromkeys(kind for one in known if one is not None for kind in one.of_kinds)
    for kind in kinds or [""]:
        title = f"Spread of a pair, {kind}" if len(kinds) > 1 else "Spread of a pair, pooled over arms"
        rows.append(TableRow(title, tuple(_pooled_spread(one, kind) for one in known), "%"))
    return TableResult(LOSSES, tuple(rows), ("Spreads are standard deviations", *_left_out(known[1])))


def _pooled_spread(pools: Pools | None, kind: str) -> TableCell:
    if pools is None or kind not in pools.of_kinds:
        return TableCell(Setting("not known: only one arm or one seed"))
    pooled = pools.of_kinds[kind].spread
    return TableCell(Setting(f"{PERCENT * pooled.sd:.3f} (df {pooled.df})"))


def _left_out(pools: Pools | None) -> tuple[str, ...]:
    if pools is None or not pools.unlike:
        return ()
    names = "; ".join(sorted(pools.unlike))
    return (f"Not pooled for the validation loss, because their own spread is significantly greater: {names}",)


def _level_spread(data: Data | NotPlanned) -> TableCell:
    if not isinstance(data, Differences):
        return cell(data)
    return spread(data, PERCENT / abs(summary(data.values).mean))


# -------------------------------------------------------------------------------- every arm


def arms_table(
    results: Results, table: ArmTable, arms: Sequence[str], *, whole: str, title: str, baseline: str = BASELINE
) -> Table:
    """Return a table with the change of every loss from the baseline, and of the validation loss from the arm `whole`.

    title: the name of `whole` in the head of its column. Arms with the same trials have one row, with the first arm's
    title.
    """
    if not results.has(baseline):
        return not_planned(results)
    rows, seen = [], {tuple(trial_ids(results, baseline).values())}
    lengths = {arm: _steps(results, arm) for arm in (*arms, baseline)}
    for arm in arms:
        trials = tuple(trial_ids(results, arm).values())
        if trials in seen or arm in table.trunks:
            continue
        seen.add(trials)
        cells = [change(results, metric, arm, baseline) for metric in METRICS]
        if lengths[arm] != lengths[baseline]:
            cells[0] = BLANK
        cells.append(BLANK if arm == whole else change(results, VALIDATION, arm, whole))
        rows.append(TableRow(table.title(arm), tuple(cells), "%"))
    notes = (
        "The training loss, a mean over the last tenth of a run, is blank for arms whose runs have another length",
    )
    uneven = any(length != lengths[baseline] for arm, length in lengths.items() if arm not in table.trunks)
    columns = (*(f"{name}, from BF16" for name in LOSSES), f"Validation loss, from {title}")
    return TableResult(columns, tuple(rows), notes if uneven else ())


def sweep_arms(results: Results, *sweeps: str) -> list[str]:
    """Return the arms of these sweeps in their order, each once."""
    arms = (str(m.cell.arm) for sweep in sweeps for m in results.members if m.cell.sweep == sweep)
    return list(dict.fromkeys(arms))


def _steps(results: Results, arm: str) -> set[int]:
    return {results.plan.trials[trial].trial.training.steps for trial in trial_ids(results, arm).values()}
