"""One trial, from its config to its result: the training script.

A trial is a pure function of its config. Batches are numbered windows of the corpus; noise is keyed by seed, step,
micro-batch, rank, layer and slot; so what a checkpoint has to hold is the weights, the optimizer, one position, and
what the observer has seen. Interrupted anywhere and run again, a trial gives the same bits.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fewbits.experiments import checkpoints, devices, run_folder
from fewbits.experiments.atomic import write_json, write_parquet
from fewbits.experiments.data.corpus import Corpus, describe
from fewbits.experiments.data.load import load
from fewbits.experiments.data.once import default_cache
from fewbits.experiments.evaluation.cloze import evaluate_cloze
from fewbits.experiments.evaluation.harness import run_tasks
from fewbits.experiments.evaluation.loss import evaluate_loss
from fewbits.experiments.identity import identity, provenance, trial_id
from fewbits.experiments.optimizers import (
    clip_gradients,
    load_optimizer_state,
    make_optimizer,
    optimizer_state,
    set_learning_rate,
)
from fewbits.experiments.schedules import factor
from fewbits.experiments.setup import check, check_evaluation, cloze, corpus_model, text_tokenizer
from fewbits.experiments.tracking import Tracker
from fewbits.experiments.trial import Runtime, Trial
from fewbits.kernels.seeds import derive_seed
from fewbits.models.decoder import Decoder
from fewbits.models.observer import Observer
from fewbits.models.partition import adam_mini_partition
from fewbits.models.quantize import Quantization, quantize
from fewbits.models.registry import build, linear_parameters

INITIAL, ORDER, ROUNDING = range(3)  # what a trial's seed is spent on
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
Say = Callable[["Progress"], None]


@dataclass(frozen=True)
class Progress:
    """For the live line."""

    step: int
    steps: int
    loss: float
    tokens_per_second: float
    evaluated: float | None = None

    @property
    def seconds_left(self) -> float:
        return math.inf if not self.tokens_per_second else self._tokens_left / self.tokens_per_second

    tokens_a_step: int = 0

    @property
    def _tokens_left(self) -> int:
        return (self.steps - self.step) * self.tokens_a_step


@dataclass
class State:
    """Where a trial stands: all that a checkpoint holds."""

    model: Decoder
    optimizer: torch.optim.Optimizer
    quantization: Quantization
    step: int = 0  # updates done
    position: int = 0  # sequences of the corpus consumed, a parent's included
    origin: int = 0  # updates done by the parents: noise is not drawn twice along a line of branches
    metrics: list[dict[str, float]] = field(default_factory=list)
    numerics: list[dict[str, Any]] = field(default_factory=list)


def run(trial: Trial, runtime: Runtime, say: Say = lambda _: None) -> tuple[run_folder.RunFolder, dict[str, Any]]:
    """Train, or go on training, or find it done: the folder and its result."""
    world = devices.choose(runtime)
    corpus = load(trial.data, Path(runtime.cache).expanduser() if runtime.cache else default_cache())
    trial = corpus_model(trial, corpus)
    check(trial, world.ranks)
    parent = _parent(trial, Path(runtime.runs))
    made_of = identity(trial, corpus.fingerprint, world.device.type, parent and parent[1])
    folder = run_folder.find(
        Path(runtime.runs), trial.name, trial_id(trial, corpus.fingerprint, world.device.type, parent and parent[1])
    )
    if (done := folder.result()) is not None:
        return folder, done
    check_evaluation(trial, corpus)
    with folder.alone() if world.rank == 0 else contextlib.nullcontext():
        if world.rank == 0:
            facts = {"data": describe(corpus), "threads": torch.get_num_threads(), "ranks": world.ranks}
            folder.begin(trial, provenance(made_of, facts))
        try:
            return folder, _train(trial, runtime, world, corpus, folder, parent and parent[0], say)
        finally:
            devices.leave(world)


def _train(
    trial: Trial,
    runtime: Runtime,
    world: devices.World,
    corpus: Corpus,
    folder: run_folder.RunFolder,
    parent: checkpoints.Checkpoint | None,
    say: Say,
) -> dict[str, Any]:
    t = trial.training
    state = set_up(trial, world.device)
    resume(state, trial, corpus, folder, parent)
    model, optimizer, quantization = state.model, state.optimizer, state.quantization
    tracker = Tracker(trial, runtime, folder) if world.rank == 0 else None
    loss_of = _loss_module(model, trial, world)
    accumulation = t.batch // t.micro_batch // world.ranks
    order_seed = derive_seed(trial.seed, ORDER)
    tokens_a_step = t.batch * t.length
    flops_a_token = 6 * linear_parameters(trial.model) + 12 * trial.model.layers * trial.model.width * t.length
    peak = devices.peak_flops(world.device)
    hopeless = t.blow_up * math.log(trial.model.vocab) if t.blow_up else math.inf
    timing: list[dict[str, float]] = []
    status = "done"

    model.train()
    while state.step < t.steps:
        step, began = state.step, time.perf_counter()
        progress = step / t.steps

        losses = []
        for micro in range(accumulation):
            first = state.position + (micro * world.ranks + world.rank) * t.micro_batch
            inputs, targets = corpus.batch("train", first, t.micro_batch, t.length, order_seed)
            quantization.begin(state.origin + step, micro, rank=world.rank, progress=progress)
            last = micro == accumulation - 1
            with contextlib.nullcontext() if last or world.ranks == 1 else loss_of.no_sync():  # type: ignore[operator]
                loss = loss_of(inputs.to(world.device), targets.to(world.device))
                penalty = quantization.penalty()
                ((loss if penalty is None else loss + penalty) / accumulation).backward()
            losses.append(loss.detach())
        loss = world.means(torch.stack(losses).mean())
        loss_max = world.greatest(torch.stack(losses).max())

        norm = clip_gradients(model.parameters(), trial.optimizer.clip)
        row = {
            "step": step,
            "tokens": (state.position + t.batch) * t.length,
            "loss": loss.item(),
            "loss_max": loss_max.item(),
            "gradient_norm": norm.item(),
            "learning_rate": trial.optimizer.lr * factor(trial.schedule, step, t.steps),
        }
        if penalty is not None:
            row["penalty"] = penalty.item()
        if not math.isfinite(row["loss"]) or not math.isfinite(row["gradient_norm"]) or row["loss"] > hopeless:
            state.metrics.append(row)
            status = "diverged"
            break
        observer = quantization.observer
        if observer is not None and (observer.due(step) or step == t.steps - 1):
            state.numerics += observer.rows(step, quantization.layers)

        set_learning_rate(optimizer, factor(trial.schedule, step, t.steps))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        state.step, state.position = step + 1, state.position + t.batch
        seconds = time.perf_counter() - began

        if state.step % trial.evaluation.every == 0 or state.step == t.steps:
            row |= evaluate(trial, corpus, model)
        state.metrics.append(row)
        speed = tokens_a_step / seconds
        timing.append({"step": step, "seconds": seconds, "tokens_per_second": speed})
        if peak:
            timing[-1]["mfu"] = speed * flops_a_token / peak / world.ranks

        if tracker:
            tracker.log(row, speed)
            say(Progress(state.step, t.steps, row["loss"], speed, row.get("validation_loss"), tokens_a_step))
            kept = runtime.keep_every and state.step % runtime.keep_every == 0
            if kept:
                save(state, corpus, folder.kept, keep=10**6)
            if state.step % t.checkpoint_every == 0 and state.step < t.steps:
                save(state, corpus, folder.checkpoints, keep=runtime.keep_checkpoints)
                write_tables(state, timing, folder.path)
                tracker.flush()

    result: dict[str, Any] = {}
    if tracker:
        if status == "done":
            save(state, corpus, folder.checkpoints, keep=runtime.keep_checkpoints)
        write_tables(state, timing, folder.path)
        result = {"id": folder.id, "name": trial.name, "status": status, "step": state.step} | _final(state)
        if status == "done":
            result |= final_evaluation(trial, corpus, model)
        write_json(folder.path / "result.json", result)
        tracker.end(result)
    world.wait()
    return result


# ------------------------------------------------------------------------------------------------ before and between


def set_up(trial: Trial, device: torch.device) -> State:
    """Model, quantizers and optimizer at the beginning."""
    torch.manual_seed(trial.seed)  # nothing here draws from torch's own generator; what a user adds may
    model = build(
        trial.model, seed=derive_seed(trial.seed, INITIAL), device=device, compute_dtype=DTYPES[trial.training.dtype]
    )
    partition = adam_mini_partition(model)
    rounding = trial.seed if trial.training.rounding_seed is None else trial.training.rounding_seed
    observer = Observer(trial.observer) if trial.observer.enabled else None
    quantization = quantize(model, trial.recipe, seed=derive_seed(rounding, ROUNDING), observer=observer)
    return State(model, make_optimizer(model, trial.optimizer, partition=partition), quantization)


def resume(
    state: State,
    trial: Trial,
    corpus: Corpus,
    folder: run_folder.RunFolder,
    parent: checkpoints.Checkpoint | None,
) -> None:
    """Go on from the newest whole checkpoint, or start where a branch's parent stood, or from the beginning."""
    found = checkpoints.newest(folder.checkpoints)
    checkpoint = found or parent
    if checkpoint is None:
        return
    saved = checkpoints.unflatten(checkpoint.tensors(), checkpoint.state)
    corpus.check(saved["data"]["fingerprint"], saved["data"])
    _load_weights(state.model, saved["model"], strict=found is not None)
    load_optimizer_state(state.optimizer, saved["optimizer"])
    state.position = saved["position"]
    if found is None:
        state.origin = saved["origin"] + saved["step"]
        return
    state.step, state.origin = saved["step"], saved["origin"]
    state.metrics, state.numerics = saved["metrics"], saved["numerics"]
    torch.set_rng_state(saved["rng"])
    if state.quantization.observer is not None:
        state.quantization.observer.load_state(saved["observer"])


