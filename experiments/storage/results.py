"""Results beside those of training: shares of mixtures' decisions, and evaluations of finished runs.

`fewbits evaluate` stores each evaluation in a JSON file in the run folder's `evaluations/`. An evaluation is found by
its key: the task and its settings, the checkpoint's step, and the numerics version of the sources. Evaluations are not
part of the trial, so they change neither the trial's id nor its `result.json`.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits.common.atomic import read_json, write_json
from fewbits.common.from_dict import from_dict
from fewbits.experiments.storage.run_folder import RunFolder
from fewbits.experiments.trial import Trial

if TYPE_CHECKING:
    import pandas as pd

FOLDER = "evaluations"
SHOWN = 8  # hexadecimal digits of the key in a file's name
DECISIONS = "decisions"
SHARE = "share_"  # column `share_i`: the share of a mixture's decisions for its i-th quantizer, from 0


# ------------------------------------------------------------------------------------------------ decisions


def decisions(rows: Sequence[Mapping[str, Any]] | pd.DataFrame) -> dict[str, dict[str, float]]:
    """Return the entry `decisions` of a result: the mean share of each format, such as {"e4m3": 0.93, "bf16": 0.07}.

    rows: those of numerics.parquet. For a recipe without mixtures, return no entry.
    """
    import pandas as pd

    shares = decision_shares(pd.DataFrame(rows))
    if shares is None:
        return {}
    formats = shares.drop(columns=["step", "slot"])
    return {DECISIONS: {str(name): math.fsum(values) / len(values) for name, values in formats.items()}}


def decision_shares(rows: pd.DataFrame) -> pd.DataFrame | None:
    """Return the shares of formats in mixtures' decisions, by window, layer and slot; None if there is no mixture.

    rows: those of numerics.parquet. Columns: `step`, `slot`, and for each format of any mixture its share, or 0.
    """
    import pandas as pd

    columns = [column for column in map(str, rows) if column.startswith(SHARE)]
    if not columns or (decided := rows[rows[columns[0]].notna()]).empty:
        return None
    named = []
    for mixture, of_mixture in decided.groupby("quantizer"):
        # Only the first four quantizers of a mixture have columns.
        names = dict(zip(columns, entry_names(str(mixture)), strict=False))
        named.append(of_mixture[["step", "slot", *columns]].rename(columns=names))
    return pd.concat(named).drop(columns=columns, errors="ignore").fillna(0.0)


def entry_names(mixture: str) -> list[str]:
    """Return a name for each quantizer of a mixture: its format, or its whole text if another one has the same format.

    >>> entry_names("e4m3:128x128:gam @ error<0.045 | bf16 ; per=block")
    ['e4m3', 'bf16']
    """
    entries = [entry.partition(" @ ")[0].strip() for entry in mixture.partition(" ; ")[0].split(" | ")]
    formats = [entry.partition(":")[0] for entry in entries]
    count = Counter(formats)
    return [name if count[name] == 1 else entry for name, entry in zip(formats, entries, strict=True)]


# ------------------------------------------------------------------------------------------------ evaluations


@dataclass(frozen=True)
class Key:
    """The values that determine an evaluation's results, and so its file name."""

    task: str
    settings: dict[str, Any]
    step: int  # of the checkpoint
    numerics: str  # of the sources that computed it (experiments/identity.py)

    @property
    def file(self) -> str:
        """The name of the evaluation's file: the task, and the first digits of the key's SHA-256."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()
        slug = re.sub(r"[^\w.]+", "-", self.task)[:40]
        return f"{slug}-{digest[:SHOWN]}.json"


@dataclass(frozen=True)
class Evaluation:
    """An evaluation: the results of one task, nested as in result.json, so that they can be merged into its content."""

    key: Key
    results: dict[str, Any]
    environment: dict[str, Any]  # the machine, and the versions of packages, that computed the results
    time: int  # when they were computed, in seconds since 1970


def find(run: Path, key: Key) -> Evaluation | None:
    """Return the evaluation with this key that is stored in the run folder `run`; None if there is none."""
    evaluation = _read(run / FOLDER / key.file)
    return evaluation if evaluation is not None and evaluation.key == key else None


def write(run: Path, evaluation: Evaluation) -> None:
    """Store an evaluation in the run folder `run`; replace an evaluation with the same key."""
    (run / FOLDER).mkdir(exist_ok=True)
    write_json(run / FOLDER / evaluation.key.file, asdict(evaluation))


def stored(run: Path) -> list[Evaluation]:
    """Return all evaluations in a run folder, the oldest first; skip files that are not valid evaluations."""
    readable = (_read(path) for path in (run / FOLDER).glob("*.json"))
    return sorted((one for one in readable if one is not None), key=lambda one: (one.time, one.key.file))


def with_stored(run: Path, result: Mapping[str, Any]) -> dict[str, Any]:
    """Return `result`, the content of result.json, merged with the whole evaluations stored in the run folder.

    Of several values, the one in `result` takes precedence, then the one of the newest evaluation.
    """
    added: dict[str, Any] = {}
    for one in stored(run):
        if _is_whole(one, result):
            added = _merged(added, one.results)
    return _merged(added, result)


def scores_over_training(run: str | Path) -> pd.DataFrame:
    """Return the stored results of all checkpoints: the columns step, name (such as tasks.piqa.acc,none) and value.

    Evaluations of some questions only (`limit`) and without the recipe (`unquantized`) are left out. If a number was
    computed several times, the newest one counts.
    """
    import pandas as pd

    rows = {
        (one.key.step, name): value
        for one in stored(Path(run))
        if _is_whole(one, {"step": one.key.step})
        for name, value in numbers(one.results)
    }
    table = [{"step": step, "name": name, "value": value} for (step, name), value in sorted(rows.items())]
    return pd.DataFrame(table, columns=["step", "name", "value"])


def read_text(path: Path) -> str:
    """Return a file's text as `data=text` reads it: line ends are not converted, and a byte order mark is removed."""
    try:
        return path.expanduser().read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ValueError(f"text {path} to evaluate: {error.strerror}; name an existing text file") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8: {error.reason} at byte {error.start}") from None


