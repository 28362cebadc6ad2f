"""The report of a study at one scale. Notebooks call its methods to show items: tables, figures and claims.

An item without data is shown as a text that says so.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
from markupsafe import Markup

from fewbits.analysis.engine.claims.findings import Verdict
from fewbits.analysis.engine.claims.judging import judge_file, judge_study, scale_words
from fewbits.analysis.engine.claims.schema import studies_with_claims
from fewbits.analysis.engine.claims.verdicts import FAMILIES
from fewbits.analysis.engine.results.archive import Archive, Joined
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.paper import paper
from fewbits.analysis.report.items import FigureResult, TableResult, why_missing
from fewbits.analysis.report.registry import Entry, StudyRegistry, declared, study_registry
from fewbits.analysis.report.top import top_rows, top_screen
from fewbits.analysis.views import tables
from fewbits.analysis.views.html import anchor, link, render
from fewbits.analysis.views.provenance import Provenance
from fewbits.analysis.views.shown import Items, ShownFigure, ShownFrame, finding_row, shown_figure, shown_frame
from fewbits.common.from_dict import one_of
from fewbits.sweeps.planning.stored_plans import find_plan, is_location
from fewbits.sweeps.planning.studies import STUDIES

NOTES = 1  # of an item that a page shows


def read_study(overrides: Sequence[str], claims: Path | None = None, archives: Sequence[Archive] = ()) -> StudyReport:
    """Return the report over the store, with archives for what it lacks. claims: a user's file, judged instead."""
    plan = find_plan(overrides)
    return report_of(Results(plan, Joined(archives)) if archives else Results(plan), overrides, claims)


def report_of(results: Results, overrides: Sequence[str], claims: Path | None = None) -> StudyReport:
    """Return the report of these results. overrides: those that selected the plan; claims: as for `read_study`."""
    (study,) = {sweep.study for sweep in results.plan.sweeps}
    if claims is None and study not in STUDIES:
        raise ValueError(
            f"{study!r} is no study, so it has no report or claims: valid are {', '.join(STUDIES)}; for claims of your "
            "own: fewbits claims my-sweep.yaml --claims my-claims.yaml"
        )
    chosen = tuple(one for one in overrides if not is_location(one))
    report = StudyReport(study, results.plan.sweeps[0].scale, chosen, results)
    if claims is not None:
        report.verdicts = judge_file(claims, results, overrides)
    return report


