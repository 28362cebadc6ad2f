"""Claims and their verdicts: the table at the top of a report, and each claim in full where the paper makes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from fewbits.analysis.engine.paper import Claim
from fewbits.analysis.registry import ClaimEntry
from fewbits.analysis.show.markup import bounds, boxed, effect, folded, listed, plural, size, tag, words
from fewbits.analysis.show.trials import Trial, behind_folded
from fewbits.analysis.verdicts import Outcome, Verdict

SIGNS = {  # told apart without colour
    Outcome.REPRODUCED: "✓",
    Outcome.CONTRADICTED: "✗",
    Outcome.INCONCLUSIVE: "?",
    Outcome.OUT_OF_REACH: "–",
}
HEADS = (
    "Claim",
    "Verdict",
    "Effect, 90 % interval",
    "Seeds",
    "Found from / margin",
    "The paper says of scale",
    "Control",
)
LEVELS = ("share", "correlation")  # kinds whose effect is a level, not a difference
NOTHING = "–"
RULES = """
A claim is <em>reproduced</em> or <em>contradicted</em> only where the interval of its effect lies wholly on one side
of what the paper says; between the two it is <em>inconclusive</em>. “No difference” is shown by an equivalence test
against a margin that was fixed before the first run, and only by a design that would have found a difference of that
margin. Arms are compared seed by seed: the same initial weights, the same data in the same order. Trials that start
alike part by chance. How far, all arms of a kind tell together as though they spread alike: those whose forward
passes read 8 bits or more, those that read fewer, and those that sample weights. In a pair of two kinds, how far a seed
moves one kind against the other comes to that. An arm that is the only one of its kind, or is seen to spread further
than it, or is bad on purpose, speaks for itself. Intervals speak of seeds, on one fixed validation text. Claims are
corrected for together (Holm). What arithmetic decides was asked of the kernels when this page was made. In the small
pictures beside verdicts the shaded band is the margin on either side of zero.
"""
FEW = 4  # comparisons that the table at the top shows one by one


def badge(outcome: Outcome) -> str:
    return tag("span", f"{SIGNS[outcome]} {words(outcome)}", class_=f"badge {outcome.name.lower().replace('_', '-')}")


def counts(verdicts: Mapping[str, Verdict]) -> str:
    """In words: `9 reproduced, 2 contradicted, …`."""
    found = Counter(verdict.outcome for verdict in verdicts.values())
    return ", ".join(f"{found[outcome]} {outcome}" for outcome in Outcome)


def tally(verdicts: Mapping[str, Verdict]) -> str:
    found = Counter(verdict.outcome for verdict in verdicts.values())
    parts = (tag("li", tag("b", str(found[outcome])), " ", badge(outcome)) for outcome in Outcome)
    return tag("ul", *parts, class_="tally")


def rules() -> str:
    return tag("p", RULES.strip())


def summary(entries: Iterable[ClaimEntry], verdicts: Mapping[str, Verdict]) -> str:
    head = tag("thead", tag("tr", *(tag("th", name, scope="col") for name in HEADS)))
    rows = [_row(entry, verdicts[entry.id]) for entry in entries]
    return tag("table", head, tag("tbody", *rows), class_="claims cards")


def _row(entry: ClaimEntry, verdict: Verdict) -> str:
    claim = entry.claim
    own = "" if entry.of_paper else tag("small", " ours")
    name = tag("a", tag("b", words(claim.id)), href=f"#{claim.id}") + own
    cells = (
        badge(verdict.outcome),
        effects(verdict, claim),
        repeats(verdict) or NOTHING,
        power(verdict, claim),
        words(claim.says_of_scale) or NOTHING,
        control(verdict),
    )
    first = tag("th", name, " ", tag("span", words(claim.statement)), scope="row")
    return tag("tr", first, *(_labelled(cell, head) for cell, head in zip(cells, HEADS[1:], strict=True)))


def _labelled(cell: str, head: str) -> str:
    """On a telephone the row is a list: with the column's head before each cell, without cells that say nothing."""
    return tag("td", tag("div", cell), data_label=head, class_="nothing" if cell == NOTHING else None)


