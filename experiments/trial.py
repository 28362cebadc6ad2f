"""Declare `Trial`, all settings of one training run, as frozen dataclasses: model, recipe, data, training and so on."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fewbits.common.from_dict import from_dict, one_of
from fewbits.common.store_folder import store_folder
from fewbits.experiments.data.corpus import DataConfig
from fewbits.experiments.optimization.optimizers import OptimizerConfig
from fewbits.experiments.optimization.precision import Precision
from fewbits.experiments.optimization.schedules import ScheduleConfig
from fewbits.kernels.seeds import derive_seed
from fewbits.models.networks.decoder import DecoderConfig
from fewbits.models.observer import ObserverConfig
from fewbits.models.recipe import Recipe

DTYPES = ("bf16", "fp16", "fp32")
TRACKING = ("auto", "none", "mlflow")
PROBE_SPLITS = ("train", "validation", "ood")
PROBE_PARTS = ("gemms", "slots", "blocks")
SEEDS = 1 << 63
# Purposes for which seeds are derived from the trial's seed: initial weights, order of the data, rounding of operands
# and samplers, rounding of weights and optimizer states, dropout.
INITIAL, ORDER, ROUNDING, UPDATES, DROPOUT = range(5)


@dataclass(frozen=True)
class Training:
    """The size and precision of training, and how it ends."""

    steps: int
    batch: int  # sequences per update, over all ranks
    micro_batch: int  # sequences that one rank processes at once
    length: int  # tokens per sequence
    dtype: str = "bf16"  # the model computes in this dtype; `Trial.precision` sets the formats of stored weights
    checkpoint_every: int = 100  # steps
    blow_up: float = 3.0  # a loss above blow_up · ln(model.vocab) ends the trial as diverged; 0: no limit (assumed)
    rounding_seed: int | None = None  # seed of stochastic rounding and of samplers' noise; None: the trial's seed
    compile: bool = False  # use torch.compile
    recompute: bool = False  # compute each block again in the backward pass instead of keeping its activations
    reduce_each: bool = False  # several ranks: reduce gradients after every micro-batch, which needs less memory

    def __post_init__(self) -> None:
        one_of("training.dtype", self.dtype, DTYPES)
        for name in ("steps", "batch", "micro_batch", "length", "checkpoint_every"):
            at_least(f"training.{name}", getattr(self, name), 1)
        if not 0 <= self.blow_up < math.inf:
            raise ValueError(f"training.blow_up {self.blow_up}: a finite number is expected, 0 (no limit) or more")
        if self.rounding_seed is not None and not 0 <= self.rounding_seed < SEEDS:
            raise ValueError(f"training.rounding_seed {self.rounding_seed}: valid values are 0 to 2^63 - 1 and null")
        if self.batch % self.micro_batch:
            raise ValueError(f"training.batch {self.batch}: not a multiple of training.micro_batch {self.micro_batch}")


@dataclass(frozen=True)
class Evaluation:
    """The evaluation of a trial: the loss during training, and further measures when training is done."""

    every: int = 50  # steps between evaluations of the loss; the last step is always evaluated
    windows: int = 64  # number of windows to evaluate in each held-out split (validation and out-of-domain text)
    ood_windows: int | None = None  # number of windows of out-of-domain text; None: as many as `windows`
    tasks: tuple[str, ...] = ()  # lm-eval's tasks or our groups of tasks (mor, nvfp4), when training is done
    texts: tuple[str, ...] = field(default=(), metadata={"neutral": ()})  # text files; their losses, with the tasks
    # Also evaluate tasks and texts each time that this number of steps is done; 0: only when training is done.
    tasks_every: int = field(default=0, metadata={"neutral": 0})
    tasks_path: str | None = None  # a folder of further lm-eval tasks, as YAML files
    run_code: bool = False  # let tasks run code that the model writes; use a sandbox

    def __post_init__(self) -> None:
        for name, least in (("every", 1), ("windows", 1)):
            at_least(f"evaluation.{name}", getattr(self, name), least)
        at_least("evaluation.tasks_every", self.tasks_every, 0)
        if self.tasks_every and not (self.tasks or self.texts):
            raise ValueError(f"evaluation.tasks_every {self.tasks_every}: set evaluation.tasks or evaluation.texts")
        if self.ood_windows is not None:
            at_least("evaluation.ood_windows", self.ood_windows, 1)


@dataclass(frozen=True)
class Branch:
    """The checkpoint of another trial from which this trial takes weights, optimizer state and position in the data."""

    parent: str | None = None  # the other trial's run folder; None: this trial starts from scratch
    step: int | None = None  # step of the checkpoint; None: the newest checkpoint


@dataclass(frozen=True)
class ProbeConfig:
    """A probe trial reads `training.steps` micro-batches with the checkpoint that `branch` names, without training."""

    # How often each batch is measured with other random numbers, if the recipe uses any; 0: the trial is no probe.
    seeds: int = 0
    # validation, ood: held-out text, of which each seed reads other documents; train: the parent's next batches.
    split: str = "validation"
    # Also measure the recipe with only one GEMM, slot or block quantized, and with all but this one.
    parts: tuple[str, ...] = ()
    # Also measure how much one optimizer update decreases the loss: with the quantized and with the exact gradient.
    update: bool = True
    # The dtype in which the unquantized model computes: bf16, fp16 or fp32; None: training.dtype.
    reference: str | None = field(default=None, metadata={"neutral": None})
    # Also measure the error of sums with these accumulators, such as hopper-fp8.
    accumulators: tuple[str, ...] = field(default=(), metadata={"neutral": ()})

    def __post_init__(self) -> None:
        if self.seeds < 0:
            raise ValueError(f"probe.seeds {self.seeds}: 0 (no probe) or more is expected")
        one_of("probe.split", self.split, PROBE_SPLITS)
        if self.reference is not None:
            one_of("probe.reference", self.reference, DTYPES)
        for part in self.parts:
            one_of("probe.parts", part, PROBE_PARTS)


@dataclass(frozen=True)
class Trial:
    """The settings of one training run, or of one probe (a measurement of a recipe at a checkpoint)."""

    model: DecoderConfig
    recipe: Recipe
    data: DataConfig
    training: Training
    seed: int = 0
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    precision: Precision = field(default_factory=Precision)
    evaluation: Evaluation = field(default_factory=Evaluation)
    observer: ObserverConfig = field(default_factory=ObserverConfig)
    branch: Branch = field(default_factory=Branch)
    probe: ProbeConfig = field(default_factory=ProbeConfig)

    def __post_init__(self) -> None:
        if not 0 <= self.seed < SEEDS:
            raise ValueError(f"seed {self.seed}: valid values are 0 to 2^63 - 1")
        self.precision.check(self.training.dtype, self.recipe.sampler.kind, self.training.compile)
        if self.model.positions == "learned" and self.training.length > self.model.context:
            raise ValueError(
                f"training.length {self.training.length}: model {self.model.name} has {self.model.context} positions"
            )
        if self.is_probe and self.training.batch != self.training.micro_batch:
            raise ValueError(
                f"training.batch {self.training.batch}: a probe (probe.seeds {self.probe.seeds}) reads one micro-batch "
                f"at a time: set it to training.micro_batch, {self.training.micro_batch}"
            )

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Trial:
        """Return the trial from nested data, such as a config; raise ValueError for unknown keys and wrong types."""
        if isinstance(data, Mapping) and isinstance(data.get("evaluation"), Mapping):  # 0.1.0 had `evaluation.cloze`
            data = {**data, "evaluation": {key: value for key, value in data["evaluation"].items() if key != "cloze"}}
        return from_dict(Trial, data)

    def to_dict(self) -> dict[str, Any]:
        """Return the trial as nested dictionaries of plain values; `from_dict` reverses it."""
        return dataclasses.asdict(self)

    def seed_for(self, purpose: int, *more: int) -> int:
        """Return the seed for a purpose, such as ROUNDING; `more` distinguishes several seeds for one purpose."""
        rounding = self.training.rounding_seed if purpose in (ROUNDING, UPDATES) else None
        return derive_seed(self.seed if rounding is None else rounding, purpose, *more)

    @property
    def is_probe(self) -> bool:
        """Tell whether the trial measures its recipe at a checkpoint instead of training."""
        return bool(self.probe.seeds)

    @property
    def name(self) -> str:
        """A readable name, MODEL-RECIPE-DATA-sSEED, of characters that are safe in the name of the run folder."""
        probe = ("probe",) if self.is_probe else ()
        parts = (self.model.name, *probe, self.recipe.label, self.data.kind, f"s{self.seed}")
        return "-".join(re.sub(r"[^\w.]+", "-", part)[:40].strip("-.") or "unnamed" for part in parts)


MOST_THREADS = 1024


@dataclass(frozen=True)
class Runtime:
    """How and where a trial runs; only the device's kind and a CPU's number of threads are part of the trial's id."""

    device: str = "auto"  # cpu, cuda, or auto: a GPU if the machine that trains has one
    threads: int = 1  # number of threads on a CPU
    runs: str = "runs"  # the store: the folder of run folders
    cache: str | None = None  # folder of prepared corpora; None: the one in the user's cache folder
    keep_checkpoints: int = 2  # number of newest checkpoints that are kept for resuming
    keep_every: int = 0  # steps between checkpoints that are kept permanently, for branches and probes; 0: none
    keep_steps: tuple[int, ...] = ()  # further steps whose checkpoints are kept permanently
    cuda_graph: str = "off"  # on: replay each step's passes as a CUDA graph; auto: where that is possible; off
    tracking: str = "auto"  # mlflow, none, or auto: mlflow if the store has a database, which `fewbits ui` creates

    def __post_init__(self) -> None:
        store_folder(self.runs)
        one_of("runtime.device", self.device, ("auto", "cpu", "cuda"))
        one_of("runtime.cuda_graph", self.cuda_graph, ("off", "auto", "on"))
        one_of("runtime.tracking", self.tracking, TRACKING)
        for name, least in (("threads", 1), ("keep_checkpoints", 1), ("keep_every", 0)):
            at_least(f"runtime.{name}", getattr(self, name), least)
        if self.threads > MOST_THREADS:
            raise ValueError(f"runtime.threads {self.threads}: at most {MOST_THREADS} is expected")


def at_least(setting: str, value: int, least: int) -> None:
    """Raise ValueError if `value` is below `least`; `setting` is its name in the message."""
    if value < least:
        raise ValueError(f"{setting} {value}: {least} or more is expected")
