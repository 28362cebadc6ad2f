"""What a study has: its tables, figures and claims, each a function of results, in the order of the paper.

    @table("mor", "Table 2")
    def table_2(results: Results) -> TableResult: …

    @figure("mor", "Figure 5")
    def figure_5(results: Results) -> FigureResult: …

    @control("mor", "bad-arm", "e2m1 per tensor is found to be worse")
    def bad_arm(results: Results) -> Verdict: …

    @claim("mor", "M3")
    def m3(results: Results) -> Verdict: …

What the paper says of a thing, and a claim's margin and control, stand in its data file. Findings of our own are
registered likewise with a title, or a declaration, of their own; they come after the paper's and are marked as ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from fewbits.analysis.engine.data import Exact
from fewbits.analysis.engine.frames import Results
from fewbits.analysis.engine.hooks import hooks_of
from fewbits.analysis.engine.loading import load_hooks
from fewbits.analysis.engine.old_loading import load
from fewbits.analysis.engine.paper import Claim, paper
from fewbits.analysis.results import Picture, Table
from fewbits.analysis.verdicts import Control, Verdict, controlled, corrected, exact, noted, out_of_reach
from fewbits.common.from_dict import one_of
from fewbits.sweeps.planning.studies import STUDIES

R = TypeVar("R")


@dataclass(frozen=True)
class Entry(Generic[R]):
    """A table, figure or control of a study."""

    study: str
    id: str
    title: str
    of_paper: bool  # else a finding of our own
    make: Callable[[Results], R]


@dataclass(frozen=True)
class ClaimEntry:
    study: str
    claim: Claim
    of_paper: bool
    check: Callable[[Results], Verdict]

    @property
    def id(self) -> str:
        return self.claim.id


@dataclass
class Shelf:
    """All that is registered of one study."""

    study: str
    _tables: dict[str, Entry[Table]] = field(default_factory=dict)
    _figures: dict[str, Entry[Picture]] = field(default_factory=dict)
    _claims: dict[str, ClaimEntry] = field(default_factory=dict)
    controls: dict[str, Entry[Verdict]] = field(default_factory=dict)

    @property
    def tables(self) -> list[Entry[Table]]:
        return list(_in_order(self._tables, [t.id for t in paper(self.study).tables]))

    @property
    def figures(self) -> list[Entry[Picture]]:
        return list(_in_order(self._figures, [f.id for f in paper(self.study).figures]))

    @property
    def claims(self) -> list[ClaimEntry]:
        """Those that the paper's data says are out of reach are there without anybody registering them."""
        found = dict(self._claims)
        load_hooks(self.study)
        for one in paper(self.study).claims:
            if hook := hooks_of(self.study).exact.get(one.id):
                found.setdefault(one.id, ClaimEntry(self.study, one, True, _exact(hook)))
        for one in paper(self.study).claims:
            if one.out_of_reach:
                found.setdefault(one.id, ClaimEntry(self.study, one, True, _unreached(one.out_of_reach)))
        return list(_in_order(found, [c.id for c in paper(self.study).claims]))

    @property
    def missing(self) -> list[str]:
        """What the paper has and nobody has registered."""
        own = paper(self.study)
        there = {entry.id for entries in (self.tables, self.figures, self.claims) for entry in entries}
        return [
            thing.id for things in (own.tables, own.figures, own.claims) for thing in things if thing.id not in there
        ]


_SHELVES: dict[str, Shelf] = {}


def shelf(study: str) -> Shelf:
    """With all that the study's modules register."""
    found = _shelf(study)
    load(study)
    return found


def _shelf(study: str) -> Shelf:
    one_of("study", study, STUDIES)
    return _SHELVES.setdefault(study, Shelf(study))


# -------------------------------------------------------------------------------- decorators

T = TypeVar("T", bound=Callable[[Results], Any])


def table(study: str, name: str, title: str | None = None) -> Callable[[T], T]:
    """Of the paper, or of our own where a title is given."""

    def register(make: T) -> T:
        words = paper(study).table(name).title if title is None else title
        _put(_shelf(study)._tables, name, Entry(study, name, words, title is None, make))
        return make

    return register


def figure(study: str, name: str, title: str | None = None) -> Callable[[T], T]:
    """As `table`."""

    def register(make: T) -> T:
        words = paper(study).figure(name).title if title is None else title
        _put(_shelf(study)._figures, name, Entry(study, name, words, title is None, make))
        return make

    return register


def claim(study: str, name: str, declaration: Claim | None = None) -> Callable[[T], T]:
    """Of the paper, or of our own where it is declared here."""

    def register(check: T) -> T:
        said = declaration or paper(study).claim(name)
        if said.id != name:
            raise ValueError(f"claim {name}: its declaration is of {said.id}")
        _put(_shelf(study)._claims, name, ClaimEntry(study, said, declaration is None, check))
        return check

    return register


def control(study: str, name: str, title: str) -> Callable[[T], T]:
    """A known effect that claims' runs must show: passed where its verdict is `reproduced`."""

    def register(check: T) -> T:
        _put(_shelf(study).controls, name, Entry(study, name, title, False, check))
        return check

    return register


# -------------------------------------------------------------------------------- judging


def judge(entry: ClaimEntry, results: Results) -> Verdict:
    """One claim: its check, with the scale of the trials behind it, and its control; where it has any."""
    verdict = entry.check(results)
    said = entry.claim
    if said.margin is not None and (verdict.margin is None or verdict.parts):  # its comparisons have their own
        verdict = replace(verdict, margin=said.margin.value)
        if verdict.n and said.margin.relative != verdict.relative:  # a ratio of tokens, say, decided by losses
            verdict = replace(verdict, mde=None)
        verdict = replace(verdict, relative=said.margin.relative)
    scale = verdict.scale or (results.scale_of(verdict.trials) if verdict.trials else "")
    verdict = replace(verdict, scale=scale)
    return verdict if said.control is None else controlled(verdict, _control(entry, said.control, results))


def judge_all(study: str, results: Results) -> dict[str, Verdict]:
    """Every claim of the study, corrected for together, after the controls have had their say."""
    return corrected({entry.id: judge(entry, results) for entry in shelf(study).claims})


def _control(entry: ClaimEntry, name: str, results: Results) -> Control:
    controls = shelf(entry.study).controls
    one_of(f"claim {entry.id}: control", name, controls)
    return Control.of(controls[name].title, controls[name].make(results))


# -------------------------------------------------------------------------------- details

K = TypeVar("K")


def _put(things: dict[str, K], name: str, thing: K) -> None:
    if name in things:
        raise ValueError(f"{name} is registered twice")
    things[name] = thing


def _in_order(things: dict[str, K], order: list[str]) -> Iterator[K]:
    """The paper's first, as it has them; then our own, as they were registered."""
    yield from (things[name] for name in order if name in things)
    yield from (thing for name, thing in things.items() if name not in order)


def _exact(hook: Callable[[], Mapping[str, Exact]]) -> Callable[[Results], Verdict]:
    def check(results: Results) -> Verdict:
        found = hook()
        holds, notes = all(one.holds for one in found.values()), [note for one in found.values() for note in one.notes]
        return noted(exact(holds, "; ".join(one.detail for one in found.values())), *notes)

    return check


def _unreached(reason: str) -> Callable[[Results], Verdict]:
    return lambda results: out_of_reach(reason)
