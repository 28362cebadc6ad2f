"""Test the shares of mixtures' decisions, which are computed from the rows of numerics.parquet."""

import pandas as pd

from fewbits.commands.train import summary
from fewbits.experiments.storage.results import decision_shares, decisions, entry_names

MOR = {"layer": "a", "quantizer": "e4m3:128x128:gam @ error<0.045 | bf16"}
THREE = "e4m3:128x128:gam @ error<e5m2:128x128:gam | e5m2:128x128:gam @ spread<normal | bf16 ; per=block"
TWO = "e5m2:1x32:mx @ error<0.1 | bf16"
RESULT = {"id": "an id", "status": "done", "step": 4, "loss": 1.0}


def test_the_shares_are_means_over_windows_layers_and_slots() -> None:
    rows: list[dict[str, object]] = [
        {"step": 1, "slot": "fprop.x", "share_0": 1.0, "share_1": 0.0, **MOR},
        {"step": 3, "slot": "fprop.x", "share_0": 0.5, "share_1": 0.5, **MOR},
        {"step": 3, "slot": "dgrad.dy", "share_0": 0.0, "share_1": 1.0, **MOR},
        {"step": 3, "slot": "weight", "layer": "a", "quantizer": None},
    ]
    found = decisions(rows)
    assert found == {"decisions": {"e4m3": 0.5, "bf16": 0.5}}
    assert "BF16 in 50.0 % of decisions" in summary(RESULT | found)


def test_a_recipe_without_mixtures_has_none() -> None:
    assert decisions([{"step": 1, "slot": "fprop.x", "error": 0.1}]) == {}
    assert decisions([{"step": 1, "slot": "x", "share_0": None, **MOR}]) == {}
    assert decisions([]) == {}
    assert "BF16" not in summary(RESULT)


def test_a_format_that_a_mixture_does_not_have_has_the_share_0() -> None:
    table = [
        {"slot": "fprop.x", "quantizer": THREE, "share_0": 0.5, "share_1": 0.25, "share_2": 0.25, "share_3": 0.0},
        {"slot": "dgrad.dy", "quantizer": TWO, "share_0": 0.75, "share_1": 0.25, "share_2": 0.0, "share_3": 0.0},
        {"slot": "fprop.w", "quantizer": "e4m3:128x128:amax"},
    ]
    shares = decision_shares(pd.DataFrame(table).assign(step=9))
    assert shares is not None
    found = shares.set_index("slot").drop(columns="step").to_dict("index")
    assert found == {
        "fprop.x": {"e4m3": 0.5, "e5m2": 0.25, "bf16": 0.25},
        "dgrad.dy": {"e4m3": 0.0, "e5m2": 0.75, "bf16": 0.25},
    }


def test_entries_with_the_same_format_have_their_whole_names() -> None:
    assert entry_names(THREE) == ["e4m3", "e5m2", "bf16"]
    names = entry_names("e4m3:128x128 @ error<0.1 | e4m3:1x16 @ error<0.2 | bf16")
    assert names == ["e4m3:128x128", "e4m3:1x16", "bf16"]