def digest(text: str) -> str:
    """Return the hash by which evaluations know a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def missing_evaluations(folder: RunFolder, trial: Trial) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return those of the trial's tasks and texts of which a finished run has no stored evaluation.

    Both are empty if the trial has diverged. A text that cannot be read is missing.
    """
    tasks, texts = trial.evaluation.tasks, trial.evaluation.texts
    result = folder.result() if tasks or texts else None
    if result is None or result["status"] != "done":
        return (), ()
    keys = [one.key for one in stored(folder.path) if _is_whole(one, result)]
    evaluated = {key.settings.get("text", key.task) for key in keys}  # names of tasks, and digests of texts

    def is_missing(text: str) -> bool:
        try:
            return digest(read_text(Path(text))) not in evaluated
        except ValueError:
            return True

    return tuple(task for task in tasks if task not in evaluated), tuple(filter(is_missing, texts))


def _is_whole(one: Evaluation, result: Mapping[str, Any]) -> bool:
    """Tell whether an evaluation is of a run's last step, of all questions, and with the recipe's operands."""
    settings = one.key.settings
    return one.key.step == result.get("step") and not (settings.get("limit") or settings.get("unquantized"))


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested mappings. If both have a key, use the value of `above`, but merge two values that are mappings."""
    both = {**below, **above}
    for key in below.keys() & above.keys():
        if isinstance(below[key], Mapping) and isinstance(above[key], Mapping):
            both[key] = _merged(below[key], above[key])
    return both


def numbers(results: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float | None]]:
    """Yield (name, value) of each number in nested results; a name is a path of keys, such as `tasks.piqa.acc,none`.

    The value is None for a number that was not finite.
    """
    for key, value in results.items():
        if isinstance(value, Mapping):
            yield from numbers(value, f"{prefix}{key}.")
        elif value is None or isinstance(value, int | float):
            yield f"{prefix}{key}", value


def _read(path: Path) -> Evaluation | None:
    """Return the evaluation in a file; None if the file is missing or is not a valid evaluation."""
    try:
        return from_dict(Evaluation, read_json(path) or {})
    except ValueError:
        return None
