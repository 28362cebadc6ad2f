"""A study read at one scale: what its notebook calls, item by item, in the order of the paper.

    mor = read(["study=mor", "scale=cpu"])
    mor.table("Table 2")
    mor.figure("Figure 5")
    mor.claims("M3", "M4", "M5")

Everything is made once; the report's files are written from what the notebook has shown. In Jupyter it looks as it does
in the report. What a store has no data for is shown in words, and so is what nobody has registered.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

from fewbits.analysis.engine.frames import Results
from fewbits.analysis.engine.paper import Paper, paper
from fewbits.analysis.registry import ClaimEntry, Shelf, judge_all, shelf
from fewbits.analysis.results import FigureResult, Picture, Table, TableResult
from fewbits.analysis.show import claims, discussion, figures, tables, trials
from fewbits.analysis.show.figures import Drawn
from fewbits.analysis.show.markup import Html, anchor, listed, tag, words
from fewbits.analysis.show.provenance import Provenance
from fewbits.analysis.verdicts import Verdict
from fewbits.common.from_dict import one_of
from fewbits.sweeps.planning.lookup import find_plan
from fewbits.sweeps.planning.studies import STUDIES

STYLE = Path(__file__).with_name("report.css")


def read(sentence: Sequence[str]) -> Reading:
    """The study that the words name, as `fewbits sweep` takes them; a sweep of your own names it by `study: mor`."""
    found = find_plan(sentence)
    sweeps = found.plan.sweeps
    studies = sorted({sweep.study for sweep in sweeps})
    for study in studies:
        one_of("study", study, STUDIES)
    (study,) = studies
    results = Results.of(found.plan, found.earlier)
    return Reading(study, sweeps[0].scale, tuple(sentence), results, found.changed, found.notes)


@dataclasses.dataclass
class Reading:
    study: str
    scale: str
    sentence: tuple[str, ...]  # the words it was read by
    results: Results
    changed: str = ""  # how the sweep's definition differs from that of the plan which is read
    notes: tuple[str, ...] = ()  # what a command says on stderr about the plan
    made_tables: dict[str, Table] = dataclasses.field(default_factory=dict)
    made_figures: dict[str, Picture] = dataclasses.field(default_factory=dict)
    drawings: dict[str, Drawn] = dataclasses.field(default_factory=dict)
    shown_claims: list[str] = dataclasses.field(default_factory=list)

    @property
    def name(self) -> str:
        """Of its report's folder."""
        return f"{self.study}-{self.scale}"

    @cached_property
    def paper(self) -> Paper:
        return paper(self.study)

    @cached_property
    def shelf(self) -> Shelf:
        return shelf(self.study)

    @cached_property
    def verdicts(self) -> dict[str, Verdict]:
        return judge_all(self.study, self.results)

    @cached_property
    def trials(self) -> dict[str, trials.Trial]:
        return trials.trials_of(self.results)

    @cached_property
    def origin(self) -> Provenance:
        return Provenance(self.results, self.sentence, self.changed)

    # -------------------------------------------------------------------------------- what opens a report

    def title(self) -> Html:
        of = STUDIES[self.study]
        number = tag("a", f"arXiv {words(of.arxiv)}", href=f"https://arxiv.org/abs/{of.arxiv}")
        at = f"Scale {words(self.scale)}: {words(self.results.scale)}, against the paper's own runs"
        head = tag("p", "fewbits report", class_="kicker") + tag("h1", words(of.title))
        text = tag("p", f"{number}. {at}.", class_="under") + claims.tally(self.verdicts)
        return Html(tag("style", STYLE.read_text("utf-8")) + tag("header", head, text), "title")

    def flags(self) -> Html:
        return Html(self.origin.flags(), "flags")

    def rules(self) -> Html:
        return Html(claims.rules(), "how claims are judged")

    def summary(self) -> Html:
        return Html(claims.summary(self.shelf.claims, self.verdicts), "summary of the verdicts")

    # -------------------------------------------------------------------------------- items

    def table(self, name: str) -> Html:
        entry = next((entry for entry in self.shelf.tables if entry.id == name), None)
        if entry is None:
            return self._unregistered(name)
        made = self.made_tables[name] = entry.make(self.results)
        printed = self.paper.table(name) if entry.of_paper else None
        if isinstance(made, TableResult):
            inside = tables.table(made, self.trials)
        else:
            inside = tag("p", words(tables.missing(made)), class_="missing")
        source = tag("p", f"The paper's numbers: {words(self.paper.sources[printed.source])}.") if printed else ""
        return self._item(name, entry.title, source, inside, own=not entry.of_paper)

    def figure(self, name: str) -> Html:
        entry = next((entry for entry in self.shelf.figures if entry.id == name), None)
        if entry is None:
            return self._unregistered(name)
        made = self.made_figures[name] = entry.make(self.results)
        caption = self.paper.figure(name).caption if entry.of_paper else ""
        said = tag("p", tag("b", "In the paper: "), words(caption)) if caption else ""
        if isinstance(made, FigureResult):
            drawing = self.drawings[name] = figures.drawn(made)
            inside = figures.picture(drawing, f"{name}: {entry.title}. {caption}")
            inside += listed(map(words, made.notes), "notes") if made.notes else ""
            inside += trials.behind_folded(made.trials, self.trials)
        else:
            inside = tag("p", words(tables.missing(made)), class_="missing")
        return self._item(name, entry.title, said, inside, own=not entry.of_paper)

    def claims(self, *names: str) -> Html:
        found = {entry.id: entry for entry in self.shelf.claims}
        cards = [self._card(found[name]) if name in found else self._unregistered(name).text for name in names]
        return Html("".join(cards), f"claims {', '.join(names)}")

    def own(self) -> Html:
        """What is registered beside the paper's: tables, figures and claims of ours that no cell has shown yet."""
        parts = [self.table(e.id).text for e in self.shelf.tables if not e.of_paper and e.id not in self.made_tables]
        parts += [
            self.figure(e.id).text for e in self.shelf.figures if not e.of_paper and e.id not in self.made_figures
        ]
        parts += [self._card(e) for e in self.shelf.claims if not e.of_paper and e.id not in self.shown_claims]
        return Html("".join(parts) or tag("p", "None is registered."), "findings of our own")

    def _card(self, entry: ClaimEntry) -> str:
        self.shown_claims.append(entry.id)
        return claims.card(entry, self.verdicts[entry.id], self.trials)

    def _item(self, name: str, title: str, said: str, inside: str, *, own: bool) -> Html:
        whose = tag("small", "ours, not the paper's", class_="own") if own else ""
        head = tag("h4", tag("span", words(name), class_="id"), " ", words(title), " ", whose)
        return Html(tag("section", head, said, inside, class_="item", id=anchor(name)), name)

    def _unregistered(self, name: str) -> Html:
        text = tag("p", f"{words(name)}: fewbits does not make this one yet.", class_="missing")
        return Html(tag("section", text, class_="item", id=anchor(name)), name)

    # -------------------------------------------------------------------------------- what closes a report

    def surprises(self) -> Html:
        return Html(discussion.surprises(self.shelf.claims, self.verdicts), "surprises")

    def inferred(self) -> Html:
        return Html(discussion.inferred(self.paper), "what is inferred or lost")

    def unreached(self) -> Html:
        return Html(discussion.unreached(self.shelf.claims, self.verdicts), "out of reach")

    def provenance(self) -> Html:
        return Html(self.origin.table(), "provenance")

    def trial_table(self) -> Html:
        return Html(trials.table(self.trials), "trials")

    # -------------------------------------------------------------------------------- for programs

    def unshown(self) -> Iterator[str]:
        """Registered, and not shown by the notebook."""
        yield from (entry.id for entry in self.shelf.tables if entry.id not in self.made_tables)
        yield from (entry.id for entry in self.shelf.figures if entry.id not in self.made_figures)
        yield from (entry.id for entry in self.shelf.claims if entry.id not in self.shown_claims)

    def record(self) -> dict[str, object]:
        """verdicts.json."""
        return {
            "study": self.study,
            "scale": self.scale,
            "parameters": self.results.scale,
            "words": list(self.sentence),
            "counts": claims.counts(self.verdicts),
            "flags": list(self.results.flags),
            "mixed": self.origin.mixed,
            "notices": self.origin.notices,
            "claims": {
                entry.id: {
                    "statement": entry.claim.statement,
                    "of_paper": entry.of_paper,
                    "says_of_scale": entry.claim.says_of_scale,
                    **dataclasses.asdict(self.verdicts[entry.id]),
                }
                for entry in self.shelf.claims
            },
            "trials": {trial.id: trial.folder for trial in self.trials.values()},
        }
