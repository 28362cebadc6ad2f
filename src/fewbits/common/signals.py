"""Handle signals of this process for the duration of a `with` block."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def handled(by: Callable[[int, FrameType | None], object], *numbers: signal.Signals) -> Iterator[None]:
    """Call the handler `by` for these signals while the `with` block runs; then restore the earlier handlers."""
    before = {number: signal.signal(number, by) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
