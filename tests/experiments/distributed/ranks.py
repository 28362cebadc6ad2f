"""Run a test's function in several processes that are connected like the ranks of a trial."""

import os
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fewbits.experiments import devices
from fewbits.experiments.trial import Runtime
from fewbits.sweeps.running.local import environments_at, meeting_place
from tests.experiments.trial_inputs import ended, ending, server

Task = Callable[..., None]  # called in every process with its World and further arguments


def _main(task: Task, environment: Mapping[str, str], output: Path, arguments: tuple[Any, ...]) -> None:
    os.environ.update(environment)
    try:
        world = devices.choose(Runtime(device="cpu"))
        task(world, *arguments)
        devices.leave(world)
    except BaseException:
        output.write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)


def on_ranks(ranks: int, folder: Path, task: Task, *arguments: object) -> None:
    """Call task(world, *arguments) on every rank; if it raises an error on a rank, fail with its traceback.

    task: a function at the top level of a module. folder: receives the tracebacks.
    """
    store = meeting_place()
    with ExitStack() as stack:
        processes = []
        for rank, environment in enumerate(environments_at(store, ranks)):
            output = folder / f"rank-{rank}"
            process = server().Process(target=_main, args=(task, environment, output, arguments))
            process.start()
            processes.append(stack.enter_context(ending(process)))
        statuses = [ended(process, 240) for process in processes]
    reports = "\n".join(path.read_text() for path in sorted(folder.glob("rank-*")))
    assert statuses == [0] * ranks, reports
