"""What the verdicts themselves say is worth a word: generated, so that nothing is chosen and nothing left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fewbits.analysis.engine.paper import Paper
from fewbits.analysis.registry import ClaimEntry
from fewbits.analysis.show.markup import bounds, effect, listed, plural, size, tag, words
from fewbits.analysis.verdicts import Outcome, Verdict

NULLS = ("equal", "no worse")  # kinds of claims that say there is none


@dataclass(frozen=True)
class Remark:
    claim: str
    text: str


def surprises(entries: Sequence[ClaimEntry], verdicts: Mapping[str, Verdict]) -> str:
    kinds = {
        "Contradicted": _contradicted,
        "An effect, but not the one that was said": _other_effects,
        "Where none was said to be, an effect beyond the margin": _large,
        "Found alone, and not kept among all claims tested": _uncorrected,
        "Controls that failed: the runs would not have shown an effect": _controls,
        "Too few seeds for the margin": _underpowered,
    }
    parts = []
    for title, find in kinds.items():
        found = [remark for entry in entries for remark in find(entry, verdicts[entry.id])]
        if found:
            parts.append(tag("h3", words(title)) + listed(_merged(found)))
    return "".join(parts) or tag("p", "No verdict stands out.")


def unreached(entries: Sequence[ClaimEntry], verdicts: Mapping[str, Verdict]) -> str:
    found = [
        Remark(
            entry.id, f"{entry.claim.statement} {verdicts[entry.id].reason[:1].upper()}{verdicts[entry.id].reason[1:]}."
        )
        for entry in entries
        if verdicts[entry.id].outcome is Outcome.OUT_OF_REACH
    ]
    return listed(map(_linked, found)) if found else tag("p", "Nothing: every claim was looked at.")


def inferred(own: Paper) -> str:
    """What the paper's text does not print, and what we take in its place."""
    items = []
    for table in own.tables:
        for row in table.rows:
            if (source := row.source or table.source) != "printed":
                items.append(f"{table.id}, {row.title}: {own.sources[source]}")
    items += [f"{f.id}: {own.sources[f.source]}" for f in own.figures if f.source != "printed"]
    items += [f"{n.about}: {own.sources[n.source]}" for n in own.numbers.values() if n.source != "printed"]
    return listed(map(words, items)) if items else tag("p", "Nothing.")


def _contradicted(entry: ClaimEntry, verdict: Verdict) -> Iterator[Remark]:
    if verdict.outcome is Outcome.CONTRADICTED:
        yield Remark(entry.id, f"{entry.claim.statement} We find otherwise: {verdict.reason}.{_scale(entry)}")


def _other_effects(entry: ClaimEntry, verdict: Verdict) -> Iterator[Remark]:
    for name, part in _tested(entry, verdict):
        there = part.interval is not None and not part.interval.low <= 0 <= part.interval.high
        if verdict.outcome is part.outcome is Outcome.INCONCLUSIVE and there:
            yield Remark(entry.id, f"{name}{_measured(part)}, which is not nothing, and decides nothing either.")


def _large(entry: ClaimEntry, verdict: Verdict) -> Iterator[Remark]:
    for name, part in _tested(entry, verdict):
        if entry.claim.kind in NULLS and part.effect is not None and part.margin and abs(part.effect) > part.margin:
            times = abs(part.effect) / part.margin
            yield Remark(entry.id, f"{name}{_measured(part)}, {times:.1f} times the margin ({part.outcome}).")


def _uncorrected(entry: ClaimEntry, verdict: Verdict) -> Iterator[Remark]:
    if verdict.outcome is Outcome.INCONCLUSIVE and verdict.reason.startswith("alone "):
        yield Remark(entry.id, f"{entry.claim.statement} {verdict.reason[:1].upper()}{verdict.reason[1:]}.")


def _controls(entry: ClaimEntry, verdict: Verdict) -> Iterator[Remark]:
    if verdict.control is not None and verdict.control.tested and not verdict.control.passed:
        yield Remark(entry.id, f"{verdict.control.name}: {verdict.control.detail}.")


def _underpowered(entry: ClaimEntry, verdict: Verdict) -> Iterator[Remark]:
    for name, part in _tested(entry, verdict):
        if part.weak:
            assert part.mde is not None
            assert part.margin is not None
            found, margin = size(part.mde, part.relative), size(part.margin, part.relative)
            yield Remark(entry.id, f"{name}{plural(part.n, part.unit)} find {found}, and the margin is {margin}.")


def _tested(entry: ClaimEntry, verdict: Verdict) -> Iterator[tuple[str, Verdict]]:
    """Comparisons of differences, by name. A share is no effect, and what arithmetic decides was not measured."""
    if entry.claim.kind not in ("share", "correlation", "arithmetic"):
        yield from [(f"{name}: ", part) for name, part in verdict.parts] or [("", verdict)]


def _measured(part: Verdict) -> str:
    assert part.effect is not None
    half = (part.interval.high - part.interval.low) / 2 if part.interval else None
    around = f" {bounds(part.interval.low, part.interval.high, part.relative)}" if part.interval else ""
    return effect(part.effect, half, part.relative) + around


def _scale(entry: ClaimEntry) -> str:
    return f" The paper says of scale: {entry.claim.says_of_scale}." if entry.claim.says_of_scale else ""


def _merged(remarks: Sequence[Remark]) -> Iterator[str]:
    """Once what is said of several claims: a control's failure, say."""
    for text in dict.fromkeys(remark.text for remark in remarks):
        claims = (tag("a", words(one.claim), href=f"#{one.claim}") for one in remarks if one.text == text)
        yield f"{', '.join(dict.fromkeys(claims))} {words(text)}"


def _linked(remark: Remark) -> str:
    return f"{tag('a', words(remark.claim), href=f'#{remark.claim}')} {words(remark.text)}"
