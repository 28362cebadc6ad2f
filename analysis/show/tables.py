"""A table of the registry: as HTML, as LaTeX, as CSV. Of each metric the paper's number, ours, and the difference."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby

from fewbits.analysis.engine.data import NoData
from fewbits.analysis.results import Ours, OutOfReach, Setting, TableCell, TableResult, TableRow, Value
from fewbits.analysis.show.markup import boxed, decimals, folded, number, tag, words
from fewbits.analysis.show.trials import Trial, behind

LINES = ("paper", "ours", "difference")
PRINTED = 4  # decimals that a paper prints at most; what is computed from them has no more


def table(result: TableResult, trials: Mapping[str, Trial]) -> str:
    body = "".join(tag("tbody", *_lines(row, trials)) for row in result.rows)
    said = (*result.notes, *_unreached(result))
    notes = tag("ul", *(tag("li", words(note)) for note in said), class_="notes") if said else ""
    return boxed(tag("table", _head(result.columns), body, class_="results")) + notes + _behind(result, trials)


def missing(ours: Ours | str) -> str:
    """In words, why there is no number."""
    return f"no data: {ours.reason}" if isinstance(ours, NoData) else str(ours)


def _unreached(result: TableResult) -> tuple[str, ...]:
    """Why rows are out of reach, once for all of them."""
    found = (cell.ours for row in result.rows for cell in row.cells)
    return tuple(dict.fromkeys(f"O{str(ours)[1:]}" for ours in found if isinstance(ours, OutOfReach)))


def _head(columns: tuple[str, ...]) -> str:
    """Columns that are all called `group: name` stand under their groups."""
    parts = [column.partition(": ") for column in columns]
    grouped = all(name for _, _, name in parts) and len({group for group, _, _ in parts}) < len(parts)
    shown = [name for _, _, name in parts] if grouped else columns
    names = tag("tr", tag("td", colspan="2"), *(tag("th", words(name), scope="col") for name in shown))
    if not grouped:
        return tag("thead", names)
    spans = [(group, len(list(several))) for group, several in groupby(group for group, _, _ in parts)]
    heads = (tag("th", words(group), scope="colgroup", colspan=str(count)) for group, count in spans)
    return tag("thead", tag("tr", tag("td", colspan="2"), *heads, class_="groups"), names)


def _lines(row: TableRow, trials: Mapping[str, Trial]) -> list[str]:
    """Of the paper, of ours, and of the difference, where there are any."""
    title = words(row.title) + (tag("small", f" {words(row.unit)}") if row.unit else "")
    shown = [line for line in LINES if line == "ours" or any(_text(line, row, cell) for cell in row.cells)]
    lines = []
    for line in shown:
        cells = _same(row) if line == "ours" else None
        first = tag("th", title, scope="row", rowspan=str(len(shown))) if line == shown[0] else ""
        what = tag("td", line, class_="what")
        cells = cells or "".join(_cell(line, row, cell, trials) for cell in row.cells)
        lines.append(tag("tr", first, what, cells, class_=line))
    return lines


def _same(row: TableRow) -> str | None:
    """One cell for all of them, where there is nothing in any for the same reason."""
    reasons = {missing(cell.ours) for cell in row.cells if not isinstance(cell.ours, Value | Setting)}
    if len(reasons) != 1 or any(isinstance(cell.ours, Value | Setting) for cell in row.cells):
        return None
    first = row.cells[0].ours
    text = _briefly(first) if isinstance(first, OutOfReach) else missing(first)
    return tag("td", words(text), colspan=str(len(row.cells)), class_="missing")


def _cell(line: str, row: TableRow, cell: TableCell, trials: Mapping[str, Trial]) -> str:
    text = _text(line, row, cell)
    if line != "ours":
        return tag("td", words(text), class_="number", title=cell.source if line == "paper" and text else None)
    if isinstance(cell.ours, Setting):
        assumed = tag("small", " assumed") if cell.ours.assumed else ""
        return tag("td", words(text), assumed, class_="setting")
    if not isinstance(cell.ours, Value):
        return tag("td", words(text), class_="missing", title=missing(cell.ours))
    return tag("td", words(text), _spread(cell.ours), class_="number", title=_told(cell.ours, trials))


def _briefly(ours: Ours) -> str:
    """In a cell, where others of its row have numbers; the reason is told by `missing`."""
    return "no data" if isinstance(ours, NoData) else str(ours).partition(":")[0].partition(" at ")[0]


def _text(line: str, row: TableRow, cell: TableCell) -> str:
    ours, places = cell.ours, 0 if _counted(row) else PRINTED
    if isinstance(ours, Value) and ours.interval:
        places = decimals(ours.mean, (ours.interval.high - ours.interval.low) / 2)
    if line == "paper":
        if cell.paper is None or isinstance(cell.paper, str):
            return cell.paper or ""
        return number(cell.paper, _printed(row))
    if line == "difference":
        return "" if cell.difference is None else number(cell.difference, places, sign=True)
    if isinstance(ours, Setting):
        return ours.text
    return number(ours.mean, places) if isinstance(ours, Value) else _briefly(ours)


def _counted(row: TableRow) -> bool:
    """Whole numbers all of them, and none with an interval."""
    ours = [cell.ours for cell in row.cells if isinstance(cell.ours, Value)]
    return all(one.interval is None and float(one.mean).is_integer() for one in ours)


def _printed(row: TableRow) -> int:
    """Decimals of the row's numbers in the paper, zeros at their ends among them."""
    texts = (f"{cell.paper:.10g}" for cell in row.cells if isinstance(cell.paper, float))
    return min(PRINTED, max(len(text.partition(".")[2]) if "e" not in text else 0 for text in texts))


