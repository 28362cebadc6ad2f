"""Test precision policies: stored formats, loss scaling, skipped updates, counts; the default changes nothing."""

import copy
import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn

from fewbits.experiments.config import load_trial
from fewbits.experiments.optimization.optimizers import OptimizerConfig, make_optimizer
from fewbits.experiments.optimization.precision import (
    LOWEST,
    PATIENCE,
    LossScaler,
    Policy,
    Precision,
    gradient_counts,
    update_counts,
)
from fewbits.experiments.storage import checkpoints
from fewbits.experiments.storage.run_folder import RunFolder
from tests.experiments.trial_inputs import metric, overrides, tensors, train
from tests.messages import naming

NUMPY = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16}
SHORT = (
    *("training.steps=6", "training.length=64", "model.layers=1"),
    *("evaluation.windows=2", "observer.enabled=false"),
)


def policy(config: Precision, weights: Tensor, *, seed: int = 0, lr: float = 1e-3) -> Policy:
    """Return a policy for one parameter `weight` with these values, updated by AdamW without weight decay."""
    model = nn.Linear(weights.shape[1], weights.shape[0], bias=False)
    with torch.no_grad():
        model.weight.copy_(weights)
    optimizer = make_optimizer(model, OptimizerConfig(lr=lr, weight_decay=0.0))
    return Policy(config, model, optimizer, seed, steps=PATIENCE)


def update(policy: Policy, grad: Tensor, step: int = 0) -> Tensor:
    """Run one update of the policy's parameter and return its new weights. grad: the gradient of the scaled loss."""
    (param,) = policy.params.values()
    param.grad = grad.clone()
    policy.begin(step)
    policy.add_up()
    policy.finish(step)
    row = policy.judge({"step": step, "gradient_norm": param.grad.norm().item()})
    policy.update(step, row)
    return param.detach().clone()


def moments(policy: Policy) -> dict[str, Tensor]:
    """Return copies of the optimizer's states of the policy's parameter, by name."""
    (state,) = policy.optimizer.state.values()
    return {name: value.clone() for name, value in state.items()}


def on_grid(x: Tensor, name: str) -> bool:
    """Tell whether all values are numbers of the format `name`."""
    return bool((x.numpy().astype(NUMPY[name]).astype(np.float32) == x.numpy()).all())


# ------------------------------------------------------------------------------------------------ the default


def test_the_default_is_named_mixed_and_records_nothing(cache: Path, tmp_path: Path) -> None:
    default, named = (load_trial(overrides(cache, tmp_path, *more))[0] for more in ((), ("precision=mixed",)))
    assert default == named
    folder, result = train(cache, tmp_path, *SHORT, "training.steps=2")
    assert not (folder.path / "precision.parquet").exists()
    assert "skipped_updates" not in result
    assert "loss_scale" not in pd.read_parquet(folder.path / "metrics.parquet")


# ------------------------------------------------------------------------------------------------ scaling of the loss


def test_the_dynamic_scale_is_that_of_torchs_scaler() -> None:
    scale, clean = torch.tensor(1024.0), torch.tensor(0, dtype=torch.int32)
    ours = LossScaler(Precision(loss_scaling="dynamic", loss_scale=1024.0, growth_interval=3))
    overflows = [0, 0, 0, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 1]
    for overflowed in overflows:
        torch._amp_update_scale_(scale, clean, torch.tensor(float(overflowed)), 2.0, 0.5, 3)
        ours.adjust(bool(overflowed))
        assert ours.scale == scale.item()
    assert ours.skipped == sum(overflows)


@pytest.mark.parametrize("overflow", [math.inf, -math.inf, math.nan])
def test_an_overflow_changes_neither_weights_nor_states(overflow: float) -> None:
    config = Precision(loss_scaling="dynamic", loss_scale=4.0, weights="bf16", rounding="stochastic", states="bf16")
    own = policy(config, torch.randn(4, 8, generator=torch.Generator().manual_seed(0)))
    weights, states = update(own, torch.ones(4, 8)), moments(own)
    broken = torch.ones(4, 8)
    broken[2, 3] = overflow
    assert torch.equal(update(own, broken, 1), weights)
    assert all(torch.equal(value, states[name]) for name, value in moments(own).items())
    assert own.scaler is not None
    assert (own.scaler.scale, own.scaler.skipped) == (2.0, 1)
    assert not torch.equal(update(own, torch.ones(4, 8), 2), weights)


