"""Test the metrics that summarize numerics.parquet by window and slot, such as shares of decisions by format."""

import pandas as pd
import pytest

from fewbits.experiments.tracking.numerics import entry_names, last_window, metrics_by_step

THREE = "e4m3:128x128:gam @ error<e5m2:128x128:gam | e5m2:128x128:gam @ spread<normal | bf16 ; per=block"
TWO = "e5m2:1x32:mx @ error<0.1 | bf16"


def rows(*given: dict[str, object]) -> pd.DataFrame:
    return pd.DataFrame([{"step": 9, "layer": "a", **row} for row in given])


def test_errors_are_averaged_over_layers_and_their_maximum_is_kept() -> None:
    table = rows(
        {"slot": "fprop.x", "error": 0.1, "error_max": 0.2, "flushed": 0.0, "saturated": 0.0},
        {"slot": "fprop.x", "error": 0.3, "error_max": 0.9, "flushed": 0.5, "saturated": 0.0},
        {"slot": "fprop.w", "error": 0.2, "error_max": 0.2, "flushed": 0.0, "saturated": 1.0},
        {"slot": "weight", "gradient_error": 0.4, "gradient_cosine": 0.9},
    )
    assert metrics_by_step(table) == {
        9: {
            "error/fprop.x": pytest.approx(0.2),
            "error_max/fprop.x": 0.9,
            "flushed/fprop.x": 0.25,
            "saturated/fprop.x": 0.0,
            "error/fprop.w": 0.2,
            "error_max/fprop.w": 0.2,
            "flushed/fprop.w": 0.0,
            "saturated/fprop.w": 1.0,
            "weight_gradient/error": 0.4,
            "weight_gradient/cosine": 0.9,
        }
    }


def test_decisions_of_different_mixtures_add_up_to_one() -> None:
    """Check slots with different mixtures: a format that a mixture does not have counts with the share 0."""
    table = rows(
        {"slot": "fprop.x", "quantizer": THREE, "share_0": 0.5, "share_1": 0.25, "share_2": 0.25, "share_3": 0.0},
        {"slot": "dgrad.dy", "quantizer": TWO, "share_0": 0.75, "share_1": 0.25, "share_2": 0.0, "share_3": 0.0},
        {"slot": "fprop.w", "quantizer": "e4m3:128x128:amax"},
    )
    metrics = metrics_by_step(table)[9]
    shares = {name: metrics[f"decisions/{name}"] for name in ("e4m3", "e5m2", "bf16")}
    assert shares == {"e4m3": 0.25, "e5m2": 0.5, "bf16": 0.25}
    assert metrics["decisions_e5m2/fprop.x"] == 0.25
    assert metrics["decisions_e5m2/dgrad.dy"] == 0.75
    assert not any(name.endswith("fprop.w") for name in metrics)


def test_bit_widths_are_those_of_all_layers() -> None:
    widths = (
        {"bits_mean": 5.0, "bits_min": 4.5, "bits_max": 6.0},
        {"bits_mean": 6.0, "bits_min": 4.0, "bits_max": 7.0},
    )
    assert metrics_by_step(rows(*({"slot": "weight", **width} for width in widths))) == {
        9: {"bits/mean": 5.5, "bits/min": 4.0, "bits/max": 7.0}
    }


def test_entries_with_the_same_format_have_their_whole_names() -> None:
    assert entry_names(THREE) == ["e4m3", "e5m2", "bf16"]
    assert entry_names("e4m3:128x128 @ error<0.1 | e4m3:1x16 @ error<0.2 | bf16") == [
        "e4m3:128x128",
        "e4m3:1x16",
        "bf16",
    ]


def test_the_last_window_is_a_table_of_its_own() -> None:
    table = pd.concat(
        [rows({"slot": "fprop.x", "error": 0.1, "histogram": [1]}).assign(step=4), rows({"slot": "fprop.x"})]
    )
    assert last_window(table) == "step,layer,slot\n9,a,fprop.x\n"
