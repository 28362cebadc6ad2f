"""Test probe trials: measured values, resuming after an interruption, variants by slot, and invalid settings."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from fewbits.experiments.config import load_trial
from fewbits.experiments.data.corpus import Corpus
from fewbits.experiments.data.load import load
from fewbits.experiments.probes.bench import UpdateEffect
from fewbits.experiments.probes.errors import WHOLE, summarize
from fewbits.experiments.session import Events, Progress, find_folder
from fewbits.experiments.storage.run_folder import RunFolder, opened, saved_trial
from fewbits.experiments.training import run
from fewbits.experiments.trial import INITIAL, ORDER, Runtime, Trial
from fewbits.kernels.seeds import derive_seed
from fewbits.models.networks.registry import build
from tests.experiments.trial_inputs import overrides, result_of, train

FILES = ("probe.parquet", "numerics.parquet", "result.json")
PROBE = ("training.batch=2", "training.steps=3", "probe.seeds=2")


@pytest.fixture(scope="module")
def parent(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run whose checkpoints of steps 11 and 12 are kept."""
    return train(cache, tmp_path_factory.mktemp("runs"), "training.batch=2", "runtime.keep_steps=[11]")[0].path


@pytest.fixture(scope="module")
def corpus(cache: Path, parent: Path) -> Corpus:
    return load(saved_trial(parent).data, cache)


class Prober:
    """Runs probe trials of the parent in a folder of the test."""

    def __init__(self, cache: Path, parent: Path, runs: Path) -> None:
        self.cache, self.parent, self.runs = cache, parent, runs

    def trial(self, *more: str, runs: str = "runs") -> tuple[Trial, Runtime]:
        own = (f"branch.parent={self.parent}", *PROBE)
        replaced = {override.partition("=")[0] for override in more}
        kept = (override for override in own if override.partition("=")[0] not in replaced)
        return load_trial(overrides(self.cache, self.runs / runs, *kept, *more))

    def __call__(self, *more: str, runs: str = "runs", stop_after: int = 0) -> RunFolder:
        """Run a probe trial. stop_after: the number of batches after which it is interrupted; 0: never."""

        class StopAfter(Events):
            done = 0

            def step(self, progress: Progress) -> None:
                self.done = progress.step

            def stopping(self) -> bool:
                return bool(stop_after) and self.done == stop_after

        return run(*self.trial(*more, runs=runs), StopAfter())[0]


@pytest.fixture
def probed(cache: Path, parent: Path, tmp_path: Path) -> Prober:
    return Prober(cache, parent, tmp_path)


def whole(folder: RunFolder) -> pd.DataFrame:
    """Return a row for each variant: the means over batches of the rows for the whole gradient."""
    table = pd.read_parquet(folder.path / "probe.parquet")
    return table[table["layer"] == WHOLE].groupby("variant", sort=False).mean(numeric_only=True)


def errors(folder: RunFolder) -> dict[str, float]:
    """Return the relative error of the whole gradient, averaged over batches, by variant."""
    return {str(variant): float(error) for variant, error in whole(folder)["error"].items()}


@pytest.mark.parametrize("dropout", [0, 0.3])
def test_operands_in_high_precision_change_nothing(probed: Prober, dropout: float) -> None:
    if dropout:  # no probe has it, so it compares equal models
        probed.parent = train(probed.cache, probed.runs, "training.steps=2", f"model.dropout={dropout}")[0].path
    result = result_of(probed("recipe=bf16", f"model.dropout={dropout}").path)
    assert result["status"] == "done"
    assert [result[name] for name in ("increase", "gradient_error", "gradient_bias", "persistent")] == [0, 0, 0, 0]
    assert result["progress"] == 1
    assert [result["update_own"], result["update_next"]] == [1, 1]


def test_an_interrupted_probe_ends_with_the_same_bytes(probed: Prober) -> None:
    recipe = ("recipe=nvfp4", "recipe.keep.last=0", "probe.parts=[gemms]")
    straight = probed(*recipe, runs="straight")
    for batch in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            probed(*recipe, runs="resumed", stop_after=batch)
    resumed = probed(*recipe, runs="resumed")
    assert resumed.id == straight.id
    for name in FILES:
        assert (resumed.path / name).read_bytes() == (straight.path / name).read_bytes(), name


def test_a_slot_alone_and_all_slots_but_it_separate_a_recipe_of_one_slot(probed: Prober) -> None:
    folder = probed("recipe=bf16", "recipe.fprop.x=e2m1:1x16:nvfp4", "probe.parts=[slots]")
    error = errors(folder)
    table = whole(folder).drop(columns=["batch", "block", "cross_gradient", "cross_error", "cross_progress"])
    table = table[[name for name in table if not str(name).startswith("decrease")]]
    assert list(table.index) == ["all", "only fprop.x", "without fprop.x"]
    numbers = {str(variant): row.to_dict() for variant, row in table.iterrows()}
    assert numbers["only fprop.x"] == pytest.approx(numbers["all"], rel=0, abs=0)
    assert error["all"] > 0.01
    assert error["without fprop.x"] == 0


