"""Run the missing trials of a sweep or of a study's sweeps; after an interruption, the same command runs the rest."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fewbits.common.arguments import CommandParser, positive
from fewbits.common.terminal import notice
from fewbits.sweeps.cluster.access import check_name, check_reachable, is_dashboard

if TYPE_CHECKING:
    from fewbits.sweeps.planning.plan import Plan

EXAMPLES = """\
examples:
  fewbits sweep study=mor scale=smoke --dry-run       show what would run, what is finished, and how long it takes
  fewbits sweep study=mor scale=smoke                 run the missing trials; after an interruption, the rest
  fewbits sweep study=mor sweep=partitions seeds=[0,1]  one sweep of the study, with other seeds
  fewbits sweep my-sweep.yaml                         a sweep file of your own, see the README
  fewbits sweep my-sweep.yaml training.steps=20       with an override for every trial, as for `fewbits train`
  fewbits sweep study=mor --address auto              on the Ray cluster that this machine is part of
  fewbits sweep study=mor --address http://head:8265  submit it as a Ray job, which also writes the study's report
  fewbits sweep study=mor --address http://head:8265 --env HF_TOKEN    also send a variable that looks like a secret

Exit status: 0 all trials have a result; 1 some failed or are blocked, which are named; 2 wrong input; 130 interrupted.
"""


def main(argv: Sequence[str]) -> int:
    parser = CommandParser("fewbits sweep", __doc__, EXAMPLES)
    chosen = "study=NAME, FILE.yaml, or sweep=NAME for conf/sweep/NAME.yaml; then keys of the sweep file, and overrides"
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help=chosen)
    parser.add_argument("--dry-run", action="store_true", help="print the plan and run nothing")
    parser.add_argument("--trials", action="store_true", help="with --dry-run: list each trial of a large sweep, too")
    memory = "with --dry-run: the memory of a GPU (default: 80), to check that each arm's trials fit"
    parser.add_argument("--gpu-memory", type=float, default=80.0, metavar="GB", help=memory)
    add_where(parser)
    parser.add_store(new=True)
    parser.add_config_dir()
    options = parser.parse_intermixed_args(argv)

    from fewbits.experiments.config_files import with_config_dir

    overrides = with_config_dir(in_store(options.overrides, options.runs), options.config_dir)
    if options.dry_run and not is_dashboard(options.address):
        return _dry_run(overrides, options)
    return sweep(overrides, options)


def sweep(overrides: Sequence[str], options: argparse.Namespace) -> int:
    """Run the missing trials of the sweeps that the overrides select; options: those of `add_where`."""
    if is_dashboard(options.address):
        return _submit(overrides, options)
    check_cluster(options)

    from fewbits.sweeps.planning.plan import plan
    from fewbits.sweeps.planning.stored_plans import changes
    from fewbits.sweeps.planning.studies import load_sweeps
    from fewbits.sweeps.running.run_sweep import Where, run_sweep, store_plan
    from fewbits.sweeps.tracking.mirror import Mirror

    planned = plan(*load_sweeps(overrides))
    for line in changes(overrides, planned):
        notice(line)
    store_plan(planned, overrides)
    where = Where(options.backend, options.address, options.parallel, options.env)
    return run_sweep(planned, where, Mirror(planned, overrides))


def _dry_run(overrides: Sequence[str], options: argparse.Namespace) -> int:
    from fewbits.sweeps.planning.outline import missing_data, plan_or_outline, print_memory, print_plan
    from fewbits.sweeps.planning.stored_plans import changes

    if not options.gpu_memory > 0:
        raise ValueError(f"--gpu-memory {options.gpu_memory}: a number of GB above 0 is expected")
    planned = plan_or_outline(overrides)
    print_plan(planned, options.parallel, options.backend, options.trials)
    for line in [] if missing_data(planned) else changes(overrides, planned):
        print(line)
    status = print_memory(planned, options.gpu_memory * 1e9)
    if status == 0 and any(text.startswith("study=") for text in overrides):
        _print_power(planned.sweeps[0].study, planned)
    return status


def _print_power(study: str, plan: Plan) -> None:
    """Print for each claim of a study the smallest effect that the planned seeds can detect, if any is known."""
    from fewbits.analysis.engine.claims.preview import preview, preview_lines
    from fewbits.analysis.engine.claims.schema import studies_with_claims
    from fewbits.analysis.engine.results.frames import Results

    if study not in studies_with_claims():
        return
    previews = preview(study, Results(plan))
    if any(one.mde is not None for one in previews):
        print("\n" + "\n".join(preview_lines(previews)))
    elif previews:
        command = f"fewbits claims study={study} scale={plan.sweeps[0].scale} --power --sd validation_loss=0.0007"
        print(f"\neffects that the seeds can detect, for a standard deviation over seeds: {command}")


def check_cluster(options: argparse.Namespace) -> None:
    """Raise ValueError if no Ray cluster answers at `--address`, or if `--address` is used with `--backend local`."""
    if options.address and options.backend == "local":
        raise ValueError("--address names a Ray cluster and cannot be used with --backend local: leave out one of them")
    if options.address:
        check_reachable(options.address)


def add_where(parser: argparse._ActionsContainer) -> None:
    """Add the options that choose the backend and machines on which trials run."""
    address = "the address of a Ray cluster; without it, Ray starts on this machine"
    parser.add_argument("--address", metavar="A", help=address)
    backend = "local: processes of this machine, without Ray"
    parser.add_argument("--backend", choices=("ray", "local"), default="ray", help=backend)
    parser.add_argument("--parallel", type=positive, metavar="N", help="run at most N trials at a time")
    sent = "on a cluster: also send this environment variable to jobs and workers, with its value on this machine"
    parser.add_argument("--env", action="append", default=[], type=check_name, metavar="NAME", help=sent)


def in_store(overrides: Sequence[str], runs: Path) -> list[str]:
    """Return the overrides and, if `--runs` is not the default, `runtime.runs=RUNS` with an absolute path."""
    if runs == Path("runs"):
        return [*overrides]
    from fewbits.experiments.composition import spelled

    return [*overrides, f"runtime.runs={spelled(str(runs.absolute()))}"]


def submit_report(overrides: Sequence[str], options: argparse.Namespace, reports: str) -> int:
    """Submit a job that runs a study's trials and writes its report, in `reports` or beside the store."""
    from fewbits.sweeps.cluster.submit import submit_study

    return submit_study(overrides, options.address, reports, _job_options(options), options.env)


def _submit(overrides: Sequence[str], options: argparse.Namespace) -> int:
    from fewbits.sweeps.cluster.submit import is_study, submit

    if is_study(overrides) and not options.dry_run:
        return submit_report(overrides, options, "reports")
    dry = ["--dry-run", "--gpu-memory", str(options.gpu_memory), *["--trials"] * options.trials] * options.dry_run
    return submit([*overrides, *dry, *_job_options(options)], options.address, options.env)


def _job_options(options: argparse.Namespace) -> list[str]:
    """Return the options for the command that runs as a job; the variables of --env are sent with the job instead."""
    return ["--backend", options.backend, *(["--parallel", str(options.parallel)] if options.parallel else [])]
