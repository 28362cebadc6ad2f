"""Validation losses by document: the error that all seeds share because they are evaluated on the same documents.

A run folder may have `evaluation.parquet` with a row for each text and document: its number of tokens and its mean loss
in the recipe's own format (`loss`), unquantized (`loss_unquantized`), with weights cast to their learned bit widths
(`loss_cast`) and with all weights cast to three bits (`loss_narrow`). Documents are the clusters and texts the strata
of the estimate. For runs without the file, no such error is computed.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd

from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.statistics.estimates import Shared

FILE = "evaluation.parquet"
LABELS = ("trial", "text", "document", "tokens")
VALIDATION = "validation"  # the text on which validation_loss is measured


def documents(results: Results) -> pd.DataFrame:
    """Return a row for each trial and document; the table is empty if no run folder has the file."""
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
) -> Shared | None:
    """Return the standard error of the pairs' mean difference that comes from the choice of documents.

    pairs: for each seed, the ids of our trial and of the baseline's. Differences are averaged over the seeds document
    by document, since all seeds share the documents. The error is that of a ratio estimate (loss over tokens),
    clustered by document within each text. Return None if a text has fewer than two documents, or no pair has any.
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
    # The influence of each document on the weighted mean difference or, if relative, on its ratio to the level.
    influence = weights * ((changes - mean) - (mean / level) * (levels - level) if relative else changes - mean)
    variance, df = 0.0, 0
    for _, part in influence.groupby(level="text"):
        if len(part) < 2:
            return None
        variance += len(part) * float(part.var(ddof=1))
        df += len(part) - 1
    return Shared(float(np.sqrt(variance)) / (float(weights.sum()) * level), df)
