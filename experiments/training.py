"""Run one trial, from its config to its result: the training script.

`run` is the one contract for trials that train and for probes. It holds the lease of the run folder while the trial
runs.

A trial is a pure function of its config. Batches are numbered windows of the corpus, and noise is a function of seed,
step, micro-batch, rank, layer and slot. So neither the data loader nor the noise has a state: a checkpoint stores the
weights, the optimizer's state, the step, one position in the data, what the observer has recorded, and the rows of the
tables. A trial that is interrupted at any step and resumed gives the same bits as one without interruption.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fewbits.common.atomic import write_parquet
from fewbits.experiments import devices
from fewbits.experiments.captured_step import CapturedStep, captured_step
from fewbits.experiments.data.corpus import Corpus
from fewbits.experiments.distributed.sharding import reshard, synchronize_gradients
from fewbits.experiments.evaluation.evaluate import evaluate_missing, evaluate_tasks
from fewbits.experiments.evaluation.loss import evaluate_documents, evaluate_loss, evaluated_windows, means
from fewbits.experiments.optimization.optimizers import clip_gradients, set_learning_rate
from fewbits.experiments.optimization.schedules import factor
from fewbits.experiments.probes import probe_trial
from fewbits.experiments.session import Events, Progress, Session, prepare
from fewbits.experiments.setup import check_data
from fewbits.experiments.state import State, resume, save, set_up
from fewbits.experiments.storage import checkpoints
from fewbits.experiments.storage.lease import Lost, leased
from fewbits.experiments.storage.results import decisions
from fewbits.experiments.storage.run_folder import RunFolder
from fewbits.experiments.trial import DROPOUT, ORDER, Runtime, Trial
from fewbits.models.networks.decoder import Decoder
from fewbits.models.networks.partition import whole
from fewbits.models.networks.registry import flops_per_token

DONE = "already done"


def run(trial: Trial, runtime: Runtime, events: Events | None = None) -> tuple[RunFolder, dict[str, Any]]:
    """Run or resume a trial unless it is done; return its run folder and the content of its result.json.

    Ranks above 0 get an empty result. Raise Held if another process runs the trial, Lost if another process has taken
    it over, and KeyboardInterrupt if `events.stopping` or `fewbits stop` ended it before its last step; then a later
    call continues. events: what reports the progress.
    """
    check, compute = (probe_trial.check_inputs, probe_trial.run) if trial.is_probe else (check_inputs, train)
    world = devices.choose(runtime)
    try:
        session = prepare(trial, runtime, world, events or Events())
        folder, leads = session.folder, session.leads
        session.events.begin(folder, session.identity)
        (finished,) = world.agree(leads and session.finished)
        if not finished:
            check(session)
            with leased(folder.path) if leads else nullcontext(threading.Event()) as lost:
                session = replace(session, lost=lost.is_set)
                finished = leads and session.finished  # another process may have finished this trial meanwhile
                if leads and not finished:
                    session.begin()
                (finished,) = world.agree(finished)
                if not finished:
                    return folder, compute(session)
        if not leads:
            return folder, {}
        evaluate_missing(session)
        session.events.saved(folder)
        session.events.message(DONE)
        return folder, folder.result() or {}
    finally:
        devices.leave(world)


def check_inputs(session: Session) -> None:
    """Raise ValueError before training if the data or the parent's checkpoint do not fit the trial."""
    check_data(session.trial, session.corpus)
    if session.parent is not None and not checkpoints.steps(session.folder.checkpoints):
        session.parent.check(session.trial, session.corpus)


