"""Test that training computes what the recipe says, and that tables and result describe what was computed."""

import functools
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from fewbits.commands.train import summary
from fewbits.experiments.config import load_trial
from fewbits.experiments.data.load import load
from fewbits.experiments.evaluation.loss import evaluate_loss
from fewbits.experiments.optimization.optimizers import clip_gradients, make_optimizer, set_learning_rate
from fewbits.experiments.optimization.schedules import factor
from fewbits.experiments.session import Progress
from fewbits.experiments.storage import checkpoints
from fewbits.experiments.storage.results import decision_shares, decisions
from fewbits.experiments.storage.run_folder import RunFolder
from fewbits.experiments.trial import INITIAL, ORDER, ROUNDING
from fewbits.kernels.seeds import derive_seed
from fewbits.models.networks.registry import build, flops_per_token
from fewbits.models.quantize import quantize
from tests.experiments.trial_inputs import GAUSSWS_MOR, metric, overrides, train

HIGH_BY_CAST = [f"recipe.{slot}=bf16" for slot in ("fprop.x", "fprop.w", "dgrad.dy", "dgrad.w", "wgrad.dy", "wgrad.x")]


@pytest.mark.parametrize("model", ["nemotron-nano", "gpt2-nano", "llama2-nano"])
def test_a_recipe_of_bf16_operands_is_the_unquantized_model(model: str, cache: Path, tmp_path: Path) -> None:
    """Check that recipe bf16, operands cast to bf16, and a plain loop without quantizers give the same numbers."""
    asked = [f"model={model}", "seed=3", "training.steps=4", "schedule=linear", "schedule.warmup_fraction=0.25"]
    high, _ = train(cache, tmp_path, *asked)
    cast, _ = train(cache, tmp_path, *asked, *HIGH_BY_CAST)
    assert high.path != cast.path

    trial, _ = load_trial(overrides(cache, tmp_path, *asked))
    t, corpus = trial.training, load(trial.data, cache)
    plain = build(trial.model, seed=derive_seed(trial.seed, INITIAL))
    optimizer = make_optimizer(plain, trial.optimizer)
    losses, norms, rates = [], [], []
    for step in range(t.steps):
        inputs, targets = corpus.batch("train", step * t.batch, t.batch, t.length, derive_seed(trial.seed, ORDER))
        halves = [
            plain.loss(x, y) for x, y in zip(inputs.split(t.micro_batch), targets.split(t.micro_batch), strict=True)
        ]
        for loss in halves:
            (loss / len(halves)).backward()
        losses.append(torch.stack(halves).mean().item())
        norms.append(clip_gradients(plain.parameters(), 1.0).item())
        set_learning_rate(optimizer, factor(trial.schedule, step, t.steps))
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        optimizer.zero_grad()
    assert metric(high, "loss") == metric(cast, "loss") == losses
    assert metric(high, "gradient_norm") == metric(cast, "gradient_norm") == norms
    assert metric(high, "learning_rate") == rates


def test_accumulating_gradients_is_one_large_batch(cache: Path, tmp_path: Path) -> None:
    asked = ("training.steps=3", "training.dtype=fp32")
    parts, _ = train(cache, tmp_path, *asked, "training.micro_batch=1")
    whole, _ = train(cache, tmp_path, *asked, "training.micro_batch=4")
    assert metric(parts, "loss") == pytest.approx(metric(whole, "loss"), rel=1e-4)
    assert metric(parts, "gradient_norm")[0] == pytest.approx(metric(whole, "gradient_norm")[0], rel=1e-5)
    assert metric(whole, "loss") == metric(whole, "loss_max")
    assert all(most > mean for most, mean in zip(metric(parts, "loss_max"), metric(parts, "loss"), strict=True))


def test_equal_seeds_share_weights_and_data_across_recipes_and_other_seeds_do_not(cache: Path, tmp_path: Path) -> None:
    first = {
        name: metric(train(cache, tmp_path, "training.steps=1", *asked)[0], "loss")
        for name, asked in {
            "high": (),
            "adam-mini": ("optimizer=adam-mini",),
            "backward alone": ("recipe.wgrad.x=e2m1:1x16:nvfp4",),
            "noise": ("training.rounding_seed=3",),
            "other": ("seed=1",),
        }.items()
    }
    assert first["high"] == first["adam-mini"] == first["backward alone"] == first["noise"] != first["other"]