@dataclass
class StudyReport:
    """The tables, figures and verdicts of a study at one scale."""

    study: str
    scale: str
    overrides: tuple[str, ...]  # the ones that selected the plan, as for `fewbits sweep`, without paths
    results: Results
    shown: set[str] = field(default_factory=set)  # the ids of the tables, figures and claims that have been shown
    _noted: set[str] = field(default_factory=set)  # the notes of items that have been shown

    @property
    def name(self) -> str:
        return f"{self.study}-{self.scale}"

    @cached_property
    def registry(self) -> StudyRegistry:
        return study_registry(self.study)

    @cached_property
    def verdicts(self) -> dict[str, Verdict]:
        return judge_study(self.study, self.results) if self.study in studies_with_claims() else {}

    @cached_property
    def origin(self) -> Provenance:
        return Provenance(self.results, self.overrides)

    @property
    def size(self) -> str:
        """The models' sizes, the training with the recipe, and the number of seeds, as text."""
        return scale_words(self.results, self.results.plan.trials, None)

    def top(self) -> ShownFrame:
        """Return the table of the first screen, with a headline and a figure: the effects that matter most."""
        of = declared(self.study).top
        rows = top_rows(self.results, self.study, of, self.verdicts) if of else []
        html = top_screen(STUDIES[self.study], self.scale, self.size, of, rows, self.verdicts) + self.origin.flags()
        frame = pd.DataFrame([row.record() for row in rows])
        files = {"tables/top.csv": frame.to_csv(index=False)} if rows else {}
        files["verdicts.json"] = json.dumps(self.record(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        return shown_frame(frame, "the first screen", html, files)

    def show(self, *names: str) -> Items:
        """Return the tables, figures and claims with these ids, which a notebook shows one below the other."""
        return Items(self._item(name) for name in names)

    def _item(self, name: str) -> ShownFrame | ShownFigure:
        if name in self.registry.tables:
            return self.table(name)
        return self.figure(name) if name in self.registry.figures else self.claims(name)

    def table(self, name: str) -> ShownFrame:
        """Return the table in long form, a row for each cell; without data it is empty, and its display says why."""
        one_of(f"table of {self.study}", name, self.registry.tables)
        self.shown.add(name)
        entry = self.registry.tables[name]
        result = entry.make(self.results)
        if not isinstance(result, TableResult):
            return shown_frame((), name, _framed(entry, missing=why_missing(result)))
        of = paper(self.study)
        printed = of.table(name) if entry.of_paper else None
        source = of.sources[printed.source] if printed and printed.source != "printed" else ""
        body, frame = tables.table_html(result, self._new(result.notes)), result.frame()
        file = f"tables/{anchor(name)}.csv"
        html = _framed(entry, source=source, body=body, file=link(file, "CSV"))
        return shown_frame(frame, name, html, {file: frame.to_csv(index=False)})

    def figure(self, name: str) -> ShownFigure:
        """Return the figure with this id as a matplotlib Figure; without data, it shows the reason (`missing`)."""
        one_of(f"figure of {self.study}", name, self.registry.figures)
        self.shown.add(name)
        entry = self.registry.figures[name]
        result = entry.make(self.results)
        if not isinstance(result, FigureResult):
            missing = why_missing(result)
            return shown_figure(None, name, lambda _: _framed(entry, missing=missing), missing)
        caption = paper(self.study).figure(name).caption if entry.of_paper else ""
        notes = self._new(result.notes)
        return shown_figure(result, name, lambda image: _framed(entry, caption=caption, image=image, notes=notes))

    def claims(self, *names: str) -> ShownFrame:
        """Return a row for each comparison of the claims with these ids or, without ids, of all claims."""
        for name in names:
            one_of(f"item of {self.study}", name, self.verdicts)
        verdicts = [self.verdicts[name] for name in names or self.verdicts]
        self.shown |= {verdict.claim.id for verdict in verdicts}
        rows = [finding_row(verdict, finding) for verdict in verdicts for finding in verdict.findings]
        if names:
            return shown_frame(rows, ", ".join(names), Markup().join(map(tables.card, verdicts)))
        files = {"tables/claims.csv": pd.DataFrame(rows).to_csv(index=False)}
        return shown_frame(rows, "claims", tables.cards(verdicts), files)

    def rest(self) -> Items:
        """Return the tables and figures of our own that no earlier cell has shown; the page names tables as files."""
        entries: list[Entry[Any]] = [*self.registry.tables.values(), *self.registry.figures.values()]
        names = [entry.id for entry in entries if not entry.of_paper and entry.id not in self.shown]
        items = [self._item(name) for name in names]
        shown = [one for one in items if not one.empty_item]
        files = {name: text for one in shown if isinstance(one, ShownFrame) for name, text in one.report_files.items()}
        missing = ", ".join(one.report_name for one in items if one.empty_item)
        html = render("rest", missing=missing, links=Markup(", ").join(map(link, files)))
        last = shown_frame((), "files of tables", html, files)
        return Items([*(one for one in shown if not isinstance(one, ShownFrame)), last])

    def _new(self, notes: tuple[str, ...]) -> tuple[str, ...]:
        """Return the first NOTES of the notes that no earlier item has shown."""
        new = tuple(note for note in notes if note not in self._noted)[:NOTES]
        self._noted |= set(notes)
        return new

    def appendix(self) -> ShownFrame:
        """Return a table (name, value) of the code, data and machines behind the numbers, after the statistics."""
        rows = [{"name": name, "value": value} for name, value, _ in self.origin.rows()]
        trials = self.results.trials.drop(columns=["computed", "axes"], errors="ignore").to_csv(index=False)
        html = render("rules", families=FAMILIES) + render("provenance", rows=self.origin.rows())
        return shown_frame(rows, "provenance", html, {"tables/trials.csv": trials})

    def record(self) -> dict[str, object]:
        """Return the contents of verdicts.json; its key `claims` has each Verdict as a dictionary, by claim id."""
        return {
            "study": self.study,
            "scale": self.scale,
            "size": self.size,
            "overrides": list(self.overrides),
            "counts": tables.counts(self.verdicts),
            "families": FAMILIES,
            "flags": list(self.results.flags),
            "mixed": self.origin.mixed,
            "notices": self.origin.notices,
            "claims": {name: dataclasses.asdict(verdict) for name, verdict in self.verdicts.items()},
        }


def _framed(entry: Entry[Any], **values: object) -> Markup:
    """Return a table or figure as HTML. values: further variables of the template; those that it lacks are empty."""
    empty = dict.fromkeys(("caption", "source", "body", "file", "image", "notes", "missing"), "")
    return render("item", name=entry.id, title=entry.title, ours=not entry.of_paper, **(empty | values))
