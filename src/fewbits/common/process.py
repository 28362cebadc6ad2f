"""Set environment variables and signal handlers of this process for the duration of a `with` block."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set these environment variables while the `with` block runs, and undo it afterwards.

    Variables that were set before get their earlier values, and the others are removed.
    """
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name, None)
        os.environ.update({name: before[name] for name in values if name in before})


@contextmanager
def handled(by: Callable[[int, FrameType | None], object], *numbers: signal.Signals) -> Iterator[None]:
    """Call the handler `by` for these signals while the `with` block runs; then restore the earlier handlers."""
    before = {number: signal.signal(number, by) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
