"""One trial runs over two processes, as torchrun starts them; here with gloo, on a CPU."""

import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from fewbits.sweeps.running.local import environments_at, meeting_place
from tests.experiments.trial_inputs import ended, ending, left, leftovers, metric, only_run, overrides, started, train

NOISY = ("recipe=nvfp4", "recipe.sampler.kind=gaussws", "recipe.sampler.penalty=0.0001", "training.steps=8")


def two_processes(cache: Path, runs: Path, *more: str, stop: int | None = None) -> list[int]:
    """Run the trial; return the exit statuses. `stop` kills both processes once the checkpoint of that step exists."""
    store = meeting_place()
    with ExitStack() as stack:
        processes = []
        for rank, environment in enumerate(environments_at(store, 2)):
            process = started(
                ["train", *overrides(cache, runs, *more)], runs.with_name(f"output-{rank}"), environment=environment
            )
            processes.append(stack.enter_context(ending(process)))
        if stop is not None:
            while processes[0].is_alive() and not list(runs.glob(f"*/checkpoints/step-{stop:08d}")):
                processes[0].join(0.01)
            for process in processes:
                process.kill()
        return [ended(process) for process in processes]


@pytest.fixture(scope="module")
def whole(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a noisy trial over two processes that was not interrupted."""
    runs = tmp_path_factory.mktemp("two") / "runs"
    assert two_processes(cache, runs, *NOISY) == [0, 0]
    return only_run(runs)


def test_a_killed_trial_over_two_processes_gives_the_same_bytes(whole: Path, cache: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    assert two_processes(cache, runs, *NOISY, stop=3) == [-9, -9]
    assert two_processes(cache, runs, *NOISY) == [0, 0]
    assert left(only_run(runs)) == left(whole)
    assert not leftovers(runs)
    assert two_processes(cache, runs, *NOISY) == [0, 0]  # it is finished, and both report it
    said = [(tmp_path / f"output-{rank}").read_text() for rank in range(2)]
    assert "done at step 8" in said[0]
    assert "loss" not in said[1].partition("done at step 8")[0]  # only one of them shows progress


def test_ranks_draw_noise_of_their_own_and_are_part_of_the_id(whole: Path, cache: Path, tmp_path: Path) -> None:
    """One process with the same batches differs only in noise and in the order of sums, and is another trial."""
    alone, _ = train(cache, tmp_path, *NOISY)
    assert alone.path.name != whole.name
    assert metric(alone, "tokens") == metric(whole, "tokens")
    assert metric(alone, "loss")[0] == pytest.approx(metric(whole, "loss")[0], rel=1e-6)  # forward rounds to nearest
    assert metric(alone, "gradient_norm")[0] != metric(whole, "gradient_norm")[0]


def test_without_noise_two_processes_train_as_one(cache: Path, tmp_path: Path) -> None:
    asked = ("training.dtype=fp32", "training.steps=4", "training.batch=8")  # two micro-batches for each of them
    assert two_processes(cache, tmp_path / "runs", *asked) == [0, 0]
    two = only_run(tmp_path / "runs")
    one, result = train(cache, tmp_path / "one", *asked)
    for name in ("loss", "loss_max", "gradient_norm"):
        assert metric(two, name) == pytest.approx(metric(one, name), rel=2e-4)
    assert metric(two, "loss_max")[0] == pytest.approx(metric(one, "loss_max")[0], rel=1e-6)
    assert metric(two, "loss_max")[0] > metric(two, "loss")[0]
    assert metric(two, "validation_loss")[-1] == pytest.approx(result["validation_loss"], rel=1e-4)


def test_a_batch_that_two_processes_cannot_share_is_refused_by_both(cache: Path, tmp_path: Path) -> None:
    assert two_processes(cache, tmp_path / "runs", "training.batch=2") == [2, 2]
    said = (tmp_path / "output-1").read_text()
    assert said == ("fewbits: training.batch 2: 2 ranks of training.micro_batch 2 need a multiple of 4\n")
    assert not (tmp_path / "runs").exists()
    assert "RANK" not in os.environ
