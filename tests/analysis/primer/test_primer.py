"""Test the study primer: its numbers against independent computations, and the result of every claim's check."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import cast

import pytest
import torch

from fewbits.analysis.engine.claims.hooks import hooks_of, load_hooks
from fewbits.analysis.engine.claims.schema import load_claims
from fewbits.analysis.engine.results.data import Exact
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.report.items import Setting, TableResult
from fewbits.analysis.studies.primer import blocks, grids, sums, tables, training, walks
from fewbits.analysis.views.html import render
from fewbits.kernels.api import fake_quantize
from fewbits.kernels.number import rounded

CONTRADICTED = {"A6", "A7", "A21", "C2", "C3", "C4", "C15"}  # claims in which the texts are wrong
BY_LIBRARY = "C13"  # the verdict depends on whether torch casts values beyond E4M3's range to NaN


def test_the_exact_claims_are_decided_as_the_texts_deserve() -> None:
    load_hooks("primer")
    exact = hooks_of("primer").exact
    declared = {claim.id for claim in load_claims("primer").claims if any(part.test == "exact" for part in claim.parts)}
    assert set(exact) == declared
    found = {name: compute() for name, compute in exact.items()}
    holds = {name: one.holds for name, one in found.items() if isinstance(one, Exact)}
    assert holds.pop(BY_LIBRARY) == torch.tensor(1e6).to(torch.float8_e4m3fn).float().isnan()
    assert {name for name, held in holds.items() if not held} == CONTRADICTED
    memory = found["C19"]
    assert not isinstance(memory, Exact)
    assert {name: one.holds for name, one in memory.items()} == {
        "activations": True,
        "parameters with gradients and states": False,  # FP32 master weights remain, and low-precision copies are added
    }
    assert {name for name, one in found.items() if not isinstance(one, Exact)} == {"C19"}


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


def test_walks_end_at_the_values_of_the_kernels() -> None:
    """Check that the step-by-step quantizations of the primer end at the values that the kernels compute."""
    found = walks.walks()
    for name, quantizer, size in (
        ("MXFP8 (E4M3)", "e4m3:1x32:mx", 32),
        ("MXINT8", "e1m6finite:1x32:mx", 32),
        ("NVFP4", "e2m1:1x16:nvfp4", 16),
    ):
        assert found[name].value == float(fake_quantize(walks.tensor(size), quantizer)[0, 0])


def test_grids_have_every_positive_value_once() -> None:
    e2m1 = grids.grid("e2m1")
    assert [*e2m1.subnormal, *e2m1.normal] == [0.5, 1, 1.5, 2, 3, 4, 6]
    for name in grids.DRAWN:
        values = [*grids.grid(name).subnormal, *grids.grid(name).normal]
        assert values == sorted(set(values))
    assert grids.grid("int4").normal.tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_a_rotation_keeps_norms_and_undoes_itself() -> None:
    x = blocks.with_outliers(16).double()
    assert torch.allclose(blocks.rotated(blocks.rotated(x)), x)
    assert blocks.rotated(x).norm() == pytest.approx(float(x.norm()))


def test_the_error_of_a_mean_of_stochastic_roundings_falls_below_that_of_nearest() -> None:
    one, sixteen, nearest = (blocks.error_of_mean(n) for n in (1, 16, 0))
    assert sixteen < nearest < one
    assert one / sixteen == pytest.approx(4, rel=0.05)  # √16, since the errors are independent


def test_the_printed_cast_tables_are_ours() -> None:
    for made in (tables.table_1, tables.table_2, tables.table_3):
        table = made(cast(Results, None))
        assert isinstance(table, TableResult)
        assert all(isinstance(c.ours, Setting) and c.ours.text == c.paper for row in table.rows for c in row.cells)


def test_memory_of_a_preset_is_four_bytes_a_parameter_and_component() -> None:
    parts, size = training.memory("gpt2-124m"), training.size("gpt2-124m")
    assert (parts.weights, parts.gradients, parts.states) == (4 * size, 4 * size, 8 * size)


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node, to run the page's script")
@pytest.mark.parametrize("number", [0.3, -0.3, 0.0, -1.0, 1e9, -1e-9, 2.5, 464.0, 448.5, 1e-45, 5.0, 1 / 3, 1.5, -0.5])
def test_the_script_of_the_page_gives_the_bits_of_the_kernels(number: float, tmp_path: Path) -> None:
    page = str(render("number", number="0.3", formats=tables.number_formats()))
    body = page.partition("<script>")[2].partition("</script>")[0]
    functions = body[body.index("const formats") : body.index("const form =")]
    functions += body[body.index("const even") : body.index("function parse")]
    script = tmp_path / "number.js"
    script.write_text(
        f"{functions}\nfor (const n in formats) console.log(JSON.stringify([n, ...row(formats[n], {number!r})]));"
    )
    printed = subprocess.run(["node", script], capture_output=True, text=True, check=True).stdout.splitlines()
    found = {name: cells for name, *cells in map(json.loads, printed)}
    for row in rounded(number):
        bits, *values = found[row.format]
        wanted = [None if v is None else pytest.approx(v, rel=1e-8) for v in (row.value, row.below, row.above)]
        assert bits == row.bits
        assert [None if v == "none" else float(v) for v in values] == wanted
