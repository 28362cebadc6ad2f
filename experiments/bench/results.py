"""Keep the results of a benchmark in a store, from where a study's report reads them.

There is one file for each kind of device, `bench/train-cpu.json`, which holds the latest measurement.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fewbits.common.store_folder import store_folder


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--store", metavar="RUNS", help="also write all results to RUNS/bench, for reports")
    parser.add_argument("--once", action="store_true", help="skip if RUNS/bench has results for this kind of device")


def check_options(options: argparse.Namespace, command: str) -> None:
    """Convert `--store` to a path; raise ValueError for a URL, and for --once without a store."""
    options.store = options.store and store_folder(options.store)
    if options.once and options.store is None:
        raise ValueError(f"{command}: --once requires --store")


def is_measured(options: argparse.Namespace, name: str) -> bool:
    """Tell whether `--once` finds results in the store; print their file."""
    if not options.once or not (file := _file(options.store, name)).exists():
        return False
    print(f"{file} exists, nothing was measured; delete it to measure again")
    return True


def save(store: Path | None, name: str, machine: dict[str, Any], results: dict[str, Any]) -> None:
    """Write the results into the store, if there is one, with the machine, its load and the time of writing."""
    import time

    from fewbits.common.atomic import write_json
    from fewbits.experiments import identity

    if store is not None:
        file = _file(store, name)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, {"machine": {**identity.machine(), **machine, "time": time.time()}, **results})


def _file(store: Path, name: str) -> Path:
    return store / "bench" / f"{name}.json"