def train(session: Session) -> dict[str, Any]:
    """Train or resume a trial to its end; return the content of its result.json on rank 0, {} on other ranks."""
    trial, runtime, world = session.trial, session.runtime, session.world
    folder, events, leads, t = session.folder, session.events, session.leads, trial.training
    state = set_up(trial, world.device, world.ranks)
    resume(state, session)
    if leads:
        session.add_segment(state.step)
        if state.step:
            events.message(f"resuming from step {state.step}")
        if state.quantization.execution:
            events.message(state.quantization.execution)
    model, optimizer, policy, observer = state.model, state.optimizer, state.policy, state.quantization.observer
    loss_of = _loss_module(model, trial)
    hopeless = t.blow_up * math.log(trial.model.vocab) if t.blow_up else math.inf
    peak = devices.peak_flops(world.device)
    captured = captured_step(trial, runtime, world, state.quantization, model.parameters())
    healthy = True

    model.train()
    while state.step < t.steps and healthy:
        step, began = state.step, time.perf_counter()
        row = gradients(state, trial, session.corpus, world, loss_of, captured)
        healthy = _finite(row) and row["loss"] <= hopeless
        if observer is not None and (observer.due(step) or step == t.steps - 1 or not healthy):
            state.numerics += observer.rows(step, state.quantization.layers, total=world.total, greatest=world.greatest)

        if healthy:
            set_learning_rate(optimizer, factor(trial.schedule, step, t.steps))
            policy.update(state.origin + step, row)
            healthy = policy.complaint is None
            state.step, state.position = step + 1, state.position + t.batch
        optimizer.zero_grad(set_to_none=True)
        seconds = time.perf_counter() - began

        if healthy and (state.step % trial.evaluation.every == 0 or state.step == t.steps):
            row |= evaluate(state, session)
            healthy = _finite(row)
        every = trial.evaluation.tasks_every
        if healthy and every and state.step % every == 0 and state.step < t.steps:
            evaluate_requested(state, session)
        state.metrics.append(row)
        if leads:
            speed = t.batch * t.length / seconds
            state.timing.append({"step": step, "time": time.time(), "seconds": seconds, "tokens_per_second": speed})
            if peak:
                state.timing[-1]["mfu"] = speed * flops_per_token(trial.model, t.length) / peak / world.ranks
            events.step(Progress(step + 1, t.steps, row["loss"], speed, seconds, row.get("validation_loss")))

        stopping, diverged, lost = world.agree(session.stopping(), not healthy, session.lost())
        if lost:
            raise Lost
        healthy = not diverged
        kept = state.step in runtime.keep_steps or (runtime.keep_every and state.step % runtime.keep_every == 0)
        due = state.step % t.checkpoint_every == 0 or state.step == t.steps or stopping
        if leads and healthy and (kept or due):
            state.write_tables(folder.path)
        if healthy and kept:
            save(state, session.corpus, folder.kept, world, keep=10**6)
        if healthy and due:
            save(state, session.corpus, folder.checkpoints, world, keep=runtime.keep_checkpoints)
            if leads:
                events.saved(folder)
        if stopping and healthy and state.step < t.steps:
            raise KeyboardInterrupt

    if leads:
        session.corpus.check_unchanged()
        state.write_tables(folder.path)
    evaluated: dict[str, float] = {}
    if healthy:
        evaluated = evaluate_last(state, session)
        evaluate_requested(state, session)
    (lost,) = world.agree(session.lost())
    if lost:
        raise Lost
    result: dict[str, Any] = {}
    if leads:
        status = "done" if healthy else "diverged"
        result = {"id": folder.id, "name": trial.name, "status": status, "step": state.step}
        result |= _final(state) | policy.results() | evaluated | decisions(state.numerics)
        folder.write_result(result)
        events.saved(folder)
    world.wait()
    return result


