"""Test `probe`: it compares recipes at a checkpoint with the unquantized model, on the trial's next batches."""

import argparse
import hashlib
import inspect
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor

from fewbits import fake_quantize, mix
from fewbits.commands.probe import main
from fewbits.experiments.config import load_recipe, load_trial
from fewbits.experiments.data.load import load
from fewbits.experiments.probes.bench import make_bench
from fewbits.experiments.probes.errors import WHOLE, Probe, sum_error
from fewbits.experiments.probes.probe import probe
from fewbits.experiments.storage.run_folder import opened, saved_trial
from fewbits.experiments.training import run
from fewbits.experiments.trial import INITIAL, ORDER
from fewbits.kernels.accumulators import product
from fewbits.kernels.seeds import derive_seed
from fewbits.models.networks.decoder import Decoder
from fewbits.models.networks.registry import build
from fewbits.models.recipe import Recipe, Wgrad
from tests.experiments.data.data_inputs import bin_folder
from tests.experiments.trial_inputs import TINY

STEP = 16  # the step of a checkpoint in the middle of training
SIZES = {
    **{key: value for key, value in TINY.items() if key.startswith("model.")},
    "training.steps": 24,
    "training.batch": 8,
    "training.micro_batch": 4,
    "training.length": 64,
    "training.checkpoint_every": 8,
    "evaluation.every": 100,
    "evaluation.windows": 4,
    "observer.enabled": False,
    "runtime.keep_every": 8,
}
MOR_BLOCKS = {"block": "32x32"}  # so small that each operand of these models has several blocks


def trained(folder: Path, *overrides: str) -> Path:
    """Train a short run on the bytes of a Python module; return its folder."""
    text, meta = list(inspect.getsource(argparse).encode()), {"dtype": "uint8", "vocab": 256}
    tokens = bin_folder(folder / "tokens", text[4000:], text[:4000], "<u1", meta)
    settings = SIZES | {"data.path": tokens, "runtime.runs": folder / "runs"}
    trial, runtime = load_trial(["data=bin", *(f"{key}={value}" for key, value in settings.items()), *overrides])
    trained_folder, result = run(trial, runtime)
    assert result["status"] == "done"
    return trained_folder.path


@pytest.fixture(scope="module")
def nvfp4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with stochastic rounding, and a learning rate so high that the weights have changed clearly."""
    return trained(tmp_path_factory.mktemp("nvfp4"), "model.layers=2", "recipe=nvfp4", "optimizer.lr=0.002")


@pytest.fixture(scope="module")
def gaussws(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of GaussWS, which has learned bit widths."""
    return trained(tmp_path_factory.mktemp("gaussws"), "model.layers=1", "recipe=gaussws", "optimizer.lr=0.01")


def plain_model(folder: Path, step: int | None = None) -> tuple[Decoder, dict[str, Any]]:
    """Return a checkpoint's unquantized model and its state, loaded without the code of probes."""
    trial, checkpoint = saved_trial(folder), opened(folder).checkpoint(step)
    saved = {name.removeprefix("model."): tensor for name, tensor in checkpoint.tensors().items()}
    model = build(trial.model, seed=derive_seed(trial.seed, INITIAL))
    model.load_state_dict({name: saved[name] for name in model.state_dict()})
    return model, checkpoint.state