def _spread(ours: Value) -> str:
    if ours.interval is None:
        return ""
    half = (ours.interval.high - ours.interval.low) / 2
    return tag("small", f" ±{number(half, decimals(ours.mean, half))}")


def _told(ours: Value, trials: Mapping[str, Trial]) -> str:
    """What a pointer is told: everything behind the number."""
    seeds = f"mean of {ours.n} seeds" if ours.n > 1 else "one seed: no interval"
    if not ours.trials:
        seeds = f"{ours.n} turns, timed" if ours.n else "computed"  # nothing was trained for it
    level = f", ± {ours.interval.level:.0%} interval" if ours.interval else ""
    names = ", ".join(trials[key].folder for key in ours.trials if key in trials)
    return "; ".join([f"{seeds}{level}", *ours.notes, names])


def _behind(result: TableResult, trials: Mapping[str, Trial]) -> str:
    """Numbers by the trials they come from."""
    found: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for row in result.rows:
        for column, cell in zip(result.columns, row.cells, strict=True):
            if cell.trials:
                found.setdefault(cell.trials, {}).setdefault(column, []).append(row.title)
    if not found:
        return ""
    items = [
        tag("dt", words("; ".join(f"{column}: {', '.join(rows)}" for column, rows in places.items())))
        + tag("dd", behind(ids, trials))
        for ids, places in found.items()
    ]
    return folded("The trials behind each number", tag("dl", *items), class_="behind")


# -------------------------------------------------------------------------------- LaTeX


def latex(result: TableResult, caption: str) -> str:
    """For booktabs: the lines of the page."""
    rows = []
    for row in result.rows:
        shown = [line for line in LINES if line == "ours" or any(_text(line, row, cell) for cell in row.cells)]
        for line in shown:
            first = f"{row.title} ({row.unit})" if row.unit else row.title
            cells = [_plain(line, row, cell) for cell in row.cells]
            rows.append(" & ".join(map(_escaped, [first if line == shown[0] else "", line, *cells])) + r" \\")
    head = " & ".join(map(_escaped, ["", "", *result.columns])) + r" \\"
    return "\n".join(
        [
            "% needs \\usepackage{booktabs}",
            r"\begin{table}",
            rf"\caption{{{_escaped(caption)}}}",
            rf"\begin{{tabular}}{{ll{'r' * len(result.columns)}}}",
            r"\toprule",
            head,
            r"\midrule",
            *rows,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def _plain(line: str, row: TableRow, cell: TableCell) -> str:
    text = _text(line, row, cell)
    if line == "ours" and isinstance(cell.ours, Value) and cell.ours.interval:
        half = (cell.ours.interval.high - cell.ours.interval.low) / 2
        text += f" ± {number(half, decimals(cell.ours.mean, half))}"
    return text


_LATEX = {
    "\\": r"\textbackslash{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "\N{MINUS SIGN}": "$-$",
    "×": r"$\times$",
    "±": r"$\pm$",
    "\N{NARROW NO-BREAK SPACE}": r"\,",
    "→": r"$\rightarrow$",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
    "Δ": r"$\Delta$",
}


def _escaped(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)
