"""Tables of every study: how far noise goes, and what its comparisons can tell.

Changes are of losses, in percent, paired by seed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fewbits.analysis.arms import ANYWHERE, BASELINE, Where, compared, own, pooled
from fewbits.analysis.cells import PERCENT, cell, spread
from fewbits.analysis.engine.data import Data, Differences
from fewbits.analysis.engine.frames import Metric, Results
from fewbits.analysis.engine.statistics import Pools, summary
from fewbits.analysis.results import NotRun, Setting, TableCell, TableResult, TableRow, Value
from fewbits.analysis.verdicts import SEEDS, detectable, seeds_needed

VALIDATION = "validation_loss"
LOSSES = ("Training loss", "Validation loss", "Loss on other text")
Titles = Mapping[str, str]  # of arms; one without is called by its name


def losses(results: Results) -> tuple[Metric, ...]:
    return results.late("loss"), VALIDATION, "ood_loss"


def noise_table(
    results: Results, pairs: Iterable[tuple[str, str]], titles: Titles, where: Where = ANYWHERE
) -> TableResult:
    """The floor of every paired difference; and what it would be without pairs, between seeds. pairs: of arms that
    should be the same."""
    rows = []
    for arm, baseline in pairs:
        found = [compared(results, metric, arm, baseline, where) for metric in losses(results)]
        title = f"{titles.get(arm, arm)} less {titles.get(baseline, baseline)}"
        rows.append(TableRow(title, tuple(cell(f, PERCENT) for f in found), "%"))
        rows.append(TableRow("    its spread over seeds", tuple(map(spread, found)), "%"))
    levels = tuple(_level_spread(own(results, metric, BASELINE, where)) for metric in losses(results))
    rows.append(TableRow("Spread of BF16 itself over seeds", levels, "%"))
    known = [pooled(results, metric, BASELINE, where) for metric in losses(results)]
    kinds = dict.fromkeys(kind for one in known if one is not None for kind in one.of_kinds)
    for kind in kinds or [""]:
        title = f"Spread of a pair, {kind}" if len(kinds) > 1 else "Spread of a pair, from all arms"
        rows.append(TableRow(title, tuple(_pooled_spread(one, kind) for one in known), "%"))
    return TableResult(LOSSES, tuple(rows), ("Spreads are standard deviations", *_unlike(known[1])))


def _pooled_spread(found: Pools | None, kind: str) -> TableCell:
    if found is None or kind not in found.of_kinds:
        return TableCell(Setting("not known: one arm, or one seed", ()))
    spread = found.of_kinds[kind].spread
    return TableCell(Setting(f"{PERCENT * spread.sd:.3f} (df {spread.df})", ()))


def _unlike(found: Pools | None) -> tuple[str, ...]:
    """Of validation loss."""
    if found is None or not found.unlike:
        return ()
    names = "; ".join(sorted(found.unlike))
    return (f"Left out of validation loss's, as their own spread is greater than chance makes it: {names}",)


def _level_spread(found: Data | NotRun) -> TableCell:
    if not isinstance(found, Differences):
        return cell(found)
    return spread(found, PERCENT / abs(summary(found.values).mean))


@dataclass(frozen=True)
class Comparison:
    """What claims about losses rest on."""

    arm: str
    baseline: str
    margin: float
    claims: tuple[str, ...]
    place: str = ""  # said behind them, where arms of these names are run in several


def power_table(found: Iterable[tuple[Comparison, Data | NotRun]], titles: Titles) -> TableResult:
    """The smallest true difference that each finds four times of five, at 5 %, one side; how many seeds would do."""
    rows = []
    for one, data in found:
        names = (titles.get(arm, arm) for arm in (one.arm, one.baseline))
        margin = TableCell(Setting(f"{one.margin:.2%}", ()))
        cells = (cell(data, PERCENT), spread(data), _detectable(data), margin, _needed(data, one.margin))
        title = f"{', '.join(one.claims)}: {' less '.join(names)}"
        rows.append(TableRow(f"{title}, {one.place}" if one.place else title, cells))
    columns = ("Change, %", "Spread over seeds, %", "Smallest found, %", "Margin", "Seeds for the margin")
    notes = (
        "80 % power, one-sided test at 5 %",
        "From the spread of a pair over all arms of its kind that start alike, or of two kinds; the pair's own where "
        "an arm is the only one of its kind or left out of that",
    )
    return TableResult(columns, tuple(rows), notes)


def _detectable(found: Data | NotRun) -> TableCell:
    if not isinstance(found, Differences) or (least := detectable(found)) is None:
        return TableCell(Setting("not known", ()))
    return TableCell(Value(PERCENT * least, None, len(found.values), found.trials))


def _needed(found: Data | NotRun, margin: float) -> TableCell:
    if not isinstance(found, Differences) or len(found.values) < 2:
        return TableCell(Setting("not known", ()))
    seeds = seeds_needed(found, margin)
    return TableCell(Setting(f"more than {SEEDS}" if seeds is None else str(seeds), found.trials))
