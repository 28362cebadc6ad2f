"""The report of a study at one scale, with the functions that its notebook calls for each item.

    mor = read_study(["study=mor", "scale=cpu"])
    mor.table("Table 2").frame          # a DataFrame; in Jupyter the item shows the table of the report
    mor.figure("Figure 5").figure       # a matplotlib Figure
    mor.claims("M3", "M4", "M5").frame

The report's files are written from the items that the notebook has shown. An item without data in the store, or
without a function that makes it, shows a text that says so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from markupsafe import Markup

from fewbits.analysis.engine.claims.findings import Verdict
from fewbits.analysis.engine.claims.judging import judge_study, training_of
from fewbits.analysis.engine.claims.schema import Claim, StudyClaims, load_claims, studies_with_claims
from fewbits.analysis.engine.claims.verdicts import FAMILIES
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.paper import Paper, paper
from fewbits.analysis.report.items import FigureResult, Picture, Table, TableResult, why_missing
from fewbits.analysis.report.registry import Entry, StudyRegistry, study_registry
from fewbits.analysis.report.shown import ClaimsItem, FigureItem, TableItem, draw
from fewbits.analysis.views import claims, remarks, trials
from fewbits.analysis.views.html import Html, render, style
from fewbits.analysis.views.provenance import Provenance
from fewbits.analysis.views.tables import table_html
from fewbits.common.from_dict import one_of
from fewbits.sweeps.planning.lookup import find_plan
from fewbits.sweeps.planning.studies import STUDIES


def read_study(overrides: Sequence[str]) -> StudyReport:
    """Return the report of the study that the overrides select; they are those of `fewbits sweep`.

    A sweep file of the user's own names its study in the key `study`. Raise ValueError for an unknown study.
    """
    found = find_plan(overrides)
    sweeps = found.plan.sweeps
    studies = sorted({sweep.study for sweep in sweeps})
    for study in studies:
        one_of("study", study, STUDIES)
    (study,) = studies
    results = Results(found.plan, found.earlier)
    return StudyReport(study, sweeps[0].scale, tuple(overrides), results, found.changed, found.notes)


# -------------------------------------------------------------------------------- a study


@dataclass
class StudyReport:
    """The tables, figures and verdicts of a study at one scale."""

    study: str
    scale: str
    overrides: tuple[str, ...]
    results: Results
    changed: str = ""  # how the sweep's definition differs from that in the stored plan
    notes: tuple[str, ...] = ()  # notes on the plan that a command prints
    tables: dict[str, TableItem] = field(default_factory=dict)  # the tables that have been shown
    figures: dict[str, FigureItem] = field(default_factory=dict)
    shown_claims: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The name of the report's folder."""
        return f"{self.study}-{self.scale}"

    @cached_property
    def paper(self) -> Paper:
        return paper(self.study)

    @cached_property
    def registry(self) -> StudyRegistry:
        return study_registry(self.study)

    @cached_property
    def study_claims(self) -> StudyClaims:
        return load_claims(self.study) if self.study in studies_with_claims() else StudyClaims(self.study, ())

    @cached_property
    def verdicts(self) -> dict[str, Verdict]:
        return judge_study(self.study, self.results) if self.study_claims.claims else {}

    @cached_property
    def trials(self) -> dict[str, trials.Trial]:
        return trials.trials_of(self.results)

    @cached_property
    def origin(self) -> Provenance:
        return Provenance(self.results, self.overrides, self.changed)

    @property
    def size(self) -> str:
        """The amount of training, and the greatest share of a quantized run's tokens that its own recipe trained."""
        total = training_of(self.results, self.results.plan.trials)
        if total is None:
            return self.results.scale
        own = training_of(self.results, self._quantized())
        share = (
            f"up to {own.quantized:.0%} of a quantized run's tokens in its own recipe" if own else "no quantized run"
        )
        return f"{total}; {share}"

    def _quantized(self) -> Iterator[str]:
        """Yield the ids of the trials that quantize something, without trunks, from which others branch."""
        trunks = {planned.parent for planned in self.results.plan.trials.values()}
        for trial, planned in self.results.plan.trials.items():
            recipe = planned.trial.recipe
            operands = any(slot.spec is not None for _, slot in recipe.operands.items())
            if trial not in trunks and (operands or recipe.sampler.kind != "none"):
                yield trial

    # -------------------------------------------------------------------------------- the start of a report

    def opening(self) -> Html:
        """Return the title with the number of verdicts of each outcome, and the warnings to read before any number."""
        study = STUDIES[self.study]
        head = render(
            "header",
            kicker="fewbits report",
            title=study.title,
            arxiv=study.arxiv,
            about=f"Scale {self.scale}: {self.size}. Our runs are compared with the paper's.",
            tally=claims.tally(self.verdicts.values()),
        )
        return Html(style() + head + self.origin.flags(), "title")

    def summary(self) -> Html:
        """Return how claims are judged, and the verdicts by group: exact, mechanism and training claims."""
        return Html(claims.rules() + claims.summary(self.verdicts), "summary of the verdicts")

    # -------------------------------------------------------------------------------- items

    def show(self, *names: str) -> Html:
        """Return tables, figures and claims by id, one below the other."""
        return Html(Markup().join(self._shown(name).text for name in names), ", ".join(names))

    def _shown(self, name: str) -> Html:
        if name in self.registry.table_ids:
            return self.table(name)
        return self.figure(name) if name in self.registry.figure_ids else self.claims(name)

    def table(self, name: str) -> TableItem:
        """Return a table by its id; if nothing makes it, an item that says so."""
        entry = next((entry for entry in self.registry.tables if entry.id == name), None)
        if entry is None:
            return TableItem(self._absent(name), name)
        result = entry.make(self.results)
        printed = self.paper.table(name) if entry.of_paper else None
        html = self._item(
            entry,
            result,
            source=self.paper.sources[printed.source] if printed else "",
            body=table_html(result, self.trials) if isinstance(result, TableResult) else "",
        )
        self.tables[name] = item = TableItem(html, name, result)
        return item

    def figure(self, name: str) -> FigureItem:
        """Return a figure by its id; if nothing makes it, an item that says so."""
        entry = next((entry for entry in self.registry.figures if entry.id == name), None)
        if entry is None:
            return FigureItem(self._absent(name), name)
        result = entry.make(self.results)
        caption = self.paper.figure(name).caption if entry.of_paper else ""
        if isinstance(result, FigureResult):
            drawing = draw(result)
            html = self._item(entry, result, caption=caption, picture=drawing, notes=result.notes, ids=result.trials)
        else:
            drawing, html = None, self._item(entry, result, caption=caption)
        self.figures[name] = item = FigureItem(html, name, result, drawing)
        return item

    def claims(self, *names: str) -> ClaimsItem:
        """Return claims in full, with their verdicts; without names, all claims."""
        names = names or tuple(self.verdicts)
        verdicts = [self.verdicts[name] for name in names if name in self.verdicts]
        self.shown_claims += [verdict.claim.id for verdict in verdicts]
        cards = [
            claims.card(self.verdicts[name], self.trials) if name in self.verdicts else self._absent(name)
            for name in names
        ]
        return ClaimsItem(Markup().join(cards), f"claims {', '.join(names)}", tuple(verdicts))

    def own(self) -> Html:
        """Return the tables, figures and claims of our own that no earlier cell has shown."""
        parts = [self.table(e.id).text for e in self.registry.tables if not e.of_paper and e.id not in self.tables]
        parts += [self.figure(e.id).text for e in self.registry.figures if not e.of_paper and e.id not in self.figures]
        ours = [claim.id for claim in self._claims() if claim.ours and claim.id not in self.shown_claims]
        parts += [self.claims(*ours).text] if ours else []
        return Html(Markup().join(parts) or render("list", items=["None."]), "findings of our own")

    def _claims(self) -> Iterator[Claim]:
        yield from (verdict.claim for verdict in self.verdicts.values())

    def _item(self, entry: Entry[Any], result: Table | Picture, **values: object) -> Markup:
        missing = "" if isinstance(result, TableResult | FigureResult) else why_missing(result)
        return self._framed(entry.id, title=entry.title, ours=not entry.of_paper, missing=missing, **values)

    def _absent(self, name: str) -> Markup:
        return self._framed(name, missing=f"{name}: fewbits does not make this item yet.")

    def _framed(self, name: str, **values: object) -> Markup:
        empty = {"title": "", "ours": False, "caption": "", "source": "", "body": "", "picture": None}
        return render("item", name=name, trials=self.trials, **(empty | {"notes": (), "ids": ()} | values))

    # -------------------------------------------------------------------------------- the end of a report

    def remarks(self) -> Html:
        """Return the remarks on verdicts; fixed rules choose them."""
        return Html(remarks.remarks(self.verdicts), "remarks")

    def not_printed(self) -> Html:
        """Return the list of the paper's numbers that are inferred or missing."""
        return Html(remarks.not_printed(self.paper), "numbers that the paper does not print")

    def unreached(self) -> Html:
        """Return the claims that are out of reach, with the reasons."""
        return Html(remarks.unreached(self.verdicts), "out of reach")

    def provenance(self) -> Html:
        """Return the table of code, data and machines behind the numbers, and the table of all trials."""
        return Html(self.origin.table() + trials.trial_table(self.trials), "provenance")

    # -------------------------------------------------------------------------------- for programs

    def unshown(self) -> Iterator[str]:
        """Yield the ids of the registered tables and figures and of the claims that the notebook has not shown."""
        yield from (entry.id for entry in self.registry.tables if entry.id not in self.tables)
        yield from (entry.id for entry in self.registry.figures if entry.id not in self.figures)
        yield from (claim.id for claim in self._claims() if claim.id not in self.shown_claims)

    def record(self) -> dict[str, object]:
        """Return the contents of verdicts.json."""
        return {
            "study": self.study,
            "scale": self.scale,
            "size": self.size,
            "overrides": list(self.overrides),
            "counts": claims.counts(self.verdicts),
            "families": FAMILIES,
            "flags": list(self.results.flags),
            "mixed": self.origin.mixed,
            "notices": self.origin.notices,
            "claims": {name: dataclasses.asdict(verdict) for name, verdict in self.verdicts.items()},
            "trials": {trial.id: trial.folder for trial in self.trials.values()},
        }
