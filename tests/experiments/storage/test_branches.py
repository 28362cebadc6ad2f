"""Test branches: they continue from another trial's checkpoint as that trial would, except for their own recipe."""

import shutil
from pathlib import Path

import pytest
import torch

from fewbits.experiments.storage import checkpoints
from fewbits.experiments.storage.run_folder import RunFolder, opened
from tests.experiments.trial_inputs import left, metric, tensors, train, train_until

NOISY = ("recipe=nvfp4", "recipe.sampler.kind=gaussws", "recipe.sampler.penalty=0.0001")
KEPT = ("runtime.keep_every=4", "runtime.keep_checkpoints=1")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def parent(cache: Path, runs: Path) -> RunFolder:
    """Return a trial of eight steps with stochastic rounding and a sampler, and checkpoints kept at steps 4 and 8."""
    return train(cache, runs, *NOISY, *KEPT, "training.steps=8")[0]


@pytest.fixture(scope="module")
def longer(cache: Path, runs: Path) -> RunFolder:
    """Return the trial of `parent` with twelve steps, for comparison with branches from step 8 or 4."""
    return train(cache, runs, *NOISY, "training.steps=12")[0]


def test_a_branch_goes_on_as_its_parent_would(parent: RunFolder, longer: RunFolder, cache: Path, runs: Path) -> None:
    assert metric(parent, "loss") == metric(longer, "loss")[:8]
    branch, result = train(cache, runs, *NOISY, "training.steps=4", f"branch.parent={parent.path}")
    assert result["step"] == 4
    for name in ("loss", "gradient_norm", "penalty", "tokens"):
        assert metric(branch, name) == metric(longer, name)[8:]
    assert metric(branch, "validation_loss")[-1] == metric(longer, "validation_loss")[-1]
    here, there = tensors(branch.path), tensors(longer.path)
    of_trial = [name for name in there if name.startswith(("model.", "optimizer."))]
    assert all(torch.equal(here[name], there[name]) for name in of_trial)


def test_a_branch_of_a_branch_goes_on(parent: RunFolder, longer: RunFolder, cache: Path, runs: Path) -> None:
    first, _ = train(cache, runs, *NOISY, "training.steps=3", f"branch.parent={parent.path}", "branch.step=4")
    second, _ = train(cache, runs, *NOISY, "training.steps=2", f"branch.parent={first.path}")
    assert metric(second, "loss") == metric(longer, "loss")[7:9]


def test_a_branch_differs_in_its_recipe_alone(parent: RunFolder, longer: RunFolder, cache: Path, runs: Path) -> None:
    """A branch without sampler drops the parent's bit scales; if only the branch has a sampler, they start at 1."""
    asked = ("training.steps=2", f"branch.parent={parent.path}")
    high, _ = train(cache, runs, *asked)
    bits = [name for name in tensors(parent.path) if name.endswith("bit_scale")]
    assert bits
    assert not [name for name in tensors(high.path) if "bit_scale" in name]
    assert metric(high, "loss")[0] != metric(longer, "loss")[8]
    assert metric(high, "loss")[0] == pytest.approx(metric(longer, "loss")[8], rel=0.05)

    plain, _ = train(cache, runs, "training.steps=2")
    added, _ = train(cache, runs, "recipe=gaussws", "optimizer.lr=0", *asked[:1], f"branch.parent={plain.path}")
    kept, scales = tensors(plain.path), tensors(added.path)
    assert all(torch.equal(scales[name], kept[name]) for name in kept if name.startswith("model."))
    new = [value for name, value in scales.items() if name.startswith("model.") and name.endswith("bit_scale")]
    assert new
    assert all((value == 1).all() for value in new)


def test_an_interrupted_branch_gives_the_same_bytes(parent: RunFolder, cache: Path, tmp_path: Path) -> None:
    asked = (*NOISY, "training.steps=7", "schedule=linear", f"branch.parent={parent.path}")
    undisturbed, _ = train(cache, tmp_path / "undisturbed", *asked)
    for step in (1, 5):
        train_until(step, cache, tmp_path / "broken", *asked)
    resumed, _ = train(cache, tmp_path / "broken", *asked)
    assert left(resumed.path) == left(undisturbed.path)


def test_a_branch_is_known_by_its_parents_id_and_step(parent: RunFolder, cache: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(parent.path, tmp_path / "elsewhere")
    folder, by_newest, other_step, none = (
        train(cache, tmp_path / "runs", "training.steps=1", *more)[0]
        for more in (
            (f"branch.parent={parent.path}", "branch.step=8"),
            (f"branch.parent={moved}",),
            (f"branch.parent={moved}", "branch.step=4"),
            (),
        )
    )
    assert folder == by_newest
    assert len({folder.id, other_step.id, none.id}) == 3
    provenance = folder.provenance() or {}
    assert provenance["identity"]["parent"] == {"id": parent.id, "step": 8}
    assert provenance["parent"] == str(parent.path)
    assert opened(folder.path) == folder


def test_a_branch_outlives_its_parents_checkpoint(parent: RunFolder, cache: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(parent.path, tmp_path / "parent")
    asked = ("training.steps=5", f"branch.parent={moved}", "branch.step=4")
    train_until(4, cache, tmp_path / "runs", *asked)
    shutil.rmtree(moved / "kept")
    folder, result = train(cache, tmp_path / "runs", *asked)
    assert result["step"] == 5
    assert train(cache, tmp_path / "runs", *asked) == (folder, result)


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (("branch.step=5",), r"has no checkpoint of step 5; available are 4, 8"),
        (("model.layers=3",), r"model and data, .*: model.layers 3, not 2"),
        (("model=llama2-nano",), r"model.activation 'swiglu', not 'relu2'.* model.fused_qkv False, not True"),
        (("seed=1",), r"seed 1, not 0; .*training\.rounding_seed"),
        (("training.length=64",), r"training.length 64, not 128"),
        (("optimizer=adam-mini",), r"optimizer.kind 'adam-mini', not 'adamw'"),
        (("data.seed=1",), r"data=synthetic data\.size=65536, not with data=synthetic .*data\.seed=1$"),
        (("data=torch",), r"data=synthetic data\.size=65536, not with data=torch"),
    ],
)
def test_a_branch_that_could_not_go_on_is_refused_before_it_leaves_anything(
    asked: tuple[str, ...], message: str, parent: RunFolder, cache: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message) as error:
        train(cache, tmp_path / "runs", f"branch.parent={parent.path}", *asked)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "runs").exists()


def test_a_trial_is_rewound_only_to_before_a_missing_checkpoint(parent: RunFolder, tmp_path: Path) -> None:
    shutil.copytree(parent.path, tmp_path / parent.path.name)
    folder = RunFolder(tmp_path / parent.path.name, parent.id)
    before, kept = checkpoints.steps(folder.checkpoints), checkpoints.steps(folder.kept)
    folder.rewind((4, 8))
    assert not folder.over
    assert (checkpoints.steps(folder.checkpoints), checkpoints.steps(folder.kept)) == (before, kept)
    folder.rewind((3, 8))
    assert before
    assert {*checkpoints.steps(folder.checkpoints), *checkpoints.steps(folder.kept)} <= {1, 2}