def save(state: State, corpus: Corpus, folder: Path, *, keep: int) -> Path:
    observer = state.quantization.observer
    tensors, rest = checkpoints.flatten(
        {
            "model": state.model.state_dict(),
            "optimizer": optimizer_state(state.optimizer),
            "observer": observer.state() if observer else {},
            "rng": torch.get_rng_state(),
            "step": state.step,
            "position": state.position,
            "origin": state.origin,
            "metrics": state.metrics,
            "numerics": state.numerics,
            "data": describe(corpus),
        }
    )
    return checkpoints.save(folder, state.step, tensors, rest, keep=keep)


def write_tables(state: State, timing: list[dict[str, float]], folder: Path) -> None:
    write_parquet(folder / "metrics.parquet", pd.DataFrame(state.metrics))
    write_parquet(folder / "numerics.parquet", pd.DataFrame(state.numerics))
    write_parquet(folder / "timing.parquet", pd.DataFrame(timing))


def evaluate(trial: Trial, corpus: Corpus, model: Decoder) -> dict[str, float]:
    """What is measured between steps. Batches are of the training size: a tensor's scale may depend on it."""
    e, t = trial.evaluation, trial.training
    found = {
        f"{name}_loss": evaluate_loss(model, corpus, split, windows=e.windows, length=t.length, batch=t.micro_batch)
        for name, split in (("validation", "validation"), ("ood", "ood"))
        if split in corpus.splits
    }
    return found | {"parameter_norm": float(torch.stack([p.detach().norm() for p in model.parameters()]).norm())}


