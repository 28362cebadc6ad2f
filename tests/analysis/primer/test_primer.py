"""Test the study primer: the result of every check, that wrong statements fail, and numbers against other sources."""

from collections.abc import Callable
from types import ModuleType
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest
import torch

from fewbits.analysis.engine.claims.hooks import hooks_of
from fewbits.analysis.engine.claims.schema import load_claims
from fewbits.analysis.engine.results.data import Exact
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.figures.theme import draw_figure
from fewbits.analysis.report.items import FigureResult, Setting, TableResult
from fewbits.analysis.report.registry import study_registry
from fewbits.analysis.studies.primer import exact_numbers, exact_training, samples
from fewbits.experiments.optimization.precision import BINS, LOWEST
from fewbits.sweeps.planning.plan import Plan

WRONG = {"C2", "C4"}  # statements of the texts that do not hold
NONE = Results(Plan((), (), {}))


def check(name: str) -> Exact:
    result = hooks_of("primer").exact[name]()
    assert isinstance(result, Exact)
    return result


def test_every_statement_is_decided_as_the_texts_deserve() -> None:
    declared = {claim.id for claim in load_claims("primer").claims if any(part.test == "exact" for part in claim.parts)}
    assert set(hooks_of("primer").exact) == declared
    assert {name for name in declared if not check(name).holds} == WRONG


def identity(x: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    return x


@pytest.mark.parametrize(
    ("name", "module", "function", "other"),
    [
        ("A1", exact_numbers, "fake_quantize", lambda x, _: x * 1.1),
        ("A24", exact_numbers, "positive", lambda name: samples.positive(name) * 1.01),
        ("B1", samples, "fake_quantize", identity),
        ("B8", exact_numbers, "fake_quantize", identity),
        ("A17", exact_numbers, "scales", lambda x, q: 2 * samples.scales(x, q)),
        ("A9", exact_numbers, "rotated", identity),
        ("A8", exact_numbers, "fake_quantize", identity),
        ("B4", exact_training, "mean_error", lambda *_: (1e-6, 0.0)),
        ("C14", exact_training, "sum_in_format", lambda a, b, _: a @ b),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_statement_fails(
    name: str, module: ModuleType, function: str, other: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, function, other)
    assert not check(name).holds


def test_golden_numbers_of_block_formats() -> None:
    normal = samples.tensors()["normal"]
    assert samples.error(normal, "e2m1:1x16:nvfp4") == pytest.approx(0.00905, abs=1e-4)
    assert samples.error(normal, "e2m1:1x16:e8m0") == pytest.approx(0.01272, abs=1e-4)
    assert samples.positive("e2m1").tolist() == [0.5, 1, 1.5, 2, 3, 4, 6]
    assert samples.positive("int4").tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_promotion_bounds_the_error_of_long_sums() -> None:
    promoted = samples.mean_error("hopper-fp8-promoted", "uniform", 4096)[0]
    assert promoted < samples.mean_error("hopper-fp8", "uniform", 512)[0] / 5


def test_the_printed_cast_tables_are_ours() -> None:
    for entry in study_registry("primer").tables.values():
        if entry.of_paper:
            table = entry.make(NONE)
            assert isinstance(table, TableResult)
            assert all(isinstance(c.ours, Setting) and c.ours.text == c.paper for row in table.rows for c in row.cells)


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 6, 7, 10])
def test_figures_that_need_no_trials_are_drawn(number: int) -> None:
    entry = study_registry("primer").figures[f"Figure {number}"]
    made = entry.make(NONE)
    assert isinstance(made, FigureResult)
    assert draw_figure(made).axes


class Stored:
    """Two gradients' and one update's rows of a trial `a`, in place of Results."""

    def table_of(self, name: str) -> pd.DataFrame:
        assert name == "precision.parquet"
        histogram = np.zeros(BINS, int)
        histogram[[-30 - LOWEST, -20 - LOWEST]] = 20, 70
        dy = {"id": "a", "step": 0, "slot": "dy", "layer": "x", "values": 100, "zeros": 10, "histogram": histogram}
        update = {"id": "a", "step": 0, "slot": "parameter", "layer": "x", "updates": 8, "lost": 2}
        return pd.DataFrame([dy, dy, update])  # a resumed trial can have written a row twice

    def numerics(self) -> pd.DataFrame:
        return pd.DataFrame({"id": "a", "slot": ["dgrad.dy", "fprop.x"], "flushed": [0.3, 0.1]})


def test_metrics_count_gradients_and_updates() -> None:
    stored = cast(Results, Stored())
    assert exact_training.zero_gradients(stored) == {"a": 0.1}
    assert exact_training.below_fp16(stored) == {"a": pytest.approx(0.3)}
    assert exact_training.lost_updates(stored) == {"a": 0.25}
    assert exact_training.flushed_beyond_activations(stored) == {"a": pytest.approx(0.2)}
