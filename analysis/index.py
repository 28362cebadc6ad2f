"""All papers on one page: what each report that lies in a folder says of its claims, scales side by side.

Made of the reports' verdicts.json alone, so that it says what they say, and of when they were made.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fewbits.analysis.engine.statistics import Interval
from fewbits.analysis.ladder import cell
from fewbits.analysis.page import document
from fewbits.analysis.reading import STYLE
from fewbits.analysis.registry import ClaimEntry, shelf
from fewbits.analysis.report import INDEX
from fewbits.analysis.show.claims import NOTHING, tally
from fewbits.analysis.show.markup import anchor, boxed, plural, tag, words
from fewbits.analysis.verdicts import Control, Outcome, Verdict
from fewbits.common.atomic import write_atomically
from fewbits.sweeps.planning.studies import STUDIES

TITLE = "Pre-training in few bits: what was reproduced"
SAID = (
    "Each claim of each paper, as far as runs of ours decide it. A verdict holds at the scale that it was reached at; "
    "what holds at one need not hold at the next. The reports have the reasons, tables, figures and trials."
)


@dataclass(frozen=True)
class Made:
    """A report that lies there."""

    study: str
    scale: str
    parameters: str
    folder: str
    flags: tuple[str, ...]  # what it is not complete in
    verdicts: Mapping[str, Verdict]


def write_index(reports: Path) -> Path:
    found = [_made(path) for path in sorted(reports.glob(f"*/{INDEX}"))]
    made = {study: [one for one in found if one is not None and one.study == study] for study in STUDIES}
    if not any(made.values()):
        raise ValueError(f"no report in {reports}: `fewbits report` makes them")
    index = reports / INDEX
    write_atomically(index, _page({study: ones for study, ones in made.items() if ones}).encode())
    return index


def _made(page: Path) -> Made | None:
    """None of what is no report of one scale: of a ladder, say."""
    file = page.with_name("verdicts.json")
    try:
        record = json.loads(file.read_text("utf-8"))
        if "claims" not in record:
            return None
        verdicts = {name: restored(claim) for name, claim in record["claims"].items()}
        flags = (*record.get("notices", ()), *record["flags"], *record["mixed"])
        return Made(record["study"], record["scale"], record["parameters"], page.parent.name, flags, verdicts)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{file} cannot be read ({error}): make that report again, or remove it") from None


def restored(record: Mapping[str, Any]) -> Verdict:
    """From what a report has written of it."""
    known = {field.name for field in dataclasses.fields(Verdict)}
    data = {name: value for name, value in record.items() if name in known}
    interval, control = data["interval"], data["control"]
    data |= {
        "outcome": Outcome(data["outcome"]),
        "interval": Interval(**interval) if interval else None,
        "trials": tuple(data["trials"]),
        "notes": tuple(data["notes"]),
        "control": Control(**{**control, "trials": tuple(control["trials"])}) if control else None,
        "parts": tuple((name, restored(part)) for name, part in data["parts"]),
    }
    return Verdict(**data)


# -------------------------------------------------------------------------------- the page


def _page(made: Mapping[str, list[Made]]) -> str:
    titles = {study: STUDIES[study].title for study in made}
    top = tag("p", "fewbits", class_="kicker") + tag("h1", words(TITLE)) + tag("p", words(SAID), class_="under")
    body = tag("header", top) + "".join(_study(study, ones) for study, ones in made.items())
    return document(TITLE, tag("style", STYLE.read_text("utf-8")) + body, list(titles.values()), words(SAID))


def _study(study: str, made: list[Made]) -> str:
    said = STUDIES[study]
    arxiv = tag("a", f"arXiv {words(said.arxiv)}", href=f"https://arxiv.org/abs/{said.arxiv}")
    head = tag("h2", words(said.title), id=anchor(said.title)) + tag("p", f"{arxiv}: {words(said.about)}")
    reports = "".join(_report(one) for one in made)
    return head + reports + boxed(_table(shelf(study).claims, made))


def _report(one: Made) -> str:
    link = tag("a", words(one.scale), href=f"{one.folder}/{INDEX}")
    flags = f"; ⚠ {plural(len(one.flags), 'flag')}, see there" if one.flags else ""
    return tag("h3", link, " ", tag("small", words(one.parameters) + flags)) + tally(one.verdicts)


def _table(entries: list[ClaimEntry], made: list[Made]) -> str:
    scales = (tag("th", words(one.scale), tag("small", f" {words(one.parameters)}"), scope="col") for one in made)
    rows = (
        tag("tr", tag("th", _name(entry), scope="row"), *(_verdict(entry, one) for one in made)) for entry in entries
    )
    head = tag("thead", tag("tr", tag("th", "Claim", scope="col"), *scales))
    return tag("table", head, tag("tbody", *rows), class_="claims cards ladder")


def _name(entry: ClaimEntry) -> str:
    own = "" if entry.of_paper else tag("small", " ours")
    return tag("b", words(entry.id)) + own + " " + words(entry.claim.statement)


def _verdict(entry: ClaimEntry, one: Made) -> str:
    verdict = one.verdicts.get(entry.id)
    shown = NOTHING if verdict is None else cell(verdict, entry, link=f"{one.folder}/{INDEX}#{entry.id}")
    return tag("td", shown, data_label=one.scale)
