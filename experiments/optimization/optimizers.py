"""Make a trial's optimizer (AdamW, Adam-mini, Muon), set its learning rate, clip gradients, save and restore its state.

There are up to four groups of parameters:

    matrices  only with Muon: the weights of linear layers inside blocks; with weight decay. This group may have its own
              learning rate, as Keller Jordan's Muon needs
    decay     other matrices (two dimensions or more): weights, embeddings, convolutions; with weight decay
    plain     norms, biases and other vectors, and the parameters of Mamba-2's recurrence; without weight decay. With
              `decay_vectors`, these parameters are in `decay`
    bits      a sampler's learned bit widths (b_i of GaussWS eq. 11); always with weight decay, because it pulls the bit
              widths to the target. This group may have its own learning rate and weight decay.

The learning rate of an update is the group's `peak_lr` times the schedule's factor. A checkpoint stores the state by
parameter name, but no settings, which always come from the config. If a branch's recipe adds or drops a sampler, the
state of all other parameters is still restored.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from fewbits.common.from_dict import one_of
from fewbits.experiments.optimization.adam_mini import AdamMini
from fewbits.experiments.optimization.muon import SCALES, AdamW, Muon
from fewbits.models.networks.partition import Partition, copy_like, is_sharded, local

BITS = "bit_scale"
RECURRENCE = ("A_log", "D", "dt_bias")  # Mamba-2's parameters that count as vectors, whatever their shape
KINDS = ("adamw", "adam-mini", "muon")


@dataclass(frozen=True)
class OptimizerConfig:
    """The settings of a trial's optimizer."""

    kind: str = "adamw"
    lr: float = 1e-3  # the peak learning rate, which the schedule multiplies by a factor
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8  # assumed, no paper states it
    weight_decay: float = 0.1
    decay_vectors: bool = False  # weight decay also for norms and biases, as in torchtitan (GaussWS's Llama 2 runs)
    clip: float | None = 1.0  # largest gradient norm; None: no clipping
    bits_lr_ratio: float = 1.0  # (learning rate of b_i) / lr; assumed, GaussWS does not state it
    bits_weight_decay: float | None = None  # of b_i; None: weight_decay's value; assumed, GaussWS does not state it
    momentum: float = field(default=0.95, metadata={"neutral": 0.95})  # only muon
    # Only muon: (learning rate of matrices) / lr.
    matrix_lr_ratio: float = field(default=1.0, metadata={"neutral": 1.0})
    # Only muon: the factor of an orthogonal update. match-rms: 0.2·√max(rows, columns), which gives it the root mean
    # square of AdamW's updates (arXiv 2502.16982); original: √max(1, rows / columns), Keller Jordan's.
    matrix_scale: str = field(default="match-rms", metadata={"neutral": "match-rms"})

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown optimizer {self.kind!r}: valid optimizers are {', '.join(KINDS)}")
        one_of("optimizer.matrix_scale", self.matrix_scale, SCALES)
        for setting in fields(self):
            value = getattr(self, setting.name)
            if "neutral" in setting.metadata and self.kind != "muon" and value != setting.default:
                raise ValueError(f"optimizer.{setting.name}={value}: only optimizer=muon has this setting")
        for name in ("beta1", "beta2", "momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"optimizer.{name}={getattr(self, name)}: valid values are numbers from 0 to below 1")
        for name in ("lr", "eps", "weight_decay", "bits_lr_ratio", "bits_weight_decay", "matrix_lr_ratio"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise ValueError(f"optimizer.{name}={value}: valid values are finite numbers, 0 or more")
        if self.clip is not None and not 0 < self.clip < float("inf"):
            raise ValueError(
                f"optimizer.clip={self.clip}: valid values are finite numbers above 0, or null (no clipping)"
            )


def make_optimizer(
    model: nn.Module, config: OptimizerConfig, *, partition: Mapping[str, Partition] | None = None
) -> torch.optim.Optimizer:
    """Return the optimizer of a model.

    partition: the parts of parameters by name, as `partition_of` returns them: for Adam-mini, those that share a second
        moment; for Muon, the matrices. Where a sampler's bit widths are missing, their partition is "tensor" for
        Adam-mini (assumed), as in its published code for every parameter that it does not know.
    """
    matrices = (partition or {}) if config.kind == "muon" else {}
    groups = parameter_groups(model, config, matrices)
    settings: dict[str, Any] = {"lr": config.lr, "betas": (config.beta1, config.beta2), "eps": config.eps}
    optimizer: torch.optim.Optimizer
    if config.kind == "adamw":
        optimizer = AdamW(groups, fused=True, **settings)
    elif config.kind == "muon":
        params = dict(model.named_parameters())
        parts: dict[Tensor, tuple[int, ...]] = {
            params[name]: rows for name, rows in matrices.items() if not isinstance(rows, str)
        }
        optimizer = Muon(groups, parts, momentum=config.momentum, scale=config.matrix_scale, **settings)
    else:
        optimizer = AdamMini(groups, _by_parameter(model, partition), **settings)
    optimizer.register_step_post_hook(_move_versions)
    return optimizer


def parameter_groups(model: nn.Module, config: OptimizerConfig, matrices: Collection[str] = ()) -> list[dict[str, Any]]:
    """Return the parameter groups, without empty ones, as dicts for torch's optimizers. matrices: names for this group.

    `params` is a list of pairs (name, parameter), `name` the group's name, and `peak_lr` its peak learning rate.
    """
    members: dict[str, list[tuple[str, nn.Parameter]]] = {name: [] for name in ("matrices", "decay", "plain", "bits")}
    for name, param in model.named_parameters():
        if param.requires_grad:
            group = "matrices" if name in matrices else _group_name(name, param, config)
            members[group].append((name, param))
    bits_decay = config.weight_decay if config.bits_weight_decay is None else config.bits_weight_decay
    decays = {"plain": 0.0, "bits": bits_decay}
    ratios = {"matrices": config.matrix_lr_ratio, "bits": config.bits_lr_ratio}
    peaks = {name: config.lr * ratios.get(name, 1.0) for name in members}
    return [
        {
            "params": params,
            "name": name,
            "lr": peaks[name],
            "peak_lr": peaks[name],
            "weight_decay": decays.get(name, config.weight_decay),
        }
        for name, params in members.items()
        if params
    ]


def _group_name(name: str, param: Tensor, config: OptimizerConfig) -> str:
    last = name.rpartition(".")[2]
    if last == BITS:
        return "bits"
    return "decay" if config.decay_vectors or (param.ndim >= 2 and last not in RECURRENCE) else "plain"


def _by_parameter(model: nn.Module, partition: Mapping[str, Partition] | None) -> dict[Tensor, Partition]:
    """Return the partition of each parameter, by the parameter itself."""
    if partition is None:
        raise ValueError("adam-mini needs a partition, a dict from each parameter's name to its partition")
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    rest = {name for name in params if name.rpartition(".")[2] == BITS}
    if missing := sorted(params.keys() - partition.keys() - rest):
        raise ValueError(f"adam-mini: the partition has no entry for {', '.join(missing)}; add one for each parameter")
    return {param: partition.get(name, "tensor") for name, param in params.items()}


def _move_versions(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Increment the version counter of each updated parameter, so that caches of quantized weights see the update.

    Torch's fused optimizers do not. The optimizer calls this function as a hook after each `step`.
    """
    torch.autograd.graph.increment_version(
        [param for _, param in _named_parameters(optimizer) if param.grad is not None]
    )


def _named_parameters(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, nn.Parameter]]:
    for group in optimizer.param_groups:
        yield from zip(group["param_names"], group["params"], strict=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set every group's learning rate for the next update to its peak times `factor`, which the schedule returns."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * factor


def clip_gradients(params: Iterable[Tensor], max_norm: float | None) -> Tensor:
    """Scale the gradients so that the norm over all of them is at most max_norm; return their norm before scaling.

    max_norm=None: do not scale. The norm stays on the gradients' device. A norm of NaN makes all scaled gradients NaN;
    an infinite norm makes each of them 0 or NaN.
    """
    params = list(params)
    if any(map(is_sharded, params)):
        return clip_sharded(params, max_norm)
    norm = get_total_norm([param.grad for param in params if param.grad is not None])
    if max_norm is not None:
        clip_grads_with_norm_(params, max_norm, norm)
    return norm


def clip_sharded(params: Iterable[Tensor], max_norm: float | None) -> Tensor:
    """Do what `clip_gradients` does for sharded gradients; all ranks must call this.

    Each rank sums the squares of its own gradients in FP64, and these sums are added, so the norm, rounded to FP32, is
    almost always the same for any way of sharding.
    """
    grads = [local(param.grad) for param in params if param.grad is not None]
    squares = [torch.linalg.vector_norm(grad, dtype=torch.float64).square() for grad in grads if grad.numel()]
    device = grads[0].device
    total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=device)
    dist.all_reduce(total)
    norm = total.sqrt().float()
    if max_norm is not None:
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # as torch.nn.utils.clip_grads_with_norm_
        for grad in grads:
            grad.mul_(scale)
    return norm


def _is_by_part(optimizer: torch.optim.Optimizer, param: Tensor) -> bool:
    """Tell whether there is one second moment per part of this parameter, not per element; every rank stores all."""
    return isinstance(optimizer, AdamMini) and not optimizer.is_by_element(param)


def _moments(optimizer: torch.optim.Optimizer, param: Tensor) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a parameter's moments, by their names in the optimizer's state."""
    shape = tuple(param.shape)
    if isinstance(optimizer, Muon) and param in optimizer.matrices:
        return {"momentum_buffer": shape}
    second = optimizer.second_moment_shape(param) if isinstance(optimizer, AdamMini) else shape
    return {"exp_avg": shape, "exp_avg_sq": second}


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """Return the optimizer's state by parameter name, for checkpoints; it shares memory with the optimizer."""
    return {
        name: dict(optimizer.state[param]) for name, param in _named_parameters(optimizer) if param in optimizer.state
    }


def load_optimizer_state(optimizer: torch.optim.Optimizer, states: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Copy `states`, which `optimizer_state` returned, into the optimizer. Empty `states` change nothing.

    Both must have the same parameters and shapes, else ValueError is raised. Bit widths of samplers are excepted: if
    only the optimizer has them, their state starts from scratch; if only `states` has them, they are ignored.
    """
    params = dict(_named_parameters(optimizer))
    alone = sorted(name for name in states.keys() ^ params.keys() if name.rpartition(".")[2] != BITS)
    if alone and states:
        raise ValueError(
            f"the saved state does not fit this optimizer: only one of the two has {', '.join(alone)}; use the model "
            "with which it was saved"
        )
    copies = {
        name: {
            key: value.clone() if key == "exp_avg_sq" and _is_by_part(optimizer, param) else copy_like(value, param)
            for key, value in states[name].items()
        }
        for name, param in params.items()
        if name in states
    }
    for name, param in params.items():
        saved = {key: tuple(value.shape) for key, value in copies.get(name, {}).items()}
        if saved and saved != {"step": (), **_moments(optimizer, param)}:
            raise ValueError(
                f"the saved state of {name} has the shapes {saved}: use the optimizer and partition of that state"
            )
    state = optimizer.state_dict()
    state["state"] = {index: copies[name] for index, name in enumerate(params) if name in copies}
    optimizer.load_state_dict(state)