def next_batch(folder: Path, state: dict[str, Any], batch: int = 0) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets of a batch that the trial would have read after its checkpoint."""
    trial = saved_trial(folder)
    corpus, first = load(trial.data, folder), state["position"] + 4 * batch
    return corpus.batch("train", first, 4, 64, derive_seed(trial.seed, ORDER))


def losses(found: Probe) -> pd.DataFrame:
    """Return a row for each recipe and batch, about all parameters."""
    return found.rows[found.rows["layer"] == WHOLE].reset_index(drop=True)


def whole(found: Probe, recipe: str) -> pd.Series:
    """Return the measures of the whole gradient of the loss, as means over batches."""
    rows = losses(found)
    return rows[rows["recipe"] == recipe].drop(columns=["recipe", "variant", "layer", "block", "part"]).mean()


def same(a: Probe, b: Probe) -> None:
    """Assert that two probes have equal tables."""
    for table in ("rows", "operands"):
        pd.testing.assert_frame_equal(getattr(a, table), getattr(b, table), check_exact=True)


# Comparisons


def test_operands_left_high_change_nothing_at_all(nvfp4: Path) -> None:
    casts = Recipe.from_dict(
        {"name": "casts", "fprop": {"x": "bf16", "w": "bf16"}, "dgrad": {"dy": "bf16"}, "wgrad": {"x": "bf16"}}
    )
    found = probe(nvfp4, ["bf16", casts], batches=2)
    assert (losses(found)["increase"] == 0).all()
    assert (found.rows["cosine"] == 1).all()
    assert (found.rows[["error", "bias", "mean_error", "noise", "systematic"]] == 0).all(axis=None)
    assert found.rows["norm"].min() > 0
    assert found.operands.empty
    assert list(found.summary()["worst_error"]) == [0, 0]


# Batches


@pytest.mark.parametrize("step", [STEP, None])
def test_batches_are_those_that_the_trial_would_have_seen_next(nvfp4: Path, step: int | None) -> None:
    found = probe(nvfp4, ["bf16"], batches=3, step=step)
    training = saved_trial(nvfp4).training
    model, state = plain_model(nvfp4, step)
    assert found.step == state["step"] == (step or training.steps)
    assert state["position"] == found.step * training.batch
    for batch in range(3):
        assert losses(found)["loss"][batch] == float(model.loss(*next_batch(nvfp4, state, batch)).detach())


# Noise and bias


def test_averaging_over_seeds_leaves_nothing_of_noise_and_all_of_a_bias(nvfp4: Path) -> None:
    """Only dy of wgrad is quantized, with scales that never saturate, so stochastic rounding is unbiased."""
    recipes = [
        Recipe(name=name, wgrad=Wgrad(dy=f"e2m1:1x32:e8m0{rounding}", output="fp32"))
        for name, rounding in (("stochastic", ":stochastic"), ("nearest", ""))
    ]
    one, many = (probe(nvfp4, recipes, batches=1, seeds=seeds) for seeds in (1, 9))
    alone, averaged = whole(one, "stochastic"), whole(many, "stochastic")
    assert alone["mean_error"] == alone["error"]
    assert alone[["noise", "systematic"]].isna().all()
    assert averaged["mean_error"] == pytest.approx(alone["error"] / 3, rel=0.15)
    assert averaged["noise"] == pytest.approx(alone["error"], rel=0.1)
    assert averaged["systematic"] < 0.1 * averaged["noise"]
    assert abs(averaged["bias"]) < 0.01
    nearest = whole(one, "nearest")
    pd.testing.assert_series_equal(nearest, whole(many, "nearest"), check_exact=True)
    assert nearest["systematic"] == nearest["mean_error"] == nearest["error"] > averaged["systematic"]
    assert nearest["noise"] == 0
    assert list(many.summary()["seeds"]) == [9, 1]


def test_gradient_errors_are_those_of_the_gradients(nvfp4: Path) -> None:
    """Compare the errors of a layer's weight gradient with a computation from the unquantized model's x and dy."""
    recipe = Recipe(name="dy", wgrad=Wgrad(dy="e4m3:1x128:amax", output="fp32"))
    found = probe(nvfp4, [recipe], batches=1)
    model, state = plain_model(nvfp4)
    seen: dict[str, Tensor] = {}

    def record(_: object, inputs: tuple[Tensor, ...], y: Tensor) -> None:
        seen["x"] = inputs[0].detach().flatten(0, 1)
        y.register_hook(lambda dy: seen.update(dy=dy.flatten(0, 1)))

    model.get_submodule("blocks.0.ffn.down").register_forward_hook(record)
    model.loss(*next_batch(nvfp4, state)).backward()
    exact = model.get_parameter("blocks.0.ffn.down.weight").grad
    assert isinstance(exact, Tensor)
    quantized = fake_quantize(seen["dy"], "e4m3:1x128:amax", axis=0).float().t() @ seen["x"].float()
    e, g = (quantized - exact).double(), exact.double()
    row = found.rows.set_index("layer").loc["blocks.0.ffn.down"]
    assert row["norm"] == pytest.approx(float(g.norm()), rel=1e-9)
    assert row["error"] == pytest.approx(float(e.norm() / g.norm()), rel=1e-3)
    assert row["bias"] == pytest.approx(float((e * g).sum() / (g * g).sum()), rel=1e-2, abs=1e-6)
    cosine = torch.nn.functional.cosine_similarity(quantized.double().flatten(), g.flatten(), dim=0)
    assert row["cosine"] == pytest.approx(float(cosine), rel=1e-6)


# Operands


def test_statistics_of_operands_are_those_of_the_kernels(nvfp4: Path) -> None:
    q, w, mixture = "e2m1:1x16:nvfp4", "e4m3:32x32:gam", "e4m3:32x32:gam @ error<0.0225 | bf16 ; per=block"
    recipe = Recipe.from_dict(
        {"name": "mixed", "fprop": {"x": q, "w": w}, "dgrad": {"w": "same"}, "wgrad": {"x": mixture}}
    )
    found = probe(nvfp4, [recipe], batches=1)
    rows = found.operands[found.operands["layer"] == "blocks.0.attention.qkv"].set_index("slot")
    assert sorted(rows.index) == ["dgrad.w", "fprop.w", "fprop.x", "wgrad.x"]

    model, state = plain_model(nvfp4)
    tokens, _ = next_batch(nvfp4, state)
    block = model.blocks[0]
    x = block.get_submodule("attention_norm")(model.embed(tokens).bfloat16()).detach().flatten(0, 1)
    weight = block.get_submodule("attention.qkv").weight
    assert isinstance(weight, Tensor)

    _, x_stats = fake_quantize(x, q, stats=True)
    _, w_stats = fake_quantize(weight.detach().bfloat16(), w, stats=True)
    _, choice, mixture_stats = mix(x, mixture, axis=0, stats=True)
    for slot, stats in (("fprop.x", x_stats), ("fprop.w", w_stats), ("dgrad.w", w_stats)):
        assert rows["error"][slot] == pytest.approx(float(stats.error), abs=2**-41)  # sums count in units of 2^-40
        for name in ("flushed", "saturated", "capped"):
            assert rows[name][slot] == int(getattr(stats, name)) / int(stats.nonzeros)
    assert rows["flushed"]["fprop.x"] > 0
    mixed = float(mixture_stats.error_sum.sum() / mixture_stats.nonzeros.sum())
    assert rows["error"]["wgrad.x"] == pytest.approx(mixed, abs=2**-41)
    shares = torch.bincount(choice.flatten(), minlength=2) / choice.numel()
    assert [rows["share_0"]["wgrad.x"], rows["share_1"]["wgrad.x"]] == shares.tolist()
    assert rows["share_0"].isna().to_dict() == {"dgrad.w": True, "fprop.w": True, "fprop.x": True, "wgrad.x": False}
    assert rows["quantizer"]["wgrad.x"] == mixture


# Samplers and switches


def test_a_sampler_has_the_widths_that_were_learned(gaussws: Path) -> None:
    tensors = opened(gaussws).checkpoint(STEP).tensors(under="model.")
    scales = torch.cat([t.flatten() for name, t in tensors.items() if name.endswith(".bit_scale")])
    learned = float((4.0 + 2.0 * scales).double().mean())
    trial = saved_trial(gaussws)
    bench = make_bench(trial, opened(gaussws).checkpoint(STEP), torch.device("cpu"), torch.bfloat16)

    def bits(recipe: Recipe) -> float:
        _, quantization = bench.quantized(recipe, 0, 0)
        widths = [
            width.detach().flatten() for width in (layer.bits for layer in quantization.layers) if width is not None
        ]
        return float(torch.cat(widths).double().mean())

    assert bits(load_recipe("gaussws")) == pytest.approx(learned, rel=1e-6)
    assert bits(load_recipe("gaussws")) == bits(load_recipe("diffq")) != 6
    assert bits(load_recipe("gaussws-mor", {"sampler.init": 8.0, **MOR_BLOCKS})) == 8


def test_a_switch_has_happened_where_the_trial_is_past_it(nvfp4: Path) -> None:
    late = load_recipe("mxfp8", {"switch": {"at": 0.5, "passes": "both", "to": "high"}})
    before, after = (probe(nvfp4, [late], batches=1, step=step) for step in (8, STEP))
    assert len(before.operands)
    assert after.operands.empty
    assert (losses(after)["increase"] == 0).all()


# No side effects


def digest(folder: Path) -> dict[str, tuple[str, int]]:
    return {
        str(path): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_a_probe_gives_the_same_bits_and_leaves_the_run_as_it_was(nvfp4: Path, tmp_path: Path) -> None:
    before = digest(nvfp4)
    arguments: list[str | Recipe] = [load_recipe("mor/block", MOR_BLOCKS), "nvfp4", "gaussws"]
    first = probe(nvfp4, arguments, batches=2, seeds=2)
    copy = shutil.copytree(nvfp4, tmp_path / nvfp4.name)
    alone = probe(copy, ["nvfp4"], batches=2, seeds=2)  # other recipes must not affect this one
    together = first.rows[first.rows["recipe"] == "nvfp4"].reset_index(drop=True)
    pd.testing.assert_frame_equal(alone.rows, together, check_exact=True)
    (folder,) = (path for path in tmp_path.iterdir() if path.name != nvfp4.name)
    once = digest(folder)
    same(alone, probe(copy, ["nvfp4"], batches=2, seeds=2))
    assert digest(folder) == once  # a recipe that was measured before is not measured again
    assert digest(nvfp4) == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": 3}, r"has no checkpoint of step 3; available are 8, 16, 24: "),
        ({"batches": 0}, "batches 0: 1 or more"),
        ({"seeds": 0}, "seeds 0: 1 or more"),
        ({"recipes": []}, r"recipes \(none\)"),
        ({"recipes": ["nvfp4", "nvfp4"]}, "recipes nvfp4, nvfp4: .* with different names"),
        ({"recipes": ["fp8"]}, "recipe fp8 keeps the first 1 and last 2 of 2 blocks"),
        ({"recipes": ["fp9"]}, "no recipe 'fp9'.*fp8"),
        ({"accumulators": ["fp8"]}, "fp8.*hopper-fp8"),
        ({"accumulators": ["blackwell-fp4"]}, "blackwell-fp4.*hopper-fp8"),
    ],
)
def test_what_cannot_be_probed_is_refused(nvfp4: Path, changes: dict[str, Any], message: str) -> None:
    recipes = changes.pop("recipes", ["bf16"])
    with pytest.raises(ValueError, match=message):
        probe(nvfp4, recipes, **({"batches": 1} | changes))


# The command line


def test_people_get_a_row_for_each_recipe_and_layer(nvfp4: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [nvfp4.name, "bf16", "nvfp4", "nvfp4", "stochastic=[]", "keep.last=0"]
    assert main([*arguments, "--runs", str(nvfp4.parent), "--batches", "2", "--seeds", "2", "--layers"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{nvfp4.name} at step 24: train, 2 × 4x64 tokens, compared with unquantized bf16"
    assert [line.split()[0] for line in lines[3:6]] == ["bf16", "nvfp4", "nvfp4"]
    assert " ".join(lines[3].split()) == "bf16 +0.000000 ± 0.000000 1.000000 0.000 +0.000 ± 0.000 0.000 –"
    assert lines[5].startswith("nvfp4 stochastic=[] keep.last=0  ")
    assert sum("blocks.1.ffn.down" in line for line in lines[8:]) == 3
    (exact,) = (line for line in lines[8:] if line.startswith("bf16 ") and "blocks.1.ffn.down" in line)
    assert exact.split()[-6:] == ["–"] * 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "bf16"], "no run .nowhere. has started"),
        ([".", "bf16"], "is no run folder: it has no provenance.json"),
        (["RUN"], "the following arguments are required: RECIPE"),
        (["RUN", "rht=16", "nvfp4"], "rht=16 comes before any recipe"),
        (["RUN", "nvfp4", "rth=16"], r"rth"),
        (["RUN", "bf16", "--step", "x"], "probe: argument --step: invalid int value"),
        (["RUN", "bf16", "--device", "tpu"], "argument --device: .*'tpu'"),
    ],
)
def test_wrong_words_are_refused_in_one_line(
    nvfp4: Path, arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        main([str(nvfp4) if word == "RUN" else word for word in arguments])
    assert not list(tmp_path.iterdir())


# Sums


def test_errors_of_sums_are_those_of_the_products_of_the_quantized_operands(nvfp4: Path) -> None:
    found = probe(nvfp4, ["bf16", "nvfp4"], batches=1, accumulators=["bf16", "fp32", "hopper-fp8"])
    layers = found.layers()
    layers = layers[layers["layer"] != WHOLE]
    assert found.sums is not None
    assert set(found.sums["accumulator"]) == {"bf16", "fp32", "hopper-fp8"}
    assert len(found.sums) == len(layers) * 3
    assert (layers["sum_error_bf16"] > 1e-3).all()  # a BF16 sum of 64 products rounds each time, by up to 2^-9
    assert (layers["sum_error_fp32"] < 1e-5).all()
    assert (layers["sum_error_hopper-fp8"] > layers["sum_error_fp32"]).all()

    x, w = torch.randn(5, 64).bfloat16(), torch.randn(3, 64).bfloat16()
    ours = product(x, w.T.contiguous(), "bf16").double()
    exact = x.double() @ w.double().T
    assert sum_error(x, w, "bf16") == float((ours - exact).norm() / exact.norm())