def shown_effect(verdict: Verdict, kind: str) -> str:
    if verdict.effect is None:
        return NOTHING
    interval, sign = verdict.interval, kind not in LEVELS
    half = (interval.high - interval.low) / 2 if interval else None
    text = effect(verdict.effect, half, verdict.relative, sign=sign)
    around = tag("small", f" {bounds(interval.low, interval.high, verdict.relative, sign=sign)}") if interval else ""
    return tag("span", words(text), around, class_="effect")


def effects(verdict: Verdict, claim: Claim) -> str:
    """The effect; of a claim about a few comparisons, each one's, and of one about many, how many are as it says."""
    if not verdict.parts:
        return shown_effect(verdict, claim.kind) + glyph(verdict, claim.kind)
    measured = [(name, part) for name, part in verdict.parts if part.effect is not None]
    if 0 < len(measured) <= FEW:
        return "".join(
            tag("div", tag("small", words(name)), effects(part, claim), class_="part") for name, part in measured
        )
    found = sum(part.outcome is Outcome.REPRODUCED for _, part in verdict.parts)
    return tag("span", f"{found} of {plural(len(verdict.parts), 'comparison')} as said")


def repeats(verdict: Verdict) -> str:
    """How many seeds; of anything else, what as well."""
    if not verdict.n:
        return ""
    return str(verdict.n) if verdict.unit == "seed" else plural(verdict.n, verdict.unit)


def power(verdict: Verdict, claim: Claim) -> str:
    """The smallest effect that the design finds, beside the margin."""
    of_claim = claim.margin is not None and (verdict.margin is None or bool(verdict.parts))
    margin = claim.margin.value if claim.margin and of_claim else verdict.margin
    # Where there is no data there is no effect that is relative, but the margin is.
    relative = claim.margin.relative if claim.margin and not verdict.n else verdict.relative
    found = size(verdict.mde, relative) if verdict.mde is not None else NOTHING
    if verdict.mde is None and margin is None:
        return NOTHING
    beside = size(margin, relative) if margin is not None else NOTHING
    weak = verdict.outcome is Outcome.INCONCLUSIVE and any(
        part.weak for part in dict(verdict.parts).values() or (verdict,)
    )
    return tag("span", f"{found} / {beside}", tag("small", " ⚠ too weak") if weak else "", class_="power")


def control(verdict: Verdict) -> str:
    if verdict.control is None:
        return NOTHING
    state = "✓ passed" if verdict.control.passed else "✗ failed" if verdict.control.tested else "? not tested"
    return tag("span", state, title=verdict.control.name)


# -------------------------------------------------------------------------------- one in full


def card(entry: ClaimEntry, verdict: Verdict, trials: Mapping[str, Trial]) -> str:
    claim = entry.claim
    facts = [
        (
            "Effect",
            shown_effect(verdict, claim.kind) + glyph(verdict, claim.kind) if verdict.effect is not None else "",
        ),
        ("Seeds" if verdict.unit == "seed" else "Repeats", repeats(verdict)),
        ("Found from", size(verdict.mde, verdict.relative) if verdict.mde is not None else ""),
        ("Margin", _margin(claim, verdict)),
        ("Looked at", words(claim.metric)),
        ("The paper says of scale", words(claim.says_of_scale)),
        ("Control", _control(verdict)),
    ]
    shown = tag("dl", *(tag("div", tag("dt", name), tag("dd", text)) for name, text in facts if text), class_="facts")
    who = "" if entry.of_paper else tag("small", "ours, not the paper's", class_="own")
    head = tag("h4", tag("span", words(claim.id), class_="id"), " ", badge(verdict.outcome), " ", who)
    notes = listed(map(words, verdict.notes), "notes") if verdict.notes else ""
    measured = verdict.scale and verdict.outcome is not Outcome.OUT_OF_REACH and claim.kind != "arithmetic"
    at = f" At {verdict.scale}." if measured else ""
    return tag(
        "section",
        head,
        tag("p", words(claim.statement), class_="statement"),
        tag("p", words(sentence(verdict.reason)), words(at), class_="reason"),
        shown,
        _parts(verdict, claim),
        notes,
        behind_folded(verdict.trials, trials),
        class_=f"claim {verdict.outcome.name.lower().replace('_', '-')}",
        id=claim.id,
    )


