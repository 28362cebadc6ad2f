"""Test that each square of a sampled weight is cast to the format of its learned bit width, and then restored."""

import pytest
import torch
from torch import nn

from fewbits.kernels.api import fake_quantize
from fewbits.models.learned_widths import cast, format_of_width, weights_cast
from fewbits.models.quantize import quantize
from tests.models.quantized import linear, noisy, recipe

# Exponent and mantissa bits of sampled weights by width (GaussWS, Table C.1).
TABLE_C1 = {3: (3, 1), 4: (3, 2), 5: (3, 3), 6: (4, 4), 7: (4, 5), 8: (4, 6), 9: (4, 7), 10: (4, 8), 11: (4, 9)}


@pytest.mark.parametrize(("bits", "widths"), TABLE_C1.items())
def test_formats_are_those_of_table_c1(bits: int, widths: tuple[int, int]) -> None:
    assert format_of_width(bits) == "e{}m{}".format(*widths)


@pytest.mark.parametrize("bits", [2, 13])
def test_widths_without_a_format_of_at_most_16_bits_are_refused(bits: int) -> None:
    with pytest.raises(ValueError, match=str(bits)):
        format_of_width(bits)


def test_each_square_gets_the_format_of_its_width_rounded_up() -> None:
    weight = torch.randn(40, 70)
    bits = torch.tensor([[2.0, 3.2, 5.0], [8.9, 12.1, 20.0]])
    found = cast(weight, bits, 32)
    for row, column, spelling in [(0, 0, "e3m1"), (0, 1, "e3m2"), (0, 2, "e3m3"), (1, 0, "e4m7")]:
        rows, columns = slice(32 * row, 32 * row + 32), slice(32 * column, 32 * column + 32)
        alone = fake_quantize(weight[rows, columns].contiguous(), f"{spelling}:32x32:amax")
        assert torch.equal(found[rows, columns], alone)
        assert not torch.equal(alone, weight[rows, columns])
    assert torch.equal(found[32:, 32:], weight[32:, 32:])


def test_weights_are_cast_inside_the_context_alone() -> None:
    sampler = {"kind": "gaussws", "penalty": 0.0, "init": 4.0, "target": 4.0}
    settings = type(recipe("high")).from_dict({**recipe("high").to_dict(), "sampler": sampler})
    model = nn.Sequential(linear(64, 64, draw=noisy))
    model[0].part = "up"  # type: ignore[assignment]
    (layer,) = (quantization := quantize(model, settings)).layers
    model.eval()
    weight, x = layer.weight.detach().clone(), torch.eye(64)
    with torch.no_grad():
        before = model(x)
        with weights_cast(quantization):
            inside = model(x)
        assert torch.equal(inside, model[0](x) + (cast(weight, torch.full((2, 2), 4.0), 32) - weight).t())
        assert torch.equal(model(x), before)
        with weights_cast(quantization, 3):
            assert torch.equal(layer.weight, cast(weight, torch.full((2, 2), 3.0), 32))
    assert torch.equal(layer.weight, weight)
