"""Test trials that diverge: they end with a result that names the step, and without a crash."""

import json
import math
import shutil
from pathlib import Path

import pandas as pd
import pytest

from fewbits.experiments.storage import checkpoints
from tests.experiments.trial_inputs import MOR, left, leftovers, metric, result_of, train, train_until

HOPELESS = ("optimizer.lr=1e30", "optimizer.clip=null")


def test_numbers_that_are_not_finite_end_a_trial_with_a_result(cache: Path, tmp_path: Path) -> None:
    asked = (*HOPELESS, *MOR, "training.checkpoint_every=1", "runtime.keep_every=1")
    folder, result = train(cache, tmp_path, *asked)
    assert result["status"] == "diverged"
    assert result["step"] == 1  # the first update ruins the model
    assert result["loss"] is None
    assert result_of(folder.path) == result
    losses = metric(folder, "loss")
    assert len(losses) == 2
    assert math.isfinite(losses[0])
    assert not math.isfinite(losses[1])
    numerics = pd.read_parquet(folder.path / "numerics.parquet")
    assert set(numerics["step"]) == {1}  # rows of the incomplete window in which the trial diverged
    for saved in (folder.checkpoints, folder.kept):
        assert set(checkpoints.steps(saved)) <= {1}, "no checkpoint has the ruined model"
    assert not leftovers(folder.path)
    assert train(cache, tmp_path, *asked) == (folder, result)


def test_a_loss_far_above_guessing_ends_a_trial(cache: Path, tmp_path: Path) -> None:
    folder, result = train(cache, tmp_path, "training.blow_up=0.5")
    assert (result["status"], result["step"]) == ("diverged", 0)
    assert result["loss"] == metric(folder, "loss")[0] > 0.5 * math.log(256)
    assert not (folder.path / "checkpoints").exists()
    _, patient = train(cache, tmp_path, "training.blow_up=0", "training.steps=2")
    assert patient["status"] == "done"


def test_a_model_that_is_ruined_by_its_last_update_has_diverged(cache: Path, tmp_path: Path) -> None:
    folder, result = train(cache, tmp_path, *HOPELESS, "training.steps=1")
    assert (result["status"], result["step"]) == ("diverged", 1)
    assert math.isfinite(result["loss"])
    assert result["parameter_norm"] is None
    assert not (folder.path / "checkpoints").exists()


def test_a_diverging_trial_that_is_interrupted_gives_the_same_bytes(cache: Path, tmp_path: Path) -> None:
    """The learning rate grows, so that the trial diverges after some good steps (measured: in steps 2 to 5)."""
    growing = ("optimizer.lr=0.2", "schedule=linear", "schedule.warmup_steps=11", "optimizer.clip=null")
    asked = (*growing, "training.blow_up=1.03", "recipe=nvfp4", "training.checkpoint_every=1")
    undisturbed, result = train(cache, tmp_path / "undisturbed", *asked)
    assert result["status"] == "diverged"
    assert 1 < result["step"] < 12
    train_until(result["step"] - 1, cache, tmp_path / "broken", *asked)
    resumed, _ = train(cache, tmp_path / "broken", *asked)
    assert left(resumed.path) == left(undisturbed.path)


def test_a_parent_that_is_not_finite_gives_branches_that_diverge_at_once(cache: Path, tmp_path: Path) -> None:
    parent, _ = train(cache, tmp_path, "training.steps=2")
    newest = checkpoints.newest(parent.checkpoints)
    assert newest is not None
    ruined = {name: value.clone() for name, value in newest.tensors().items()}
    ruined["model.blocks.1.ffn.down.weight"][3, 5] = math.nan
    shutil.rmtree(parent.checkpoints)
    checkpoints.save(parent.checkpoints, 2, ruined, newest.state)
    for recipe in (("recipe=bf16",), MOR, ("recipe=nvfp4",), ("recipe=gaussws",)):
        branch, result = train(cache, tmp_path, *recipe, f"branch.parent={parent.path}")
        assert (result["status"], result["step"], result["loss"]) == ("diverged", 0, None)
        assert len(metric(branch, "loss")) == 1
        json.loads((branch.path / "result.json").read_text(), parse_constant=pytest.fail)
