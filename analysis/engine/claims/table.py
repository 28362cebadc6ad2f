"""Generate the site's page of claims from studies/*/claims.yaml: claims, the paper's sentences, our tests."""

from __future__ import annotations

from collections.abc import Iterable

from fewbits.analysis.engine.claims.schema import Claim, Kind, Margin, Needs, Part, load_claims, studies_with_claims
from fewbits.analysis.engine.results.paper import paper
from fewbits.common.wording import amount

HEAD = """\
# Claims

`fewbits claims --table` prints this page from `analysis/studies/*/claims.yaml`.
Numbers in square brackets are missing from the paper's text as we have it; we restored them. A star marks the paper's
main claims, whose primary parts are corrected together by Holm's method. *Control* names what the same runs have to
show before anything can be told about the claim.
"""
COLUMNS = ("claim", "the paper says", "we test", "control", "margin or bound, and its source")


def claims_table() -> str:
    """Return Markdown with, for each study, a Markdown table of claims and one of controls."""
    parts = [HEAD]
    for study in studies_with_claims():
        of, main = load_claims(study), paper(study).primary
        parts += [f"## {study}", _table(COLUMNS, (_row(claim, claim.id in main) for claim in of.claims))]
        if of.controls:
            rows = ((one.id, one.title, _list(_part(part, part.margin) for part in one.parts)) for one in of.controls)
            parts.append(f"### Controls of {study}\n\n{_table(('control', 'shows', 'test'), rows)}")
    return "\n\n".join(parts) + "\n"


def _row(claim: Claim, main: bool) -> tuple[str, ...]:
    source = claim.source
    tests = _list(_part(part, claim.margin_of(part) if part.margin else None) for part in claim.parts)
    scale = "" if claim.kind is Kind.ARITHMETIC or not claim.judged_at else f"judged at scale `{claim.judged_at}`"
    notes = ". ".join(filter(None, (claim.tests, _needs(claim.needs), scale)))
    bounds = [f"{part.shown_bounds}: {part.reason}" for part in claim.parts if part.reason]
    return (
        f"**{claim.id}**{'*' * main} {claim.statement}",
        f"“{source.sentence}” ({source.place})" if source else "a finding of ours",
        f"{notes}<br>{tests}" if notes else tests,
        ", ".join(claim.control),
        "<br>".join(dict.fromkeys([*([_margin(claim.margin)] if claim.margin else []), *bounds])),
    )


def _part(part: Part, margin: Margin | None) -> str:
    if part.test == "exact":
        return "exact"
    text = f"`{part.test}` {', '.join(part.arms) or f'measured: {part.data}'}" if part.test else "not testable here"
    if part.baseline:
        text += f" beside {part.baseline}"
    if part.arms:
        text += f" by {', '.join(part.metrics)}"
    if part.shown_bounds:
        text += f", {part.shown_bounds}"
    if margin is not None:
        text += f", margin {_margin(margin)}"
    if part.wrong:
        text += f"; {', '.join(part.wrong)} must not pass"
    if needs := _needs(part.needs):
        text += f"; {needs}"
    return f"{part.name}: {text}" if part.name else text


def _needs(needs: Needs) -> str:
    wanted = [f"{amount(needs.parameters)} parameters"] if needs.parameters else []
    wanted += [f"{amount(needs.tokens)} tokens"] if needs.tokens else []
    wanted += [f"stored scores of {needs.scores}"] if needs.scores else []
    wanted += [needs.other] if needs.other else []
    return f"needs {', '.join(wanted)}" if wanted else ""


def _margin(margin: Margin) -> str:
    if margin.third:
        return "a third of what the whole recipe costs in the same runs" + (
            f": {margin.reason}" if margin.reason else ""
        )
    value = margin.value or 0.0
    return f"{f'{100 * value:g} %' if margin.relative else f'{value:g}'}: {margin.reason}"


def _list(parts: Iterable[str]) -> str:
    return "<br>".join(f"• {part}" for part in parts)


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [heads, ("---",) * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|').strip() for cell in line)} |" for line in lines)
