"""Generate docs/claims.md from studies/*/claims.yaml: every claim with the paper's sentence and what we test."""

from __future__ import annotations

from collections.abc import Iterator

from fewbits.analysis.engine.claims.schema import Claim, Margin, Part, load_claims, studies_with_claims
from fewbits.analysis.engine.results.amounts import amount

HEAD = """\
# Claims

`fewbits claims --table` generates this page from `analysis/studies/*/claims.yaml`; a test checks that it is up to date.
Numbers in square brackets are missing from the paper's text as we have it; we restored them.

* *Reach* says where a claim can be decided: `any` (arithmetic, true at any scale), `mechanism` (about tensors of a
  trained network) or `outcome` (about losses). A number of parameters and tokens follows if the paper reports what it
  saw in a model of this size; then only runs with at least half of both numbers can contradict the claim. Sentences of
  the paper about any network have no such numbers.
* *Absence* says what follows if our runs show that there is no effect: this contradicts the claim, or the effect is
  only "not seen at this scale".
* *Control* names what the same runs have to show before they may decide the claim.
"""
COLUMNS = ("claim", "the paper says", "we test", "reach", "absence", "control", "margin or bound, and its source")


def claims_table() -> str:
    """Return the content of docs/claims.md: for each study, a Markdown table of claims and one of controls."""
    parts = [HEAD]
    for study in studies_with_claims():
        study_claims = load_claims(study)
        parts.append(f"## {study}")
        parts += [
            f"The scale {scale} decides only claims that need no trials: {reason}."
            for scale, reason in study_claims.unfit.items()
        ]
        parts.append(f"{_table(COLUMNS, (_row(claim) for claim in study_claims.claims))}")
        if study_claims.controls:
            rows = (
                (control.id, control.title, _list(_part(part, part.margin) for part in control.parts))
                for control in study_claims.controls
            )
            parts.append(f"### Controls of {study}\n\n{_table(('control', 'shows', 'test'), rows)}")
    return "\n\n".join(parts) + "\n"


def _row(claim: Claim) -> tuple[str, ...]:
    sentence = f"“{claim.sentence}” ({claim.place})" if claim.sentence else "a finding of ours"
    tests = _list(_part(part, claim.margin_of(part) if part.margin else None) for part in claim.parts)
    unfit = (f"not decided at the scale {scale}: {reason}" for scale, reason in claim.unfit.items())
    notes = ". ".join(text for text in (claim.tests, claim.caveat, *unfit) if text)
    reach = claim.reach
    if claim.stated is not None:
        reach += f": {amount(claim.stated.parameters, 3)} parameters, {amount(claim.stated.tokens, 3)} tokens"
    bounds = [f"{part.bounds}: {part.reason}" for part in claim.parts if part.reason]
    margins = dict.fromkeys([*([_margin(claim.margin)] if claim.margin else []), *bounds])
    absence = {part.absence or claim.absence for part in claim.parts if not part.out_of_reach}
    return (
        f"**{claim.id}** {claim.statement}",
        sentence,
        f"{notes}<br>{tests}" if notes else tests,
        reach,
        ", ".join(sorted(text.replace("-", " ") for text in absence)),
        ", ".join(claim.control),
        "<br>".join(margins),
    )


def _part(part: Part, margin: Margin | None) -> str:
    if part.out_of_reach:
        return f"{part.name}: out of reach, {part.out_of_reach}"
    if part.test == "exact":
        return "exact"
    text = f"`{part.test}` {_compared(part)}"
    if part.baseline and not part.chain:
        text += f" beside {part.baseline}"
    if not part.data and not part.formula:
        text += f" by {', '.join(part.metrics)}"
    if part.bounds:
        text += f", {part.bounds}"
    if margin is not None:
        text += f", margin {_margin(margin)}"
    if part.probed:
        text += "; by probes of the trunk, where a scale has them"
    return f"{part.name}: {text}" if part.name else text


def _compared(part: Part) -> str:
    if part.formula:
        return f"`{part.formula}`, where {', '.join(f'{name} is {place}' for name, place in part.of.items())}"
    return " > ".join(part.chain) or ", ".join(part.arms) or f"measured: {part.data}"


def _margin(margin: Margin) -> str:
    return f"{f'{100 * margin.value:g} %' if margin.relative else f'{margin.value:g}'}: {margin.reason}"


def _list(parts: Iterator[str]) -> str:
    return "<br>".join(f"• {part}" for part in parts)


def _table(heads: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [heads, ("---",) * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|').strip() for cell in line)} |" for line in lines)
