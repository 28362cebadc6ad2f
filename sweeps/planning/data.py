"""Look up the data of each trial, and limit how often the trial reads them.

A model memorises text that it reads many times, and a comparison of recipes then compares how well they memorise. Text
that is read up to four times is about as good as new text (arXiv 2305.16264). Therefore a plan is refused if a trial,
together with the trials from which it branches, reads its data more than `data.repeat` times (4 by default).
`fewbits train` has no such limit, since a user may want to overfit.
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
    """Return the corpus of a trial's data; raise ValueError if the data are missing and cannot be generated.

    cache_folder: the folder of prepared data (the setting `runtime.cache`); None: the user's cache.
    """
    return load(data, _cache(cache_folder))


def training_tokens(data: DataConfig, cache_folder: str | None) -> int | None:
    """Return the number of tokens in the training split; None if the data are not on this machine."""
    try:
        return corpus_of(data, cache_folder).tokens_in("train")
    except ValueError:
        return None


def missing_folder(data: DataConfig, cache_folder: str | None) -> Path | None:
    """Return the folder (for data=text: the file) that these data need if it is missing, else None.

    Data that are generated, such as `synthetic`, need no folder.
    """
    if data.path:
        folder = Path(data.path).expanduser()  # a file if data=text
    elif data.kind in COLLECTIONS:
        folder = _cache(cache_folder) / data.kind
    else:
        return None
    return None if folder.exists() else folder


def _cache(folder: str | None) -> Path:
    return Path(folder).expanduser() if folder else default_cache()


def tokens_until(trial: Trial, step: int) -> int:
    """Return how many tokens the trial itself, without its parents, reads in its first `step` steps."""
    return step * trial.training.batch * trial.training.length


def check_repeats(trial: Trial, earlier_tokens: int, corpus_tokens: int) -> None:
    """Raise ValueError if a trial and its parents read the training split more often than `data.repeat` allows.

    earlier_tokens: the tokens that the parents read before the trial starts. corpus_tokens: the tokens in the training
    split.
    """
    if trial.is_probe:  # a probe does not train
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
