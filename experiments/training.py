"""Train one trial, from its config to its result: the training script.

A trial is a pure function of its config. Batches are numbered windows of the corpus, and noise is a function of seed,
step, micro-batch, rank, layer and slot. So neither the data loader nor the noise has a state: a checkpoint stores the
weights, the optimizer's state, the step, one position in the data, what the observer has recorded, and the rows of the
tables. A trial that is interrupted at any step and resumed gives the same bits as one without interruption.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import pandas as pd
import torch
from torch import Tensor, nn

from fewbits.common.atomic import write_parquet
from fewbits.experiments import devices
from fewbits.experiments.data.corpus import Corpus, describe
from fewbits.experiments.data.load import load
from fewbits.experiments.data.once import default_cache
from fewbits.experiments.distributed import saving
from fewbits.experiments.distributed.penalties import Penalties
from fewbits.experiments.distributed.sharding import build_sharded, recompute_blocks, reshard, synchronize_gradients
from fewbits.experiments.environment import environment
from fewbits.experiments.evaluation.by_document import evaluate_documents, means
from fewbits.experiments.evaluation.harness import run_tasks
from fewbits.experiments.evaluation.loss import evaluate_loss, window_count
from fewbits.experiments.evaluation.tasks import shots
from fewbits.experiments.identity import identity, provenance, segment
from fewbits.experiments.machine_kinds import discard_unlike
from fewbits.experiments.optimization.optimizers import (
    clip_gradients,
    load_optimizer_state,
    make_optimizer,
    optimizer_state,
    set_learning_rate,
)
from fewbits.experiments.optimization.precision import DTYPES, Policy
from fewbits.experiments.optimization.schedules import factor
from fewbits.experiments.setup import check, check_data, check_evaluation, corpus_model, text_tokenizer
from fewbits.experiments.storage import checkpoints, run_folder
from fewbits.experiments.storage.branches import Parent, find_parent
from fewbits.experiments.trial import Runtime, Trial
from fewbits.kernels.seeds import derive_seed
from fewbits.models.networks.decoder import Decoder
from fewbits.models.networks.partition import adam_mini_partition
from fewbits.models.networks.registry import build, linear_parameters, on_meta
from fewbits.models.networks.sharded import fill, whole
from fewbits.models.observer import Observer
from fewbits.models.quantize import Quantization, quantize

# Purposes for which seeds are derived from the trial's seed: initial weights, order of the data, rounding of operands
# and samplers, rounding of weights and optimizer states.
INITIAL, ORDER, ROUNDING, UPDATES = range(4)
DONE = "already done"
Say = Callable[["Progress"], None]
Saved = Callable[[run_folder.RunFolder], None]


@dataclass(frozen=True)
class Progress:
    """The progress of a trial after a step, which `run` passes to its argument `say` to be shown."""

    step: int  # number of steps done
    steps: int  # number of steps of the whole trial
    loss: float  # training loss of this step
    tokens_per_second: float
    seconds_a_step: float
    evaluated: float | None = None  # validation loss, if this step was followed by an evaluation


class OtherTrial(RuntimeError):
    """Raised if a trial's id, as this machine computes it, differs from the id with which the trial was planned.

    made_of: the values from which this machine computes the id.
    """

    def __init__(self, made_of: dict[str, Any]) -> None:
        super().__init__("this machine would compute another trial than was planned")
        self.made_of = made_of


@dataclass
class State:
    """The state of a trial during training; a checkpoint stores it."""

    model: Decoder
    optimizer: torch.optim.Optimizer
    quantization: Quantization
    policy: Policy  # scales the loss, and rounds weights, optimizer states and gradients
    penalty: Callable[[], Tensor | None]  # returns the penalty of learned bit widths for the last forward pass
    step: int = 0  # number of updates done
    position: int = 0  # sequences of the corpus read so far, including those that a branch's parents have read
    origin: int = 0  # updates done by a branch's parents; noise is keyed by origin + step, so it differs from theirs
    metrics: list[dict[str, float]] = field(default_factory=list)  # rows of metrics.parquet
    numerics: list[dict[str, Any]] = field(default_factory=list)  # rows of numerics.parquet


def run(
    trial: Trial,
    runtime: Runtime,
    say: Say = lambda _: None,
    stop: Callable[[], bool] = lambda: False,
    expected: str | None = None,
    saved: Saved = lambda _: None,
    tell: Callable[[str], None] = lambda _: None,
) -> tuple[run_folder.RunFolder, dict[str, Any]]:
    """Train or resume a trial unless it is done; return its run folder and the content of its result.json.

    After training, ranks above 0 get an empty result.

    say: called on rank 0 after every step, with the progress.
    stop: called on every rank after every step; if it returns true on any rank, the trial saves a checkpoint and raises
        KeyboardInterrupt on all ranks.
    expected: the id that the trial was planned with. If the id on this machine differs, raise OtherTrial.
    saved: called on rank 0 with the run folder, each time the config, a checkpoint or the result was written there.
    tell: called with a message if the trial is resumed, evaluated again or already done.
    """
    world = devices.choose(runtime)
    try:
        runs = Path(runtime.runs).expanduser()
        trial, corpus = with_data(trial, runtime)
        check(trial, world.ranks)
        devices.check_products(trial.recipe, world.device)
        parent = find_parent(trial.branch, runs)
        made_of = identity_here(trial, corpus, runtime, parent)
        folder = run_folder.find(runs, trial.name, made_of)
        if expected not in (None, folder.id):
            raise OtherTrial(made_of)
        done = folder.result()
        (finished,) = world.agree(not world.rank and done is not None and folder.has(runtime.keep_steps))
        if finished and done is not None:
            if not world.rank:
                done = with_evaluation(done, trial, world, corpus, folder, tell)
                saved(folder)
            tell(DONE)
            return folder, done
        check_data(trial, corpus)
        if parent is not None and not checkpoints.steps(folder.checkpoints):
            parent.check(trial, corpus)
        if world.rank:
            (finished,) = world.agree(False)
            if finished:
                return folder, {}
            return folder, _train(trial, runtime, world, corpus, folder, parent, say, stop, saved, tell)
        with folder.alone():
            done = folder.result()  # another process may have finished this trial meanwhile
            if done is not None and folder.has(runtime.keep_steps) and not trial.evaluation.missing_from(done):
                world.agree(True)
                tell(DONE)
                return folder, done
            _check_examples(done or folder.earlier_result, trial)
            if done is not None:
                folder.reopen(runtime.keep_steps)
            discard_unlike(folder, environment(world.device))
            origin = {"data": describe(corpus), "parent": parent and str(parent.folder.path)}
            facts = origin | {"products": trial.recipe.execute}
            folder.begin(trial, provenance(made_of, facts))
            saved(folder)
            world.agree(False)
            return folder, _train(trial, runtime, world, corpus, folder, parent, say, stop, saved, tell)
    finally:
        devices.leave(world)


def _train(
    trial: Trial,
    runtime: Runtime,
    world: devices.World,
    corpus: Corpus,
    folder: run_folder.RunFolder,
    parent: Parent | None,
    say: Say,
    stop: Callable[[], bool],
    saved: Saved,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    t, leads = trial.training, world.rank == 0
    state = set_up(trial, world.device, world.ranks)
    resume(state, corpus, folder, parent, world)
    if leads:
        folder.add_segment(segment(state.step, world.device))
        if state.step:
            tell(f"resuming from step {state.step}")
    model, optimizer, policy, observer = state.model, state.optimizer, state.policy, state.quantization.observer
    loss_of = _loss_module(model, trial)
    hopeless = t.blow_up * math.log(trial.model.vocab) if t.blow_up else math.inf
    peak = devices.peak_flops(world.device)
    timing = read_timing(folder.path, state.step)
    healthy = True

    model.train()
    while state.step < t.steps and healthy:
        step, began = state.step, time.perf_counter()
        row = gradients(state, trial, corpus, world, loss_of)
        healthy = _finite(row) and row["loss"] <= hopeless
        if observer is not None and (observer.due(step) or step == t.steps - 1 or not healthy):
            state.numerics += observer.rows(step, state.quantization.layers)

        if healthy:
            set_learning_rate(optimizer, factor(trial.schedule, step, t.steps))
            policy.update(state.origin + step, row)
            healthy = policy.complaint is None
            state.step, state.position = step + 1, state.position + t.batch
        optimizer.zero_grad(set_to_none=True)
        seconds = time.perf_counter() - began

        if healthy and (state.step % trial.evaluation.every == 0 or state.step == t.steps):
            row |= evaluate(state, trial, corpus)
            healthy = _finite(row)
        state.metrics.append(row)
        if leads:
            speed = t.batch * t.length / seconds
            timing.append({"step": step, "time": time.time(), "seconds": seconds, "tokens_per_second": speed})
            if peak:
                timing[-1]["mfu"] = speed * flops_a_token(trial) / peak / world.ranks
            say(Progress(step + 1, t.steps, row["loss"], speed, seconds, row.get("validation_loss")))
        kept = state.step in runtime.keep_steps or (runtime.keep_every and state.step % runtime.keep_every == 0)
        stopping, diverged = world.agree(stop(), not healthy)
        healthy = not diverged
        due = state.step % t.checkpoint_every == 0 or state.step == t.steps or stopping
        if leads and healthy and (kept or due):
            write_tables(state, timing, folder.path)
        if healthy and kept:
            save(state, corpus, folder.kept, world, keep=10**6)
        if healthy and due:
            save(state, corpus, folder.checkpoints, world, keep=runtime.keep_checkpoints)
            if leads:
                saved(folder)
        if stopping and healthy and state.step < t.steps:
            raise KeyboardInterrupt

    result: dict[str, Any] = {}
    if leads:
        corpus.folder.check_unchanged()
        write_tables(state, timing, folder.path)
    evaluated: dict[str, Any] = {}
    if healthy:
        evaluated = evaluate_last(state, trial, corpus, folder.path if leads else None)
        evaluated |= final_evaluation(state, trial, corpus)
    if leads:
        status = "done" if healthy else "diverged"
        result = {"id": folder.id, "name": trial.name, "status": status, "step": state.step} | _final(state)
        result |= policy.results() | evaluated
        if healthy and (earlier := folder.earlier_result):
            result = _merged(earlier, result)
        folder.write_result(result)
        saved(folder)
    world.wait()
    return result


def gradients(state: State, trial: Trial, corpus: Corpus, world: devices.World, loss_of: nn.Module) -> dict[str, float]:
    """Compute and clip the gradients of one update; return the update's row of metrics.parquet.

    loss_of: a module that returns the model's mean loss for inputs and targets.
    """
    t, quantization = trial.training, state.quantization
    accumulation = t.batch // t.micro_batch // world.ranks
    order_seed = derive_seed(trial.seed, ORDER)
    losses = []
    state.policy.begin(state.step)
    for micro in range(accumulation):
        first = state.position + (micro * world.ranks + world.rank) * t.micro_batch
        inputs, targets = corpus.batch("train", first, t.micro_batch, t.length, order_seed)
        quantization.begin(state.origin + state.step, micro, rank=world.rank, progress=state.step / t.steps)
        synchronize_gradients(state.model, t.reduce_each or micro == accumulation - 1)
        loss = loss_of(inputs.to(world.device), targets.to(world.device))
        penalty = state.penalty()
        state.policy.scaled((loss if penalty is None else loss + penalty) / accumulation).backward()
        state.policy.add_up()
        losses.append(loss.detach())
    loss = world.mean(torch.stack(losses).mean())
    loss_max = world.greatest(torch.stack(losses).max())
    state.policy.finish(state.step)
    norm = clip_gradients(state.model.parameters(), trial.optimizer.clip)
    row = {
        "step": state.step,
        "tokens": (state.position + t.batch) * t.length,
        "loss": loss.item(),
        "loss_max": loss_max.item(),
        "gradient_norm": norm.item(),
        "learning_rate": trial.optimizer.lr * factor(trial.schedule, state.step, t.steps),
    }
    return state.policy.judge(row if penalty is None else row | {"penalty": penalty.item()})


# ------------------------------------------------------------------------------------------------ before and between


def with_data(trial: Trial, runtime: Runtime) -> tuple[Trial, Corpus]:
    """Load the trial's corpus; return the trial and the corpus.

    In the returned trial, the model's vocabulary is at least as large as that of the corpus (see `corpus_model`).
    """
    corpus = load(trial.data, Path(runtime.cache).expanduser() if runtime.cache else default_cache())
    return corpus_model(trial, corpus), corpus


def identity_here(trial: Trial, corpus: Corpus, runtime: Runtime, parent: Parent | None) -> dict[str, Any]:
    """Return the values that the trial's id hashes, with this machine's device and number of torchrun processes."""
    return identity(
        trial,
        corpus.fingerprint,
        devices.kind_of_device(runtime),
        ranks=devices.rank_count(),
        threads=runtime.threads,
        parent=parent.point if parent else None,
    )


def find_folder(trial: Trial, runtime: Runtime) -> run_folder.RunFolder:
    """Return the run folder of a trial, which need not exist yet; nothing is trained."""
    trial, corpus = with_data(trial, runtime)
    runs = Path(runtime.runs).expanduser()
    made_of = identity_here(trial, corpus, runtime, find_parent(trial.branch, runs))
    return run_folder.find(runs, trial.name, made_of)


def set_up(trial: Trial, device: torch.device, ranks: int = 1) -> State:
    """Return the initial state of a trial: model, quantizers and optimizer, sharded if there are several ranks."""
    torch.manual_seed(trial.seed)  # our code does not use torch's generator, but a user's code may
    rounding = trial.seed if trial.training.rounding_seed is None else trial.training.rounding_seed
    observer = Observer(trial.observer) if trial.observer.enabled else None
    quantized = partial(quantize, recipe=trial.recipe, seed=derive_seed(rounding, ROUNDING), observer=observer)
    seed, dtype = derive_seed(trial.seed, INITIAL), DTYPES[trial.training.dtype]
    if ranks == 1:
        model = build(trial.model, seed=seed, device=device, compute_dtype=dtype)
        quantization = quantized(model)
        penalty = quantization.penalty
    else:
        whole_weights = partial(quantized, keep_weights=False)
        model, quantization = build_sharded(
            trial.model, seed=seed, device=device, ranks=ranks, compute_dtype=dtype, quantized=whole_weights
        )
        penalty = Penalties(quantization).take
    if trial.training.recompute:
        recompute_blocks(model)
    partition = adam_mini_partition(on_meta(trial.model))
    optimizer = make_optimizer(model, trial.optimizer, partition=partition)
    policy = Policy(trial.precision, model, optimizer, seed=derive_seed(rounding, UPDATES), steps=trial.training.steps)
    return State(model, optimizer, quantization, policy, penalty)


def resume(
    state: State,
    corpus: Corpus,
    folder: run_folder.RunFolder,
    parent: Parent | None,
    world: devices.World,
) -> None:
    """Load the trial's newest intact checkpoint into `state`; if there is none, load the checkpoint of its parent.

    Only a branch has a parent. If there is no checkpoint to load, leave the state unchanged.
    """
    own = saving.newest(world, folder.checkpoints, folder.kept)
    checkpoint = own or (parent.checkpoint if parent else None)
    if checkpoint is None:
        return
    saved = checkpoints.unflatten(checkpoint.tensors(part=(world.rank, world.ranks)), checkpoint.state)
    corpus.check(saved["data"]["fingerprint"], saved["data"])
    _load_weights(state.model, saved["model"], strict=own is not None)
    load_optimizer_state(state.optimizer, saved["optimizer"])
    state.policy.load_state(saved.get("precision", {}), branch=own is None)
    state.position = saved["position"]
    if own is None:
        state.origin = saved["origin"] + saved["step"]
        return
    state.step, state.origin = saved["step"], saved["origin"]
    state.metrics, state.numerics = _rows(saved["metrics"]), saved["numerics"]
    torch.set_rng_state(saved["rng"])
    if state.quantization.observer is not None:
        state.quantization.observer.load_state(saved["observer"])


def save(state: State, corpus: Corpus, folder: Path, world: devices.World, *, keep: int) -> None:
    """Save a checkpoint in a folder, and keep the newest `keep` checkpoints there. All ranks must call this."""
    corpus.folder.check_unchanged()
    observer = state.quantization.observer
    content = {
        "model": state.model.state_dict(),
        "optimizer": optimizer_state(state.optimizer),
        "observer": observer.state() if observer else {},
        "precision": state.policy.state(),
        "rng": torch.get_rng_state(),
        "step": state.step,
        "position": state.position,
        "origin": state.origin,
        "metrics": _columns(state.metrics),
        "numerics": state.numerics,
        "data": describe(corpus),
    }
    saving.save(folder, state.step, content, world, keep=keep)


def write_tables(state: State, timing: Sequence[Mapping[str, float]], folder: Path) -> None:
    """Write the tables metrics, numerics, precision (if it was measured) and timing into the run folder.

    Times are in a table of their own, because only they differ if the same trial is run again.
    """
    write_parquet(folder / "metrics.parquet", pd.DataFrame(state.metrics))
    write_parquet(folder / "numerics.parquet", pd.DataFrame(state.numerics))
    if rows := state.policy.rows():
        write_parquet(folder / "precision.parquet", pd.DataFrame(rows))
    write_parquet(folder / "timing.parquet", pd.DataFrame(timing))


def read_timing(folder: Path, step: int) -> list[dict[str, float]]:
    """Return the rows of timing.parquet for the steps before `step`; an interruption may have lost some of them."""
    path = folder / "timing.parquet"
    if not step or not path.is_file():
        return []
    try:
        frame = pd.read_parquet(path)
        return cast(list[dict[str, float]], frame[frame["step"] < step].to_dict("records"))
    except (ValueError, KeyError) as error:
        warnings.warn(f"{path} is damaged, its rows are lost: {error}", stacklevel=2)
        return []


def evaluate(state: State, trial: Trial, corpus: Corpus) -> dict[str, float]:
    """Return the losses of the held-out splits, such as `validation_loss`, and `parameter_norm`.

    Batches have the size of a micro-batch: if a whole tensor shares one scale, the loss depends on the batch size.
    """
    t = trial.training
    _begin_evaluation(state, trial)
    losses = {
        f"{name}_loss": evaluate_loss(state.model, corpus, name, windows=windows, length=t.length, batch=t.micro_batch)
        for name, windows in evaluated_windows(trial, corpus).items()
    }
    reshard(state.model)
    norms = [whole(parameter.detach()).norm() for parameter in state.model.parameters()]
    return losses | {"parameter_norm": float(torch.stack(norms).norm())}


def evaluated_windows(trial: Trial, corpus: Corpus) -> dict[str, int]:
    """Return the number of windows to evaluate, by held-out split."""
    e = trial.evaluation
    splits = [name for name in ("validation", "ood") if name in corpus.splits]
    return {name: window_count(name, e.windows, e.ood_windows) for name in splits}


def evaluate_last(state: State, trial: Trial, corpus: Corpus, folder: Path | None) -> dict[str, float]:
    """Evaluate the final weights document by document, and write evaluation.parquet into `folder` (None: nowhere).

    Return mean losses by name, for each split: `SPLIT_loss_unquantized`, with unquantized operands. If the recipe has a
    sampler, also two losses with the weights that get noise in training cast: `SPLIT_loss_cast`, to the formats of
    their learned bit widths, and `SPLIT_loss_narrow`, to the narrowest format of GaussWS's Table C.1. The loss with the
    recipe's operands is omitted, because `evaluate` returns it.
    """
    t = trial.training
    _begin_evaluation(state, trial)
    windows = evaluated_windows(trial, corpus)
    frame = evaluate_documents(state.model, state.quantization, corpus, windows, length=t.length, batch=t.micro_batch)
    if folder is not None:
        write_parquet(folder / "evaluation.parquet", frame)
    return means(frame)


def final_evaluation(state: State, trial: Trial, corpus: Corpus) -> dict[str, Any]:
    """Return the results of the tasks that the trial requests, by their keys in result.json.

    The key `evaluated` lists what was evaluated; without tasks, the dictionary is empty.
    """
    e, model = trial.evaluation, state.model
    _begin_evaluation(state, trial)
    found: dict[str, Any] = {}
    if (tokenizer := text_tokenizer(corpus)) and e.tasks:
        end, length = corpus.folder.meta.separator, trial.training.length
        scores = run_tasks(
            model, tokenizer, e.tasks, length=length, end=end, include_path=e.tasks_path, run_code=e.run_code
        )
        found["tasks"] = {
            task: {key: value if math.isfinite(value) else None for key, value in metrics.items()}
            for by_task in scores.values()
            for task, metrics in by_task.items()
        }
    if found:
        found["evaluated"] = {"tasks": list(e.tasks)}
    return found


def with_evaluation(
    result: dict[str, Any],
    trial: Trial,
    world: devices.World,
    corpus: Corpus,
    folder: run_folder.RunFolder,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """Return a finished trial's result; if requested tasks are missing, evaluate and store them first.

    The missing results are computed from the trial's last checkpoint.
    """
    if not trial.evaluation.missing_from(result):
        return result
    check_evaluation(trial, corpus)
    with folder.alone():
        result = folder.result() or result  # another process may have stored an evaluation meanwhile
        if not trial.evaluation.missing_from(result):
            return result
        _check_examples(result, trial)
        checkpoint = folder.checkpoint(result["step"])
        tell(f"evaluating {folder.path}, which is trained already")
        state = set_up(trial, world.device)
        saved = checkpoints.unflatten(checkpoint.tensors(), checkpoint.state)
        _load_weights(state.model, saved["model"], strict=True)
        state.step, state.origin = saved["step"], saved["origin"]
        result = _merged(result, final_evaluation(state, trial, corpus))
        folder.write_result(result)
    return result


def _check_examples(result: dict[str, Any], trial: Trial) -> None:
    """Raise ValueError if `result` has a task that the trial requests with another number of few-shot examples."""
    if trial.evaluation.tasks:
        shots([*result.get("evaluated", {}).get("tasks", ()), *trial.evaluation.tasks])


def _merged(result: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """Return `result` updated with `later`, the result of a later evaluation; tasks that only `result` has are kept."""
    before, now = (part.get("evaluated") or {} for part in (result, later))
    evaluated = {"tasks": [*dict.fromkeys((*before.get("tasks", ()), *now.get("tasks", ())))]}
    merged = result | later | {"evaluated": evaluated}
    if "tasks" in merged:
        merged["tasks"] = {**(result.get("tasks") or {}), **later.get("tasks", {})}
    return merged


def _begin_evaluation(state: State, trial: Trial) -> None:
    """Set the quantizers and seeds of an evaluation to those of the next update's first micro-batch on rank 0.

    The result of the evaluation then depends on the weights and the step, not on how often the trial was evaluated.
    """
    state.quantization.begin(state.origin + state.step, progress=state.step / trial.training.steps)


# ------------------------------------------------------------------------------------------------ details


def _load_weights(model: nn.Module, saved: dict[str, Tensor], *, strict: bool) -> None:
    """Load saved weights into the model.

    strict: require the same names of weights. Otherwise (for a branch) the model and the checkpoint may differ in the
    samplers' parameters `bit_scale`, because a branch may have another recipe.
    """
    own = model.state_dict()
    missing, unexpected = own.keys() - saved.keys(), saved.keys() - own.keys()
    for name in own.keys() & saved.keys():
        fill(own[name], saved[name])
    wrong = [name for name in (*sorted(missing), *sorted(unexpected)) if strict or not name.endswith(".bit_scale")]
    if wrong:
        raise ValueError(
            "the checkpoint belongs to another model: some weights are only in one of the two, such as "
            f"{', '.join(wrong[:5])}; use a checkpoint of the same model"
        )


def _columns(rows: list[dict[str, float]]) -> dict[str, Tensor]:
    """Return a table's rows as one tensor per column; NaN where a row has no value.

    Checkpoints store these tensors. Stored as JSON, many rows could take more space than the model.
    """
    frame = pd.DataFrame(rows, dtype="float64")
    return {str(name): torch.from_numpy(frame[name].to_numpy(copy=True)) for name in frame}


def _rows(columns: Mapping[str, Tensor]) -> list[dict[str, float]]:
    """Return a table's rows from its columns; a row gets no entry for a value that is not finite (see `_columns`)."""
    values = zip(*(column.tolist() for column in columns.values()), strict=True)
    rows = [{name: value for name, value in zip(columns, row, strict=True) if math.isfinite(value)} for row in values]
    return [{**row, "step": int(row["step"]), "tokens": int(row["tokens"])} for row in rows]


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


def flops_a_token(trial: Trial) -> float:
    """Return the FLOPs per token of a forward and a backward pass.

    These are 6 for each weight of a linear layer or the head, plus 12 · heads · head_dim · length for each attention
    layer, as if no position were masked.
    """
    model = trial.model
    matrices = linear_parameters(model) + model.width * model.vocab
    attentions = model.pattern.count("*") if model.pattern else model.layers
    return 6 * matrices + 12 * attentions * model.heads * model.head_dim * trial.training.length


def _finite(row: Mapping[str, float]) -> bool:
    return all(map(math.isfinite, row.values()))


def _final(state: State) -> dict[str, float | None]:
    """Return the last value of every metric, by its name; None if it is not finite, which JSON cannot represent."""
    last = {key: value for row in state.metrics for key, value in row.items() if key != "step"}
    return {key: value if math.isfinite(value) else None for key, value in last.items()}