def test_scaling_by_a_power_of_two_changes_no_bit_where_nothing_overflows(cache: Path, tmp_path: Path) -> None:
    scaled = ("precision.loss_scaling=static", "precision.loss_scale=4096.0")
    one, other = (train(cache, tmp_path, *SHORT, *more)[0].path for more in ((), scaled))
    ours, theirs = tensors(one), tensors(other)
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items() if name.startswith("model."))
    assert metric(one, "gradient_norm") == metric(other, "gradient_norm")


@pytest.fixture(scope="module")
def fp16(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunFolder]:
    """Return runs by policy; in `high`, the first loss scale is so high that gradients overflow."""
    runs = tmp_path_factory.mktemp("runs")
    trials = {
        "unscaled": ("precision=fp16-unscaled",),
        "scaled": ("precision=fp16",),
        "high": ("precision=fp16", "precision.loss_scale=2097152.0", "precision.growth_interval=2"),
        "fp32": ("precision=fp32",),
    }
    return {name: train(cache, runs, *SHORT, "precision.every=1", *more)[0] for name, more in trials.items()}


def test_skipped_updates_are_recorded_and_the_schedule_goes_on(fp16: dict[str, RunFolder]) -> None:
    folder, calm = fp16["high"], fp16["scaled"]
    table, result = pd.read_parquet(folder.path / "metrics.parquet"), folder.result()
    assert result is not None
    assert result["skipped_updates"] == table["skipped"].sum() > 0
    assert (table["gradient_norm"].isna() == (table["skipped"] == 1)).all()
    assert list(table["learning_rate"]) == metric(calm, "learning_rate")
    assert list(table["tokens"]) == metric(calm, "tokens")
    scaler = LossScaler(Precision(loss_scaling="dynamic", loss_scale=2.0**21, growth_interval=2))
    for _, row in table.iterrows():
        assert row["loss_scale"] == scaler.scale
        scaler.adjust(row["skipped"] == 1)
    rows = pd.read_parquet(folder.path / "precision.parquet")
    of_parameters = rows[rows["slot"] == "parameter"]
    skipped = of_parameters.groupby("step")["nonfinite"].sum() > 0
    assert list(skipped) == list(table["skipped"] == 1)
    assert list(of_parameters.groupby("step")["updates"].count() == 0) == list(skipped)


def test_fp16_loses_gradients_that_a_loss_scale_keeps(fp16: dict[str, RunFolder]) -> None:
    """Measured are 2,584 more zeros dy than in FP32 without loss scaling, and 302 with the scale 2^16."""

    def zeros(name: str) -> int:
        rows = pd.read_parquet(fp16[name].path / "precision.parquet")
        return int(rows.loc[(rows["slot"] == "dy") & (rows["step"] == 0), "zeros"].sum())

    assert zeros("unscaled") - zeros("fp32") > 3 * abs(zeros("scaled") - zeros("fp32"))


@pytest.mark.parametrize(("steps", "limit"), [(PATIENCE + 4, PATIENCE), (3, 3)])
def test_too_many_skipped_updates_end_a_trial_as_diverged(steps: int, limit: int, cache: Path, tmp_path: Path) -> None:
    forever = ("precision=fp16", "precision.loss_scaling=static", f"precision.loss_scale={2.0**100}")
    folder, result = train(cache, tmp_path, *SHORT, *forever, f"training.steps={steps}", "training.batch=2")
    assert (result["status"], result["step"], result["skipped_updates"]) == ("diverged", limit, limit)
    assert f"{limit} updates in a row" in result["reason"]
    assert metric(folder, "skipped") == [1.0] * limit


# ------------------------------------------------------------------------------------------------ stored values