def gradients(
    state: State,
    trial: Trial,
    corpus: Corpus,
    world: devices.World,
    loss_of: nn.Module,
    captured: CapturedStep | None = None,
) -> dict[str, float]:
    """Compute and clip the gradients of one update; return the update's row of metrics.parquet.

    loss_of: a module that returns the model's mean loss for inputs and targets. captured: replays the computation.
    """
    t, quantization = trial.training, state.quantization
    accumulation = t.batch // t.micro_batch // world.ranks
    order_seed = trial.seed_for(ORDER)
    text, first_step = corpus.phase_at(state.origin + state.step, t.steps)
    position = state.position - first_step * t.batch
    state.policy.begin(state.step)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for micro in range(accumulation):
            first = position + (micro * world.ranks + world.rank) * t.micro_batch
            yield text.batch("train", first, t.micro_batch, t.length, order_seed)

    def compute(batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        losses, scalars = [], dict[str, Tensor]()
        for micro, (inputs, targets) in enumerate(batches):
            quantization.begin(state.origin + state.step, micro, rank=world.rank, progress=state.step / t.steps)
            if trial.model.dropout:  # so that resumed training draws the same masks
                torch.manual_seed(trial.seed_for(DROPOUT, state.origin + state.step, micro, world.rank))
            synchronize_gradients(state.model, t.reduce_each or micro == accumulation - 1)
            loss = loss_of(inputs, targets)
            losses.append(loss.detach())
            loss = loss / accumulation
            if micro == 0 and (penalty := state.penalty()) is not None:  # once for each update
                scalars["penalty"] = penalty.detach()
                loss = loss + penalty
            state.policy.scaled(loss).backward()
            state.policy.add_up()
        scalars["loss"] = world.mean(torch.stack(losses).mean())
        scalars["loss_max"] = world.greatest(torch.stack(losses).max())
        return scalars

    if captured is None:
        scalars = compute((devices.copy(x, world.device), devices.copy(y, world.device)) for x, y in batches())
    else:
        switched = quantization.is_switched(state.step / t.steps)
        scalars = captured.run(state.origin + state.step, switched, batches(), compute)
    state.policy.finish(state.step)
    scalars = scalars | {"gradient_norm": clip_gradients(state.model.parameters(), trial.optimizer.clip)}
    row = {
        "step": state.step,
        "tokens": (state.position + t.batch) * t.length,
        **dict(zip(scalars, torch.stack([*scalars.values()]).tolist(), strict=True)),  # one copy from the device
        "learning_rate": trial.optimizer.lr * factor(trial.schedule, state.step, t.steps),
    }
    return state.policy.judge(row)


def evaluate(state: State, session: Session) -> dict[str, float]:
    """Return the losses of the held-out splits, such as `validation_loss`, and `parameter_norm`.

    Batches have the size of a micro-batch: if a whole tensor shares one scale, the loss depends on the batch size.
    """
    trial, corpus, t = session.trial, session.corpus, session.trial.training
    begin_evaluation(state, trial)
    losses = {
        f"{name}_loss": evaluate_loss(state.model, corpus, name, windows=windows, length=t.length, batch=t.micro_batch)
        for name, windows in evaluated_windows(trial, corpus).items()
    }
    reshard(state.model)
    norms = [whole(parameter.detach()).norm() for parameter in state.model.parameters()]
    return losses | {"parameter_norm": float(torch.stack(norms).norm())}


def evaluate_last(state: State, session: Session) -> dict[str, float]:
    """Evaluate the final weights document by document; rank 0 writes evaluation.parquet.

    Return the mean losses of each split, such as `ood_loss_unquantized`, without the loss with the recipe's operands,
    which `evaluate` returns.
    """
    trial, corpus, t = session.trial, session.corpus, session.trial.training
    begin_evaluation(state, trial)
    windows = evaluated_windows(trial, corpus)
    frame = evaluate_documents(state.model, state.quantization, corpus, windows, length=t.length, batch=t.micro_batch)
    if session.leads:
        write_parquet(session.folder.path / "evaluation.parquet", frame)
    return means(frame)


def evaluate_requested(state: State, session: Session) -> None:
    """Evaluate the tasks and texts that the trial requests; the results are stored in the run folder, by step."""
    begin_evaluation(state, session.trial)
    evaluate_tasks(session, state.model, state.quantization, state.step)
    reshard(state.model)


def begin_evaluation(state: State, trial: Trial) -> None:
    """Set the quantizers and seeds of an evaluation to those of the next update's first micro-batch on rank 0.

    The result of the evaluation then depends on the weights and the step, not on how often the trial was evaluated.
    """
    state.quantization.begin(state.origin + state.step, progress=state.step / trial.training.steps)


class _Loss(nn.Module):
    """A module whose forward pass returns the model's mean loss, so that torch.compile compiles model and loss."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.model.loss(inputs, targets)


def _loss_module(model: Decoder, trial: Trial) -> nn.Module:
    module: nn.Module = _Loss(model)
    if trial.training.compile:
        torch.use_deterministic_algorithms(True)  # the compiler reads this setting, not the deterministic debug mode
        module = torch.compile(module)  # type: ignore[assignment]
    return module


def _finite(row: Mapping[str, float]) -> bool:
    return all(map(math.isfinite, row.values()))


def _final(state: State) -> dict[str, float | None]:
    """Return the last value of every metric, by its name; None if it is not finite, which JSON cannot represent."""
    last = {key: value for row in state.metrics for key, value in row.items() if key != "step"}
    return {key: value if math.isfinite(value) else None for key, value in last.items()}