def test_dropout_draws_the_same_masks_when_blocks_are_recomputed_and_after_an_interruption(
    cache: Path, tmp_path: Path
) -> None:
    asked = ("model.dropout=0.2", "training.steps=4", "training.checkpoint_every=2")
    plain, _ = train(cache, tmp_path, "training.steps=4", "training.checkpoint_every=2")
    straight, _ = train(cache, tmp_path / "straight", *asked)
    recomputed, _ = train(cache, tmp_path / "recomputed", *asked, "training.recompute=true")
    broken, _ = train(cache, tmp_path / "broken", *asked)
    assert metric(straight, "loss") == metric(recomputed, "loss") != metric(plain, "loss")
    (broken.path / "result.json").unlink()
    for step in (broken.path / "checkpoints").glob("*4"):
        shutil.rmtree(step)
    resumed, _ = train(cache, tmp_path / "broken", *asked)
    assert metric(resumed, "loss") == metric(straight, "loss")
    assert metric(resumed, "validation_loss")[-1] == metric(straight, "validation_loss")[-1]


def test_dropout_draws_other_masks_in_each_step_and_micro_batch_and_none_in_evaluations(
    cache: Path, tmp_path: Path
) -> None:
    """At a learning rate of 0, on a text of equal tokens, losses differ by their masks alone."""
    for name in ("train", "val"):
        np.full(20_000, 7, np.uint16).tofile(tmp_path / f"{name}.bin")
    asked = ("data=bin", "data.size=null", f"data.path={tmp_path}", "optimizer.lr=0", "training.steps=3")
    plain, dropped = (train(cache, tmp_path / "runs", *asked, f"model.dropout={p}")[0] for p in (0, 0.3))
    assert len({*metric(dropped, "loss")}) == 3
    assert all(most > mean for most, mean in zip(metric(dropped, "loss_max"), metric(dropped, "loss"), strict=True))
    assert metric(plain, "loss_max") == metric(plain, "loss")
    assert metric(plain, "validation_loss")[-1] == metric(dropped, "validation_loss")[-1]
    branch, _ = train(cache, tmp_path / "runs", *asked, "model.dropout=0.3", f"branch.parent={plain.path}")
    assert all(most > mean for most, mean in zip(metric(branch, "loss_max"), metric(branch, "loss"), strict=True))


def test_tables_and_result_say_what_happened(cache: Path, tmp_path: Path) -> None:
    seen: list[Progress] = []
    folder, result = train(cache, tmp_path, *GAUSSWS_MOR, "recipe.sampler.parts=[od]", say=seen.append)
    metrics = pd.read_parquet(folder.path / "metrics.parquet")
    assert list(metrics["step"]) == list(range(12))
    assert list(metrics["tokens"]) == [4 * 128 * (step + 1) for step in range(12)]
    assert set(metrics.columns) == {
        *("step", "tokens", "loss", "loss_max", "gradient_norm", "learning_rate", "penalty"),
        *("validation_loss", "ood_loss", "parameter_norm"),
    }
    assert list(metrics["validation_loss"].notna().to_numpy().nonzero()[0]) == [4, 9, 11]
    assert metrics["loss"].iloc[-1] < metrics["loss"].iloc[0]
    assert metrics["loss"].iloc[0] == pytest.approx(math.log(256), abs=0.5)
    last = metrics.iloc[-1].to_dict()
    splits, formats = ("validation", "ood"), ("cast", "cast3", "cast4", "cast5", "unquantized")
    otherwise = {f"{split}_loss_{name}": last[f"{split}_loss"] for split in splits for name in formats}
    assert {name: result[name] for name in otherwise} == pytest.approx(otherwise, abs=0.01)
    assert result["decisions"].keys() == {"e4m3", "bf16"}
    assert sum(result["decisions"].values()) == pytest.approx(1)
    assert {name: value for name, value in result.items() if name not in {*otherwise, "decisions"}} == {
        "id": folder.id,
        "name": "nemotron-nano-gaussws-mor-synthetic-s0",
        "status": "done",
        "step": 12,
        **{key: value for key, value in last.items() if key != "step"},
    }

    numerics = pd.read_parquet(folder.path / "numerics.parquet")
    assert sorted(set(numerics["step"])) == [4, 9, 11]
    mixtures = numerics[numerics["slot"] != "weight"]
    assert set(mixtures["slot"]) == {"fprop.x", "fprop.w", "dgrad.dy"}  # a tensor that two GEMMs read is decided once
    assert (mixtures["share_0"] + mixtures["share_1"] == 1).all()
    assert (mixtures["batches"][mixtures["slot"] == "fprop.x"].groupby(numerics["step"]).first() == [10, 10, 4]).all()
    weights = numerics[numerics["slot"] == "weight"]
    assert set(weights["part"][weights["bits_mean"].notna()]) == {"out", "down"}
    errors = weights["gradient_error"].dropna()  # measured every 4th step, so never in the last window (2 steps)
    assert len(errors) == 2 * 8
    assert errors.between(0.001, 0.2).all()

    timing = pd.read_parquet(folder.path / "timing.parquet")
    assert list(timing["step"]) == list(range(12))
    assert (timing["tokens_per_second"] * timing["seconds"]).to_numpy() == pytest.approx(4 * 128)
    assert [(p.step, p.steps) for p in seen] == [(step, 12) for step in range(1, 13)]
    assert [p.loss for p in seen] == list(metrics["loss"])
    assert not (folder.path / "kept").exists()


