"""Define a trial's precision policy: the scale of its loss, and the formats of its weights, states and gradients.

`training.dtype` is the dtype in which the model computes. The policy defines everything else:

    loss        multiplied by a power of two before the backward pass, so that small gradients do not become 0 in FP16
    gradients   summed over micro-batches in FP32, or in BF16 (then the sum is rounded after each micro-batch)
    weights     stored in FP32 (master weights), or in BF16 or FP16 (then weights are rounded after each update)
    states      the optimizer's states: stored in FP32, or in BF16 (then states are rounded after each update)

Values of a narrower format are stored in FP32 tensors. The optimizer computes an update in FP32 and the results are
rounded once, as a fused optimizer does with narrow tensors: the numbers are the same, but no memory is saved.

Dynamic loss scaling follows torch's GradScaler. An update whose gradients are not finite is skipped, and the scale is
halved; after `growth_interval` updates without overflow, it is doubled. A skipped update uses up its batch and its step
of the schedule. With static loss scaling, updates are skipped in the same way, but the scale never changes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fewbits.common.from_dict import one_of
from fewbits.kernels.seeds import derive_seed

LOSS_SCALING = ("none", "static", "dynamic")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ROUNDING = ("nearest", "stochastic")
NARROW = ("fp32", "bf16")  # valid formats of states and of sums of gradients; in FP16 second moments would underflow
GROWTH, BACKOFF = 2.0, 0.5
PATIENCE = 32  # a trial ends as diverged after this many skipped updates in a row (or all its updates, if fewer)


@dataclass(frozen=True)
class Precision:
    """The settings of a trial's precision policy: the loss scale, and the formats of weights, states and gradients."""

    loss_scaling: str = "none"
    loss_scale: float = 65536.0  # the factor of the loss; with dynamic scaling, at the start of training
    growth_interval: int = 2000  # dynamic scaling: updates without overflow after which the scale is doubled
    weights: str = "fp32"  # the format in which weights are stored; fp32: master weights
    rounding: str = "nearest"  # how updated weights are rounded to the format `weights`
    states: str = "fp32"  # the format of the optimizer's states
    accumulation: str = "fp32"  # the format in which gradients are summed over micro-batches
    every: int = 0  # every how many updates gradients and updates are measured; 0: never

    def __post_init__(self) -> None:
        one_of("precision.loss_scaling", self.loss_scaling, LOSS_SCALING)
        one_of("precision.weights", self.weights, DTYPES)
        one_of("precision.rounding", self.rounding, ROUNDING)
        one_of("precision.states", self.states, NARROW)
        one_of("precision.accumulation", self.accumulation, NARROW)
        if not 0 < self.loss_scale < math.inf or math.frexp(self.loss_scale)[0] != 0.5:
            raise ValueError(f"precision.loss_scale {self.loss_scale}: a power of two is expected, such as 65536")
        if self.growth_interval < 1:
            raise ValueError(f"precision.growth_interval {self.growth_interval}: 1 or more is expected")
        if self.every < 0:
            raise ValueError(f"precision.every {self.every}: 0 (never measure) or a number of updates is expected")
        if self.loss_scaling == "none" and self.loss_scale != Precision.loss_scale:
            raise ValueError(
                f"precision.loss_scale {self.loss_scale}: needs precision.loss_scaling static or dynamic, not none"
            )
        if self.rounding == "stochastic" and self.weights == "fp32":
            raise ValueError("precision.rounding stochastic needs precision.weights bf16 or fp16, not fp32")

    @property
    def is_plain(self) -> bool:
        """True for the default policy: FP32 weights, states and sums of gradients, no loss scaling, no measurements."""
        return self == Precision(growth_interval=self.growth_interval)

    def check(self, dtype: str, sampler: str, compiled: bool) -> None:
        """Raise ValueError if the policy cannot be combined with training.dtype, sampler kind, or compilation."""
        if self.weights not in ("fp32", dtype) and dtype != "fp32":
            raise ValueError(
                f"precision.weights {self.weights}: with training.dtype {dtype}, valid values are fp32 and {dtype}, "
                "because the model would round weights of another format again"
            )
        if self.weights != "fp32" and sampler != "none":
            raise ValueError(f"precision.weights {self.weights}: sampler {sampler} needs precision.weights=fp32")
        if self.every and compiled:
            raise ValueError(f"precision.every {self.every}: needs training.compile=false, or set precision.every=0")

    def check_ranks(self, ranks: int) -> None:
        """Raise ValueError if there are several ranks and the policy is not the default one."""
        if ranks > 1 and not self.is_plain:
            raise ValueError(
                f"precision: {ranks} ranks need FP32 weights, states and sums of gradients, no loss scaling, and "
                "precision.every=0: train with one rank, or set precision=mixed"
            )