@pytest.mark.parametrize("weights", ["bf16", "fp16"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_an_update_in_fp32_is_rounded_once_to_the_stored_format(weights: str, rounding: str) -> None:
    start = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    own = policy(Precision(weights=weights, rounding=rounding, states="bf16"), start)
    stored = torch.from_numpy(start.numpy().astype(NUMPY[weights]).astype(np.float32))
    (first,) = own.params.values()
    assert torch.equal(first, stored)
    exact = policy(Precision(), stored)
    grad = torch.randn(64, 64, generator=torch.Generator().manual_seed(2))
    got, want = update(own, grad), update(exact, grad)
    nearest = torch.from_numpy(want.numpy().astype(NUMPY[weights]).astype(np.float32))
    assert on_grid(got, weights)
    if rounding == "nearest":
        assert torch.equal(got, nearest)
    else:
        assert 0 < (got != nearest).double().mean() < 0.5
    for name, value in moments(own).items():
        expected = moments(exact)[name]
        rounded = expected if name == "step" else expected.bfloat16().float()
        assert torch.equal(value, rounded)


def test_stochastic_updates_have_the_exact_mean_and_are_a_function_of_seed_and_step() -> None:
    """All weights are 1, where the next BF16 number is 2^-7 larger, and the first update is the rate, 2^-7 / 13."""
    exact = 2.0**-7 / 13
    start = torch.ones(256, 256)
    config = Precision(weights="bf16", rounding="stochastic")
    draws = {
        (seed, step): update(policy(config, start, seed=seed, lr=exact), -torch.ones(256, 256), step)
        for seed, step in itertools.product((0, 1), (0, 1))
    }
    for values in draws.values():
        assert set(values.unique().tolist()) == {1.0, 1 + 2.0**-7}
        moved = (values > 1).double().mean().item()
        assert abs(moved - 1 / 13) < 5 * math.sqrt(12 / 13 / 13 / values.numel())
    again = update(policy(config, start, seed=1, lr=exact), -torch.ones(256, 256), 1)
    assert torch.equal(again, draws[1, 1])
    for one, other in itertools.combinations(draws.values(), 2):
        both = ((one > 1) & (other > 1)).double().mean().item()
        assert both == pytest.approx(1 / 169, rel=0.3)  # independent draws: 388 ± 20 of 65,536
    nearest = update(policy(Precision(weights="bf16"), start, lr=exact), -torch.ones(256, 256))
    assert torch.equal(nearest, start)


@pytest.mark.parametrize("accumulation", ["fp32", "bf16"])
def test_gradients_are_summed_in_the_accumulation_format(accumulation: str) -> None:
    """Add 1 to 256 in 256 steps: BF16 loses every addition, because its next number after 256 is 258."""
    own = policy(Precision(accumulation=accumulation), torch.zeros(2, 2))
    (param,) = own.params.values()
    param.grad = torch.full((2, 2), 256.0)
    for _ in range(256):
        param.grad += 1
        own.add_up()
    assert param.grad.unique().tolist() == [512.0 if accumulation == "fp32" else 256.0]


# ------------------------------------------------------------------------------------------------ counts


def weights_and_updates() -> Iterator[tuple[float, float]]:
    """Yield pairs (weight, update), with updates around half the distance of neighbouring numbers of FP16 and BF16."""
    for weight in (1.0, 1.0078125, 1.9921875, 3.0, -1.0, -0.171875, 2.0**-20, 0.0, 0.3, -5.3):
        exponent = math.frexp(weight)[1] - 1 if weight else -30
        for power in range(exponent - 16, exponent - 5):
            for factor in (1.0, 1.25, 0.75):
                yield from ((weight, sign * factor * 2.0**power) for sign in (1, -1))


def test_lost_updates_are_those_that_plain_arithmetic_finds() -> None:
    pairs = np.array(list(weights_and_updates()), np.float32)
    before, after = pairs[:, 0], pairs[:, 0] + pairs[:, 1]
    want = {"updates": int((after != before).sum())}
    for name, dtype in NUMPY.items():
        start = before.astype(dtype).astype(np.float32)
        moved = (start + (after - before)).astype(dtype).astype(np.float32)
        want[f"lost_{name}"] = int(((after != before) & (moved == start)).sum())
    got = update_counts(torch.from_numpy(before), torch.from_numpy(after), torch.from_numpy(before))
    assert {name: got[name] for name in want} == want
    assert got["lost"] == want["updates"]


def test_updates_lost_without_master_weights_are_counted_exactly(cache: Path, tmp_path: Path) -> None:
    """Compare with checkpoints before and after each update, at a learning rate so low that most updates are lost."""
    low = ("precision=bf16-weights", "precision.every=1", "optimizer.lr=1e-5", "runtime.keep_every=1")
    folder, _ = train(cache, tmp_path, *SHORT, *low)
    rows = pd.read_parquet(folder.path / "precision.parquet").query("slot == 'parameter'").set_index(["step", "layer"])
    kept = {
        step: checkpoints.load(path).tensors(under="model.") for step, path in checkpoints.steps(folder.kept).items()
    }
    for step in range(1, 5):
        for name, before in kept[step].items():
            assert on_grid(before, "bf16")
            row = rows.xs((step, name.removeprefix("model.")))
            unmoved = int((kept[step + 1][name] == before).sum())
            assert unmoved == row["values"] - row["updates"] + row["lost"]
            assert row["lost"] == row["lost_bf16"]
    assert rows["lost"].sum() > 0.5 * rows["updates"].sum()


def test_exponents_tell_what_fp16_would_lose_at_any_loss_scale() -> None:
    g = torch.Generator().manual_seed(3)
    gradient = torch.randn(1 << 14, generator=g) * torch.exp2(-40 * torch.rand(1 << 14, generator=g))
    gradient[:5] = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan])
    counts = gradient_counts(gradient).tolist()
    bins, (zeros, nonfinite, values) = counts[:-3], counts[-3:]
    assert (zeros, nonfinite, values, sum(bins)) == (2, 3, 1 << 14, (1 << 14) - 5)
    for k in (0, 6, 16):
        lost = int(((gradient * 2.0**k).half() == 0).sum()) - zeros
        assert lost == sum(bins[: -25 - k - LOWEST])
    assert gradient_counts(gradient * 64, scale=64.0).tolist() == counts