def test_evaluation_is_of_each_split_with_the_operands_and_noise_of_its_step(cache: Path, tmp_path: Path) -> None:
    """Compute the losses again from a checkpoint before and one after the recipe's switch."""
    asked = ["recipe=mor/tensor", "recipe.fprop.x=e4m3:tensor:amax:stochastic", "recipe.switch.at=0.75"]
    asked += ["recipe.switch.to=e2m1:tensor:amax:stochastic", "training.steps=4", "evaluation.every=2"]
    trial, _ = load_trial(overrides(cache, tmp_path, *asked))
    folder, _ = train(cache, tmp_path, *asked, "training.checkpoint_every=2")
    corpus, parameters = load(trial.data, cache), metric(folder, "parameter_norm")
    for step in (2, 4):
        model = build(trial.model, seed=7)
        quantization = quantize(model, trial.recipe, seed=derive_seed(trial.seed, ROUNDING))
        saved = checkpoints.load(checkpoints.steps(folder.checkpoints)[step]).tensors(under="model.")
        model.load_state_dict({name.removeprefix("model."): value for name, value in saved.items()})
        quantization.begin(step, progress=step / 4)
        for split in ("validation", "ood"):
            loss = metric(folder, f"{split}_loss")[step - 1]
            assert loss == evaluate_loss(model, corpus, split, windows=4, length=128, batch=2)
        squares = sum(float(value.double().square().sum()) for value in model.state_dict().values())
        assert parameters[step - 1] == pytest.approx(math.sqrt(squares), rel=1e-5)


def test_the_samplers_penalty_is_part_of_what_is_minimised(cache: Path, tmp_path: Path) -> None:
    """The first gradient is almost only that of the penalty λ · Σ over layers of mean |b_t − target|."""
    penalty = 1e6  # so large that the loss's own gradient is negligible
    asked = ("recipe=gaussws", f"recipe.sampler.penalty={penalty}", "training.steps=6", "observer.window=1")
    folder, _ = train(cache, tmp_path, *asked)
    squares = [6 * 2, 2 * 2, 4 * 2, 2 * 4] * 2  # qkv, out, up, down of two blocks
    assert metric(folder, "penalty")[0] == penalty * len(squares) * 2
    expected = penalty * 2 * math.sqrt(sum(1 / n for n in squares))
    assert metric(folder, "gradient_norm")[0] == pytest.approx(expected, rel=1e-4)
    numerics = pd.read_parquet(folder.path / "numerics.parquet")
    bits = numerics[numerics["slot"] == "weight"].groupby("step")["bits_mean"].mean()
    assert (bits.diff().dropna() < 0).all()