def final_evaluation(trial: Trial, corpus: Corpus, model: Decoder) -> dict[str, Any]:
    e = trial.evaluation
    found: dict[str, Any] = {}
    for split, items in cloze(trial, corpus).items():
        score = evaluate_cloze(model, items)
        found[f"{split}_cloze"] = {"accuracy": score.accuracy, "error": score.standard_error, "items": score.count}
    if (tokenizer := text_tokenizer(corpus)) and e.tasks:
        end, length = corpus.folder.meta.separator, trial.training.length
        scores = run_tasks(
            model, tokenizer, e.tasks, length=length, end=end, include_path=e.tasks_path, run_code=e.run_code
        )
        found["tasks"] = {
            task: {key: value if math.isfinite(value) else None for key, value in metrics.items()}
            for task, metrics in scores.items()
        }
    return found


# ------------------------------------------------------------------------------------------------ details


def _parent(trial: Trial, runs: Path) -> tuple[checkpoints.Checkpoint, str] | None:
    """The checkpoint that a branch starts from, and what identifies it."""
    branch = trial.branch
    if branch.parent is None:
        if branch.step is not None:
            raise ValueError(f"branch.step {branch.step} without branch.parent: the run folder that it is a step of")
        return None
    path = next((p for p in (Path(branch.parent).expanduser(), runs / branch.parent) if p.is_dir()), None)
    if path is None:
        raise ValueError(f"branch.parent {branch.parent}: no such run folder, here or in {runs}")
    folder = run_folder.opened(path)
    places = (folder.checkpoints, folder.kept)
    steps = {
        int(at.name[5:].partition(".")[0]): at for place in places if place.is_dir() for at in place.glob("step-*")
    }
    if not steps or branch.step not in (None, *steps):
        raise ValueError(f"{path} has no checkpoint of step {branch.step}; there are {sorted(steps) or 'none'}")
    step = max(steps) if branch.step is None else branch.step
    return checkpoints.load(steps[step]), f"{folder.id}@{step}"


def _load_weights(model: nn.Module, saved: dict[str, Tensor], *, strict: bool) -> None:
    """A branch's recipe may have samplers that its parent had not, or the other way round; all else is the same."""
    missing, unexpected = model.load_state_dict(saved, strict=False)
    wrong = [name for name in (*missing, *unexpected) if strict or not name.endswith(".bit_scale")]
    if wrong:
        raise ValueError(f"the checkpoint is of another model: {', '.join(wrong[:5])} differ")


class _Loss(nn.Module):
    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.model.loss(inputs, targets)


def _loss_module(model: Decoder, trial: Trial, world: devices.World) -> nn.Module:
    module: nn.Module = _Loss(model)
    if trial.training.compile:
        module = torch.compile(module)  # type: ignore[assignment]
    if world.ranks > 1:
        module = DistributedDataParallel(
            module, device_ids=[world.device.index] if world.device.type == "cuda" else None
        )
    return module


def _final(state: State) -> dict[str, float | None]:
    """The last numbers of every metric; None for what is not finite, which JSON cannot say."""
    found: dict[str, float | None] = {}
    for row in state.metrics:
        found |= {key: value if math.isfinite(value) else None for key, value in row.items() if key != "step"}
    return found
