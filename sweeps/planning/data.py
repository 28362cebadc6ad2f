"""Find the data of trials, and limit how often a trial reads them, together with the trials from which it branches.

Text that is read many times is memorised, and a comparison of recipes then compares how well they memorise. Text read
four times is about as good as new text (arXiv 2305.16264), so a plan that exceeds `data.repeat` (4 by default) is
refused. `fewbits train` has no such limit: a user may overfit on purpose.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from fewbits.experiments.data.config import DataConfig
from fewbits.experiments.data.corpus import Corpus
from fewbits.experiments.data.load import load
from fewbits.experiments.data.once import default_cache
from fewbits.experiments.data.preparation.web import COLLECTIONS
from fewbits.experiments.trial import Trial


@cache
def corpus_of(data: DataConfig, cache_folder: str | None) -> Corpus:
    """Return the data of a trial; raise ValueError if they are missing and cannot be generated."""
    return load(data, _cache(cache_folder))


def training_tokens(data: DataConfig, cache_folder: str | None) -> int | None:
    """Return how many tokens the training split has; None if the data are not on this machine."""
    try:
        return corpus_of(data, cache_folder).tokens_in("train")
    except ValueError:
        return None


def missing_folder(data: DataConfig, cache_folder: str | None) -> Path | None:
    """Return the folder or file that these data need and that does not exist; None if there is none."""
    if data.path:
        folder = Path(data.path).expanduser()  # for data=text, a file
    elif data.kind in COLLECTIONS:
        folder = _cache(cache_folder) / data.kind
    else:
        return None
    return None if folder.exists() else folder


def _cache(folder: str | None) -> Path:
    return Path(folder).expanduser() if folder else default_cache()


def tokens_until(trial: Trial, step: int) -> int:
    """Return how many tokens the trial reads in its first `step` steps, without what its parents read."""
    return step * trial.training.batch * trial.training.length


def check_repeats(trial: Trial, earlier_tokens: int, corpus_tokens: int) -> None:
    """Raise ValueError if a trial and its parents read the training split more often than `data.repeat` allows.

    earlier_tokens: the tokens that its parents have read when it starts. corpus_tokens: the tokens of the split.
    """
    if trial.is_probe:  # it does not train
        return
    tokens = earlier_tokens + tokens_until(trial, trial.training.steps)
    epochs = tokens / corpus_tokens
    if epochs > trial.data.repeat:
        before = f" ({earlier_tokens:,} before it branches)" if earlier_tokens else ""
        raise ValueError(
            f"{trial.name} reads {tokens:,} tokens{before}, which is {epochs:,.1f} epochs of the {corpus_tokens:,} "
            f"tokens of data.kind={trial.data.kind}; data.repeat allows {trial.data.repeat}: use fewer steps, "
            f"more data, or data.repeat={-(-tokens // corpus_tokens)}"
        )
