"""Test trials with `recipe.execute=fp8` against emulated trials: ids, provenance, losses, and a probe."""

from __future__ import annotations

from typing import Any

import pytest

from fewbits.analysis.engine.results.pooling import kind
from fewbits.experiments.config import load_recipe, load_trial
from fewbits.experiments.identity import all_settings
from fewbits.experiments.probes.probe import probe
from fewbits.experiments.storage.run_folder import RunFolder
from fewbits.experiments.training import run
from tests.experiments.trial_inputs import overrides

CHANNELS = ("recipe=fp8", "recipe.weights=channel", "recipe.block=channel", "recipe.keep.first=0", "recipe.keep.last=1")
EXECUTED = "recipe.execute=fp8"
SHORT = ("training.steps=6", "data.repeat=1")


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[RunFolder, dict[str, Any]]]:
    """Return the run folder and the result of an executed trial (key `fp8`) and of its emulation (key `emulate`)."""
    folder = tmp_path_factory.mktemp("executed")
    commands = {"fp8": (*CHANNELS, EXECUTED), "emulate": CHANNELS}
    return {
        name: run(*load_trial(overrides(folder / "cache", folder / "runs", *SHORT, *command)))
        for name, command in commands.items()
    }


def test_an_executed_trial_trains_as_its_emulation_does(both: dict[str, tuple[RunFolder, dict[str, Any]]]) -> None:
    executed, emulated = both["fp8"][1], both["emulate"][1]
    assert executed["status"] == emulated["status"] == "done"
    assert executed["validation_loss"] != emulated["validation_loss"]
    assert executed["validation_loss"] == pytest.approx(emulated["validation_loss"], rel=5e-3)


def test_execution_is_in_the_id_the_name_and_the_provenance(both: dict[str, tuple[RunFolder, dict[str, Any]]]) -> None:
    executed, emulated = both["fp8"][0], both["emulate"][0]
    assert executed.id != emulated.id
    assert "executed" in executed.path.name
    assert "executed" not in emulated.path.name
    assert executed.provenance()["products"] == "fp8"  # type: ignore[index]
    assert emulated.provenance()["products"] == "emulate"  # type: ignore[index]
    plain, _ = load_trial(list(CHANNELS))
    explicit, _ = load_trial([*CHANNELS, "recipe.execute=emulate"])
    assert all_settings(plain) == all_settings(explicit)


def test_a_probe_compares_execution_and_emulation_at_one_checkpoint(
    both: dict[str, tuple[RunFolder, dict[str, Any]]],
) -> None:
    settings = {"weights": "channel", "block": "channel", "keep.first": 0, "keep.last": 1}
    recipes = [load_recipe("fp8", {**settings, "execute": how, "name": f"fp8 {how}"}) for how in ("emulate", "fp8")]
    result = probe(both["emulate"][0].path, recipes, batches=1)
    whole = result.rows.query("layer == 'whole'").set_index("recipe")
    loss = whole["loss"]
    assert loss["fp8 emulate"] != loss["fp8 fp8"]
    assert loss["fp8 emulate"] == pytest.approx(loss["fp8 fp8"], rel=1e-3)
    assert whole["cosine"]["fp8 fp8"] == pytest.approx(whole["cosine"]["fp8 emulate"], abs=1e-3)


def test_executed_and_emulated_arms_are_of_different_kinds() -> None:
    settings = {"weights": "channel", "block": "channel"}
    assert kind(load_recipe("fp8", settings)) != kind(load_recipe("fp8", {**settings, "execute": "fp8"}))
