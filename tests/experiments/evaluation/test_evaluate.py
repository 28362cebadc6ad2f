"""Test evaluations of finished runs: they equal training's own, are computed once, and are stored in the run folder."""

import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fewbits import cli
from fewbits.experiments.evaluation.evaluate import evaluate
from fewbits.experiments.evaluation.loss import text_windows
from fewbits.experiments.storage import results as evaluations
from tests.experiments.evaluation.evaluation_inputs import toy_tasks
from tests.experiments.trial_inputs import GAUSSWS_MOR, result_of, train, train_until
from tests.messages import names, naming
from tests.once import once

DATA = ("data=python", "data.size=200000", "training.steps=4", "training.length=64")


@pytest.fixture(scope="module")
def finished(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run folder of a trial with a mixture and a sampler's noise."""
    folder = once(
        tmp_path_factory,
        "evaluated",
        lambda folder: train(cache, folder / "runs", *DATA, *GAUSSWS_MOR) and None,
    )
    (run,) = (folder / "runs").iterdir()
    return run


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "runs" / finished.name))


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def command(run: Path, cache: Path, *words: str) -> list[str]:
    return ["evaluate", str(run), *words, "--cache", str(cache)]


def printed(run: Path, cache: Path, capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert cli.main([*command(run, cache, *words), "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def test_the_loss_is_that_of_training_bit_for_bit(run: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained, before = result_of(run), (run / "result.json").read_bytes()
    (loss,) = printed(run, cache, capsys, "loss")
    assert {"validation_loss", "ood_loss", "validation_loss_unquantized", "ood_loss_cast"} <= loss["results"].keys()
    assert loss["results"] == {key: trained[key] for key in loss["results"]}
    assert loss["step"] == 4
    assert (run / "result.json").read_bytes() == before


def test_a_second_call_computes_nothing(run: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (first,) = printed(run, cache, capsys, "loss")
    shutil.rmtree(run / "checkpoints")  # so that nothing can be computed
    (second,) = printed(run, cache, capsys, "loss")
    assert (first["stored"], second["stored"]) == (False, True)
    assert first["results"] == second["results"]
    assert cli.main(command(run, cache, "loss", "--unquantized")) == 2


def test_a_text_is_predicted_once(run: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "def naïve(x):\n    return x\n" * 7
    (tmp_path / "notes.txt").write_text(text)
    (one,) = printed(run, cache, capsys, "--text", str(tmp_path / "notes.txt"))
    values = one["results"]["texts"]["notes.txt"]
    assert values["tokens"] == len(text.encode())
    assert values["bits_per_byte"] == pytest.approx(values["loss"] / math.log(2))
    assert values["loss"] != values["loss_unquantized"]
    assert 0 < values["loss"] < 6.0
    (tmp_path / "notes.txt").write_text(text + "more")
    (other,) = printed(run, cache, capsys, "--text", str(tmp_path / "notes.txt"))
    assert other["results"]["texts"]["notes.txt"]["tokens"] == len(text.encode()) + 4


@pytest.mark.parametrize(("count", "separator", "length"), [(10, 0, 4), (8, 0, 4), (3, 0, 4), (9, None, 4)])
def test_windows_cover_a_text(count: int, separator: int | None, length: int) -> None:
    tokens = list(range(1, count + 1))
    inputs, targets, counts = text_windows(tokens, separator, length)
    assert targets[counts].tolist() == (tokens if separator is not None else tokens[1:])
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert inputs.shape[1] == min(length, counts.sum())


@pytest.mark.usefixtures("offline")
def test_tasks_of_lm_eval(run: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tasks = toy_tasks(tmp_path / "tasks")
    (one,) = printed(run, cache, capsys, "toy", "--include-path", str(tasks))
    assert one["results"]["tasks"]["toy"]["acc,none"] in (1 / 3, 2 / 3)
    assert evaluations.with_stored(run, result_of(run))["tasks"] == one["results"]["tasks"]
    (part,) = printed(run, cache, capsys, "toy", "--include_path", str(tasks), "--limit", "1", "--unquantized")
    assert part["results"]["tasks"]["toy"]["sample_len"] == 1
    assert evaluations.with_stored(run, result_of(run))["tasks"] == one["results"]["tasks"]


@pytest.mark.usefixtures("offline")
def test_a_changed_task_is_evaluated_again(
    run: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = toy_tasks(tmp_path / "tasks")
    (tasks / "questions.py").write_text("SHOWN = 1\n")
    for name, more in (("toy.yaml", "num_fewshot: 0\n"), ("toy.jsonl", "\n"), ("questions.py", "\n")):
        for stored in (False, True):
            assert printed(run, cache, capsys, "toy", "--include-path", str(tasks))[0]["stored"] == stored
        with (tasks / name).open("a") as file:
            file.write(more)
    assert not printed(run, cache, capsys, "toy", "--include-path", str(tasks))[0]["stored"]


@pytest.mark.usefixtures("offline")
def test_a_run_is_a_model_of_lm_eval(run: Path, cache: Path, tmp_path: Path) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    import fewbits.experiments.evaluation.language_model  # noqa: F401, as the entry point does

    tasks = toy_tasks(tmp_path / "tasks")
    manager = TaskManager(include_path=tasks, include_defaults=False)
    arguments = {"run": run.name.rpartition("-")[2], "runs": str(run.parent), "cache": str(cache)}
    found = simple_evaluate("fewbits", arguments, tasks=["toy"], batch_size=16, task_manager=manager)
    expected = evaluate(run, ["toy"], include_path=str(tasks))["tasks"]["toy"]
    assert found["results"]["toy"]["acc,none"] == expected["acc,none"]
    assert found["config"]["fewbits_run"] == run.name
    with pytest.raises(ValueError, match=naming("no run", "run-of-nobody")):
        simple_evaluate("fewbits", {"run": "run-of-nobody"}, tasks=["toy"], task_manager=manager)


@pytest.mark.deep  # lm-eval's command line reads its 14,000 tasks
@pytest.mark.usefixtures("offline")
def test_lm_evals_command_evaluates_a_run(
    run: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fewbits import lm_eval

    tasks, hashed = toy_tasks(tmp_path / "tasks"), run.name.rpartition("-")[2]
    arguments = f"run='{hashed}',runs={run.parent},cache={cache}"
    words = ["run", "--model", "fewbits", "--model_args", arguments, "--tasks", "toy", "--include_path", str(tasks)]
    monkeypatch.setattr(sys, "argv", ["lm_eval", *words, "--batch_size", "16", "--output_path", str(tmp_path / "out")])
    assert lm_eval.main() == 0
    (file,) = (tmp_path / "out").rglob("results_*.json")
    written = json.loads(file.read_text())
    expected = evaluate(run, ["toy"], include_path=str(tasks))["tasks"]["toy"]
    assert written["results"]["toy"]["acc,none"] == expected["acc,none"]
    assert written["config"]["fewbits_run"] == run.name


def test_evaluations_are_numbers_of_reports_unless_the_result_has_them(run: Path) -> None:
    def store(task: str, results: dict[str, Any], step: int = 4, **settings: Any) -> None:
        key = evaluations.Key(task, settings, step, "fingerprint")
        evaluations.write(run, evaluations.Evaluation(key, results, {}, 1))

    store("loss", {"validation_loss": 2.0})
    store("toy", {"tasks": {"toy": {"acc,none": 0.5}}})
    store("other", {"tasks": {"other": {"acc,none": 0.25}}})
    store("early", {"tasks": {"early": {"acc,none": 0.25}}}, step=3)
    store("some", {"tasks": {"some": {"acc,none": 0.25}}}, limit=10)
    (run / evaluations.FOLDER / "damaged.json").write_text("{")
    found = dict(evaluations.numbers(evaluations.with_stored(run, result_of(run))))
    assert found["validation_loss"] == result_of(run)["validation_loss"]
    assert {name: value for name, value in found.items() if name.startswith("tasks.")} == {
        "tasks.toy.acc,none": 0.5,
        "tasks.other.acc,none": 0.25,
    }


def test_wrong_input_is_one_line(run: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_until(2, cache, tmp_path / "unfinished", *DATA, "training.checkpoint_every=1")
    (unfinished,) = (tmp_path / "unfinished").iterdir()
    (tmp_path / "image").write_bytes(b"\xff\xd8\xff")
    for words, named in (
        (["loss"], ["loss", "names a run"]),
        ([str(run), "00000000"], ["00000000"]),
        ([str(run), "00000"], ["00000", "no run"]),
        ([str(unfinished)], [unfinished.name, "not ended"]),
        ([str(run), "--step", "2"], ["step 2"]),
        ([str(run), "--text", str(tmp_path / "missing.txt")], ["missing.txt"]),
        ([str(run), "--text", str(tmp_path / "image")], ["image", "UTF-8"]),
    ):
        assert cli.main(["evaluate", *words, "--cache", str(cache), "--runs", str(tmp_path)]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert names(error, *named), (words, error)
    assert cli.main(["evaluate", str(unfinished), "--step", "1", "--cache", str(cache)]) == 0
