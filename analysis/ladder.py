"""The scale ladder: what several scales say of each claim, side by side, on one page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fewbits.analysis.fingerprint import made_of
from fewbits.analysis.page import document
from fewbits.analysis.reading import STYLE, Reading, read
from fewbits.analysis.registry import ClaimEntry
from fewbits.analysis.report import INDEX, Report, put, to_json
from fewbits.analysis.show.claims import NOTHING, badge, counts, effects, power, tally
from fewbits.analysis.show.markup import boxed, folded, listed, plural, tag, words
from fewbits.analysis.verdicts import Verdict
from fewbits.sweeps.planning.studies import STUDIES


def write_ladder(sentence: Sequence[str], scales: Sequence[str], reports: Path) -> Report:
    """Of the study that the words name, at each of the scales."""
    if len(scales) < 2 or len(set(scales)) != len(scales):
        raise ValueError(f"--compare {' '.join(scales)}: two scales or more are expected, each once")
    if given := [word for word in sentence if word.startswith("scale=")]:
        raise ValueError(f"{given[0]} and --compare {' '.join(scales)}: say scales once")
    readings = {scale: read((*sentence, f"scale={scale}")) for scale in scales}
    folder = reports / "-".join((readings[scales[0]].study, *scales))
    made = [made_of(reading.results, (*reading.sentence, reading.changed)) for reading in readings.values()]
    put(folder, lambda: _files(readings), " ".join(made))
    missing = tuple(f"{scale}: {flag}" for scale, reading in readings.items() for flag in reading.results.flags)
    verdicts = "; ".join(f"{scale}: {counts(reading.verdicts)}" for scale, reading in readings.items())
    notes = tuple(f"{scale}: {note}" for scale, reading in readings.items() for note in reading.notes)
    return Report(folder / INDEX, verdicts, missing, notes)


def _files(readings: Mapping[str, Reading]) -> dict[str, str]:
    record = {scale: reading.record() for scale, reading in readings.items()}
    return {INDEX: _page(readings), "verdicts.json": to_json(record)}


def _page(readings: Mapping[str, Reading]) -> str:
    first = next(iter(readings.values()))
    title = STUDIES[first.study].title
    top = tag("p", "fewbits scale ladder", class_="kicker") + tag("h1", words(title))
    said = "The same claims, decided at each scale by itself. What holds at one need not hold at the next."
    body = tag("header", top, tag("p", said, class_="under"))
    for scale, reading in readings.items():
        at = tag("h3", f"{words(scale)} ", tag("small", words(reading.results.scale)))
        body += at + tally(reading.verdicts) + _flags(reading)
    body += tag("h2", "Claims", id="claims") + boxed(_table(readings))
    body += tag("h2", "Reasons", id="reasons") + "".join(_reasons(entry, readings) for entry in first.shelf.claims)
    style = tag("style", STYLE.read_text("utf-8"))
    return document(f"{title}: scales {', '.join(readings)}", style + body, ["Claims", "Reasons"], said)


def _flags(reading: Reading) -> str:
    flags = [*reading.origin.notices, *reading.results.flags, *reading.origin.mixed]
    if not flags:
        return ""
    return tag("div", folded(f"⚠ {plural(len(flags), 'flag')}", listed(map(words, flags))), class_="flags")


def _table(readings: Mapping[str, Reading]) -> str:
    scales = (
        tag("th", words(scale), tag("small", f" {words(r.results.scale)}"), scope="col")
        for scale, r in readings.items()
    )
    rows = []
    for entry in next(iter(readings.values())).shelf.claims:
        name = tag("th", tag("b", words(entry.id)), " ", words(entry.claim.statement), scope="row")
        verdicts = {scale: reading.verdicts[entry.id] for scale, reading in readings.items()}
        cells = (tag("td", cell(verdict, entry), data_label=scale) for scale, verdict in verdicts.items())
        rows.append(tag("tr", name, *cells))
    head = tag("thead", tag("tr", tag("th", "Claim", scope="col"), *scales))
    return tag("table", head, tag("tbody", *rows), class_="claims cards ladder")


def cell(verdict: Verdict, entry: ClaimEntry, link: str | None = None) -> str:
    """A verdict with its effect; link: where it is said in full."""
    shown = badge(verdict.outcome)
    lines = [shown if link is None else tag("a", shown, href=link, class_="plain")]
    if verdict.effect is not None or verdict.parts:
        lines.append(effects(verdict, entry.claim))
    if verdict.n:
        lines.append(tag("small", plural(verdict.n, verdict.unit)))
    if (found := power(verdict, entry.claim)) != NOTHING:
        lines.append(tag("small", "found from / margin ", found))
    return tag("div", *(tag("div", line) for line in lines if line))


def _reasons(entry: ClaimEntry, readings: Mapping[str, Reading]) -> str:
    items = [f"{words(scale)}: {words(str(reading.verdicts[entry.id]))}" for scale, reading in readings.items()]
    return tag("h3", words(entry.id)) + tag("p", words(entry.claim.statement)) + listed(items)
