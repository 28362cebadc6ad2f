"""The state of a trial during training: set it up, save it in a checkpoint, and load it again."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import pandas as pd
import torch
from torch import Tensor, nn

from fewbits.common.atomic import write_parquet
from fewbits.experiments.data.corpus import Corpus, describe
from fewbits.experiments.devices import World
from fewbits.experiments.distributed import sharding
from fewbits.experiments.distributed.sharding import Penalties, build_sharded, recompute_blocks
from fewbits.experiments.optimization.optimizers import load_optimizer_state, make_optimizer, optimizer_state
from fewbits.experiments.optimization.precision import DTYPES, Policy
from fewbits.experiments.session import Session
from fewbits.experiments.storage import checkpoints
from fewbits.experiments.trial import INITIAL, ROUNDING, UPDATES, Trial
from fewbits.models.networks.decoder import Decoder
from fewbits.models.networks.partition import fill, partition_of
from fewbits.models.networks.registry import build, on_meta
from fewbits.models.observer import Observer
from fewbits.models.quantize import Quantization, quantize


@dataclass
class State:
    """The state of a trial during training; a checkpoint stores it, except for `timing`."""

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
    timing: list[dict[str, float]] = field(default_factory=list)  # rows of timing.parquet

    def write_tables(self, folder: Path) -> None:
        """Write the tables into the run folder; only `timing` differs if the same trial is run again."""
        tables = {"metrics": self.metrics, "numerics": self.numerics, "timing": self.timing}
        if rows := self.policy.rows():
            tables["precision"] = rows
        for name, rows in tables.items():
            write_parquet(folder / f"{name}.parquet", pd.DataFrame(rows))


def set_up(trial: Trial, device: torch.device, ranks: int = 1) -> State:
    """Return the initial state of a trial: model, quantizers and optimizer, sharded if there are several ranks."""
    torch.manual_seed(trial.seed)  # our code does not use torch's generator, but a user's code may
    observer = Observer(trial.observer) if trial.observer.enabled else None
    quantized = partial(quantize, recipe=trial.recipe, seed=trial.seed_for(ROUNDING), observer=observer)
    seed, dtype = trial.seed_for(INITIAL), DTYPES[trial.training.dtype]
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
    partition = partition_of(on_meta(trial.model), trial.optimizer.kind)
    optimizer = make_optimizer(model, trial.optimizer, partition=partition)
    policy = Policy(trial.precision, model, optimizer, seed=trial.seed_for(UPDATES), steps=trial.training.steps)
    return State(model, optimizer, quantization, policy, penalty)


def resume(state: State, session: Session) -> None:
    """Load the trial's newest intact checkpoint into `state`, else that of a branch's parent, else nothing."""
    world, folder, parent = session.world, session.folder, session.parent
    own = sharding.newest(world, folder.checkpoints, folder.kept)
    checkpoint = own or (parent.checkpoint if parent else None)
    if checkpoint is None:
        return
    saved = checkpoints.unflatten(checkpoint.tensors(part=(world.rank, world.ranks)), checkpoint.state)
    session.corpus.check(saved["data"])
    _load_weights(state.model, saved["model"], strict=own is not None)
    load_optimizer_state(state.optimizer, saved["optimizer"])
    state.policy.load_state(saved.get("precision", {}), branch=own is None)
    delayed = state.quantization.delayed
    if delayed is not None and "delayed" in saved:  # a branch's parent may have none
        delayed.load_state(saved["delayed"])
    state.position = saved["position"]
    if own is None:
        state.origin = saved["origin"] + saved["step"]
        return
    state.step, state.origin = saved["step"], saved["origin"]
    state.metrics, state.numerics = _rows(saved["metrics"]), saved["numerics"]
    state.timing = _timing(folder.path / "timing.parquet", state.step)
    torch.set_rng_state(saved["rng"])
    if state.quantization.observer is not None:
        state.quantization.observer.load_state(saved["observer"])


def save(state: State, corpus: Corpus, folder: Path, world: World, *, keep: int) -> None:
    """Save a checkpoint in a folder, and keep the newest `keep` checkpoints there. All ranks must call this."""
    corpus.check_unchanged()
    observer = state.quantization.observer
    content = {
        "model": state.model.state_dict(),
        "optimizer": optimizer_state(state.optimizer),
        "observer": observer.state() if observer else {},
        "precision": state.policy.state(),
        **({} if state.quantization.delayed is None else {"delayed": state.quantization.delayed.state()}),
        "rng": torch.get_rng_state(),
        "step": state.step,
        "position": state.position,
        "origin": state.origin,
        "metrics": _columns(state.metrics),
        "numerics": state.numerics,
        "data": describe(corpus),
    }
    sharding.save(folder, state.step, content, world, keep=keep)


def _timing(path: Path, step: int) -> list[dict[str, float]]:
    """Return the rows of timing.parquet for the steps before `step`; an interruption may have lost some of them."""
    if not path.is_file():
        return []
    try:
        frame = pd.read_parquet(path)
        return cast(list[dict[str, float]], frame[frame["step"] < step].to_dict("records"))
    except (ValueError, KeyError) as error:
        warnings.warn(f"{path} is damaged, its rows are lost: {error}", stacklevel=2)
        return []


def _load_weights(model: nn.Module, saved: dict[str, Tensor], *, strict: bool) -> None:
    """Load saved weights, which have the model's names; unless `strict`, samplers' `bit_scale` may be in only one."""
    own = model.state_dict()
    missing, unexpected = own.keys() - saved.keys(), saved.keys() - own.keys()
    for name in own.keys() & saved.keys():
        fill(own[name], saved[name])
    wrong = [name for name in (*sorted(missing), *sorted(unexpected)) if strict or not name.endswith(".bit_scale")]
    if wrong:
        raise ValueError(f"the checkpoint belongs to another model: only one of the two has {', '.join(wrong[:5])}")


def _columns(rows: list[dict[str, float]]) -> dict[str, Tensor]:
    """Return a table's rows as one tensor per column; NaN where a row has no value."""
    frame = pd.DataFrame(rows, dtype="float64")
    return {str(name): torch.from_numpy(frame[name].to_numpy(copy=True)) for name in frame}


def _rows(columns: Mapping[str, Tensor]) -> list[dict[str, float]]:
    """Return a table's rows from its columns; a row gets no entry for a value that is not finite (see `_columns`)."""
    values = zip(*(column.tolist() for column in columns.values()), strict=True)
    rows = [{name: value for name, value in zip(columns, row, strict=True) if math.isfinite(value)} for row in values]
    return [{**row, "step": int(row["step"]), "tokens": int(row["tokens"])} for row in rows]
