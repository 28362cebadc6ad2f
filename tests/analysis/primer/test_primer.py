"""The primer study: its arithmetic against independent computations, and a verdict for every claim."""

from __future__ import annotations

import pytest
import torch

from fewbits.analysis.engine.claims.hooks import hooks_of, load_hooks
from fewbits.analysis.engine.claims.schema import load_claims
from fewbits.analysis.engine.results.data import Exact
from fewbits.analysis.studies.primer import blocks, grids, sums

CONTRADICTED = {"A6", "A7", "C2", "C3", "C4"}  # what the texts have wrong


def test_the_exact_claims_are_decided_as_the_texts_deserve() -> None:
    load_hooks("primer")
    exact = hooks_of("primer").exact
    declared = {claim.id for claim in load_claims("primer").claims if any(part.test == "exact" for part in claim.parts)}
    assert set(exact) == declared
    found = {name: compute() for name, compute in exact.items()}
    assert all(isinstance(one, Exact) for one in found.values())
    assert {name for name, one in found.items() if isinstance(one, Exact) and not one.holds} == CONTRADICTED


def test_casts_are_those_of_torch() -> None:
    values = grids.LOSS_OF_PRECISION["fp32"] + grids.UNDERFLOW["fp32"]
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("e4m3", torch.float8_e4m3fn)):
        assert grids.cast(values, name) == tuple(torch.tensor(values).to(dtype).float().tolist())


@pytest.mark.parametrize(("quantizer", "rule"), [("e2m1:1x32:mx", "floor"), ("e2m1:1x32:e8m0", "up")])
def test_rules_for_the_scale_are_those_of_the_kernels(quantizer: str, rule: str) -> None:
    for name in blocks.samples():
        assert blocks.mx_rules(name)[rule][0] == pytest.approx(blocks.error_of(name, quantizer), rel=1e-6)


def test_golden_numbers_of_the_fact_sheet() -> None:
    assert blocks.error_of("normal", "e2m1:1x16:nvfp4") == pytest.approx(0.00905, abs=1e-4)
    assert blocks.error_of("normal", "e2m1:1x16:e8m0") == pytest.approx(0.01272, abs=1e-4)
    assert blocks.transpose_difference("e2m1:1x16:nvfp4") == pytest.approx(0.130, abs=1e-3)


def test_promotion_bounds_the_error_of_long_sums() -> None:
    assert sums.errors("hopper-fp8-promoted", "uniform", 4096)[0] < sums.errors("hopper-fp8", "uniform", 512)[0] / 5
