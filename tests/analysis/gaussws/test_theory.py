"""Test GaussWS's exact claims: they hold for our kernels, and they fail with a wrong generator, cast or gradient."""

from typing import Any

import pytest

from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.report.items import Setting, TableResult, Value
from fewbits.analysis.studies.gaussws import exact as arithmetic
from fewbits.analysis.studies.gaussws import theory
from fewbits.analysis.studies.gaussws.tables import TIES, table_c1
from fewbits.kernels.reference import noise as reference_noise
from fewbits.sweeps.planning.plan import Plan

CLAIMS = (arithmetic.g1, arithmetic.g2, arithmetic.g3, arithmetic.g4, arithmetic.g5, arithmetic.g6, arithmetic.g17)


@pytest.mark.parametrize("claim", CLAIMS)
def test_what_arithmetic_decides_is_reproduced(claim: Any) -> None:
    assert claim().holds


def test_a_generator_that_shares_a_bit_between_one_and_two_contradicts_g1(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = reference_noise.gaussian_nibbles
    monkeypatch.setattr(
        reference_noise, "gaussian_nibbles", lambda planes: whole([*planes[:10], planes[0], *planes[11:]])
    )
    theory.generated.cache_clear()
    one = arithmetic.g1()
    assert not one.holds
    assert theory.generated() != theory.equation_10()
    monkeypatch.undo()
    theory.generated.cache_clear()


@pytest.mark.parametrize(("bits", "magnitude"), [(9, 1.0), (5, 1 / 16)])
def test_lemma_1_on_the_grid_ends_in_a_single_tie(bits: int, magnitude: float) -> None:
    """Check Lemma 1 for weights on BF16's grid: noise of magnitude 2^τ survives the cast if b < m + 2 + τ.

    b is the bit width, and m = 7 the number of mantissa bits. At the bound itself, b = m + 2 + τ, the cast swallows the
    noise in exactly one case: a tie, with noise of half a step and the weight 1.
    """
    assert theory.swallowed_noise(bits - 0.01, magnitude).sum() == 0
    assert theory.swallowed_noise(bits, magnitude).sum() == 1
    assert theory.swallowed_noise(bits, magnitude, ties=False).sum() == 0
    assert theory.swallowed_noise(bits + 1, magnitude, ties=False).sum() > 1000


def test_proposition_3s_exponents_suffice_and_fewer_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [theory.underflows(bits) for bits in (3, 6, 8, 13)]
    assert not any(map(any, found))
    enough = theory.exponent_bits
    for fewer, bits in ((1, 6), (1, 8), (2, 8)):
        monkeypatch.setattr(theory, "exponent_bits", lambda b, less=fewer, **of: enough(b, **of) - less)
        found = [theory.underflows(bits)]
        assert found[0][1]
    assert found[0][0]


def test_table_c1_is_found_again_entry_by_entry() -> None:
    found = table_c1(Results(Plan((), (), {})))
    assert isinstance(found, TableResult)
    for row in found.rows[:-2]:
        assert {cell.difference for cell in row.cells} == {0.0}
    assert [cell.ours for cell in found.rows[3].cells] == [Setting(str(cell.paper)) for cell in found.rows[3].cells]
    (ties,) = (row for row in found.rows if row.title == TIES)
    values = [cell.ours.mean for cell in ties.cells if isinstance(cell.ours, Value)]
    assert values == [float(bits - 1) for bits in theory.WIDTHS]


def test_noise_of_another_seed_in_backward_contradicts_g6(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetic, "noise", lambda kind, count, seed: theory.noise(kind, count, seed + 1))
    assert not arithmetic.g6().holds
