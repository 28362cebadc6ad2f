"""Limit how often trials read their training split, including the trials that they branch from.

Text that is read many times is memorised, and a comparison of recipes then compares how well they memorise. Text read
four times is about as good as new text (arXiv 2305.16264), so a plan that exceeds `data.repeat` (4 by default) is
refused. `fewbits train` has no such limit: a user may overfit on purpose.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Protocol

from fewbits.experiments.data.config import DataConfig
from fewbits.experiments.data.load import load
from fewbits.experiments.data.once import default_cache
from fewbits.experiments.trial import Trial


class Branching(Protocol):
    """A planned trial, with the id of the trial that it branches from."""

    @property
    def trial(self) -> Trial: ...

    @property
    def parent(self) -> str | None: ...


@cache
def training_tokens(data: DataConfig, cache_folder: str | None) -> int | None:
    """Return how many tokens the training split has; None if the data are not on this machine."""
    folder = Path(cache_folder).expanduser() if cache_folder else default_cache()
    try:
        return load(data, folder).tokens_in("train")
    except ValueError:
        return None


def tokens_until(trial: Trial, step: int) -> int:
    """Return how many tokens the trial itself reads in this many steps."""
    return step * trial.training.batch * trial.training.length


def tokens_before(trial: Trial, parent: str | None, trials: Mapping[str, Branching]) -> int:
    """Return how many tokens are read before a trial starts: by its parent until the branch, and by earlier parents."""
    if parent is None:
        return 0
    earlier = trials[parent]
    step = trial.branch.step
    assert step is not None
    return tokens_until(earlier.trial, step) + tokens_before(earlier.trial, earlier.parent, trials)


def check_repeats(trial: Trial, earlier_tokens: int, corpus_tokens: int) -> None:
    """Raise ValueError if the trial reads its training split more often than `data.repeat` allows."""
    tokens = earlier_tokens + tokens_until(trial, trial.training.steps)
    epochs = tokens / corpus_tokens
    if epochs > trial.data.repeat:
        before = f" ({earlier_tokens:,} before it branches)" if earlier_tokens else ""
        raise ValueError(
            f"{trial.name} reads {tokens:,} tokens{before}, which is {epochs:,.1f} epochs of the {corpus_tokens:,} of "
            f"data.kind={trial.data.kind}; data.repeat allows {trial.data.repeat}: use fewer steps, more data, or "
            f"data.repeat={-(-tokens // corpus_tokens)}"
        )
