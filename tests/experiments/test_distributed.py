"""Test trials that run as several processes (ranks), as torchrun starts them; here with gloo, on a CPU."""

import os
import signal
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pandas as pd
import pytest

from fewbits.experiments.distributed import sharding as saving
from fewbits.experiments.storage.run_folder import opened
from fewbits.sweeps.running.local import environments_at, meeting_place
from tests.experiments.trial_inputs import (
    ended,
    ending,
    left,
    leftovers,
    metric,
    only_run,
    overrides,
    result_of,
    started,
    train,
)

NOISY = ("recipe=nvfp4", "recipe.sampler.kind=gaussws", "recipe.sampler.penalty=0.0001", "training.steps=8")


def two_processes(
    cache: Path,
    runs: Path,
    *more: str,
    stop: int | None = None,
    ranks: int = 2,
    victims: Sequence[int] | None = None,
    by: signal.Signals = signal.SIGKILL,
) -> list[int]:
    """Run the trial with the overrides `more` on several ranks; return the exit status of each rank.

    stop: once the checkpoint of this step exists, send the signal `by` to the ranks `victims` (None: to all ranks).
    """
    store = meeting_place()
    with ExitStack() as stack:
        processes = []
        for rank, environment in enumerate(environments_at(store, ranks)):
            process = started(
                ["train", *overrides(cache, runs, *more)], runs.with_name(f"output-{rank}"), environment=environment
            )
            processes.append(stack.enter_context(ending(process)))
        if stop is not None:
            while processes[0].is_alive() and not list(runs.glob(f"*/checkpoints/step-{stop:08d}")):
                processes[0].join(0.01)
            for rank in range(ranks) if victims is None else victims:
                pid = processes[rank].pid
                assert pid is not None
                os.kill(pid, by)
        return [ended(process) for process in processes]


