"""Test the evaluation of a trial on lm-eval tasks when its training is done.

The data are subword tokens. An evaluation that would fail is refused before training.
"""

import json
import shutil
from pathlib import Path

import pytest

from fewbits.experiments.config import load_trial
from fewbits.experiments.data.corpus import DataConfig
from fewbits.experiments.data.load import load
from fewbits.experiments.data.tokenizing import saved_tokenizer
from fewbits.experiments.evaluation.evaluate import evaluate
from fewbits.experiments.storage.results import scores_over_training, with_stored
from fewbits.experiments.training import run
from fewbits.experiments.trial import Runtime
from tests.experiments.evaluation.evaluation_inputs import toy_tasks

SUBWORDS = ["data.tokenizer=bpe:512", "data.size=200000"]


def overrides(*more: str) -> list[str]:
    sizes = {"model.layers": 1, "training.steps": 2, "training.batch": 2, "training.micro_batch": 2}
    sizes |= {"training.length": 64, "evaluation.windows": 2}
    return [*(f"{key}={value}" for key, value in sizes.items()), *more]


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:512"])
def test_a_model_may_stop_within_a_letter_or_have_more_tokens_than_its_tokenizer(cache: Path, tokenizer: str) -> None:
    corpus = load(DataConfig(tokenizer=tokenizer, size=200000), cache)
    found = saved_tokenizer(corpus.folder)
    assert found is not None
    assert corpus.folder.meta.separator is not None
    assert (
        found.decode([*found.encode(["a日"])[0].tolist()[:-1], corpus.folder.meta.separator, corpus.vocab + 40])
        == "a\ufffd"
    )


def test_a_tokenizer_that_is_not_that_of_the_tokens_is_refused(cache: Path, tmp_path: Path) -> None:
    made = load(DataConfig(tokenizer="bpe:512", size=200000), cache).folder.path
    other = load(DataConfig(tokenizer="bpe:300", size=200000), cache).folder.path
    for file in made.iterdir():
        (tmp_path / file.name).write_bytes(((other if file.suffix == ".json" else made) / file.name).read_bytes())
    (tmp_path / "meta.json").write_bytes((made / "meta.json").read_bytes())
    corpus = load(DataConfig(kind="bin", path=str(tmp_path)), tmp_path / "cache")
    with pytest.raises(ValueError, match="is not the tokenizer of the tokens"):
        saved_tokenizer(corpus.folder)


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the lm-eval tasks `toy` and `toy_code`, which runs code; they are read offline."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    return toy_tasks(tmp_path / "tasks")


def test_a_trial_in_subwords_ends_with_tasks(cache: Path, tasks: Path, tmp_path: Path) -> None:
    asked = ["evaluation.tasks=[toy]", f"evaluation.tasks_path={tasks}"]
    place = [f"runtime.runs={tmp_path}", f"runtime.cache={cache}"]
    trial, runtime = load_trial(overrides(*SUBWORDS, *asked, *place))
    folder, result = run(trial, runtime)
    assert result["status"] == "done"
    assert with_stored(folder.path, result)["tasks"]["toy"]["acc,none"] in (1 / 3, 2 / 3)
    assert json.loads((folder.path / "result.json").read_text()) == result


def test_tasks_and_texts_are_evaluated_during_training_without_changing_it(
    cache: Path, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the stored results of a step equal those of `fewbits evaluate --step`, and that the trial is equal."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    (tmp_path / "notes.txt").write_text("def f(x):\n    return x + 1\n" * 20)
    asked = ["evaluation.tasks=[toy]", f"evaluation.tasks_path={tasks}", f"evaluation.texts=[{tmp_path}/notes.txt]"]
    place = [*SUBWORDS, "training.steps=6", f"runtime.cache={cache}", "recipe=gaussws"]
    place += ["recipe.sampler.in_evaluation=true"]  # the noise depends on the step
    plain, _ = run(*load_trial(overrides(*place, f"runtime.runs={tmp_path}/plain")))
    often = [*asked, "evaluation.tasks_every=2", "runtime.keep_steps=[2]", f"runtime.runs={tmp_path}/often"]
    folder, _ = run(*load_trial(overrides(*place, *often)))
    assert folder.id == plain.id
    assert (folder.path / "metrics.parquet").read_bytes() == (plain.path / "metrics.parquet").read_bytes()
    table = scores_over_training(folder.path)
    losses, scores = (table[table["name"] == name] for name in ("texts.notes.txt.loss", "tasks.toy.acc,none"))
    assert list(losses["step"]) == list(scores["step"]) == [2, 4, 6]
    assert losses["value"].is_unique
    evaluate(folder.path, ["toy"], limit=1, include_path=str(tasks), runtime=Runtime(cache=str(cache)))
    assert scores_over_training(folder.path).equals(table)
    later = load_trial(overrides(*place, asked[2], f"runtime.runs={tmp_path}/plain"))  # of a trial that is done
    _, result = run(*later)
    assert with_stored(plain.path, result)["texts"]["notes.txt"]["loss"] == losses["value"].iloc[-1]
    (tmp_path / "notes.txt").rename(tmp_path / "other.txt")
    with pytest.raises(ValueError, match=r"notes\.txt to evaluate: No such file"):
        run(*later)
    (tmp_path / "other.txt").rename(tmp_path / "notes.txt")
    shutil.rmtree(folder.path / "evaluations")
    settings = {"step": 2, "include_path": str(tasks), "runtime": Runtime(cache=str(cache))}
    again = evaluate(folder.path, ["toy"], texts=[tmp_path / "notes.txt"], **settings)  # type: ignore[arg-type]
    assert again["texts"]["notes.txt"]["loss"] == losses["value"].iloc[0]
    assert again["tasks"]["toy"]["acc,none"] == scores["value"].iloc[0]


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (["evaluation.tasks=[toy_code]"], "toy_code run code that the model writes"),
        (["data=synthetic", "data.size=5000", "evaluation.tasks=[toy]"], "the tokenizer of data.kind=synthetic"),
        (["evaluation.texts=[TASKS/none.txt]"], "No such file"),
        (["evaluation.texts=[TASKS/empty.txt]"], "empty.txt has no token to predict"),
        (["evaluation.texts=[TASKS/binary.txt]"], "is not text in UTF-8"),
        (["evaluation.tasks_every=2"], "tasks_every 2: set evaluation.tasks"),
    ],
)
def test_an_evaluation_that_cannot_be_is_refused_before_training(
    cache: Path, tasks: Path, tmp_path: Path, asked: list[str], told: str
) -> None:
    place = [f"runtime.runs={tmp_path / 'runs'}", f"runtime.cache={cache}", f"evaluation.tasks_path={tasks}"]
    data = [] if "data=synthetic" in asked else SUBWORDS
    for name, content in {"empty.txt": b"", "binary.txt": b"\xff\xfe\x00"}.items():
        (tasks / name).write_bytes(content)
    with pytest.raises(ValueError, match=told):
        run(*load_trial(overrides(*data, *place, *(text.replace("TASKS", str(tasks)) for text in asked))))
    assert not (tmp_path / "runs").exists()
