"""Evaluate finished runs on tasks and on other text, and store the results in the run folders (`fewbits evaluate`)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits.common import terminal
from fewbits.common.arguments import CommandParser, positive
from fewbits.common.terminal import print_json, print_table

if TYPE_CHECKING:
    from fewbits.experiments.storage.results import Evaluation

EXAMPLES = """\
examples:
  fewbits evaluate 1a2b3c4d                                  held-out losses of the run with this hash
  fewbits evaluate runs/*-mor-* loss                         the same of several runs
  fewbits evaluate 1a2b3c4d --text notes.txt                 the loss on a file of text
  fewbits evaluate 1a2b3c4d piqa hellaswag --limit 200       tasks of lm-eval (pip install 'fewbits[eval]')
  fewbits evaluate 1a2b3c4d mor                              all tasks of MoR's tables; also: nvfp4

Results are stored in RUN/evaluations, and a stored result is not computed again. Reports show only results of whole
tasks (without --limit) with the recipe's operands (without --unquantized). lm-eval's own command line accepts runs as
models: python -m fewbits.lm_eval run --model fewbits --model_args run=RUN --tasks piqa"""


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_intermixed_args(argv)

    from fewbits.experiments.evaluation.evaluate import Request, evaluations_of
    from fewbits.experiments.storage.finished_run import FinishedRun
    from fewbits.experiments.trial import Runtime

    folders, tasks = _runs_and_tasks(options.words, options.runs)
    request = Request(
        tasks=tuple(tasks) or (() if options.text else Request.tasks),
        texts=tuple(options.text),
        limit=options.limit,
        include_path=options.include_path,
        run_code=options.run_code,
        unquantized=options.unquantized,
    )
    request.check()
    opened = [FinishedRun.open(folder, options.step, options.cache) for folder in folders]
    runtime = Runtime(device=options.device, threads=options.threads, cache=options.cache)
    evaluated: list[tuple[str, Evaluation, bool]] = []
    try:
        for number, run in enumerate(opened, 1):
            place = f"{run.name} ({number}/{len(opened)})"
            report = lambda task, place=place: terminal.show(f"{place}: {task}")  # noqa: E731
            made = evaluations_of(run, request, runtime, report=report)
            evaluated += [(run.name, one, was_stored) for one, was_stored in made]
    finally:
        terminal.clear()
    if options.json:
        print_json([_plain(*one) for one in evaluated])
    else:
        _print(evaluated)
    return 0


def _parser() -> CommandParser:
    parser = CommandParser("fewbits evaluate", __doc__, EXAMPLES)
    words = "runs (folders, names or hashes), and tasks: loss (the default), tasks of lm-eval, the groups mor and nvfp4"
    parser.add_argument("words", nargs="+", metavar="RUN|TASK", help=words)
    text = "also compute the loss on this text file; may be repeated"
    parser.add_argument("--text", action="append", default=[], type=Path, metavar="FILE", help=text)
    parser.add_argument("--step", type=int, help="step of the checkpoint to evaluate (default: the last step)")
    parser.add_argument("--limit", type=positive, metavar="N", help="only the first N questions of each lm-eval task")
    spellings = ("--include-path", "--include_path")  # the second is lm-eval's spelling
    parser.add_argument(*spellings, metavar="DIR", help="a folder of further lm-eval tasks, as YAML files")
    parser.add_argument("--run-code", action="store_true", help="let tasks run code that the model writes")
    parser.add_argument("--unquantized", action="store_true", help="evaluate with unquantized operands")
    parser.add_argument("--json", action="store_true", help="print a JSON list of objects")
    parser.add_store()
    parser.add_device()
    parser.add_cache()
    return parser


def _runs_and_tasks(arguments: Sequence[str], runs: Path) -> tuple[list[Path], list[str]]:
    """Split the arguments into run folders and names of tasks.

    An argument that is no run of the store `runs` is the name of a task, unless it looks like a run: it contains `/`,
    ends with a hash, or consists of four or more hexadecimal digits. Raise ValueError for those, and without any run.
    """
    from fewbits.experiments.storage.run_folder import find_run

    folders, tasks = [], []
    for argument in arguments:
        try:
            folders.append(find_run(argument, runs))
        except ValueError:
            if "/" in argument or re.search(r"(^|-)[0-9a-f]{8}$|^(?=.*\d)[0-9a-f]{4,}$", argument):
                raise
            tasks.append(argument)
    if not folders:
        raise ValueError(f"no argument names a run of the store {runs}: {' '.join(arguments)}: name a folder or a hash")
    return list(dict.fromkeys(folders)), tasks


# ------------------------------------------------------------------------------------------------ output


def _plain(run: str, one: Evaluation, was_stored: bool) -> dict[str, Any]:
    facts = {"run": run, "step": one.key.step, "task": one.key.task, "settings": one.key.settings}
    return facts | {"stored": was_stored, "results": one.results, "environment": one.environment}


def _print(evaluated: Sequence[tuple[str, Evaluation, bool]]) -> None:
    """Print a row for each number of each run, grouped by the number's name: value ± standard error."""
    from fewbits.experiments.storage.results import numbers

    rows: list[tuple[str, str, str, str]] = []
    for run, one, was_stored in evaluated:
        values = dict(numbers(one.results))
        errors = {_error_of(name) for name in values}
        for name, value in values.items():
            if name not in errors and not name.endswith((".tokens", ".sample_len")):
                error = values.get(_error_of(name))
                shown = "not finite" if value is None else f"{value:.4f}" + (f" ± {error:.4f}" if error else "")
                rows.append((name.removeprefix("tasks."), run, shown, "stored" if was_stored else ""))
    names = list(dict.fromkeys(row[0] for row in rows))
    print_table(("number", "run", "value", ""), sorted(rows, key=lambda row: names.index(row[0])), right=("value",))


def _error_of(name: str) -> str:
    head, _, last = name.rpartition(".")
    metric, comma, name_of_filter = last.partition(",")
    return f"{head}.{metric}_stderr{comma}{name_of_filter}"  # lm-eval's name of the standard error
