"""Print what a sweep would do (`fewbits sweep --dry-run`): the trials' states, the arms' costs, and the totals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fewbits.common.store_folder import size
from fewbits.common.terminal import notice, print_table
from fewbits.common.wording import plural
from fewbits.sweeps.planning import outline, store
from fewbits.sweeps.planning.cost import Speeds, disk, remaining, slots_of, work_of
from fewbits.sweeps.planning.expand import spell
from fewbits.sweeps.planning.plan import Plan, Planned
from fewbits.sweeps.planning.store import HALF_DONE, TrialStatus, counted, trial_statuses, unfinished

FEW = 40  # plans with more places list their trials only with --trials


def print_plan(plan: Plan, parallel: int | None = None, backend: str = "ray", trials: bool = False) -> None:
    """Print the trials with their states, the table of arms and the totals; trials: also those of large plans.

    If data are missing on this machine, print the arms' settings instead of the trials, and at the end the commands
    that prepare the data. parallel, backend: the values of `--parallel` and `--backend`, for the estimate of the time.
    """
    statuses, missing = trial_statuses(plan), outline.missing_data(plan)
    tokens = outline.corpus_tokens(plan, missing)
    if missing:
        print_table(("sweep", "place", *outline.SETTINGS), outline.setting_rows(plan))
        print(f"\n{outline.LEGEND}\n" if any(sweep.assumed for sweep in plan.sweeps) else "")
    elif trials or len(plan.members) <= FEW:
        print_table([""] * 4, _trial_rows(plan, statuses))
        print()
    print_table(outline.COSTS, outline.cost_rows(plan, tokens))
    print("", *_totals(plan, statuses, parallel, backend), sep="\n")
    if missing:
        print(f"{sum(work_of(planned.trial) for planned in plan.trials.values()):.2e} FLOPs")
        print(f"these data are not on this machine: {', '.join(map(str, missing))}")
        print("".join(f"{line}\n" for line in outline.preparations(missing)), end="")


def print_memory(plan: Plan, device_bytes: float) -> int:
    """Print the memory that each arm needs on a GPU of `device_bytes`; return 2 if one does not fit, else 0."""
    arms = list(outline.memory_rows(plan, device_bytes))
    if arms:
        print()
        print_table(("sweep", "arm", "model", "ranks", "GB a rank", *outline.PARTS), [row for row, _ in arms])
    complaints = [reason for _, reason in arms if reason is not None]
    for text in complaints:
        notice(text)
    return 2 if complaints else 0


def print_power(study: str, plan: Plan) -> None:
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


def _trial_rows(plan: Plan, statuses: Mapping[str, TrialStatus]) -> Iterator[tuple[str, str, str, str]]:
    seen, has_to_run = set(), unfinished(plan)
    for member in plan.members:
        planned = plan.trials[member.id]
        text = _describe_status(planned, statuses[member.id], member.id in has_to_run)
        again = "  (the same trial as above)" if member.id in seen else ""
        seen.add(member.id)
        yield member.cell.sweep, spell(member.cell.place), planned.folder.path.name, text + again


def _describe_status(planned: Planned, status: TrialStatus, has_to_run: bool) -> str:
    state = status.state
    if state is store.State.BLOCKED:
        return f"blocked: {status.why}"
    if not has_to_run:
        return str(state)
    if state in store.OVER:
        return f"{state}, runs again for the checkpoints of steps {', '.join(map(str, sorted(planned.keep)))}"
    step = store.reached(planned.folder)
    if state is store.State.PLANNED and step:
        return f"{HALF_DONE}, resumes from step {step}"
    return f"{state}, resumes from step {step}" if step and state is not store.State.RUNNING else str(state)


def _totals(plan: Plan, statuses: Mapping[str, TrialStatus], parallel: int | None, backend: str) -> list[str]:
    """Return lines with the number of trials in each state, and the time and disk space that the sweep still needs."""
    has_to_run = unfinished(plan)
    missing = [t for key, t in plan.trials.items() if key in has_to_run and not statuses[key].blocked_permanently]
    states = counted(plan, statuses)
    lines = [f"{plural(len(plan.trials), 'trial')}: {states}"]
    if not missing:
        return [*lines, "nothing to run"]
    slots = parallel or slots_of(missing)
    if backend == "local":
        slots = min(slots, slots_of(missing))
    return [*lines, remaining(missing, slots, Speeds(plan.store)), f"{size(disk(missing))} of checkpoints"]
