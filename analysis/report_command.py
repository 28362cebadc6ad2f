"""`fewbits report`: a study's notebook over what the store holds, as one page with its tables, figures, verdicts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from fewbits.common.arguments import CommandParser
from fewbits.sweeps.cluster.address import is_dashboard
from fewbits.sweeps.commands.sweep import add_where, in_store, submit_report, sweep

EXAMPLES = """\
examples:
  fewbits report study=mor scale=cpu                    reports/mor-cpu/index.html
  fewbits report study=mor scale=cpu seeds=[0,1,2,3,4]  with the seeds that were added
  fewbits report study=mor scale=smoke --sweep          what is missing is trained first, as by `fewbits sweep`
  fewbits report study=mor --compare smoke cpu          scales side by side: reports/mor-smoke-cpu/index.html
  fewbits report --index                                all reports that lie there: reports/index.html

Without --sweep nothing is trained: what has no result is said to be missing. Equal results give equal bytes.
Exit status: 0 the report is complete; 1 it is made, but places have no result; 2 wrong input; 130 interrupted.
"""


def main(argv: Sequence[str]) -> int:
    parser = CommandParser("fewbits report", __doc__, EXAMPLES)
    parser.add_argument("words", nargs="*", metavar="WORD", help="as for `fewbits sweep`")
    parser.add_argument("--runs", metavar="DIR", help="the store (default: runs)")
    parser.add_argument("--out", metavar="DIR", default="reports", help="where reports lie (default: reports)")
    parser.add_argument("--compare", nargs="+", metavar="SCALE", help="one page for several scales")
    parser.add_argument("--index", action="store_true", help="one page of the verdicts of all reports there")
    parser.add_argument("--sweep", action="store_true", help="first have done what is missing")
    add_where(parser)
    options = parser.parse_intermixed_args(argv)
    if options.index:
        if options.words or options.runs or options.compare or options.sweep:
            parser.error("--index is of the reports that lie in --out: nothing else is said beside it")
        return _index(Path(options.out).expanduser())
    if not options.words:
        parser.error("which study? study=NAME, or --index")
    if options.sweep and options.compare:
        parser.error("--sweep is of one scale, --compare of several: sweep them one by one")
    if options.like and not options.sweep:
        parser.error("--like is of --sweep: without it nothing is trained")
    words, reports = in_store(options.words, options.runs), Path(options.out).expanduser()

    from fewbits.analysis.report import check_place, write_report
    from fewbits.sweeps.planning.lookup import show_notes

    if options.sweep:  # which takes a while
        check_place(reports)
    if options.sweep and is_dashboard(options.address):
        return submit_report(words, options, reports)
    swept = sweep(words, options) if options.sweep else 0
    if swept > 1:
        return swept
    if options.compare:
        from fewbits.analysis.ladder import write_ladder

        report = write_ladder(words, options.compare, reports)
    else:
        report = write_report(words, reports)
    show_notes(report.notes)
    if report.missing:
        count = len(report.missing)
        what = "1 place has" if count == 1 else f"{count} places have"
        print(f"fewbits: {what} no result, the first: {report.missing[0]}; the page names all", file=sys.stderr)
    print(report.verdicts)
    print(report.index)
    return swept or (1 if report.missing else 0)


def _index(reports: Path) -> int:
    from fewbits.analysis.index import write_index

    print(write_index(reports))
    return 0