class LossScaler:
    """The loss scale, and the counts of updates from which dynamic loss scaling decides when to change it."""

    def __init__(self, config: Precision) -> None:
        self.dynamic, self.growth_interval = config.loss_scaling == "dynamic", config.growth_interval
        self.scale = config.loss_scale
        self.clean = 0  # updates without overflow since the scale last changed
        self.skipped = 0  # skipped updates in total
        self.in_a_row = 0  # skipped updates since the last update that was not skipped

    def adjust(self, overflowed: bool) -> None:
        """Count one update, and adjust a dynamic scale: halve it after an overflow, else let it grow."""
        self.skipped += overflowed
        self.in_a_row = self.in_a_row + 1 if overflowed else 0
        self.clean = 0 if overflowed else self.clean + 1
        if not self.dynamic:
            return
        if overflowed:
            self.scale *= BACKOFF
        elif self.clean == self.growth_interval:
            self.scale, self.clean = self.scale * GROWTH, 0

    def state(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in _SCALER_STATE}

    def load_state(self, state: Mapping[str, float], *, branch: bool) -> None:
        """Restore what `state()` returned; of the state of a branch's parent, only the scale."""
        for name in ("scale",) if branch else _SCALER_STATE:
            setattr(self, name, state[name])


_SCALER_STATE = ("scale", "clean", "skipped", "in_a_row")


