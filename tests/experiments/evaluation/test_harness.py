"""Test lm-eval on our models: the numbers equal those of a direct computation, and tasks run without a network."""

import json
import os
import random
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fewbits.experiments.data.tokenizing import Bytes
from fewbits.experiments.evaluation.language_model import FewbitsLM
from fewbits.experiments.evaluation.loss import Model
from fewbits.experiments.evaluation.tasks import TASK_GROUPS, run_tasks
from tests.experiments.evaluation.evaluation_inputs import Bigram, LanguageModel, Recurrent, successor
from tests.messages import naming

LENGTH = 24
END = 0  # the token that ends a document, in tests that have such a token
SENTENCE = "the quick brown fox jumps over the lazy dog and runs away from all of them"


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Make every connection fail, and cache data sets in the test's folder."""
    import datasets
    import huggingface_hub

    def refused(*_: object) -> None:
        raise AssertionError("a connection was attempted")

    monkeypatch.setattr(socket.socket, "connect", refused)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def encode(text: str) -> list[int]:
    return list(text.encode())


def decode(tokens: Sequence[int]) -> str:
    return Bytes().decode(tokens)


# Requests, compared with what follows directly from the logits


class Request:
    """A replacement for lm-eval's Instance, with the only attribute that a model reads."""

    def __init__(self, *args: Any) -> None:
        self.args = args


def ask(model: Model, method: str, *requests: tuple[Any, ...], **settings: Any) -> list[Any]:
    lm = FewbitsLM(model, Bytes(), **({"length": LENGTH, "batch": 3} | settings))
    return list(getattr(lm, method)([Request(*request) for request in requests]))


def likelihood(model: Model, read: Sequence[int], wanted: Sequence[int]) -> tuple[float, bool]:
    """Return the log-likelihood of `wanted` after `read`, token by token, and whether these are the greedy tokens."""
    total, greedy = 0.0, True
    for i, token in enumerate(wanted):
        logits = model(torch.tensor([[*read, *wanted[:i]]]))[0, -1]
        total += logits.log_softmax(-1)[token].item()
        greedy &= logits.argmax().item() == token
    return total, greedy


def greedy(model: LanguageModel, read: Sequence[int], count: int) -> list[int]:
    tokens = list(read)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens[-LENGTH:]]))[0, -1].argmax()))
    return tokens[len(read) :]


def same(found: Sequence[tuple[float, bool]], wanted: Sequence[tuple[float, bool]]) -> None:
    assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted]
    assert [total for total, _ in found] == pytest.approx([total for total, _ in wanted], rel=1e-11)


def pairs(seed: int) -> list[tuple[str, str]]:
    """Return pairs of a context and a continuation that fit into one window together."""
    draw = random.Random(seed)
    texts = [" ".join(draw.choices(SENTENCE.split(), k=6)) for _ in range(12)]
    return [(text[: draw.randint(1, 14)].rstrip(), text[14 : 14 + draw.randint(1, 10)]) for text in texts]


@pytest.mark.parametrize("batch", [1, 3, 64])
def test_a_likelihood_is_the_sum_over_the_continuation_given_the_context(batch: int) -> None:
    model = Recurrent()
    wanted = [likelihood(model, encode(context), encode(after)) for context, after in pairs(0)]
    same(ask(model, "loglikelihood", *pairs(0), batch=batch), wanted)


REQUESTS = [  # a context, a continuation, and the texts that the model reads and predicts
    *[("Which?", f" {letter}", "Which?", f" {letter}") for letter in "ABCDA"],  # choices after one context
    ("a b ", "c", "a b", " c"),  # the last spaces of a context belong to the continuation
    (SENTENCE, " again", SENTENCE[-(LENGTH + 1 - len(" again")) :], " again"),  # the last token is not read
    # Without context a text begins after the end of another.
    ("", "begins", "\n", "begins"),
    ("", "\nbegins", "\n", "\nbegins"),
    ("  ", "begins", "\n", "  begins"),
]


def test_what_is_read_and_what_is_predicted() -> None:
    model = Recurrent()
    found = ask(model, "loglikelihood", *[(context, after) for context, after, _, _ in REQUESTS])
    same(found, [likelihood(model, encode(read), encode(wanted)) for _, _, read, wanted in REQUESTS])
    assert found[0] == found[4]
    same(ask(model, "loglikelihood", ("", "begins"), end=END), [likelihood(model, [END], encode("begins"))])
    assert ask(model, "loglikelihood", ("context", ""), ("", "")) == [(0.0, True)] * 2


def test_a_continuation_longer_than_the_window_rolls_on() -> None:
    model, tokens = Recurrent(), encode(" " + SENTENCE)
    found = ask(model, "loglikelihood", ("before it,", decode(tokens)))
    same(found, [rolled(model, encode(",")[0], tokens)])


