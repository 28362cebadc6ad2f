"""Write the report of a study from the finished trials of the store (`fewbits report`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fewbits.commands.sweep import add_where, in_store, submit_report, sweep
from fewbits.common.arguments import CommandParser, warn_in_lines
from fewbits.common.terminal import notice
from fewbits.common.wording import plural
from fewbits.sweeps.cluster.access import is_dashboard

EXAMPLES = """\
examples:
  fewbits report study=mor scale=cpu                    write reports/mor-cpu/index.html
  fewbits report study=mor scale=cpu seeds=[0,1,2,3,4]  use other seeds than the scale's
  fewbits report study=mor scale=smoke --sweep          run the missing trials first, as `fewbits sweep` does
  fewbits report --from mor-cpu/results.parquet         write the page again, without the store
  fewbits report study=mor scale=cpu-full --from a.parquet --from b.parquet   with trials of other machines
  fewbits report --index                                write reports/index.html: all reports

Without --sweep nothing is trained, and the page names each place (arm, axis values, seed) that has no result. Equal
results give equal files.
Exit status: 0 the report is complete; 1 it is written, but some results are missing; 2 wrong input; 130 interrupted.
"""


def main(argv: Sequence[str]) -> int:
    parser = CommandParser("fewbits report", __doc__, EXAMPLES)
    chosen = "selects the study and scale, as for `fewbits sweep`"
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help=chosen)
    parser.add_store(new=True)
    out = "the folder for reports (default: reports); of a job on a cluster, beside the store"
    parser.add_argument("--out", metavar="DIR", default="reports", help=out)
    parser.add_argument("--index", action="store_true", help="write a page with the verdicts of all reports in --out")
    again = "make the report from this file results.parquet, which lies beside each page; no store is needed. With a "
    again += "study, read the trials that are not finished in the store from the file; may be repeated"
    parser.add_argument("--from", dest="archives", metavar="FILE", action="append", default=[], help=again)
    parser.add_argument("--sweep", action="store_true", help="train the missing trials before the report is written")
    add_where(parser)
    options = parser.parse_intermixed_args(argv)
    if options.index:
        if options.overrides or options.sweep or options.archives:
            parser.error("--index reads the reports in the folder --out; it cannot be combined with any other option")
        from fewbits.analysis.report.files import write_index

        print(write_index(Path(options.out).expanduser()))
        return 0
    archives = [Path(name).expanduser() for name in options.archives]
    if archives and (options.sweep or (len(archives) > 1 and not options.overrides)):
        parser.error("--from cannot be combined with --sweep; several files need a study, such as study=mor scale=cpu")
    if not options.overrides and not options.archives:
        parser.error("name a study (study=NAME), or use --index")
    if not options.sweep and options.runs != Path("runs") and not options.runs.is_dir():
        parser.error(f"argument --runs: {options.runs}: no such folder")
    overrides, reports = in_store(options.overrides, options.runs), Path(options.out).expanduser()
    if options.sweep and is_dashboard(options.address):
        return submit_report(overrides, options, options.out)

    from fewbits.analysis.report.files import check_place, write_report

    warn_in_lines()
    if options.sweep:  # a report folder without write access must be an error before the training, not after it
        check_place(reports)
    swept = sweep(overrides, options) if options.sweep else 0
    if swept > 1:
        return swept
    report = write_report(overrides if options.overrides else (), reports, archives)
    if report.missing:
        places = f"{plural(len(report.missing), 'place')} without a result"
        notice(f"{places}; the first is {report.missing[0]}; the report names all of them")
    print(report.verdicts)
    print(report.index)
    return swept or (1 if report.missing else 0)
