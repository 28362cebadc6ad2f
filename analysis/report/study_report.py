"""The report of a study at one scale. Notebooks call its methods to show items: tables, figures and claims.

    mor = fewbits.read("mor", scale="cpu").report
    mor.table("Table 2")                # a DataFrame; in Jupyter it is shown as the table of the report
    mor.figure("Figure 5")              # a matplotlib Figure, shown with its caption
    mor.claims("M3", "M4", "M5")        # a DataFrame

The report's files contain the items that the notebook has shown. An item without data in the store, or without a
function that makes it, is shown as a text that says so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from markupsafe import Markup

from fewbits.analysis.engine.claims.findings import Verdict
from fewbits.analysis.engine.claims.judging import judge_study, training_of
from fewbits.analysis.engine.claims.schema import Claim, StudyClaims, claim_ids, load_claims, studies_with_claims
from fewbits.analysis.engine.claims.verdicts import FAMILIES
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.paper import Paper, paper
from fewbits.analysis.report.items import FigureResult, Picture, Table, TableResult, why_missing
from fewbits.analysis.report.registry import Entry, StudyRegistry, study_registry
from fewbits.analysis.views import claims, remarks, trials
from fewbits.analysis.views.html import render
from fewbits.analysis.views.provenance import Provenance
from fewbits.analysis.views.shown_frame import Items, ShownFrame, finding_row, outcome_rows, shown_frame, verdict_row
from fewbits.analysis.views.tables import table_html
from fewbits.common.from_dict import one_of
from fewbits.sweeps.planning.plan import Plan
from fewbits.sweeps.planning.stored_plans import RUNS, find_plan
from fewbits.sweeps.planning.studies import STUDIES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fewbits.analysis.views.shown_figure import Drawing, ShownFigure

NOT_MADE = "fewbits does not make this item yet"


def read_study(overrides: Sequence[str]) -> StudyReport:
    """Return the report of the study that the overrides select. overrides: as for `fewbits sweep`.

    If they select a sweep file of the user's own, the file's key `study` names the study. Raise ValueError if the
    study is unknown.
    """
    return report_of(find_plan(overrides), overrides)


def report_of(plan: Plan, overrides: Sequence[str]) -> StudyReport:
    """Return the report of a plan. overrides: those that selected the plan. Raise ValueError for an unknown study."""
    sweeps = plan.sweeps
    studies = sorted({sweep.study for sweep in sweeps})
    for study in studies:
        one_of("study", study, STUDIES)
    (study,) = studies
    return StudyReport(study, sweeps[0].scale, tuple(overrides), Results(plan))


@dataclass
class StudyReport:
    """The tables, figures and verdicts of a study at one scale."""

    study: str
    scale: str
    overrides: tuple[str, ...]  # the ones that selected the plan, as for `fewbits sweep`
    results: Results
    tables: dict[str, Table] = field(default_factory=dict)  # by id, the tables that have been shown
    figures: dict[str, Picture] = field(default_factory=dict)  # by id, the figures that have been shown
    shown_claims: list[str] = field(default_factory=list)  # the ids of the claims that have been shown
    _drawings: dict[str, Drawing] = field(default_factory=dict)  # a cache by the figures' ids

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
        return Provenance(self.results, self.overrides)

    @property
    def size(self) -> str:
        """The models' sizes, the longest run's tokens, and the share of training with quantized recipes, as text.

        A run that branches from a trunk trains only the tokens after the branch with its own recipe. The text gives the
        share of these tokens among all tokens of the run and its trunk, for the quantized run with the greatest share.
        """
        total = training_of(self.results, self.results.plan.trials)
        if total is None:
            return self.results.scale
        own = training_of(self.results, self._quantized())
        if own is None:
            return f"{total}; no quantized run"
        share = f"up to {own.quantized:.0%} of a quantized run's tokens in its own recipe"
        return f"{total}; {share}" + (", the others in that of its trunk" if own.quantized < 1 else "")

    def _quantized(self) -> Iterator[str]:
        """Yield the ids of the trials that quantize an operand or use a sampler; trunks are left out."""
        trunks = {planned.parent for planned in self.results.plan.trials.values()}
        for trial, planned in self.results.plan.trials.items():
            recipe = planned.trial.recipe
            operands = any(slot.spec is not None for _, slot in recipe.operands.items())
            if trial not in trunks and (operands or recipe.sampler.kind != "none"):
                yield trial

    # -------------------------------------------------------------------------------- the start of a report

    def opening(self) -> ShownFrame:
        """Return a table with the number of claims for each possible verdict, such as `reproduced`.

        In the report, the header of the page shows this table, with title, scale and warnings.
        """
        study = STUDIES[self.study]
        head = render(
            "header",
            kicker="fewbits report",
            title=study.title,
            arxiv=study.arxiv,
            about=f"Scale {self.scale}: {self.size}. Our runs are compared with the paper's.",
            tally=claims.tally(self.verdicts.values()),
        )
        return shown_frame(outcome_rows(self.verdicts.values()), "title", head + self.origin.flags())

    def summary(self) -> ShownFrame:
        """Return a table with a row for each claim: its statement, verdict, reason, and the numbers of one comparison.

        This comparison is the one with the greatest p value (`Verdict.leading`). In the report, the rules for verdicts
        come first, then the claims in three groups: exact, mechanism and training.
        """
        html = claims.rules() + claims.summary(self.verdicts)
        return shown_frame(map(verdict_row, self.verdicts.values()), "summary of the verdicts", html)

    # -------------------------------------------------------------------------------- items

    def show(self, *names: str) -> Items:
        """Return the tables, figures and claims with these ids, which a notebook shows one below the other."""
        return Items(self._item(name) for name in names)

    def _item(self, name: str) -> ShownFrame | ShownFigure:
        if name in self.registry.table_ids:
            return self.table(name)
        return self.figure(name) if name in self.registry.figure_ids else self.claims(name)

    def table(self, name: str) -> ShownFrame:
        """Return the table with the id `name` in long form: a row for each cell, with the paper's number and ours.

        If there are no data, the frame is empty, and its display gives the reason. Raise ValueError for an unknown id.
        """
        one_of(f"table of {self.study}", name, self.registry.table_ids)
        entry = next((entry for entry in self.registry.tables if entry.id == name), None)
        if entry is None:
            return shown_frame((), name, self._absent(name))
        self.tables[name] = result = entry.make(self.results)
        printed = self.paper.table(name) if entry.of_paper else None
        html = self._made(
            entry,
            result,
            source=self.paper.sources[printed.source] if printed else "",
            body=table_html(result, self.trials) if isinstance(result, TableResult) else "",
        )
        return shown_frame(result.frame() if isinstance(result, TableResult) else (), name, html)

    def figure(self, name: str) -> ShownFigure:
        """Return the figure with the id `name` as a matplotlib Figure in the light theme.

        If there are no data, the figure shows the reason, which its attribute `missing` also has. Raise ValueError for
        an unknown id.
        """
        from fewbits.analysis.views.shown_figure import shown_figure  # imported here: matplotlib is slow to import

        one_of(f"figure of {self.study}", name, self.registry.figure_ids)
        entry = next((entry for entry in self.registry.figures if entry.id == name), None)
        if entry is None:
            return shown_figure(None, name, lambda _: self._absent(name), self._drawn(name), NOT_MADE)
        self.figures[name] = result = entry.make(self.results)
        caption = self.paper.figure(name).caption if entry.of_paper else ""
        if not isinstance(result, FigureResult):
            html = self._made(entry, result, caption=caption)
            return shown_figure(None, name, lambda _: html, self._drawn(name), why_missing(result))

        def card(drawing: Drawing | None) -> Markup:
            values = {"caption": caption, "picture": drawing, "notes": result.notes, "ids": result.trials}
            return self._made(entry, result, **values)

        return shown_figure(result, name, card, self._drawn(name))

    def _drawn(self, name: str) -> Callable[[Figure], Drawing]:
        return lambda light: self.drawing(name, light)

    def drawing(self, name: str, light: Figure | None = None) -> Drawing:
        """Return a figure as SVG and PNG for the report's files, from a cache if it was drawn before.

        name: the id of a figure that has been shown and has data. light: this figure, if it is already drawn in the
        light theme.
        """
        from fewbits.analysis.views.shown_figure import draw

        if name not in self._drawings:
            self._drawings[name] = draw(cast(FigureResult, self.figures[name]), light)
        return self._drawings[name]

    def claims(self, *names: str) -> ShownFrame:
        """Return a table with a row for each comparison of the claims with these ids; without ids, of all claims.

        In the report, each claim is shown in full.
        """
        names = names or tuple(self.verdicts)
        for name in names:
            one_of(f"item of {self.study}", name, dict.fromkeys([*self.verdicts, *claim_ids(self.study)]))
        verdicts = [self.verdicts[name] for name in names if name in self.verdicts]
        self.shown_claims += [verdict.claim.id for verdict in verdicts]
        rows = [finding_row(verdict, finding) for verdict in verdicts for finding in verdict.findings]
        return shown_frame(rows, ", ".join(names), Markup().join(map(self._claim_html, names)))

    def _claim_html(self, name: str) -> Markup:
        return claims.card(self.verdicts[name], self.trials) if name in self.verdicts else self._absent(name)

    def own(self) -> Items:
        """Return the tables, figures and claims that the paper does not have and that no earlier cell has shown."""
        tables = [self.table(e.id) for e in self.registry.tables if not e.of_paper and e.id not in self.tables]
        figures = [self.figure(e.id) for e in self.registry.figures if not e.of_paper and e.id not in self.figures]
        ours = [claim.id for claim in self._claims() if claim.ours and claim.id not in self.shown_claims]
        items: list[ShownFrame | ShownFigure] = [*tables, *figures, *([self.claims(*ours)] if ours else [])]
        return Items(items or [shown_frame((), "findings of our own", render("list", items=["None."]))])

    def _claims(self) -> Iterator[Claim]:
        yield from (verdict.claim for verdict in self.verdicts.values())

    def _made(self, entry: Entry[Any], result: Table | Picture, **values: object) -> Markup:
        missing = "" if isinstance(result, TableResult | FigureResult) else why_missing(result)
        return self._framed(entry.id, title=entry.title, ours=not entry.of_paper, missing=missing, **values)

    def _absent(self, name: str) -> Markup:
        return self._framed(name, missing=f"{name}: {NOT_MADE}.")

    def _framed(self, name: str, **values: object) -> Markup:
        empty = {"title": "", "ours": False, "caption": "", "source": "", "body": "", "picture": None}
        return render("item", name=name, trials=self.trials, **(empty | {"notes": (), "ids": ()} | values))

    # -------------------------------------------------------------------------------- the end of a report

    def remarks(self) -> ShownFrame:
        """Return a table with a row for each remark on the verdicts; fixed rules choose the remarks (`remarks.py`)."""
        rows = [dict(zip(remarks.COLUMNS, row, strict=True)) for row in remarks.remarks(self.verdicts)]
        return shown_frame(rows, "remarks", remarks.remarks_html(self.verdicts))

    def not_printed(self) -> ShownFrame:
        """Return a table, with a row for each item of the paper whose values the paper does not state as numbers.

        An item is a row of one of the paper's tables, a figure, or a single number; the column `number` names it. The
        column `source` says where the values in the study's file `paper.yaml` are from, for example from a
        figure, or that they are not known.
        """
        numbers = remarks.not_printed(self.paper)
        html = render("list", items=[f"{number}: {source}" for number, source in numbers] or ["Nothing."])
        rows = [{"number": number, "source": source} for number, source in numbers]
        return shown_frame(rows, "numbers that the paper does not print", html)

    def unreached(self) -> ShownFrame:
        """Return a table of reasons why claims cannot be tested, at this scale or at any, each with the claims' ids."""
        reasons = remarks.unreached(self.verdicts)
        html = render("remarks", sections=[("", reasons)] if reasons else [])
        rows = [{"claims": ", ".join(names), "reason": reason} for names, reason in reasons]
        return shown_frame(rows, "out of reach", html)

    def provenance(self) -> ShownFrame:
        """Return a table (name, value) of the code, data and machines behind the numbers.

        In the report, the table of all trials follows.
        """
        rows = [{"name": name, "value": value} for name, value, _ in self.origin.rows()]
        return shown_frame(rows, "provenance", self.origin.table() + trials.trial_table(self.trials))

    # -------------------------------------------------------------------------------- for programs

    def unshown(self) -> Iterator[str]:
        """Yield the ids of the registered tables and figures and of the claims that the notebook has not shown."""
        yield from (entry.id for entry in self.registry.tables if entry.id not in self.tables)
        yield from (entry.id for entry in self.registry.figures if entry.id not in self.figures)
        yield from (claim.id for claim in self._claims() if claim.id not in self.shown_claims)

    def record(self) -> dict[str, object]:
        """Return the contents of verdicts.json; its key `claims` has each Verdict as a dictionary, by claim id."""
        return {
            "study": self.study,
            "scale": self.scale,
            "size": self.size,
            "overrides": [override for override in self.overrides if override.partition("=")[0] != RUNS],
            "counts": claims.counts(self.verdicts),
            "families": FAMILIES,
            "flags": list(self.results.flags),
            "mixed": self.origin.mixed,
            "notices": self.origin.notices,
            "claims": {name: dataclasses.asdict(verdict) for name, verdict in self.verdicts.items()},
            "trials": {trial.id: trial.folder for trial in self.trials.values()},
        }