def test_compiled_training_in_fp32_is_eager_training_but_for_the_order_of_sums(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare eager and compiled training; about one code of E2M1 in a million differs, and losses differ by 1e-7."""
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    asked = ("recipe=nvfp4", "recipe.keep.last=0", "model.layers=1", "training.steps=3", "training.dtype=fp32")
    eager, _ = train(cache, tmp_path, *asked, "evaluation.windows=2")
    compiled, result = train(cache, tmp_path, *asked, "evaluation.windows=2", "training.compile=true")
    assert result["status"] == "done"
    assert compiled.path != eager.path
    assert metric(compiled, "loss") == pytest.approx(metric(eager, "loss"), rel=1e-5)
    assert metric(compiled, "gradient_norm") == pytest.approx(metric(eager, "gradient_norm"), rel=1e-4)


def test_flops_are_those_of_matrices_and_attention() -> None:
    """Check FLOPs per token of nvfp4-1.2b, and how many a longer window adds in a hybrid with one attention block."""
    trial, _ = load_trial(["scale=paper/nvfp4-1.2b"])
    linear = 20 * (2048 * 4096 + 2048 * 2048 + 2 * 2048 * 6144)
    assert flops_per_token(trial.model, trial.training.length) == 6 * (linear + 2048 * 131072) + 12 * 20 * 2048 * 8192
    hybrid = load_trial(["model=hybrid-nano"])[0].model
    # one attention block: four heads of 64
    assert flops_per_token(hybrid, 257) - flops_per_token(hybrid, 256) == 12 * 256


# Executed FP8 products

CHANNELS = ("recipe=fp8", "recipe.weights=channel", "recipe.block=channel", "recipe.keep.first=0", "recipe.keep.last=1")
Trained = tuple[RunFolder, dict[str, Any]]


@pytest.fixture(scope="module")
def executed(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Return a trial with `recipe.execute=fp8`, and its result."""
    runs = tmp_path_factory.mktemp("executed")
    return train(cache, runs, *CHANNELS, "training.steps=6", "recipe.execute=fp8")


@pytest.fixture(scope="module")
def emulated(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(cache, tmp_path_factory.mktemp("emulated"), *CHANNELS, "training.steps=6")


def test_an_executed_trial_trains_as_its_emulation_does(executed: Trained, emulated: Trained) -> None:
    assert executed[1]["status"] == emulated[1]["status"] == "done"
    assert executed[1]["validation_loss"] != emulated[1]["validation_loss"]
    assert executed[1]["validation_loss"] == pytest.approx(emulated[1]["validation_loss"], rel=5e-3)


# Shares of mixtures' decisions, which are computed from the rows of numerics.parquet

DECIDED = {"layer": "a", "quantizer": "e4m3:128x128:gam @ error<0.045 | bf16"}
THREE_WAY = "e4m3:128x128:gam @ error<e5m2:128x128:gam | e5m2:128x128:gam @ spread<normal | bf16 ; per=block"
TWO_WAY = "e5m2:1x32:mx @ error<0.1 | bf16"
DONE = {"id": "an id", "status": "done", "step": 4, "loss": 1.0}


def test_the_shares_are_means_over_windows_layers_and_slots() -> None:
    rows: list[dict[str, object]] = [
        {"step": 1, "slot": "fprop.x", "share_0": 1.0, "share_1": 0.0, **DECIDED},
        {"step": 3, "slot": "fprop.x", "share_0": 0.5, "share_1": 0.5, **DECIDED},
        {"step": 3, "slot": "dgrad.dy", "share_0": 0.0, "share_1": 1.0, **DECIDED},
        {"step": 3, "slot": "weight", "layer": "a", "quantizer": None},
    ]
    found = decisions(rows)
    assert found == {"decisions": {"e4m3": 0.5, "bf16": 0.5}}
    assert "BF16 in 50.0 % of decisions" in summary(DONE | found)


def test_a_format_that_a_mixture_does_not_have_has_the_share_0() -> None:
    table = [
        {"slot": "fprop.x", "quantizer": THREE_WAY, "share_0": 0.5, "share_1": 0.25, "share_2": 0.25, "share_3": 0.0},
        {"slot": "dgrad.dy", "quantizer": TWO_WAY, "share_0": 0.75, "share_1": 0.25, "share_2": 0.0, "share_3": 0.0},
        {"slot": "fprop.w", "quantizer": "e4m3:128x128:amax"},
    ]
    shares = decision_shares(pd.DataFrame(table).assign(step=9))
    assert shares is not None
    found = shares.set_index("slot").drop(columns="step").to_dict("index")
    assert found == {
        "fprop.x": {"e4m3": 0.5, "e5m2": 0.25, "bf16": 0.25},
        "dgrad.dy": {"e4m3": 0.0, "e5m2": 0.75, "bf16": 0.25},
    }
