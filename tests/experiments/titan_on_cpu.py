"""Run jobs with torchtitan's trainer on a CPU; ranks are forked from a process that has imported this module.

torchtitan is made for GPUs. This module replaces the device's name, the queries of the memory monitor, triton if it is
not installed (none of its kernels runs), and FSDP's mean of gradients, because gloo has only a sum.

A job is a command line of torchtitan. `by_hand` does the same training without torchtitan's trainer and without our
converter: with the same model, `quantize`, and a plain loop, with all ranks in one process.
"""

import copy
import importlib.util
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn


def _stand_in_for_a_gpu() -> None:
    cpu = ModuleType("cpu")
    vars(cpu).update(vars(torch.cpu))
    vars(cpu).update(
        current_device=lambda: 0,
        set_device=lambda _: None,
        get_device_name=lambda _: "CPU",
        get_device_properties=lambda _: SimpleNamespace(total_memory=1 << 34),
        reset_peak_memory_stats=lambda: None,
        empty_cache=lambda: None,
        memory_stats=lambda _: {},
    )
    vars(torch._utils).update(_get_available_device_type=lambda: "cpu", _get_device_module=lambda _: cpu)
    if importlib.util.find_spec("triton") is None:  # replace torchtitan's only file that imports triton
        kernels = ModuleType("torchtitan.models.moe.kernels")
        vars(kernels).update(generate_permute_indices=None)
        sys.modules[kernels.__name__] = kernels


_stand_in_for_a_gpu()

import torchtitan.models.llama3.infra.parallelize as sharding  # noqa: E402
import torchtitan.train  # noqa: E402
from torch.distributed.checkpoint.state_dict_loader import load  # noqa: E402
from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torchtitan.components.loss import cross_entropy_loss  # noqa: E402
from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.models.llama3 import Transformer, llama3_args  # noqa: E402
from torchtitan.protocols.train_spec import get_train_spec  # noqa: E402

from fewbits.experiments.config import recipe_from_overrides  # noqa: E402
from fewbits.models.networks.registry import build  # noqa: E402
from fewbits.models.quantize import quantize  # noqa: E402

# Four times narrower than in torchtitan: without AVX-512, torch multiplies BF16 matrices at 1 GFLOP/s.
llama3_args["debugmodel"].dim, llama3_args["debugmodel"].n_heads = 64, 4

PATIENCE = 300  # seconds after which a rank ends itself
Rows = list[dict[str, float]]
undivided = sharding.disable_fsdp_gradient_division


