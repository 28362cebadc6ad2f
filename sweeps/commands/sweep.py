"""`fewbits sweep`: have all trials of a sweep done; the same command goes on, and repeats nothing."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from fewbits.common.arguments import CommandParser
from fewbits.common.store_folder import store_folder
from fewbits.sweeps.cluster.environment import check_name

EXAMPLES = """\
examples:
  fewbits sweep study=mor scale=smoke --dry-run       what would run, what is there, how long it should take
  fewbits sweep study=mor scale=smoke                 run what is missing; after an interruption, the rest
  fewbits sweep study=mor sweep=tables seeds=[0,1]    one sweep of the study, with other seeds
  fewbits sweep my-sweep.yaml                         one of your own, see the README
  fewbits sweep my-sweep.yaml training.steps=20       with a word for every trial, as for `fewbits train`
  fewbits sweep study=mor --address auto              on the Ray cluster that this machine is part of
  fewbits sweep study=mor --address http://head:8265  submitted as a job, which also makes the study's report
  fewbits sweep study=mor --address http://head:8265 --env HF_TOKEN    with a variable that is not sent unless named
  fewbits sweep study=mor --like amd-avx2 --dry-run   which trials would run again, to have all on one kind of machine

Exit status: 0 all trials are over; 1 some failed, which are named; 2 wrong input; 130 interrupted.
"""


def main(argv: Sequence[str]) -> int:
    parser = CommandParser("fewbits sweep", __doc__, EXAMPLES)
    parser.add_argument(
        "words", nargs="*", metavar="WORD", help="study=NAME or FILE.yaml, changes of its keys, words for trials"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the plan and run nothing")
    parser.add_argument("--trials", action="store_true", help="with --dry-run: list each trial of a large sweep, too")
    add_where(parser)
    parser.add_argument("--runs", metavar="DIR", help="the store (default: runs); on a cluster, shared by its nodes")
    options = parser.parse_intermixed_args(argv)
    words = in_store(options.words, options.runs)
    return _dry_run(words, options) if options.dry_run else sweep(words, options)


def sweep(words: Sequence[str], options: argparse.Namespace) -> int:
    """Have all of its trials done, where the options of `add_where` say."""
    if is_submitted(options):
        return _submit(words, options)

    from fewbits.sweeps.planning.plan import plan
    from fewbits.sweeps.planning.sweep import load_sweeps
    from fewbits.sweeps.running.run_sweep import run_sweep

    planned = plan(*load_sweeps(words))
    return run_sweep(
        planned, options.backend, options.address, options.parallel, options.env, options.like, overrides=words
    )


def _dry_run(words: Sequence[str], options: argparse.Namespace) -> int:
    if is_submitted(options):
        return _submit(words, options)

    from fewbits.sweeps.planning import outline
    from fewbits.sweeps.planning.plan import plan
    from fewbits.sweeps.planning.sweep import load_sweeps

    sweeps, extra = load_sweeps(words)
    try:
        planned = plan(sweeps, extra)
    except ValueError:
        if not outline.missing_data(sweeps, extra):
            raise
        print(outline.describe(sweeps, extra, options.parallel))
        return 0
    from fewbits.sweeps.commands.dry_run import describe
    from fewbits.sweeps.planning.replacing import find_unlike

    again = find_unlike(planned, options.like, options.address) if options.like else {}
    print(describe(planned, options.parallel, options.backend, options.trials, again))
    return 0


def is_submitted(options: argparse.Namespace) -> bool:
    """Return whether the command runs as a job of the cluster, whose dashboard is the address."""
    return bool(options.address) and options.address.startswith(("http://", "https://"))


def add_where(parser: argparse.ArgumentParser) -> None:
    """The options that say where trials run."""
    parser.add_argument("--address", metavar="A", help="of a Ray cluster; without, Ray starts on this machine")
    parser.add_argument("--backend", choices=("ray", "local"), default="ray", help="local: processes, without Ray")
    parser.add_argument("--parallel", type=_count, metavar="N", help="at most N trials at a time")
    parser.add_argument(
        "--like",
        metavar="KIND",
        help="run all trials on this kind of processor or GPU (amd-avx2, say): those that another kind computed are "
        "run again, and their old folders moved to replaced/ in the store",
    )
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        type=check_name,
        metavar="NAME",
        help="on a cluster, give jobs and workers this environment variable too, with the value that it has here",
    )


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: 1 or more is expected")
    return int(text)


def in_store(words: Sequence[str], runs: str | None) -> list[str]:
    """With the store that an option names, whatever characters it has."""
    if not runs:
        return [*words]
    from fewbits.experiments.config import spelled

    return [*words, f"runtime.runs={spelled(str(store_folder(runs).absolute()))}"]


def submit_report(words: Sequence[str], options: argparse.Namespace, reports: Path) -> int:
    """Have the study's trials done and its report made by a job; the report is copied into `reports` where the store
    is seen from here."""
    from fewbits.sweeps.cluster.report_job import submit_study

    return submit_study(words, options.address, reports, _passed_on(options), options.env)


def _submit(words: Sequence[str], options: argparse.Namespace) -> int:
    from fewbits.sweeps.cluster.report_job import is_study
    from fewbits.sweeps.cluster.submit import submit

    if is_study(words) and not options.dry_run:
        return submit_report(words, options, Path("reports"))
    dry = ["--dry-run", *(["--trials"] if options.trials else [])] if options.dry_run else []
    return submit([*words, *dry, *_passed_on(options)], options.address, options.env)


def _passed_on(options: argparse.Namespace) -> list[str]:
    """Return the options that the job's own command gets. The job has the variables of --env already."""
    parallel = ["--parallel", str(options.parallel)] if options.parallel else []
    return ["--backend", options.backend, *parallel, *(["--like", options.like] if options.like else [])]
