"""Test that a plan is refused if a trial, including its trunk, reads its data more often than `data.repeat` allows."""

from pathlib import Path

import numpy as np
import pytest

from fewbits import cli
from fewbits.experiments.data.folder import Meta, write_folder
from fewbits.experiments.data.web_text import COLLECTIONS
from fewbits.sweeps.planning.plan import plan
from fewbits.sweeps.planning.studies import STUDIES, load_sweeps
from tests.messages import names
from tests.sweeps.sweep_inputs import planned, tiny_file

LINE = {  # a trunk and its branch; an epoch of the data has 8 steps
    "overrides": ["data.kind=synthetic", "data.size=2048", "data.repeat=4", "training.batch=4", "training.length=64"],
    "arms": {
        "trunk": {"overrides": ["recipe=bf16", "training.steps=24"]},
        "branch": {"overrides": ["recipe=nvfp4", "training.steps=16"], "parent": "trunk", "at": 16},
    },
}


def test_a_line_of_trials_may_read_its_data_four_times(cache: Path, tmp_path: Path) -> None:
    """Check that a branch is allowed if it and its trunk together read their data exactly four times, the limit.

    The branch starts at step 16 of its trunk and trains 16 steps; the data of these 32 steps are four epochs.
    """
    assert len(planned(tiny_file(tmp_path, cache, LINE), f"runtime.runs={tmp_path / 'runs'}").trials) == 2


def test_one_step_more_is_refused_by_name_and_number(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    branch = {**LINE["arms"]["branch"], "at": 17}  # type: ignore[index]
    file = tiny_file(tmp_path, cache, LINE | {"arms": LINE["arms"] | {"branch": branch}})  # type: ignore[operator]
    arguments = ["sweep", str(file), "--runs", str(tmp_path / "runs")]
    for mode in ([], ["--dry-run"]):
        assert cli.main([*arguments, *mode]) == 2
        refusal = capsys.readouterr().err
        assert names(refusal, "arm branch", "seed 0", "8,448", "4,352", "4.1 epochs", "2,048")
        assert refusal.strip().endswith("data.repeat=5")
    assert not (tmp_path / "runs").exists()
    assert cli.main([*arguments, "--dry-run", "data.repeat=5"]) == 0


def test_a_grid_of_train_is_a_plan_too(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    overrides = ["data.kind=synthetic", "data.size=2048", "training.steps=200", f"runtime.cache={cache}", "seed=0,1"]
    assert cli.main(["train", "--multirun", *overrides, "--backend", "local"]) == 2
    assert "data.repeat allows 4" in capsys.readouterr().err


def test_the_allowance_is_no_part_of_an_id(cache: Path, tmp_path: Path) -> None:
    """Check that `data.repeat`, the number of epochs that is allowed, does not change the ids of trials."""
    file = tiny_file(tmp_path, cache, {"overrides": ["training.steps=2"]})
    runs = f"runtime.runs={tmp_path / 'runs'}"
    assert planned(file, runs).trials.keys() == planned(file, runs, "data.repeat=9").trials.keys()


def test_a_trial_by_itself_may_overfit(cache: Path, tmp_path: Path) -> None:
    """Check that `fewbits train`, unlike a sweep, trains more epochs than `data.repeat` allows."""
    overrides = (
        planned(
            tiny_file(tmp_path, cache, {"overrides": [*LINE["overrides"], "data.repeat=9", "training.steps=33"]}),
            f"runtime.runs={tmp_path / 'runs'}",
        )
        .members[0]
        .cell.overrides
    )
    assert cli.main(["train", *overrides, "data.repeat=1"]) == 0


ON_GPUS = [study.name for study in STUDIES.values() if "gpu" in study.scales]


@pytest.mark.parametrize(
    "study", [pytest.param(name, marks=() if name == "gaussws" else pytest.mark.deep) for name in ON_GPUS]
)
def test_a_study_on_a_gpu_can_be_planned_where_its_data_are(study: str, cache: Path, tmp_path: Path) -> None:
    """A study at scale gpu can be planned on a machine without a GPU. Small random token folders replace the data."""
    generator = np.random.default_rng(0)
    for name, vocab in (("openwebtext", 50257), ("c4", 32000), ("c4-nemotron", 131072)):
        dtype = "uint32" if vocab > 1 << 16 else "uint16"
        splits = {split: generator.integers(0, 40, size) for split, size in SPLITS.items()}
        (tmp_path / name).mkdir()
        write_folder(tmp_path / name, splits, Meta(dtype, vocab, 0))
    chosen = (f"study={study}", "scale=gpu", "seeds=[0]")
    sweeps, extra = load_sweeps((*chosen, f"runtime.cache={tmp_path}", f"runtime.runs={tmp_path / 'r'}"))
    with pytest.raises(ValueError, match=r"data\.repeat"):
        plan(sweeps, extra)
    found = plan(sweeps, (*extra, "data.repeat=1000000"))
    assert {one.trial.data.kind for one in found.trials.values()} <= set(COLLECTIONS)


SPLITS = {"train": 1 << 20, "validation": 2 << 20, "ood": 120_000}