class Policy:
    """Applies a precision policy (see `Precision`) to one model and its optimizer.

    A training loop calls, for each update: `begin`; `scaled` and `add_up` for every micro-batch, before and after its
    backward pass; then `finish`, `judge` and `update`.

    seed: the seed of stochastic rounding. steps: the number of updates of the trial.
    """

    def __init__(
        self, config: Precision, model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, *, steps: int
    ) -> None:
        self.config, self.optimizer, self.seed = config, optimizer, seed
        self.patience = min(PATIENCE, steps)
        self.params = {name: param for name, param in model.named_parameters() if param.requires_grad}
        self.scaler = LossScaler(config) if config.loss_scaling != "none" else None
        self.records = UpdateRecords(model, config.every) if config.every else None
        self.store()

    # ---- an update, in the order of calls

    def begin(self, step: int) -> None:
        """Prepare the measurements of update `step`, if it is measured; to be called before its first forward pass."""
        if self.records is not None:
            self.records.begin(step, 1.0 if self.scaler is None else self.scaler.scale)

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss times the loss scale, for the backward pass."""
        return loss if self.scaler is None else loss * self.scaler.scale

    def add_up(self) -> None:
        """Round the sums of gradients to the format `accumulation`; called after each micro-batch's backward pass."""
        if self.config.accumulation != "fp32":
            for param in self.params.values():
                if param.grad is not None:
                    param.grad.copy_(param.grad.to(DTYPES[self.config.accumulation]))

    def finish(self, step: int) -> None:
        """Divide the gradients by the loss scale, and record them if `step` is measured; called before clipping."""
        if self.scaler is not None:
            grads = [param.grad for param in self.params.values() if param.grad is not None]
            torch._foreach_mul_(grads, 1 / self.scaler.scale)
        if self.records is not None:
            self.records.add_gradients(step, self.params)

    def judge(self, row: dict[str, float]) -> dict[str, float]:
        """Return the update's metrics; with loss scaling, add `loss_scale`, and `skipped` (1.0 or 0.0).

        row: the metrics, including `gradient_norm`. If it is not finite, the gradients overflowed: `update` then skips
            the update, and the result has no `gradient_norm`.
        """
        if self.scaler is None:
            return row
        overflowed = not math.isfinite(row["gradient_norm"])
        kept = {key: value for key, value in row.items() if not (overflowed and key == "gradient_norm")}
        return kept | {"loss_scale": self.scaler.scale, "skipped": float(overflowed)}

    def update(self, step: int, row: Mapping[str, float]) -> None:
        """Update the weights, or skip the update if its gradients overflowed; then adjust the loss scale.

        step: seeds stochastic rounding; it is counted from the start of the trunk, so that a branch does not repeat the
            random numbers of its parent. row: the result of `judge`, with `step`, the update's number in this trial.
        """
        overflowed = bool(row.get("skipped"))
        if not overflowed:
            self._update(step, int(row["step"]))
        if self.scaler is not None:
            self.scaler.adjust(overflowed)

    def _update(self, seed_step: int, step: int) -> None:
        measured = self.records is not None and self.records.due(step)
        before = {name: param.detach().clone() for name, param in self.params.items()} if measured else {}
        self.optimizer.step()
        exact = {name: param.detach().clone() for name, param in self.params.items()} if measured else {}
        self.store(seed_step if self.config.rounding == "stochastic" else None)
        if self.records is not None and measured:
            self.records.add_updates(step, before, exact, self.params)

    @torch.no_grad()
    def store(self, step: int | None = None) -> None:
        """Round the weights and the optimizer's states, in place, to the formats in which the policy stores them.

        step: the step that seeds stochastic rounding of the weights; None: round to nearest, as for initial weights.
        """
        if self.config.weights != "fp32":
            for index, param in enumerate(self.params.values()):
                cast = self._nearest if step is None else partial(self._stochastic, step=step, index=index)
                param.copy_(cast(param))
        if self.config.states != "fp32":
            for param in self.params.values():
                for name, state in self.optimizer.state.get(param, {}).items():
                    if name != "step":
                        state.copy_(state.to(DTYPES[self.config.states]))

    def _nearest(self, param: Tensor) -> Tensor:
        return param.to(DTYPES[self.config.weights])

    def _stochastic(self, param: Tensor, *, step: int, index: int) -> Tensor:
        """Return a parameter rounded stochastically, seeded by its position `index`. Large values become infinite."""
        spec = f"{self.config.weights}:stochastic:overflow=inf"
        return torch.ops.fewbits.quantize(param, spec, -1, derive_seed(self.seed, step, index))

    # ---- state

    @property
    def complaint(self) -> str | None:
        """A message if training must end because too many updates in a row were skipped; None if it can go on."""
        if self.scaler is None or self.scaler.in_a_row < self.patience:
            return None
        return (
            f"{self.patience} updates in a row were skipped because gradients overflowed; the loss scale is "
            f"{self.scaler.scale:g}"
        )

    def results(self) -> dict[str, Any]:
        """Return the entries of result.json: with loss scaling `skipped_updates`; if they ended training, `reason`."""
        skipped = {} if self.scaler is None else {"skipped_updates": self.scaler.skipped}
        return skipped if self.complaint is None else skipped | {"reason": self.complaint}

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of precision.parquet; none without measurements."""
        return [] if self.records is None else self.records.rows

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint: `scaler` if the loss is scaled, `records` if updates are measured."""
        scaler = {} if self.scaler is None else {"scaler": self.scaler.state()}
        return scaler | ({} if self.records is None else {"records": self.records.state()})

    def load_state(self, state: Mapping[str, Any], *, branch: bool) -> None:
        """Restore what `state()` returned, after weights and optimizer were loaded; round both to the formats here.

        branch: True if the state is the parent's, which may have another policy; then only the loss scale is restored.
        """
        if self.scaler is not None and "scaler" in state:
            self.scaler.load_state(state["scaler"], branch=branch)
        if self.records is not None and "records" in state and not branch:
            self.records.load_state(state["records"])
        self.store()


# ------------------------------------------------------------------------------------------------ records of updates

# docs/columns.md defines the columns. An update u ≠ 0 of a weight w is lost in a format if round(round(w) + u) =
# round(w), rounded to nearest in this format. The histogram of a gradient's exponents shows which values would be 0
# with another loss scale, because FP16 rounds magnitudes up to 2^-25 to 0.
LOWEST, HIGHEST = -64, 15  # exponents of the first and the last bin, which also count all lower and all higher ones
BINS = HIGHEST - LOWEST + 1
FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16}
_ZEROS, _NONFINITE, _VALUES = range(BINS, BINS + 3)  # indices of the counts that `gradient_counts` appends