# ------------------------------------------------------------------------------------------------ branches, state


def test_a_branch_goes_on_with_the_scale_of_its_parent(fp16: dict[str, RunFolder], cache: Path, tmp_path: Path) -> None:
    parent = fp16["high"]
    more = (f"branch.parent={parent.path}", "training.steps=2", "precision=fp16")
    folder, result = train(cache, tmp_path, *SHORT, *more)
    scaler = LossScaler(Precision(loss_scaling="dynamic", loss_scale=2.0**21, growth_interval=2))
    for skipped in metric(parent, "skipped"):
        scaler.adjust(skipped == 1)
    assert metric(folder, "loss_scale")[0] == scaler.scale != Precision().loss_scale
    assert result["skipped_updates"] == sum(metric(folder, "skipped"))


def test_a_state_restores_the_rest_of_a_sequence() -> None:
    config = Precision(loss_scaling="dynamic", loss_scale=64.0, growth_interval=2, weights="fp16", every=1)
    own = policy(config, torch.randn(8, 8, generator=torch.Generator().manual_seed(4)))
    for step in range(3):
        update(own, torch.full((8, 8), math.inf if step == 1 else 1.0), step)
    saved = copy.deepcopy(checkpoints.unflatten(*checkpoints.flatten(own.state())))
    other = policy(config, *(param.detach() for param in own.params.values()))
    other.load_state(saved, branch=False)
    assert other.state()["scaler"] == own.state()["scaler"]
    assert pd.DataFrame(other.rows()).equals(pd.DataFrame(own.rows()))


# ------------------------------------------------------------------------------------------------ refusals


def test_several_ranks_train_with_the_default_policy_alone() -> None:
    Precision().check_ranks(8)
    Precision(growth_interval=5).check_ranks(8)
    for changed in (Precision(weights="bf16"), Precision(loss_scaling="static"), Precision(every=1)):
        changed.check_ranks(1)
        with pytest.raises(ValueError, match=naming("precision", "8 ranks", "precision=mixed")):
            changed.check_ranks(8)


def test_a_branch_stores_its_parents_weights_in_its_own_format_with_any_optimizer(cache: Path, tmp_path: Path) -> None:
    asked = (*SHORT, "training.steps=2", "optimizer=adam-mini")
    parent, _ = train(cache, tmp_path, *asked)
    branch = (*asked, f"branch.parent={parent.path}", "optimizer.lr=0.0", "training.steps=1")
    folder, result = train(cache, tmp_path, *branch, "precision=bf16-pure")
    assert result["status"] == "done"
    old, new = tensors(parent.path), tensors(folder.path)
    for name, value in new.items():
        if name.startswith("model."):
            assert torch.equal(value, old[name].bfloat16().float())
        elif name.endswith(("exp_avg", "exp_avg_sq")):
            assert on_grid(value, "bf16")
