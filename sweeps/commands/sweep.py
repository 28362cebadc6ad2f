"""Run the missing trials of a sweep; after an interruption, the same command runs the rest (`fewbits sweep`)."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from fewbits.common.arguments import CommandParser
from fewbits.common.store_folder import store_folder
from fewbits.sweeps.cluster.address import check_reachable, is_dashboard
from fewbits.sweeps.cluster.environment import check_name

EXAMPLES = """\
examples:
  fewbits sweep study=mor scale=smoke --dry-run       show what would run, what is finished and the time it takes
  fewbits sweep study=mor scale=smoke                 run the missing trials; after an interruption, the rest
  fewbits sweep study=mor sweep=tables seeds=[0,1]    one sweep of the study, with other seeds
  fewbits sweep my-sweep.yaml                         a sweep file of your own, see the README
  fewbits sweep my-sweep.yaml training.steps=20       with an override for every trial, as for `fewbits train`
  fewbits sweep study=mor --address auto              on the Ray cluster that this machine is part of
  fewbits sweep study=mor --address http://head:8265  submitted as a job, which also writes the study's report
  fewbits sweep study=mor --address http://head:8265 --env HF_TOKEN    with a variable that is not sent unless named
  fewbits sweep study=mor --like amd-avx2 --dry-run   which trials would run again, to have all on one kind of machine

Exit status: 0 all trials have ended; 1 some failed, which are named; 2 wrong input; 130 interrupted.
"""


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    overrides = overrides_of(options)
    return _dry_run(overrides, options) if options.dry_run else sweep(overrides, options)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the command line's overrides and options."""
    parser = CommandParser("fewbits sweep", __doc__, EXAMPLES)
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="OVERRIDE",
        help="study=NAME, FILE.yaml, or sweep=NAME for conf/sweep/NAME.yaml; then changes of its keys, and overrides "
        "for every trial",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the plan and run nothing")
    parser.add_argument("--trials", action="store_true", help="with --dry-run: list each trial of a large sweep, too")
    parser.add_argument(
        "--gpu-memory",
        type=float,
        default=80.0,
        metavar="GB",
        help="with --dry-run: the memory of a GPU (default: 80), which the trials of every arm have to fit",
    )
    add_where(parser)
    parser.add_argument("--runs", metavar="DIR", help="the store (default: runs); on a cluster, shared by its nodes")
    parser.add_argument("-cd", "--config-dir", metavar="DIR", help="a folder of your own configs, such as DIR/recipe")
    return parser.parse_intermixed_args(argv)


def sweep(overrides: Sequence[str], options: argparse.Namespace) -> int:
    """Run the missing trials of a sweep and return the exit status. options: the parsed options of `add_where`."""
    if is_dashboard(options.address):
        return _submit(overrides, options)
    check_cluster(options)

    from fewbits.sweeps.planning.plan import plan
    from fewbits.sweeps.planning.sweep import load_sweeps
    from fewbits.sweeps.running.run_sweep import run_sweep

    planned = plan(*load_sweeps(overrides))
    return run_sweep(
        planned, options.backend, options.address, options.parallel, options.env, options.like, overrides=overrides
    )


def _dry_run(overrides: Sequence[str], options: argparse.Namespace) -> int:
    if is_dashboard(options.address):
        return _submit(overrides, options)

    from fewbits.sweeps.commands.dry_run import print_memory, print_plan
    from fewbits.sweeps.dry_run.outline import plan_without_missing_data
    from fewbits.sweeps.planning.replacing import find_unlike

    planned = plan_without_missing_data(overrides)
    again = find_unlike(planned, options.like, options.address) if options.like else {}
    print_plan(planned, options.parallel, options.backend, options.trials, again)
    return print_memory(planned, options.gpu_memory * 1e9)


def check_cluster(options: argparse.Namespace) -> None:
    """Raise ValueError if no Ray cluster answers at `--address`, or if `--backend local` is set too.

    Call it before anything is planned or written.
    """
    if options.address:
        if options.backend == "local":
            raise ValueError("--address names a Ray cluster and cannot be used with --backend local")
        check_reachable(options.address)


def add_where(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where trials run."""
    parser.add_argument("--address", metavar="A", help="the Ray cluster's address; without it, Ray starts here")
    parser.add_argument("--backend", choices=("ray", "local"), default="ray", help="local: processes, without Ray")
    parser.add_argument("--parallel", type=_count, metavar="N", help="at most N trials at a time")
    parser.add_argument(
        "--like",
        metavar="KIND",
        help="run all trials on this kind of processor or GPU, for example amd-avx2: trials that another kind computed "
        "run again, and their old folders are moved to replaced/ in the store",
    )
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        type=check_name,
        metavar="NAME",
        help="on a cluster: also send this environment variable to jobs and workers, with its value on this machine",
    )


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: 1 or more is expected")
    return int(text)


def overrides_of(options: argparse.Namespace) -> list[str]:
    """Return the overrides of the command line, with those that its `--runs` and `--config-dir` mean."""
    from fewbits.experiments.config_files import with_config_dir

    return with_config_dir(in_store(options.overrides, options.runs), options.config_dir)


def in_store(overrides: Sequence[str], runs: str | None) -> list[str]:
    """Return the overrides and, if `--runs` is set, one more that sets the store to it.

    The path is quoted, so it may contain any characters.
    """
    if not runs:
        return [*overrides]
    from fewbits.experiments.composition import spelled

    return [*overrides, f"runtime.runs={spelled(str(store_folder(runs).absolute()))}"]


def submit_report(overrides: Sequence[str], options: argparse.Namespace, reports: Path) -> int:
    """Submit a job that runs a study's trials and writes its report, and return the job's exit status.

    reports: the folder into which the report is copied if the store's file system is mounted on this machine.
    """
    from fewbits.sweeps.cluster.report_job import submit_study

    return submit_study(overrides, options.address, reports, _job_options(options), options.env)


def _submit(overrides: Sequence[str], options: argparse.Namespace) -> int:
    from fewbits.sweeps.cluster.report_job import is_study
    from fewbits.sweeps.cluster.submit import submit

    if is_study(overrides) and not options.dry_run:
        return submit_report(overrides, options, Path("reports"))
    dry = ["--dry-run", "--gpu-memory", str(options.gpu_memory), *(["--trials"] if options.trials else [])]
    return submit([*overrides, *(dry if options.dry_run else []), *_job_options(options)], options.address, options.env)


def _job_options(options: argparse.Namespace) -> list[str]:
    """Return the options of the job's command. `--env` is left out: the job has these variables already."""
    parallel = ["--parallel", str(options.parallel)] if options.parallel else []
    return ["--backend", options.backend, *parallel, *(["--like", options.like] if options.like else [])]
