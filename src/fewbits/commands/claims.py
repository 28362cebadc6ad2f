"""List claims, of a study or your own, with their verdicts from the finished trials in the store (`fewbits claims`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fewbits.commands.sweep import in_store
from fewbits.common.arguments import CommandParser
from fewbits.common.terminal import print_json, print_table
from fewbits.common.wording import plural

if TYPE_CHECKING:
    from fewbits.analysis.engine.claims.findings import Verdict

EXAMPLES = """\
examples:
  fewbits claims study=mor scale=cpu
  fewbits claims study=mor scale=smoke --json
  fewbits claims my-sweep.yaml --claims my-claims.yaml    judge your own claims; docs/claims-file.md lists the keys
  fewbits claims study=mor scale=cpu --power --sd validation_loss=0.0007    what the planned seeds can detect
"""
# The columns of the printed list. repeats: the number of seeds or trials; tokens: the effect as extra tokens.
HEADS = ("claim", "verdict", "effect", "90 % interval", "repeats", "tokens", "margin or bound", "statement")
RIGHT = ("effect", "repeats", "tokens", "margin or bound")  # columns that are aligned to the right


def main(argv: Sequence[str]) -> int:
    parser = CommandParser("fewbits claims", __doc__, EXAMPLES)
    chosen = "selects the study and scale, or your own sweep, as for `fewbits sweep`"
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help=chosen)
    own = "judge the claims in this YAML file instead of the study's"
    parser.add_argument("--claims", type=Path, metavar="FILE", help=own)
    parser.add_store()
    parser.add_config_dir()
    parser.add_argument("--json", action="store_true", help="print JSON, as in the file verdicts.json of a report")
    power = "print the effects that the planned seeds can detect, from the spreads of stored results or from --sd"
    parser.add_argument("--power", action="store_true", help=power)
    sd = "for --power: the standard deviation over seeds of a relative difference; can be repeated"
    parser.add_argument("--sd", action="append", default=[], metavar="METRIC=VALUE", help=sd)
    options = parser.parse_intermixed_args(argv)
    try:
        given = {name: float(value) for name, _, value in (word.partition("=") for word in options.sd)}
    except ValueError:
        parser.error("--sd: write METRIC=VALUE, for example --sd validation_loss=0.0007")
    if not options.overrides:
        parser.error("name a study, for example study=mor, or a sweep file of your own")
    if options.claims and options.power:
        parser.error("--power is for the claims of studies: leave out --claims")

    from fewbits.analysis.engine.claims.judging import sweep_command
    from fewbits.analysis.report.study_report import read_study
    from fewbits.analysis.views.tables import counts
    from fewbits.experiments.config_files import with_config_dir

    overrides = with_config_dir(in_store(options.overrides, options.runs), options.config_dir)
    report = read_study(overrides, options.claims and options.claims.expanduser())
    if options.power:
        from fewbits.analysis.engine.claims.preview import preview, preview_lines

        print("\n".join(preview_lines(preview(report.study, report.results, given))))
        return 0
    if options.json:
        print_json(report.record())
        return 0
    places, flags = report.results.members, report.results.flags
    brief = len(flags) == len(places) and not options.claims
    print_table(HEADS, [row for verdict in report.verdicts.values() for row in _rows(verdict, brief)], right=RIGHT)
    for notice in report.origin.notices:
        print(f"\n{notice}")
    print(f"\n{counts(report.verdicts)}, at {report.size}")
    if flags:
        without = f"{len(flags)} of {plural(len(places), 'place')} without a result; the first is {flags[0]}"
        print(f"\n{without}; to run them: {sweep_command(report.results, overrides)}")
    return 0


def _rows(verdict: Verdict, brief: bool) -> Iterator[tuple[str, ...]]:
    """Yield the rows of one claim: its verdict, the reason unless it is reproduced, and each of several comparisons.

    brief: yield only the first row of a claim that is not run.
    """
    from fewbits.analysis.engine.claims.findings import Outcome
    from fewbits.analysis.views.tables import view

    views = [view(one) for one in verdict.findings]
    numbers = [(one.effect, one.bounds, one.repeats, one.tokens, one.margin) for one in views]
    single = len(numbers) == 1
    yield (verdict.claim.id, str(verdict.outcome), *(numbers[0] if single else ("",) * 5), verdict.claim.statement)
    if brief and verdict.outcome is Outcome.NOT_RUN:
        return
    if verdict.outcome is not Outcome.REPRODUCED:
        yield (*[""] * (len(HEADS) - 1), f"because: {verdict.reason}")
    for cells, one in zip(numbers, verdict.findings, strict=True) if not single else ():
        yield ("", str(one.status), *cells, f"· {one.heading}")