def rolled(model: LanguageModel, prefix: int, tokens: Sequence[int]) -> tuple[float, bool]:
    """Return the expected score of a text that is longer than a window; `prefix` is the token before the text.

    Windows of LENGTH tokens follow one another; the input of the last one begins earlier, to have LENGTH tokens, too.
    """
    text, total, greedy = [prefix, *tokens], 0.0, True
    for start in range(1, len(text), LENGTH):
        stop = min(start + LENGTH, len(text))
        first = max(stop - 1 - LENGTH, 0)  # start of the input: LENGTH tokens up to the last predicted one
        part = likelihood(model, text[first:start], text[start:stop])
        total, greedy = total + part[0], greedy and part[1]
    return total, greedy


@pytest.mark.parametrize("size", [0, 1, LENGTH - 1, LENGTH, LENGTH + 1, 2 * LENGTH, 2 * LENGTH + 7])
def test_a_rolling_likelihood_predicts_every_token_once(size: int) -> None:
    model, tokens = Recurrent(), encode(SENTENCE)[:size]
    (found,) = ask(model, "loglikelihood_rolling", (decode(tokens),), end=END)
    assert found == pytest.approx(rolled(model, END, tokens)[0], rel=1e-11)


def generate(text: str, **settings: Any) -> tuple[str, dict[str, Any]]:
    return text, {"until": [], "max_gen_toks": 8, "do_sample": False} | settings


@pytest.mark.parametrize("batch", [1, 3])
def test_generation_is_greedy_within_a_window_that_slides(batch: int) -> None:
    model = Recurrent()
    prompts = ["a", "some prompt", SENTENCE, "x" * LENGTH, ""]
    wanted = [decode(greedy(model, encode(prompt or "\n"), 40)) for prompt in prompts]
    found = ask(model, "generate_until", *[generate(prompt, max_gen_toks=40) for prompt in prompts], batch=batch)
    assert found == wanted


def test_generation_ends_before_a_stop_or_at_the_limit_each_text_for_itself() -> None:
    requests = [
        generate("abc"),
        generate("a", max_gen_toks=3),
        generate("a", until=["f"]),
        generate("bc", until=["ijk", "hi"]),  # two stop strings: the first complete one ends the text
        generate("ab", until="gh"),
        generate("a", until=["g", "efg"]),  # g completes both: the text is cut before "efg", which begins first
        generate("a", max_gen_toks=0),
        generate("a", until=["b"]),
    ]
    wanted = ["defghijk", "bcd", "bcde", "defg", "cdef", "bcd", "", ""]
    for batch in (1, 2, 16):
        assert ask(successor(), "generate_until", *requests, batch=batch) == wanted
    assert ask(successor(), "generate_until", generate("a"), end=ord("d")) == ["bc"]  # the document's end


# Tasks: lm-eval itself, on local data


def write_task(folder: Path, name: str, rows: list[dict[str, Any]], examples: int = 0, **settings: Any) -> None:
    """Write an lm-eval task with these rows, the first of which are few-shot examples, as JSON, which is valid YAML."""
    files = {}
    for split, part in {"train": rows[:examples], "test": rows[examples:]}.items():
        if part:
            files[split] = str(folder / f"{name}-{split}.json")
            Path(files[split]).write_text("\n".join(json.dumps(row) for row in part))
    local = {"task": name, "dataset_path": "json", "dataset_name": None, "dataset_kwargs": {"data_files": files}}
    local |= {"training_split": None, "validation_split": None, "test_split": "test"}
    local |= {"fewshot_split": "train"} if examples else {}
    (folder / f"{name}.yaml").write_text(json.dumps(local | settings))


CHOOSE: dict[str, Any] = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "target_delimiter": "",
    "metric_list": [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")],
}
CHOICES = [
    {"question": "a", "choices": ["bcd", "xbz", "zzz"], "answer": 0},
    {"question": "k", "choices": ["aaa", "lmn", "bbb"], "answer": 1},
    {"question": "k", "choices": ["lmm", "aaa", "lmn"], "answer": 0},  # the model chooses 2
    {"question": "p", "choices": ["qrs", "z", "aaaaa"], "answer": 0},  # acc chooses 1, acc_norm 0
    {"question": "p", "choices": ["zzz", "z", "qrs"], "answer": 2},  # acc chooses 1, acc_norm 2
]
CONTINUE: dict[str, Any] = {
    "output_type": "generate_until",
    "doc_to_text": "{{start}}",
    "doc_to_target": "{{goal}}",
    "generation_kwargs": {"until": ["h"], "max_gen_toks": 6, "do_sample": False},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}
STARTS = [
    {"start": "abc", "goal": "defg"},
    {"start": "ab", "goal": "cdefg"},
    {"start": "tu", "goal": "vwxyz{"},
    {"start": "k", "goal": "lmn"},  # the model continues to the limit
]


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    folder = tmp_path / "tasks"
    folder.mkdir()
    write_task(folder, "choose", CHOICES, **CHOOSE)
    write_task(folder, "continue", STARTS, **CONTINUE)
    return folder