def sentence(text: str) -> str:
    text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _margin(claim: Claim, verdict: Verdict) -> str:
    if claim.margin is None:
        return ""
    return f"{size(claim.margin.value, claim.margin.relative)} {tag('small', words(claim.margin.reason))}"


def _control(verdict: Verdict) -> str:
    if verdict.control is None:
        return ""
    return f"{control(verdict)} {tag('small', words(f'{verdict.control.name}: {verdict.control.detail}'))}"


def _parts(verdict: Verdict, claim: Claim) -> str:
    if not verdict.parts:
        return ""
    heads = ("Comparison", "Verdict", "Effect, 90 % interval", "Seeds", "Found from / margin", "")
    rows = [
        tag(
            "tr",
            tag("th", words(name), scope="row"),
            tag("td", badge(part.outcome)),
            tag("td", shown_effect(part, claim.kind), class_="number"),
            tag("td", repeats(part) or NOTHING, class_="number"),
            tag("td", power(part, claim), class_="number"),
            tag("td", glyph(part, claim.kind)),
        )
        for name, part in verdict.parts
    ]
    head = tag("thead", tag("tr", *(tag("th", name, scope="col") for name in heads)))
    inside = boxed(tag("table", head, tag("tbody", *rows), class_="parts"))
    return folded(plural(len(verdict.parts), "comparison"), inside) if len(rows) > 4 else inside


# -------------------------------------------------------------------------------- an interval as a picture

WIDTH, HEIGHT, REACH = 120.0, 16.0, 2.5  # REACH: margins on either side of zero


def glyph(verdict: Verdict, kind: str) -> str:
    """The interval beside zero and the margin, drawn in the colour of the text."""
    if verdict.effect is None or verdict.interval is None:
        return ""
    low, high = verdict.interval.low, verdict.interval.high
    if kind in LEVELS:
        first, last, margin = min(0.0, low), max(1.0, high), None
    else:
        margin = verdict.margin
        last = REACH * margin if margin else 1.2 * max(abs(low), abs(high), 1e-12)
        first = -last

    def x(value: float) -> float:
        return round(min(max((value - first) / (last - first), 0.0), 1.0) * (WIDTH - 8) + 4, 1)

    middle = HEIGHT / 2
    marks = [f'<path d="M{x(0)} 1V{HEIGHT - 1:g}" class="zero"/>']
    if margin:
        marks.insert(0, f'<rect x="{x(-margin)}" y="1" width="{x(margin) - x(-margin):.1f}" height="{HEIGHT - 2:g}"/>')
    marks.append(f'<path d="M{x(low)} {middle:g}H{x(high)}" class="interval"/>')
    marks += [_arrow(side, middle) for side, beyond in ((-1, low < first), (1, high > last)) if beyond]
    marks.append(f'<circle cx="{x(verdict.effect)}" cy="{middle:g}" r="3"/>')
    told = f"{effect(verdict.effect, (high - low) / 2, verdict.relative)} {bounds(low, high, verdict.relative)}"
    if margin:
        told += f", shaded: within the margin of {size(margin, verdict.relative)}"
    box = f"0 0 {WIDTH:g} {HEIGHT:g}"
    return tag("svg", tag("title", words(told)), *marks, class_="glyph", viewBox=box, role="img")


def _arrow(side: int, middle: float) -> str:
    tip = 0.5 if side < 0 else WIDTH - 0.5
    base, above, below = tip - side * 4, middle - 4, middle + 4
    return f'<path d="M{base:g} {above:g}L{tip:g} {middle:g}L{base:g} {below:g}" class="interval"/>'
