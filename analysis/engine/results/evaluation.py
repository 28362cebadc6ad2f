"""Estimate, from the losses of single documents, the error in a validation loss due to the choice of documents.

All seeds are evaluated on the same documents, so more seeds do not reduce this error. A run folder may have the file
`evaluation.parquet` with a row for each document of each text (a set of documents: `validation` or `ood`): the number
of tokens and the mean loss with the recipe's formats (`loss`), unquantized (`loss_unquantized`), with weights cast to
their learned bit widths (`loss_cast`) and with all weights cast to three bits (`loss_narrow`). For runs without this
file, the error is not computed.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd

from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.statistics.estimates import Error

FILE = "evaluation.parquet"
LABELS = ("trial", "text", "document", "tokens")
VALIDATION = "validation"  # the value of the column `text` for the documents that validation_loss is measured on


def documents(results: Results) -> pd.DataFrame:
    """Return a table with a row for each trial, text and document; it is empty if no run folder has evaluation.parquet.

    A text is a set of documents: `validation` or `ood`. The columns are trial, text, document, tokens, and the losses
    of the document (`loss`, `loss_unquantized` …).
    """
    frame = results.table_of(FILE)
    if frame.empty:
        return pd.DataFrame(columns=[*LABELS, "loss"])
    frame = frame.rename(columns={"id": "trial"}).drop_duplicates(["trial", "text", "document"])
    losses = [column for column in frame if str(column).startswith("loss")]
    return frame[[*LABELS, *losses]].reset_index(drop=True)


def document_error(
    frame: pd.DataFrame,
    pairs: Iterable[tuple[str, str]],
    *,
    relative: bool,
    column: str = "loss",
    texts: Iterable[str] = (VALIDATION,),
) -> Error | None:
    """Return the standard error of the mean difference, arm minus baseline, that comes from the choice of documents.

    frame: as `documents` returns it. pairs: for each seed, the ids of the arm's trial and of the baseline's trial.
    column: the column with the loss. texts: the sets of documents that are used, such as `validation`. relative: the
    difference is a fraction of the baseline's loss.

    All seeds share the documents, so each document's difference is first averaged over the seeds. The error is that of
    a ratio estimator (sum of losses / sum of tokens), with documents as clusters and texts as strata. Return None if a
    text has fewer than two documents, or if no pair has losses of documents.
    """
    texts = tuple(texts)
    rows = frame[frame["text"].isin(texts)]
    wide = rows.pivot_table(index=["text", "document"], columns="trial", values=column)
    tokens = rows.groupby(["text", "document"])["tokens"].first()
    evaluated = [(ours, base) for ours, base in pairs if {ours, base} <= set(wide.columns)]
    if not evaluated:
        return None
    changes = pd.concat([wide[ours] - wide[base] for ours, base in evaluated], axis=1).mean(axis=1).dropna()
    levels = pd.concat([wide[base] for _, base in evaluated], axis=1).mean(axis=1).loc[changes.index]
    weights = tokens.loc[changes.index].astype(float)
    level = float(np.average(levels, weights=weights)) if relative else 1.0
    mean = float(np.average(changes, weights=weights))
    # The influence of each document on the weighted mean difference or, if relative, on this difference / the
    # baseline's mean loss (`level`).
    influence = weights * ((changes - mean) - (mean / level) * (levels - level) if relative else changes - mean)
    variance, df = 0.0, 0
    for _, part in influence.groupby(level="text"):
        if len(part) < 2:
            return None
        variance += len(part) * float(part.var(ddof=1))
        df += len(part) - 1
    return Error(float(np.sqrt(variance)) / (float(weights.sum()) * level), df)
