"""Test the error that comes from the choice of evaluation documents, by comparison with other random documents."""

import numpy as np
import pandas as pd
import pytest

from fewbits.analysis.engine.results.evaluation import document_error

SEEDS = (0, 1, 2)
PAIRS = [(f"arm{seed}", f"bf16{seed}") for seed in SEEDS]


def frame(generator: np.random.Generator, documents: int, texts: tuple[str, ...] = ("validation",)) -> pd.DataFrame:
    """Return simulated losses by document: a row for each text, document and trial.

    The trials are of an arm and of bf16, on three seeds. The arm's loss is higher by 0.01 nats on average; the increase
    differs between documents but not between seeds. The documents also differ in their losses and numbers of tokens.

    documents: the number of documents of each text.
    """
    rows = []
    for text in texts:
        for document in range(documents):
            tokens, level, cost = generator.integers(50, 500), generator.normal(2, 0.3), generator.normal(0.01, 0.02)
            for seed in SEEDS:
                rows.append((f"bf16{seed}", text, document, tokens, level, level))
                rows.append((f"arm{seed}", text, document, tokens, level + cost, level + cost / 2))
    return pd.DataFrame(rows, columns=["trial", "text", "document", "tokens", "loss", "loss_unquantized"])


def effect(of: pd.DataFrame) -> float:
    means = [
        np.average(rows["loss"], weights=rows["tokens"])
        for _, rows in of[of["trial"].isin(["arm0", "bf160"])].groupby("trial")
    ]
    return float(means[0] / means[1] - 1)


def test_the_error_is_that_of_drawing_other_documents() -> None:
    generator = np.random.default_rng(0)
    drawn = [effect(frame(generator, 60)) for _ in range(150)]
    found = [document_error(frame(generator, 60), PAIRS, relative=True) for _ in range(20)]
    errors = [one.error for one in found if one is not None]
    assert len(errors) == 20
    assert np.mean(errors) == pytest.approx(np.std(drawn, ddof=1), rel=0.2)
    assert {one.df for one in found if one is not None} == {59}


def test_a_change_that_is_alike_in_every_document_has_no_such_error() -> None:
    rows = frame(np.random.default_rng(1), 30)
    same = rows.assign(loss=np.where(rows["trial"].str.startswith("arm"), rows["loss_unquantized"] * 0 + 1.01, 1.0))
    found = document_error(same, PAIRS, relative=True)
    assert found is not None
    assert found.error == pytest.approx(0, abs=1e-12)


def test_texts_are_strata_and_a_text_of_one_document_has_no_error() -> None:
    rows = frame(np.random.default_rng(2), 30, ("validation", "other"))
    found = document_error(rows, PAIRS, relative=True, texts=("validation", "other"))
    assert found is not None
    assert found.df == 58
    assert document_error(rows[rows["document"] == 0], PAIRS, relative=True) is None


def test_without_documents_there_is_no_share() -> None:
    nothing = frame(np.random.default_rng(3), 5).iloc[:0]
    assert document_error(nothing, PAIRS, relative=True) is None
