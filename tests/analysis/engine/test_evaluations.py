"""Test the error that comes from the choice of evaluation documents, by comparison with other random documents."""

import numpy as np
import pandas as pd
import pytest

from fewbits.analysis.engine.results.evaluations import document_error

SEEDS = (0, 1, 2)
PAIRS = [(f"arm{seed}", f"bf16{seed}") for seed in SEEDS]


def losses(generator: np.random.Generator, documents: int) -> pd.DataFrame:
    """Return simulated losses of an arm and of bf16 by document and trial, on three seeds.

    The arm's loss is higher by 0.01 nats on average; the increase differs between documents but not between seeds. The
    documents also differ in their losses and numbers of tokens.
    """
    levels, costs = generator.normal(2, 0.3, documents), generator.normal(0.01, 0.02, documents)
    index = pd.MultiIndex.from_arrays(
        [range(documents), generator.integers(50, 500, documents)], names=["document", "tokens"]
    )
    columns = {f"bf16{seed}": levels for seed in SEEDS} | {f"arm{seed}": levels + costs for seed in SEEDS}
    return pd.DataFrame(columns, index)


def effect(of: pd.DataFrame) -> float:
    weights = of.index.get_level_values("tokens")
    return float(np.average(of["arm0"], weights=weights) / np.average(of["bf160"], weights=weights) - 1)


def test_the_error_is_that_of_drawing_other_documents() -> None:
    generator = np.random.default_rng(0)
    drawn = [effect(losses(generator, 60)) for _ in range(1000)]
    found = [document_error(losses(generator, 60), PAIRS, relative=True) for _ in range(20)]
    errors = [one.error for one in found if one is not None]
    assert len(errors) == 20
    assert np.mean(errors) == pytest.approx(np.std(drawn, ddof=1), rel=0.1)
    assert {one.df for one in found if one is not None} == {59}


def test_a_change_that_is_alike_in_every_document_has_no_such_error() -> None:
    same = losses(np.random.default_rng(1), 30)
    same.loc[:, :] = np.where(same.columns.str.startswith("arm"), 1.01, 1.0)
    found = document_error(same, PAIRS, relative=True)
    assert found is not None
    assert found.error == pytest.approx(0, abs=1e-12)


def test_one_document_or_none_has_no_error() -> None:
    few = losses(np.random.default_rng(2), 2)
    assert document_error(few.iloc[:1], PAIRS, relative=True) is None
    assert document_error(few, [("arm7", "bf167")], relative=True) is None
