"""Generate the remarks in a report's discussion by fixed rules, so that nobody can select or omit results by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from markupsafe import Markup

from fewbits.analysis.engine.claims.findings import Finding, Outcome, Status, Verdict
from fewbits.analysis.engine.claims.schema import BOUNDED, WITHIN
from fewbits.analysis.engine.results.paper import Paper
from fewbits.analysis.views.claims import view
from fewbits.analysis.views.html import render
from fewbits.analysis.views.numbers import sentence

COLUMNS = ("kind", "claims", "remark")  # the columns of the DataFrame of remarks
Find = Callable[[Verdict], Iterator[str]]  # yields the remarks of one kind on a verdict


def remarks(verdicts: Mapping[str, Verdict]) -> Iterator[tuple[str, str, str]]:
    """Yield all remarks on the verdicts as (kind, claims, text): a key of KINDS, the claims' ids, and the remark."""
    for kind, items in _sections(verdicts):
        yield from ((kind, ", ".join(claims), text) for claims, text in items)


def remarks_html(verdicts: Mapping[str, Verdict]) -> Markup:
    """Return all remarks on the verdicts as HTML, in sections by kind."""
    return render("discussion", sections=_sections(verdicts))


def unreached(verdicts: Mapping[str, Verdict]) -> list[tuple[list[str], str]]:
    """Return (claim ids, text) for the claims, or parts of claims, that cannot be tested at this scale or at any scale.

    The text is the reason why. If only one claim has this reason, the claim's statement precedes the reason.
    """
    reasons = _merged(verdicts, _not_testable)
    alone = {text: verdicts[names[0]].claim.statement for names, text in reasons if len(names) == 1}
    return [(names, " ".join(filter(None, (alone.get(text), text)))) for names, text in reasons]


def not_printed(copy: Paper) -> list[tuple[str, str]]:
    """Return (name, source) for each table row, figure and number of a paper whose value is not in the paper's text.

    copy: our copy of the paper's tables, figures and numbers. The source says where the copy's value is from instead,
    or that the value is not known.
    """
    items = []
    for table in copy.tables:
        for row in table.rows:
            if (source := row.source or table.source) != "printed":
                items.append((f"{table.id}, {row.title}", copy.sources[source]))
    items += [(f.id, copy.sources[f.source]) for f in copy.figures if f.source != "printed"]
    return items + [(n.about, copy.sources[n.source]) for n in copy.numbers.values() if n.source != "printed"]


def _sections(verdicts: Mapping[str, Verdict]) -> list[tuple[str, list[tuple[list[str], str]]]]:
    sections = [(title, _merged(verdicts, find)) for title, find in KINDS.items()]
    return [(title, items) for title, items in sections if items]


def _merged(verdicts: Mapping[str, Verdict], find: Find) -> list[tuple[list[str], str]]:
    """Return (claim ids, text) for each remark that `find` yields for any of the verdicts.

    Claims with the same text share one entry. find: a function that yields the texts of the remarks on one verdict.
    """
    claims_by_text: dict[str, list[str]] = {}
    for name, verdict in verdicts.items():
        for text in find(verdict):
            claims_by_text.setdefault(text, []).append(name)
    return [(list(dict.fromkeys(claims)), text) for text, claims in claims_by_text.items()]


def _not_reproduced(verdict: Verdict) -> Iterator[str]:
    if verdict.outcome is Outcome.NOT_REPRODUCED:
        yield f"{verdict.claim.statement} {sentence(verdict.reason)}"


def _other_effects(verdict: Verdict) -> Iterator[str]:
    for part in _compared(verdict):
        significant = part.interval is not None and not part.interval.low <= 0 <= part.interval.high
        if part.status is Status.UNDECIDED and significant:
            yield f"{_measured(part)} differs significantly from zero, but does not decide the comparison."


def _large(verdict: Verdict) -> Iterator[str]:
    for part in _compared(verdict):
        if part.test in BOUNDED and part.effect is not None and part.margin and abs(part.effect) > part.margin:
            yield f"{_measured(part)} is {abs(part.effect) / part.margin:.1f} times the margin ({part.status})."


def _controls(verdict: Verdict) -> Iterator[str]:
    for control in verdict.controls:
        if control.tested and not control.passed:
            yield f"{control.title}: {'; '.join(part.reason for part in control.findings)}."


def _not_testable(verdict: Verdict) -> Iterator[str]:
    parts: dict[str, list[str]] = {}  # the headings of the findings by reason
    for part in verdict.findings:
        if part.status is Status.NOT_TESTABLE:
            parts.setdefault(part.reason, []).append(part.heading)
    for reason, headings in parts.items():
        yield sentence(reason if len(headings) == len(verdict.findings) else f"{', '.join(headings)}: {reason}")


KINDS: Mapping[str, Find] = {
    "Not reproduced": _not_reproduced,
    "An effect, but not the stated one": _other_effects,
    "An effect beyond the margin where none was stated": _large,
    "Controls that failed: the runs would not have shown an effect": _controls,
}


def _compared(verdict: Verdict) -> Iterator[Finding]:
    """Yield the findings that compare arms: all but exact checks and tests of an arm's own numbers."""
    yield from (part for part in verdict.findings if part.test not in (WITHIN, "exact"))


def _measured(part: Finding) -> str:
    shown = view(part)
    return " ".join(filter(None, (f"{part.heading}:", shown.effect, shown.bounds)))
