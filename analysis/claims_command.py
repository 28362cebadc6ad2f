"""`fewbits claims`: the claims of a study, each with its verdict by what the store holds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fewbits.common.arguments import CommandParser
from fewbits.sweeps.commands.sweep import in_store

if TYPE_CHECKING:
    from fewbits.analysis.reading import Reading
    from fewbits.analysis.registry import ClaimEntry
    from fewbits.analysis.verdicts import Verdict

EXAMPLES = """\
examples:
  fewbits claims study=mor scale=cpu
  fewbits claims study=mor scale=smoke --json
  fewbits claims --table > docs/claims.md
  fewbits claims study=mor scale=cpu --spreads    rows of analysis/papers/spreads.yaml, from finished runs
"""
HEADS = ("claim", "verdict", "effect", "90 % interval", "seeds", "found from", "margin", "statement")
RIGHT = ("effect", "seeds", "found from", "margin")  # where numbers are aligned


def main(argv: Sequence[str]) -> int:
    parser = CommandParser("fewbits claims", __doc__, EXAMPLES)
    parser.add_argument("words", nargs="*", metavar="WORD", help="as for `fewbits sweep`")
    parser.add_argument("--runs", metavar="DIR", help="the store (default: runs)")
    parser.add_argument("--json", action="store_true", help="the same for programs, as a report's verdicts.json")
    parser.add_argument("--table", action="store_true", help="print what every claim tests, without any results")
    parser.add_argument("--spreads", action="store_true", help="print the measured spreads that --dry-run uses")
    options = parser.parse_intermixed_args(argv)
    if options.table:
        from fewbits.analysis.engine.claims_table import claims_table

        print(claims_table(), end="")
        return 0
    if not options.words:
        parser.error("a study is expected, for example study=mor")

    from fewbits.analysis.reading import read
    from fewbits.analysis.show.claims import counts
    from fewbits.sweeps.planning.lookup import show_notes

    reading = read(in_store(options.words, options.runs))
    show_notes(reading.notes)
    if options.spreads:
        from fewbits.analysis.engine.preview import spreads_of

        for one in spreads_of(reading.study, reading.results):
            values = f"metric: {one.metric}, sd: {one.sd:g}, df: {one.df}"
            print(f"- {{study: {one.study}, scale: {one.scale}, {values}, source: here}}")
        return 0
    if options.json:
        print(json.dumps(reading.record(), indent=2, ensure_ascii=False))
        return 0
    rows = [HEADS, *(row for entry in reading.shelf.claims for row in _rows(reading, entry))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADS))]
    for row in rows:
        cells = (
            text.rjust(width) if head in RIGHT else text.ljust(width)
            for text, width, head in zip(row, widths, HEADS, strict=True)
        )
        print("  ".join(cells).rstrip())
    for notice in reading.origin.notices:
        if notice not in reading.notes:
            print(f"\n{notice}")
    if flags := reading.results.flags:
        print(f"\n{len(flags)} places have no result, the first: {flags[0]}")
    print(f"\n{counts(reading.verdicts)}, at {reading.results.scale}")
    return 0


def _rows(reading: Reading, entry: ClaimEntry) -> list[tuple[str, ...]]:
    """Of the claim, and of each of its comparisons."""
    from fewbits.analysis.show.claims import repeats
    from fewbits.analysis.show.markup import bounds, effect, size

    verdict = reading.verdicts[entry.id]
    rows: list[tuple[str, ...]] = []
    for name, of, said in [
        (entry.id, verdict, entry.claim.statement),
        *(("", part, f"· {name}") for name, part in verdict.parts),
    ]:
        interval, relative = of.interval, of.relative
        half = (interval.high - interval.low) / 2 if interval else None
        rows.append(
            (
                name,
                str(of.outcome),
                effect(of.effect, half, relative) if of.effect is not None else "",
                bounds(interval.low, interval.high, relative) if interval else "",
                repeats(of),
                size(of.mde, relative) if of.mde is not None else "",
                size(of.margin, relative) if of.margin is not None and of.n else "",
                said,
            )
        )
    if why := _why(verdict):
        rows.insert(1, (*[""] * (len(HEADS) - 1), f"because: {why}"))
    return rows


def _why(verdict: Verdict) -> str:
    """Of a claim that is not reproduced, what its comparisons do not say already."""
    from fewbits.analysis.verdicts import Outcome, every

    if verdict.outcome is Outcome.REPRODUCED or (verdict.parts and verdict.reason == every(dict(verdict.parts)).reason):
        return ""
    return verdict.reason
