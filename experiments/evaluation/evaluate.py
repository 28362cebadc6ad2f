"""Evaluate finished runs: loss, other text and lm-eval's tasks; results are stored in the run folder.

The numbers equal those that training itself would have written, because the model is opened with the operands, noise
and batch sizes of the trial's own evaluation (`FinishedRun`). A stored result is not computed again.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from fewbits.experiments.data.tokenizing import Tokenizer, saved_tokenizer
from fewbits.experiments.environment import environment
from fewbits.experiments.evaluation.loss import (
    LOSS,
    evaluate_documents,
    evaluate_loss,
    evaluated_windows,
    loss_count,
    means,
    text_loss,
    text_windows,
)
from fewbits.experiments.evaluation.tasks import check_tasks, run_tasks
from fewbits.experiments.identity import label, numerics
from fewbits.experiments.session import Session
from fewbits.experiments.setup import check_evaluation
from fewbits.experiments.storage import results as storage
from fewbits.experiments.storage.finished_run import FinishedRun
from fewbits.experiments.storage.results import Evaluation, Key
from fewbits.experiments.storage.run_folder import find_run
from fewbits.experiments.trial import Runtime, Trial
from fewbits.models.networks.decoder import Decoder
from fewbits.models.quantize import Quantization, unquantized

Report = Callable[[str], None]


@dataclass(frozen=True)
class Request:
    """The evaluations to compute for each run.

    tasks: loss, names of lm-eval's tasks and groups, or of fewbits' groups (mor, nvfp4: a paper's tasks).
    texts: text files on which the loss is also computed.
    limit: number of questions of each lm-eval task; None: all.
    include_path: a folder of further lm-eval tasks. run_code: let tasks run code that the model writes.
    unquantized: evaluate with all operands in the compute dtype, not quantized by the recipe.
    """

    tasks: tuple[str, ...] = (LOSS,)
    texts: tuple[Path, ...] = ()
    limit: int | None = None
    include_path: str | None = None
    run_code: bool = False
    unquantized: bool = False

    @staticmethod
    def of(trial: Trial) -> Request:
        """Return the request for the tasks in a trial's config."""
        e = trial.evaluation
        return Request(e.tasks, tuple(map(Path, e.texts)), include_path=e.tasks_path, run_code=e.run_code)

    def check(self) -> None:
        """Raise ValueError if lm-eval cannot run a task or a text cannot be read, before anything is computed."""
        if self.harness_tasks:
            check_tasks(self.harness_tasks, self.include_path, self.run_code)
        _texts(self)

    @property
    def harness_tasks(self) -> tuple[str, ...]:
        return tuple(task for task in self.tasks if task != LOSS)


def evaluate(
    run: str | Path,
    tasks: Sequence[str] = (LOSS,),
    *,
    texts: Sequence[str | Path] = (),
    runs: str | Path = "runs",
    step: int | None = None,
    runtime: Runtime = Runtime(),  # noqa: B008, a frozen value
    **settings: Any,
) -> dict[str, Any]:
    """Return the results of tasks on a finished run, computed now or stored earlier, nested as in result.json.

    Results of lm-eval's tasks are under the key `tasks`, those of texts under `texts`. Losses are at the top,
    with keys such as `validation_loss`.

    run: the run's folder, or its name or hash in the store `runs`. step: step of the checkpoint; None: the last step.
    settings: further fields of `Request`, such as limit=100.

    >>> evaluate("1a2b3c4d", ["loss", "piqa"])["tasks"]["piqa"]["acc,none"]
    """
    request = Request(tuple(tasks), tuple(map(Path, texts)), **settings)
    request.check()
    opened = FinishedRun.open(find_run(str(run), Path(runs).expanduser()), step, runtime.cache)
    merged: dict[str, Any] = {}
    for one, _ in evaluations_of(opened, request, runtime):
        for name, value in one.results.items():
            merged[name] = {**merged[name], **value} if isinstance(merged.get(name), dict) else value
    return merged


def evaluations_of(
    run: FinishedRun, request: Request, runtime: Runtime, *, report: Report = lambda _: None
) -> list[tuple[Evaluation, bool]]:
    """Return (evaluation, whether it was stored) for each task and text; `report` gets texts about the progress."""
    keys = list(_keys(request, run.step))
    stored = {key.file: one for key in keys if (one := storage.find(run.folder.path, key))}
    missing = [key for key in keys if key.file not in stored]
    made = {one.key.file: one for one in (_computed(run, request, runtime, missing, report) if missing else ())}
    return [((stored | made)[key.file], key.file in stored) for key in keys]


def evaluate_tasks(session: Session, model: Decoder, quantization: Quantization, step: int) -> None:
    """Evaluate a model in training on the tasks and texts that its trial requests; rank 0 stores the results.

    They are stored as `fewbits evaluate --step` stores them. All ranks must call this.
    """
    request, t = Request.of(session.trial), session.trial.training
    if not (request.tasks or request.texts):
        return
    tokenizer, end = saved_tokenizer(session.corpus.folder), session.corpus.folder.meta.separator
    assert tokenizer is not None  # `check_evaluation` has refused the trial otherwise
    results: dict[str, dict[str, Any]] = {}
    for name, text in _texts(request).items():
        windows = text_windows(tokenizer.encode([text])[0].tolist(), end, t.length)
        results[name] = {"texts": {name: _text(model, quantization, text, windows, t.micro_batch)}}
    if request.harness_tasks:
        scores = _run_tasks(request, model, tokenizer, length=t.length, end=end)
        results |= {task: {"tasks": of} for task, of in scores.items()}
    if session.leads:
        for key in _keys(request, step):
            _store(session.folder.path, session.world.device, key, results[key.task])


def evaluate_missing(session: Session) -> None:
    """Evaluate a finished trial on those of its tasks and texts of which its run folder has no results."""
    folder, trial = session.folder, session.trial
    tasks, texts = storage.missing_evaluations(folder, trial)
    if tasks or texts:
        check_evaluation(trial, session.corpus)
        session.events.message(f"evaluating {folder.path}, which is trained already")
        run = FinishedRun.open(folder.path, cache=session.runtime.cache)
        request = replace(Request.of(trial), tasks=tasks, texts=tuple(map(Path, texts)))
        evaluations_of(run, request, session.runtime)


def _keys(request: Request, step: int) -> Iterator[Key]:
    common = {"unquantized": True} if request.unquantized else {}
    harness: dict[str, Any] = {"lm_eval": _version("lm_eval"), "limit": request.limit}
    if request.include_path:
        harness["include_path"] = _digest_of_folder(Path(request.include_path))
    for task in dict.fromkeys(request.tasks):
        yield Key(task, common | ({} if task == LOSS else harness), step, label(numerics()))
    for name, text in _texts(request).items():
        yield Key(name, common | {"text": storage.digest(text)}, step, label(numerics()))


def _digest_of_folder(folder: Path) -> str:
    """Return a hash of all files in a folder of tasks, because a task may read data files and Python modules there."""
    files = (file for file in sorted(folder.rglob("*")) if file.is_file() and file.suffix != ".pyc")
    contents = ((str(file.relative_to(folder)), hashlib.sha256(file.read_bytes()).hexdigest()) for file in files)
    return storage.digest(json.dumps([*contents]))


def _computed(
    run: FinishedRun, request: Request, runtime: Runtime, keys: Sequence[Key], report: Report
) -> Iterator[Evaluation]:
    """Compute an evaluation for each key, store it in the run folder, and yield it; lm-eval's tasks come last."""
    report("loading the checkpoint")
    model, quantization = run.model(runtime)
    device, length = next(model.parameters()).device, run.trial.training.length
    texts = _texts(request)

    with unquantized(quantization) if request.unquantized else nullcontext():
        for key in keys:
            if "text" in key.settings or key.task == LOSS:
                report(key.task)
            if "text" in key.settings:
                windows = text_windows(run.tokenizer.encode([texts[key.task]])[0].tolist(), run.separator, length)
                with _counting(key.task, model, 2 * len(windows[0]), report):
                    measured = _text(model, quantization, texts[key.task], windows, run.trial.training.micro_batch)
                yield _store(run.folder.path, device, key, {"texts": {key.task: measured}})
            elif key.task == LOSS:
                count = sum(evaluated_windows(run.trial, run.corpus).values()) * (1 + loss_count(quantization))
                with _counting(key.task, model, count, report):
                    losses = _loss(run, model, quantization)
                yield _store(run.folder.path, device, key, losses)
        if harness := [key for key in keys if key.task != LOSS and "text" not in key.settings]:
            report(", ".join(key.task for key in harness))
            asked = replace(request, tasks=tuple(key.task for key in harness))
            scores = _run_tasks(asked, model, run.tokenizer, length=length, end=run.separator)
            for key in harness:
                yield _store(run.folder.path, device, key, {"tasks": scores[key.task]})


@contextmanager
def _counting(task: str, model: Decoder, total: int, report: Report) -> Iterator[None]:
    """Report in each forward pass of the `with` block how many of the task's windows earlier passes have read."""
    done = 0

    def count(_: Module, arguments: tuple[Tensor, ...], __: Tensor) -> None:
        nonlocal done
        report(f"{task}: {done} of {total} windows")
        done += len(arguments[0])

    with model.embed.register_forward_hook(count):
        yield


def _store(run: Path, device: torch.device, key: Key, measured: dict[str, Any]) -> Evaluation:
    facts = dict(environment(device)) | {"lm_eval": _version("lm_eval")}
    one = Evaluation(key, measured, facts, round(time.time()))
    storage.write(run, one)
    return one


def _loss(run: FinishedRun, model: Decoder, quantization: Quantization) -> dict[str, Any]:
    t, windows = run.trial.training, evaluated_windows(run.trial, run.corpus)
    sizes = {"length": t.length, "batch": t.micro_batch}
    losses = {
        f"{split}_loss": evaluate_loss(model, run.corpus, split, windows=count, **sizes)
        for split, count in windows.items()
    }
    losses |= means(evaluate_documents(model, quantization, run.corpus, windows, **sizes))
    return {name: _number(value) for name, value in losses.items()}


def _text(
    model: Decoder, quantization: Quantization, text: str, windows: tuple[Tensor, Tensor, Tensor], batch: int
) -> dict[str, Any]:
    loss = text_loss(model, windows, batch)
    with unquantized(quantization):
        exact = text_loss(model, windows, batch)
    count = int(windows[2].sum())
    return {
        "loss": _number(loss),
        "loss_unquantized": _number(exact),
        "bits_per_byte": _number(loss * count / math.log(2) / len(text.encode())),
        "tokens": count,
    }


def _run_tasks(
    request: Request, model: Decoder, tokenizer: Tokenizer, *, length: int, end: int | None
) -> dict[str, dict[str, dict[str, float | None]]]:
    """Return the metrics of the request's lm-eval tasks: requested name → lm-eval task → metric → value."""
    scores = run_tasks(
        model,
        tokenizer,
        request.harness_tasks,
        length=length,
        end=end,
        limit=request.limit,
        include_path=request.include_path,
        run_code=request.run_code,
    )
    return {
        requested: {task: {name: _number(value) for name, value in of.items()} for task, of in by_task.items()}
        for requested, by_task in scores.items()
    }


def _texts(request: Request) -> dict[str, str]:
    """Return the contents of the requested text files, by the name that the results use for each text.

    A text's name is its file's name. If files of the same name have different contents, a part of the content's digest
    is appended to their names.
    """
    paths: dict[str, dict[str, str]] = {}  # contents by file name and digest
    for path in request.texts:
        text = storage.read_text(path)
        paths.setdefault(path.name, {})[storage.digest(text)] = text
    return {
        name if len(contents) == 1 else f"{name}-{digest[:8]}": text
        for name, contents in paths.items()
        for digest, text in contents.items()
    }


def _number(value: float) -> float | None:
    """Return the value, or None if it is not finite: JSON has no such numbers."""
    return value if math.isfinite(value) else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