def summed(model: nn.Module) -> None:
    undivided(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


sharding.disable_fsdp_gradient_division = summed
torchtitan.train.time = SimpleNamespace(
    perf_counter=time.perf_counter, sleep=lambda _: None
)  # the trainer would sleep for 2 s at its end


class Recorder:
    """A replacement of TensorBoard's logger that keeps all bits of the numbers."""

    def __init__(self) -> None:
        self.rows: Rows = []

    def log(self, metrics: dict[str, Any], step: int) -> None:
        row = {"step": step, "loss": metrics["loss_metrics/global_avg_loss"], "norm": metrics["grad_norm"]}
        self.rows.append(row | {name: value for name, value in metrics.items() if name.startswith("fewbits/")})

    def close(self) -> None:
        pass


def train(config: Any) -> Rows:
    trainer = torchtitan.train.Trainer(config)
    try:
        trainer.metrics_processor.logger = recorder = Recorder()
        trainer.train()
        return recorder.rows
    finally:
        trainer.close()


def by_hand(config: Any, ranks: int) -> Rows:
    """Train without torchtitan's trainer, with this number of simulated ranks; return the losses and gradient norms."""
    sharded = config.parallelism.data_parallel_replicate_degree == 1 and ranks > 1
    ours = config.model.name == "fewbits"
    autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=not sharded and not ours)
    masters = build(config.model.flavor, seed=config.debug.seed) if ours else initial_model(config)
    # FSDP computes with a copy of all weights in the lower precision, but gathers our models' weights in FP32.
    low_precision = sharded and not ours and config.training.mixed_precision_param == "bfloat16"
    model = copy.deepcopy(masters).bfloat16() if low_precision else masters
    recipe = recipe_from_overrides(config.fewbits.recipe, config.fewbits.settings)
    quantization = quantize(model, recipe, seed=config.debug.seed)
    # torchtitan draws other initial weights if they are sharded, so these jobs start from a checkpoint.
    if start := config.checkpoint.initial_load_path:
        state = masters.state_dict()
        load(state, checkpoint_id=start, no_dist=True)
        masters.load_state_dict(state)
    o = config.optimizer
    optimizer = torch.optim.AdamW(
        masters.parameters(), lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps, weight_decay=o.weight_decay, fused=True
    )
    micro_batches = max(config.training.global_batch_size // (config.training.local_batch_size * ranks), 1)
    batches = [batches_of(config, rank, ranks) for rank in range(ranks)]
    rows: Rows = []
    for step in range(config.training.steps):
        tokens = [list(itertools.islice(batch, micro_batches)) for batch in batches]
        count = sum(labels.numel() for rank_batches in tokens for _, labels in rank_batches)
        total = torch.zeros(())
        if model is not masters:
            with torch.no_grad():
                for low, master in zip(model.parameters(), masters.parameters(), strict=True):
                    low.copy_(master)
        for rank, rank_batches in enumerate(tokens):
            for micro_batch, (inputs, labels) in enumerate(rank_batches):
                quantization.begin(step, micro_batch, rank=rank)
                with autocast:
                    loss = cross_entropy_loss(model(inputs), labels) / count
                total += loss.detach()
                if micro_batch == 0 and (penalty := quantization.penalty()) is not None:
                    loss = loss + penalty / ranks
                loss.backward()
            if model is not masters:
                add_gradients(model, masters)
        if not sharded and ranks > 1:  # DDP takes the mean
            for master in masters.parameters():
                assert master.grad is not None
                master.grad /= ranks
        norm = nn.utils.clip_grad_norm_(masters.parameters(), config.training.max_norm, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        rows.append({"step": step + 1, "loss": float(total), "norm": float(norm)})
    return rows


def initial_model(config: Any) -> nn.Module:
    torch.manual_seed(config.debug.seed)
    arguments = llama3_args[config.model.flavor]
    arguments.update_from_config(config)
    with torch.device("meta"):
        model = Transformer(arguments)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights()
    return model


def batches_of(config: Any, rank: int, ranks: int) -> Iterator[tuple[Tensor, Tensor]]:
    spec = get_train_spec("llama3")
    tokenizer = spec.build_tokenizer_fn(config)
    loader = spec.build_dataloader_fn(dp_world_size=ranks, dp_rank=rank, tokenizer=tokenizer, job_config=config)
    for inputs, labels in loader:
        yield inputs["input"], labels


def add_gradients(model: nn.Module, masters: nn.Module) -> None:
    """Add the gradients of the low-precision copy `model` to the gradients of the FP32 `masters`, in FP32."""
    for low, master in zip(model.parameters(), masters.parameters(), strict=True):
        assert low.grad is not None
        master.grad = low.grad.float() if master.grad is None else master.grad + low.grad.float()
        low.grad = None


def main() -> None:
    """Run the jobs that stdin lists in JSON; print one line of JSON: the logged rows or the error of each job."""
    signal.alarm(PATIENCE)  # ranks would wait for each other for ever
    torch.set_num_threads(1)
    jobs: list[dict[str, Any]] = json.load(sys.stdin)
    done: list[dict[str, Any]] = []
    for job in jobs:
        os.environ["MASTER_PORT"] = str(job["port"])
        try:
            config = ConfigManager().parse_args(job["arguments"])
            rows = by_hand(config, job["by_hand"]) if job["by_hand"] else train(config)
            done.append({"rows": rows})
        except Exception as error:
            done.append({"error": f"{type(error).__name__}: {error}"})
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
    print(json.dumps(done))
