"""List the claims of a study with their verdicts, computed from the finished trials in the store (`fewbits claims`)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from fewbits.commands.sweep import in_store
from fewbits.common.arguments import CommandParser, existing

if TYPE_CHECKING:
    from fewbits.analysis.engine.claims.findings import Verdict

EXAMPLES = """\
examples:
  fewbits claims study=mor scale=cpu
  fewbits claims study=mor scale=smoke --json
  fewbits claims --table > docs/claims.md         write the table of all claims and their tests, which needs no results
  fewbits claims study=mor scale=cpu --spreads    print rows for analysis/papers/planning/spreads.yaml
"""
# The columns of the printed list. repeats: the number of seeds or trials; mde: the minimum detectable effect.
HEADS = ("claim", "verdict", "effect", "90 % interval", "repeats", "mde", "margin or bound", "statement")
RIGHT = ("effect", "repeats", "mde", "margin or bound")  # columns that are aligned to the right


def main(argv: Sequence[str]) -> int:
    """Run `fewbits claims` with these arguments and return exit status 0; raise ValueError if an argument is wrong."""
    parser = CommandParser("fewbits claims", __doc__, EXAMPLES)
    parser.add_argument(
        "overrides", nargs="*", metavar="OVERRIDE", help="selects the study and scale, as for `fewbits sweep`"
    )
    parser.add_argument("--runs", metavar="DIR", help="the store (default: runs)")
    parser.add_argument(
        "--json", action="store_true", help="print the verdicts as JSON, as in the file verdicts.json of a report"
    )
    parser.add_argument("--table", action="store_true", help="print all studies' claims and their tests as Markdown")
    parser.add_argument(
        "--spreads",
        action="store_true",
        help="print how much differences between arms vary over seeds in finished runs (standard deviations), as rows "
        "for the file spreads.yaml, from which `fewbits sweep --dry-run` computes minimum detectable effects",
    )
    options = parser.parse_intermixed_args(argv)
    if options.table:
        from fewbits.analysis.engine.claims.table import claims_table

        print(claims_table(), end="")
        return 0
    if not options.overrides:
        parser.error("name a study, for example study=mor")

    from fewbits.analysis.report.study_report import read_study
    from fewbits.analysis.views.claims import counts

    report = read_study(in_store(options.overrides, existing(options.runs)))
    if options.spreads:
        from fewbits.analysis.engine.claims.preview import spreads_of

        for spread in spreads_of(report.study, report.results):
            values = f"metric: {spread.metric}, sd: {spread.sd:g}, df: {spread.df}"
            print(f"- {{study: {spread.study}, scale: {spread.scale}, {values}, source: here}}")
        return 0
    if options.json:
        print(json.dumps(report.record(), indent=2, ensure_ascii=False))
        return 0
    rows = [HEADS, *(row for verdict in report.verdicts.values() for row in _rows(verdict))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADS))]
    for row in rows:
        cells = (
            text.rjust(width) if head in RIGHT else text.ljust(width)
            for text, width, head in zip(row, widths, HEADS, strict=True)
        )
        print("  ".join(cells).rstrip())
    for notice in report.origin.notices:
        print(f"\n{notice}")
    if flags := report.results.flags:
        places = "1 place has" if len(flags) == 1 else f"{len(flags)} places have"
        print(f"\n{places} no result; the first is {flags[0]}")
    print(f"\n{counts(report.verdicts)}, at {report.size}")
    return 0


def _rows(verdict: Verdict) -> Iterator[tuple[str, ...]]:
    """Yield the rows that are printed for one claim; the cells of a row are in the order of HEADS.

    The first row has the claim and its verdict. If the claim is not reproduced, the second row has the reason. The
    numbers of a single comparison are in the first row; if there are several comparisons, each has a further row.
    """
    from fewbits.analysis.engine.claims.findings import Outcome
    from fewbits.analysis.views.claims import view

    findings = [view(one) for one in verdict.findings]
    single = len(findings) == 1
    shown = findings[0] if single else None
    numbers = (shown.effect, shown.bounds, shown.repeats, shown.mde, shown.margin) if shown else ("",) * 5
    yield (verdict.claim.id, str(verdict.outcome), *numbers, verdict.claim.statement)
    if verdict.outcome is not Outcome.REPRODUCED:
        yield (*[""] * (len(HEADS) - 1), f"because: {verdict.reason}")
    for finding, one in zip(findings, verdict.findings, strict=True) if not single else ():
        yield (
            "",
            str(one.status),
            finding.effect,
            finding.bounds,
            finding.repeats,
            finding.mde,
            finding.margin,
            f"· {one.heading}",
        )