@pytest.fixture(scope="module")
def whole(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run folder of a trial with noise that two ranks trained without interruption."""
    runs = tmp_path_factory.mktemp("two") / "runs"
    assert two_processes(cache, runs, *NOISY) == [0, 0]
    return only_run(runs)


def test_a_killed_trial_over_two_processes_gives_the_same_bytes(whole: Path, cache: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    statuses = two_processes(cache, runs, *NOISY, stop=3, victims=[1])
    assert statuses[1] == -9
    assert statuses[0] not in (0, -9)  # rank 0 loses its connection to rank 1 and ends with an error
    (newest,) = sorted(runs.glob("*/checkpoints/step-*"))[-1:]
    shard = newest / saving.file_name(1, 2)
    flip(shard, -1)
    assert two_processes(cache, runs, *NOISY) == [0, 0]
    assert f"damaged checkpoint skipped: {shard}" in (tmp_path / "output-1").read_text()
    assert left(only_run(runs)) == left(whole)
    assert not leftovers(runs)
    assert two_processes(cache, runs, *NOISY) == [0, 0]  # the trial is finished, and both ranks report it
    said = [(tmp_path / f"output-{rank}").read_text() for rank in range(2)]
    assert "done at step 8" in said[0]
    assert "loss" not in said[1].partition("done at step 8")[0]  # only rank 0 shows progress


def test_ranks_draw_noise_of_their_own_and_are_part_of_the_id(whole: Path, cache: Path, tmp_path: Path) -> None:
    """Check that a trial on two ranks has the batches of a trial in one process, but another id and rounding noise."""
    alone, _ = train(cache, tmp_path, *NOISY)
    assert alone.path.name != whole.name
    assert metric(alone, "tokens") == metric(whole, "tokens")
    assert metric(alone, "loss")[0] == pytest.approx(metric(whole, "loss")[0], rel=1e-6)  # forward rounds to nearest
    assert metric(alone, "gradient_norm")[0] != metric(whole, "gradient_norm")[0]


@pytest.mark.parametrize("ranks", [1, 2])
def test_delayed_scales_outlive_a_killed_trial(cache: Path, tmp_path: Path, ranks: int) -> None:
    asked = ("recipe=fp8-delayed", "recipe.delayed.history=3", "training.steps=8")
    whole, runs = tmp_path / "whole" / "runs", tmp_path / "runs"
    whole.parent.mkdir()
    assert two_processes(cache, whole, *asked, ranks=ranks) == [0] * ranks
    two_processes(cache, runs, *asked, ranks=ranks, stop=3)
    assert not list(runs.glob("*/result.json"))
    assert two_processes(cache, runs, *asked, ranks=ranks) == [0] * ranks
    assert left(only_run(runs)) == left(only_run(whole))


def test_without_noise_two_processes_train_as_one(cache: Path, tmp_path: Path) -> None:
    asked = ("training.dtype=fp32", "training.steps=4", "training.batch=8")  # two micro-batches for each rank
    assert two_processes(cache, tmp_path / "runs", *asked) == [0, 0]
    two = only_run(tmp_path / "runs")
    one, result = train(cache, tmp_path / "one", *asked)
    for name in ("loss", "loss_max", "gradient_norm"):
        assert metric(two, name) == pytest.approx(metric(one, name), rel=2e-4)
    assert metric(two, "loss_max")[0] == pytest.approx(metric(one, "loss_max")[0], rel=1e-6)
    assert metric(two, "loss_max")[0] > metric(two, "loss")[0]
    assert metric(two, "validation_loss")[-1] == pytest.approx(result["validation_loss"], rel=1e-4)


def test_the_statistics_of_two_ranks_are_those_of_one(cache: Path, tmp_path: Path) -> None:
    """Check that the numbers of all slots in the first step are equal: both read the same micro-batches."""
    asked = ("recipe=mor/three-way", "recipe.block=32x32", "observer.window=1", "observer.every=1", "training.steps=1")
    assert two_processes(cache, tmp_path / "runs", *asked) == [0, 0]
    one, _ = train(cache, tmp_path / "one", *asked)
    rows = [pd.read_parquet(path / "numerics.parquet") for path in (only_run(tmp_path / "runs"), one.path)]
    slots = [frame[frame["slot"] != "weight"].reset_index(drop=True) for frame in rows]
    assert len(slots[0]) > 0
    assert set(slots[0]["batches"]) == {1, 2}  # 1: all micro-batches read the same quantized weights
    pd.testing.assert_frame_equal(slots[0], slots[1], check_exact=True)


def test_three_ranks_stop_together_when_one_is_asked_and_resume_to_the_same_bytes(cache: Path, tmp_path: Path) -> None:
    """Check that Ctrl-C on one rank stops all ranks, and that the resumed trial has the bytes of an uninterrupted one.

    The test uses three ranks because then the last one has no rows of some small parameters.
    """
    asked = (
        *NOISY,
        "model=hybrid-nano",
        "model.layers=3",
        "model.pattern=M-*",
        "training.batch=6",
        "optimizer=adam-mini",
    )
    (tmp_path / "whole").mkdir()
    assert two_processes(cache, tmp_path / "whole" / "runs", *asked, ranks=3) == [0, 0, 0]
    runs = tmp_path / "runs"
    assert two_processes(cache, runs, *asked, ranks=3, stop=3, victims=[2], by=signal.SIGINT) == [130, 130, 130]
    assert two_processes(cache, runs, *asked, ranks=3) == [0, 0, 0]
    assert left(only_run(runs)) == left(only_run(tmp_path / "whole" / "runs"))


def test_a_branch_of_another_number_of_ranks_starts_from_its_parents_weights(
    whole: Path, cache: Path, tmp_path: Path
) -> None:
    """Check that a branch on one rank loads the weights of a parent that ran on two, and vice versa.

    The learning rate is near 0, so the branch's checkpoint still has the weights that it loaded.
    """
    still = ("optimizer.lr=1e-30", "optimizer.weight_decay=0", "training.steps=1", *NOISY[1:3])
    down, _ = train(cache, tmp_path / "one", *still, "recipe=nvfp4", f"branch.parent={whole}")
    parent = opened(whole).checkpoint().tensors(under="model.")
    assert sum(name.endswith("weight") for name in parent) > 4
    assert {name: x.tolist() for name, x in down.checkpoint().tensors(under="model.").items()} == {
        name: x.tolist() for name, x in parent.items()
    }
    up = tmp_path / "two"
    assert two_processes(cache, up, *still, "recipe=nvfp4", f"branch.parent={down.path}") == [0, 0]
    again = opened(only_run(up)).checkpoint()
    assert len(again.files) == 2
    assert {name: x.tolist() for name, x in again.tensors(under="model.").items()} == {
        name: x.tolist() for name, x in parent.items()
    }


def test_all_ranks_end_a_trial_that_diverges(cache: Path, tmp_path: Path) -> None:
    asked = ("optimizer.lr=1e4", "optimizer.clip=null", "training.blow_up=1.2")
    assert two_processes(cache, tmp_path / "runs", *asked) == [0, 0]
    result = result_of(only_run(tmp_path / "runs"))
    assert result["status"] == "diverged"
    assert result["step"] < 12


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
