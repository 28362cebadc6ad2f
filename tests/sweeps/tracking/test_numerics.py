"""Test the metrics that summarize numerics.parquet by window and slot, such as shares of decisions by format."""

import pandas as pd
import pytest

from fewbits.sweeps.tracking.points import numerics_by_step

MIXTURE = "e4m3:128x128:gam @ error<0.045 | bf16 ; per=block"


def rows(*given: dict[str, object]) -> pd.DataFrame:
    return pd.DataFrame([{"step": 9, "layer": "a", **row} for row in given])


def test_errors_are_averaged_over_layers_and_their_maximum_is_kept() -> None:
    table = rows(
        {"slot": "fprop.x", "error": 0.1, "error_max": 0.2, "flushed": 0.0, "saturated": 0.0},
        {"slot": "fprop.x", "error": 0.3, "error_max": 0.9, "flushed": 0.5, "saturated": 0.0},
        {"slot": "fprop.w", "error": 0.2, "error_max": 0.2, "flushed": 0.0, "saturated": 1.0},
        {"slot": "weight", "gradient_error": 0.4, "gradient_cosine": 0.9},
    )
    assert numerics_by_step(table) == {
        9: {
            "operand_error/fprop.x": pytest.approx(0.2),
            "operand_error_max/fprop.x": 0.9,
            "operand_flushed/fprop.x": 0.25,
            "operand_saturated/fprop.x": 0.0,
            "operand_error/fprop.w": 0.2,
            "operand_error_max/fprop.w": 0.2,
            "operand_flushed/fprop.w": 0.0,
            "operand_saturated/fprop.w": 1.0,
            "weight_gradient/error": 0.4,
            "weight_gradient/cosine": 0.9,
        }
    }


def test_decisions_are_means_over_layers_and_slots() -> None:
    table = rows(
        {"slot": "fprop.x", "quantizer": MIXTURE, "share_0": 0.5, "share_1": 0.5},
        {"slot": "fprop.x", "quantizer": MIXTURE, "share_0": 1.0, "share_1": 0.0},
        {"slot": "dgrad.dy", "quantizer": MIXTURE, "share_0": 0.0, "share_1": 1.0},
    )
    metrics = numerics_by_step(table)[9]
    assert metrics == {
        "share/e4m3": 0.5,
        "share/bf16": 0.5,
        "share_e4m3/fprop.x": 0.75,
        "share_bf16/fprop.x": 0.25,
        "share_e4m3/dgrad.dy": 0.0,
        "share_bf16/dgrad.dy": 1.0,
    }


def test_bit_widths_are_those_of_all_layers() -> None:
    widths = (
        {"bits_mean": 5.0, "bits_min": 4.5, "bits_max": 6.0},
        {"bits_mean": 6.0, "bits_min": 4.0, "bits_max": 7.0},
    )
    assert numerics_by_step(rows(*({"slot": "weight", **width} for width in widths))) == {
        9: {"weight_bits/mean": 5.5, "weight_bits/min": 4.0, "weight_bits/max": 7.0}
    }
