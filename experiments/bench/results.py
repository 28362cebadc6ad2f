"""Write the results of benchmarks into a store, from which a study's report reads them.

Each benchmark has one file for each kind of device, such as `bench/train-cpu.json`; a new result replaces the old one.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fewbits.common.store_folder import store_folder

FOLDER = "bench"  # the folder of a store with the timings of `fewbits bench`, in a file for each device


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--store", metavar="RUNS", help="also write the results into the store RUNS, for reports")
    parser.add_argument("--once", action="store_true", help="do nothing if RUNS has results for this kind of device")


def check_options(options: argparse.Namespace, command: str) -> None:
    """Convert the option `--store` to a path; raise ValueError for a URL, and for `--once` without `--store`.

    command: the command's name in the message.
    """
    options.store = options.store and store_folder(options.store)
    if options.once and options.store is None:
        raise ValueError(f"{command}: --once requires --store RUNS, the store that has the results of earlier calls")


def is_measured(options: argparse.Namespace, name: str) -> bool:
    """Tell whether `--once` is given and the store has results of the benchmark `name`.

    If so, print that nothing is measured, and the path of the results.
    """
    if not options.once or not (file := _file(options.store, name)).exists():
        return False
    print(f"{file} exists, so nothing was measured; delete it to measure again")
    return True


def save(store: Path | None, name: str, machine: dict[str, Any], results: dict[str, Any]) -> None:
    """Write the results, facts about the machine and the current time to the file of the benchmark `name`.

    store: the store with this file; None: write nothing.
    """
    import time

    from fewbits.common.atomic import write_json
    from fewbits.experiments import identity

    if store is not None:
        file = _file(store, name)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, {"machine": {**identity.process_facts(), **machine, "time": time.time()}, **results})


def _file(store: Path, name: str) -> Path:
    return store / FOLDER / f"{name}.json"