class UpdateRecords:
    """Collects the rows of precision.parquet: at every `every`-th update, a row for each parameter and linear layer."""

    def __init__(self, model: nn.Module, every: int) -> None:
        self.every, self.rows = every, list[dict[str, Any]]()
        self._scale: float | None = None  # the loss scale while an update is measured, else None
        self._dy: dict[str, Tensor] = {}  # sums of `gradient_counts` over micro-batches, by layer
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(lambda _module, _inputs, y, name=name: self._watch(name, y))

    def due(self, step: int) -> bool:
        """Tell whether this update is measured."""
        return step % self.every == 0

    def begin(self, step: int, scale: float) -> None:
        """Start update `step`; to be called before its first forward pass. scale: the loss scale of this update."""
        self._scale, self._dy = scale if self.due(step) else None, {}

    def _watch(self, name: str, y: Tensor) -> None:
        if self._scale is not None and y.requires_grad:
            y.register_hook(lambda dy: self._add_dy(name, dy))

    def _add_dy(self, name: str, dy: Tensor) -> None:
        if self._scale is not None:
            counts = gradient_counts(dy, self._scale)
            self._dy[name] = self._dy[name] + counts if name in self._dy else counts

    def add_gradients(self, step: int, params: Mapping[str, Tensor]) -> None:
        """Add the rows of update `step` if it is measured. params: by name; with unscaled gradients."""
        if self._scale is None:
            return
        self._scale = None
        grads = {name: param.grad for name, param in params.items() if param.grad is not None}
        counts = {("parameter", name): gradient_counts(grad) for name, grad in grads.items()}
        counts |= {("dy", name): count for name, count in self._dy.items()}
        numbers = torch.stack([*counts.values()]).tolist()
        for (slot, name), count in zip(counts, numbers, strict=True):
            self.rows.append(
                {
                    "step": step,
                    "layer": name,
                    "slot": slot,
                    "values": count[_VALUES],
                    "zeros": count[_ZEROS],
                    "nonfinite": count[_NONFINITE],
                    "histogram": count[:BINS],
                }
            )

    def add_updates(
        self, step: int, before: Mapping[str, Tensor], exact: Mapping[str, Tensor], stored: Mapping[str, Tensor]
    ) -> None:
        """Add the counts of lost updates to the rows of the parameters at update `step` (see `update_counts`)."""
        rows = {row["layer"]: row for row in self.rows if row["step"] == step and row["slot"] == "parameter"}
        for name, row in rows.items():
            row |= update_counts(before[name], exact[name], stored[name].detach())

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint: `rows` without their histograms, and `histograms`, int64 [rows, BINS]."""
        histograms = torch.tensor([row["histogram"] for row in self.rows], dtype=torch.int64).view(-1, BINS)
        rows = [{key: value for key, value in row.items() if key != "histogram"} for row in self.rows]
        return {"rows": rows, "histograms": histograms}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the rows that `state()` returned."""
        self.rows = [
            # The columns must have the same order as in a new row.
            {key: row[key] for key in row if key not in COUNTED}
            | {"histogram": histogram}
            | {key: row[key] for key in COUNTED if key in row}
            for row, histogram in zip(state["rows"], state["histograms"].tolist(), strict=True)
        ]


# The columns of `update_counts`.
COUNTED = ("updates", "lost", *(f"lost_{name}" for name in FORMATS))


@torch.no_grad()
def gradient_counts(grad: Tensor, scale: float = 1.0) -> Tensor:
    """Return one tensor: the histogram of exponents of grad / scale; then _ZEROS, _NONFINITE and _VALUES."""
    magnitude = grad.float().abs()
    zeros, nonfinite = (magnitude == 0).sum(), (~magnitude.isfinite()).sum()
    ordinary = magnitude[magnitude.isfinite() & (magnitude > 0)]
    exponents = torch.frexp(ordinary)[1] - 1 - (math.frexp(scale)[1] - 1)
    bins = torch.bincount(exponents.clamp(LOWEST, HIGHEST) - LOWEST, minlength=BINS)
    return torch.cat((bins, torch.stack((zeros, nonfinite, torch.full_like(zeros, grad.numel())))))


@torch.no_grad()
def update_counts(before: Tensor, exact: Tensor, stored: Tensor) -> dict[str, int]:
    """Return how many weights have an update other than 0, and how many of these are lost: the columns COUNTED.

    before, exact, stored: the weights before the update, after it in FP32, and after it as the trial stores them.
    """
    changed = exact != before
    lost = {"lost": changed & (stored == before)}
    for name, dtype in FORMATS.items():
        start = before.to(dtype).float()
        lost[f"lost_{name}"] = changed & ((start + (exact - before)).to(dtype) == start)
    counts = torch.stack([changed.sum(), *(where.sum() for where in lost.values())]).tolist()
    return dict(zip(COUNTED, counts, strict=True))