def test_slots_that_share_their_values_are_one_variant(probed: Prober) -> None:
    folder = probed("recipe=mor/always-block", "recipe.block=32x32", "probe.parts=[slots,blocks]")
    only = [name for name in whole(folder).index if name.startswith("only")]
    assert only == ["only fprop.x", "only fprop.w", "only dgrad.dy", "only block 0", "only block 1"]


def test_statistics_of_operands_cover_all_batches(probed: Prober) -> None:
    numerics = pd.read_parquet(probed("recipe=mor/block", "recipe.block=32x32").path / "numerics.parquet")
    assert not numerics.duplicated(["layer", "slot"]).any()
    assert set(numerics["batches"]) == {3}
    assert set(numerics["step"]) == {11}  # the checkpoint is after 12 updates, the last of which has the number 11
    assert [sum(histogram) for histogram in numerics["histogram"]] == [3] * len(numerics)


def test_the_update_of_a_probe_is_the_one_that_training_makes(parent: Path, corpus: Corpus) -> None:
    trial, checkpoint = saved_trial(parent), opened(parent).checkpoint(11)
    model = build(trial.model, seed=derive_seed(trial.seed, INITIAL))
    weights = {name.removeprefix("model."): tensor for name, tensor in checkpoint.tensors(under="model.").items()}
    model.load_state_dict(weights)
    tokens = corpus.batch("train", checkpoint.state["position"], 2, 128, derive_seed(trial.seed, ORDER))
    gradients = torch.autograd.grad(model.loss(*tokens), list(model.parameters()))
    named = dict(zip(dict(model.named_parameters()), gradients, strict=True))
    after = opened(parent).checkpoint(12).tensors(under="model.")
    with UpdateEffect(trial, checkpoint, model).applied(named):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter, after[f"model.{name}"], rtol=0, atol=0)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, weights[name], rtol=0, atol=0)


def test_averaging_leaves_the_error_that_batches_have_in_common() -> None:
    """Check `persistent` and `progress` with random vectors: gradients have a common part, errors another along it."""
    generator = np.random.default_rng(0)
    size, count = 200, 500
    gradient = np.ones(size) * 10 / np.sqrt(size)  # of norm 10; the errors' common part has the norm 3
    gradients = gradient + generator.normal(size=(count, size))
    errors = -0.3 * gradient + generator.normal(size=(count, size))
    earlier = {name: np.cumsum(rows, 0)[:-1] for name, rows in (("g", gradients), ("e", errors))}
    rows = pd.DataFrame(
        {
            "variant": "all",
            "layer": WHOLE,
            "cross_error": [np.nan, *(errors[1:] * earlier["e"]).sum(1)],
            "cross_gradient": [np.nan, *(gradients[1:] * earlier["g"]).sum(1)],
            "cross_progress": [np.nan, *(errors[1:] * earlier["g"] + gradients[1:] * earlier["e"]).sum(1) / 2],
        }
    )
    for name in ("loss", "reference", "increase", "cosine", "error", "bias", "noise", "systematic"):
        rows[name] = 1.0
    rows["zeros"] = rows["zeros_exact"] = 0.0
    assert summarize(rows)["persistent"] == pytest.approx(9 / 100, rel=0.05)
    assert summarize(rows)["progress"] == pytest.approx(0.7, rel=0.02)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (("branch.parent=null",), "branch.parent"),
        (("training.batch=4",), "training.micro_batch"),
        (("model.layers=3",), "model.layers"),
        (("probe.split=test",), "probe.split"),
        (("probe.parts=[layers]",), "probe.parts"),
        (("probe.seeds=-1",), "probe.seeds"),
        (("probe.split=train", "training.length=64"), "training.length 64: probe.split=train"),
    ],
)
def test_a_wrong_probe_is_refused_by_name(probed: Prober, changes: tuple[str, ...], named: str) -> None:
    with pytest.raises(ValueError, match=named.replace(".", r"\.")):
        probed(*changes)
    assert not list(probed.runs.rglob("result.json"))


def test_the_settings_of_a_probe_are_in_its_id_and_in_no_other(probed: Prober) -> None:
    changes = ((), ("probe.seeds=1",), ("probe.split=train",), ("probe.update=false",), ("recipe=mxfp8",))
    assert len({find_folder(*probed.trial(*more)).id for more in changes}) == 5
    assert opened(probed.parent).provenance()["identity"].keys().isdisjoint({"probe"})  # type: ignore[index]
