"""Test plans: ids are computed before any trial has run, as training uses them; limits of data and machines hold."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fewbits import cli
from fewbits.experiments.data.folder import Meta, write_folder
from fewbits.experiments.data.web_text import COLLECTIONS
from fewbits.sweeps.planning.cost import disk
from fewbits.sweeps.planning.plan import Plan, Planned, plan
from fewbits.sweeps.planning.studies import STUDIES, load_sweeps
from tests.experiments.trial_inputs import MOR, train
from tests.messages import names
from tests.sweeps.sweep_inputs import planned, tiny, tiny_file

ARMS = {
    "trunk": {"overrides": ["recipe=bf16"], "axes": []},
    "branch": {"overrides": [*MOR, "training.steps=6"], "parent": "trunk", "at": 0.5},
    "twig": {"overrides": ["recipe=nvfp4", "training.steps=2"], "parent": "branch", "axes": ["optimizer.lr"]},
}
FAMILY = {"arms": ARMS, "axes": {"optimizer.lr": [0.001, 0.002]}, "overrides": ["training.steps=4"]}


def of(plan: Plan, **place: str) -> Planned:
    (member,) = [member for member in plan.members if member.cell.place.items() >= place.items()]
    return plan.trials[member.id]


def test_a_planned_trial_is_the_one_that_train_runs(cache: Path, tmp_path: Path) -> None:
    """`fewbits train` with the overrides of a planned trial trains in the planned folder, under the planned id.

    The recipe's file has interpolations, which are resolved in both cases.
    """
    file = tiny_file(tmp_path, cache, {"overrides": ["recipe=nvfp4", "recipe.weights=1x16"], "seeds": [3]})
    found = planned(file, f"runtime.runs={tmp_path / 'runs'}", "training.steps=1")
    overrides = found.members[0].cell.overrides
    assert cli.main(["train", *overrides]) == 0
    (one,) = found.trials.values()
    assert one.folder.path.is_dir()
    assert (one.folder.result() or {})["id"] == one.id


def test_branches_run_under_the_ids_that_they_were_planned_with(cache: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    file = tiny_file(tmp_path, cache, FAMILY)
    found = planned(file, "seeds=[1]", "axes={optimizer.lr:[0.002]}", f"runtime.runs={runs}")
    trunk, branch, twig = (of(found, arm=arm) for arm in ARMS)
    assert (branch.parent, twig.parent) == (trunk.id, branch.id)
    assert (trunk.keep, branch.keep) == ({2}, {6})
    overrides = [word for word in tiny(cache, "seed=1", "optimizer.lr=0.002") if not word.startswith("runtime.cache")]
    first, _ = train(cache, runs, *overrides, "recipe=bf16", "training.steps=4", "runtime.keep_steps=[2]")
    assert first.id != trunk.id  # arm trunk does not vary over optimizer.lr, so it has the default learning rate
    first, _ = train(cache, runs, *overrides[:-1], "recipe=bf16", "training.steps=4", "runtime.keep_steps=[2]")
    assert first == trunk.folder
    at = [f"branch.parent={first.path.name}", "branch.step=2"]
    second, _ = train(cache, runs, *overrides, *MOR, "training.steps=6", *at)
    assert second == branch.folder
    third, _ = train(cache, runs, *overrides, "recipe=nvfp4", "training.steps=2", f"branch.parent={second.path}")
    assert third == twig.folder
    again = planned(file, "seeds=[1]", "axes={optimizer.lr:[0.002]}", f"runtime.runs={runs}")
    assert list(again.trials) == list(found.trials)


def test_what_runs_it_is_no_part_of_an_id_but_ranks_are(cache: Path, tmp_path: Path) -> None:
    """Check that requested resources and allowed epochs do not change a trial's id, but that ranks and threads do."""
    file = tiny_file(tmp_path, cache, {})
    (first,) = planned(file).trials
    assert [first] == list(
        planned(file, "resources={cpus:2,attempts:9}", "runtime.keep_every=2", "data.repeat=9").trials
    )
    assert [first] != list(planned(file, "resources.ranks=1", "runtime.threads=2").trials)
    assert [first] != list(planned(file, "resources.ranks=2", "training.batch=8").trials)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"overrides": ["recipe=mor/blok"]}, "sweep tiny, seed 0: no recipe 'mor/blok'.*mor/block"),
        ({"axes": {"optimizer.rate": [1]}}, r"sweep tiny, optimizer\.rate 1, seed 0: unknown key 'optimizer\.rate'"),
        ({"axes": {"training.steps": [2, -1]}}, r"training\.steps -1, seed 0: training\.steps -1: 1 or more"),
        ({"axes": {"training.steps": ["many"]}}, r"training\.steps: int is expected, not 'many'"),
        ({"resources": {"ranks": 3}}, r"training\.batch 4: 3 ranks of training\.micro_batch 4 need a multiple of 12"),
        ({"overrides": ["evaluation.windows=100000"]}, r"evaluation\.windows: "),
        ({"arms": {"t": {}, "b": {"parent": "t", "at": 9}}}, r"sweep tiny, arm b, seed 0: at 9\.0: .*parent, 1 to 8"),
        *(
            ({"arms": {"t": {}, "b": {"parent": "t", "overrides": [override]}}}, f"arm b, seed 0: a branch .*{problem}")
            for override, problem in (
                ("optimizer.kind=adam-mini", r"optimizer\.kind 'adam-mini', not 'adamw'"),
                ("training.length=32", r"training\.length 32, not 64"),
                ("model.layers=3", r"model\.layers 3, not 2"),
                ("data.seed=1", r"not with data=synthetic .*data\.seed=1"),
            )
        ),
        ({"scales": ["gpu"]}, "nothing to run: no trial belongs to sweep tiny at scale smoke"),
        ({"exclude": [{"seed": 0}]}, "nothing to run"),
    ],
)
def test_a_trial_that_could_not_be_is_refused_by_its_place(
    cache: Path, tmp_path: Path, data: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=message):
        planned(tiny_file(tmp_path, cache, data))
    assert cli.main(["sweep", str(tmp_path / "tiny.yaml"), "--runs", str(tmp_path / "runs")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_sweeps_planned_together_share_trials_and_what_they_keep(cache: Path, tmp_path: Path) -> None:
    plain = tiny_file(tmp_path, cache, {"overrides": ["recipe=bf16"]}, "plain")
    arms = {"t": {}, "b": {"parent": "t", "at": 4, "overrides": ["recipe=nvfp4"]}}
    branched = tiny_file(tmp_path, cache, {"arms": arms}, "branched")
    sweeps = [load_sweeps([str(path)])[0][0] for path in (plain, branched)]
    both = plan(sweeps)
    assert [member.cell.sweep for member in both.members] == ["plain", "branched", "branched"]
    assert len(both.trials) == 2
    assert both.trials[both.members[0].id].keep == {4}


def test_what_this_machine_never_has_room_for_is_refused(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for resources, expected in (
        ({"gpus": 99}, "(99 GPUs, 1 CPU), but this machine has"),
        ({"cpus": 500}, "asks for 1 × (500 CPUs)"),
    ):
        file = tiny_file(tmp_path, cache, {"resources": resources})
        assert cli.main(["sweep", str(file), "--runs", str(tmp_path / "runs"), "--backend", "local"]) == 2
        assert expected in capsys.readouterr().err
    (tmp_path / "taken").write_text("")
    assert cli.main(["sweep", str(file), "--runs", str(tmp_path / "taken"), "--backend", "local"]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_probes_of_a_trunk_are_planned_with_its_checkpoints_and_keep_none(cache: Path, tmp_path: Path) -> None:
    probe = ["probe.seeds=1", "training.steps=2", "training.batch=2", "training.micro_batch=2"]
    data = {
        "arms": {"trunk": {"overrides": ["recipe=bf16"], "axes": []}, "probe": {"overrides": MOR, "parent": "trunk"}},
        "axes": {"checkpoint": {"middle": ["at=0.5", *probe], "end": probe}},
    }
    found = planned(tiny_file(tmp_path, cache, data), f"runtime.runs={tmp_path}")
    trunk, middle, end = (of(found, **p) for p in ({"arm": "trunk"}, {"checkpoint": "middle"}, {"checkpoint": "end"}))
    assert trunk.keep == {trunk.trial.training.steps // 2, trunk.trial.training.steps}
    assert (middle.parent, end.parent) == (trunk.id, trunk.id)
    assert middle.id != end.id
    assert (disk([middle, end]), disk([trunk]) > 0) == (0, True)


# ------------------------------------------------------------------------------------------------ data

LINE: dict[str, Any] = {  # a trunk and its branch; an epoch of the data has 8 steps
    "overrides": ["data.kind=synthetic", "data.size=2048", "data.repeat=4", "training.batch=4", "training.length=64"],
    "arms": {
        "trunk": {"overrides": ["recipe=bf16", "training.steps=24"]},
        "branch": {"overrides": ["recipe=nvfp4", "training.steps=16"], "parent": "trunk", "at": 16},
    },
}


def test_trials_that_read_their_data_more_than_four_times_are_refused(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trunk and its branch may read their data four times together, the limit; one step more is refused.

    The branch starts at step 16 of its trunk and trains 16 steps; the data of these 32 steps are four epochs.
    """
    arguments = ["sweep", str(tiny_file(tmp_path, cache, LINE)), "--runs", str(tmp_path / "runs")]
    assert cli.main([*arguments, "--dry-run"]) == 0
    branch = {**LINE["arms"]["branch"], "at": 17}
    tiny_file(tmp_path, cache, LINE | {"arms": LINE["arms"] | {"branch": branch}})
    for mode in ([], ["--dry-run"]):
        capsys.readouterr()
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


SPLITS = {"train": 1 << 20, "validation": 2 << 20, "ood": 120_000}
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