def run(folder: Path, *names: str, model: LanguageModel | None = None, **settings: Any) -> dict[str, dict[str, float]]:
    scores = run_tasks(model or successor(), Bytes(), names, include_path=folder, **({"length": 32} | settings))
    return {task: metrics for by_task in scores.values() for task, metrics in by_task.items()}


def test_accuracies_are_those_of_a_model_whose_answers_are_known(tasks: Path) -> None:
    found = run(tasks, "choose", "continue")
    assert found["choose"]["acc,none"] == 2 / 5
    assert found["choose"]["acc_norm,none"] == 4 / 5
    assert found["choose"]["sample_len"] == 5
    assert found["choose"]["acc_stderr,none"] == pytest.approx((0.4 * 0.6 / 4) ** 0.5)
    assert found["continue"]["exact_match,none"] == 3 / 4
    assert set(found) == {"choose", "continue"}


def test_results_repeat_exactly_and_leave_the_generators_and_the_environment_as_they_were(tasks: Path) -> None:
    def state() -> object:
        return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist(), dict(os.environ)

    random.seed(99)
    np.random.seed(99)
    torch.manual_seed(99)
    model, before = Recurrent(), state()
    first = run(tasks, "choose", "continue", model=model)
    assert state() == before
    torch.rand(1)
    assert run(tasks, "choose", "continue", model=model) == first


def test_tasks_of_mor_run_as_lm_eval_defines_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import lm_eval.tasks

    rows: dict[str, dict[str, Any]] = {  # one row for each data set, with the data set's own fields
        "mmlu": {"question": "What?", "choices": ["yes", "no", "maybe", "never"], "answer": 2},
        "piqa": {"goal": "Open it.", "sol1": "Pull.", "sol2": "Push.", "label": 0},
    }
    sources = {"mmlu": "mmlu/default/_default_template_yaml", "piqa": "piqa/piqa.yaml"}
    two = tuple(task for task in TASK_GROUPS["mor"] if task.names[0] in rows)
    monkeypatch.setitem(TASK_GROUPS, "mor", two)
    for name, row in rows.items():
        source = Path(lm_eval.tasks.__file__).parent / sources[name]
        examples = 5 if name == "mmlu" else 0
        write_task(tmp_path, name, [row] * (2 + examples), examples, include=str(source))
    seen: list[str] = []

    class Reader(Bigram):
        def forward(self, tokens: Tensor) -> Tensor:
            seen.extend(decode(row) for row in tokens.tolist())
            return super().forward(tokens)

    found = run(tmp_path, "mor", model=Reader(successor().table.detach()), length=400)
    for task in two:
        assert task.score(found) in (0.0, 1.0)
        assert found[task.names[0]]["sample_len"] == 2
    assert max(text.count("Answer: C\n\nWhat?") for text in seen) == 5  # the five examples of MMLU


# Mistakes


def test_tasks_that_run_written_code_are_refused_unless_that_is_wanted(tasks: Path) -> None:
    write_task(tasks, "program", STARTS, **CONTINUE, unsafe_code=True)
    with pytest.raises(ValueError, match=naming("program", "run_code=True")):
        run(tasks, "choose", "program")
    assert run(tasks, "program", run_code=True)["program"]["exact_match,none"] == 3 / 4
    assert "HF_ALLOW_CODE_EVAL" not in os.environ


def test_members_of_a_group_are_checked_before_training(tasks: Path) -> None:
    from fewbits.experiments.evaluation.tasks import check_tasks

    write_task(tasks, "coded", STARTS, unsafe_code=True, **CONTINUE)
    (tasks / "both.yaml").write_text(json.dumps({"group": "both", "task": ["choose", "coded"]}))
    with pytest.raises(ValueError, match=naming("choose", "'choose'", "'both'")):
        check_tasks(["choose", "both"], tasks, run_code=True)
    with pytest.raises(ValueError, match=naming("coded", "run_code=True")):
        check_tasks(["both"], tasks)
    check_tasks(["both"], tasks, run_code=True)


def test_an_unknown_task_is_named_with_what_is_near(monkeypatch: pytest.MonkeyPatch, tasks: Path) -> None:
    import lm_eval.tasks.manager as manager

    few = tasks.parent / "lm_eval"  # instead of lm-eval's 14,000 tasks, which take 10 seconds to read
    shutil.copytree(Path(manager.__file__).parent / "piqa", few / "piqa")
    monkeypatch.setattr(manager, "__file__", str(few / "manager.py"))
    with pytest.raises(ValueError, match=naming("piqq", "xyz", "mor, nvfp4", "piqa")):
        run(tasks, "choose", "piqq", "xyz")
    with pytest.raises(ValueError, match=naming("piqq", "include_path=DIR")):
        run_tasks(successor(), Bytes(), ["piqq"], length=32)
