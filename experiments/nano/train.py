"""Train GPT-2 or Llama 2 in few bits: a training loop in one file, without configs, scheduler or tracker.

    python train.py --data FOLDER_OR_TEXT --recipe nvfp4
    torchrun --nproc-per-node 8 train.py --model llama2-134m --data FOLDER --recipe gaussws

--data is a text file, read as bytes, or a folder with train.bin and val.bin as nanoGPT (or `fewbits data`) writes them.
The same command resumes from OUT/checkpoint.pt. On one device, a run has the bits of `fewbits train` with the same
settings. GPT-2 has nanoGPT's defaults, Llama 2 those of GaussWS's paper. `--model gpt2-nano` trains on a laptop. Copy
this file and change it.
"""

import argparse
import math
import os
from contextlib import nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fewbits.experiments.config import quantize
from fewbits.experiments.data.corpus import DataConfig
from fewbits.experiments.data.load import load
from fewbits.experiments.evaluation.loss import evaluate_loss
from fewbits.experiments.trial import INITIAL, ORDER, ROUNDING
from fewbits.kernels.seeds import derive_seed
from fewbits.models.networks.registry import build


@dataclass
class Settings:
    """The settings, with the values for GPT-2."""

    data: str = "input.txt"
    out: str = "out"
    model: str = "gpt2-124m"
    recipe: str = "nvfp4"
    steps: int = 19_000
    batch: int = 480  # sequences per update, of all ranks
    micro_batch: int = 16
    length: int = 1024
    lr: float = 6e-4
    final_ratio: float = 0.1  # the last learning rate divided by the first
    decay: str = "cosine"  # or linear
    decay_vectors: int = 0  # 1: weight decay also for norms and biases, as in torchtitan
    warmup: int = 700
    weight_decay: float = 0.1
    beta2: float = 0.95
    clip: float = 1.0
    evaluate_every: int = 250
    windows: int = 200
    save_every: int = 1000
    seed: int = 1


LLAMA2 = {"recipe": "gaussws", "steps": 10_000, "batch": 96, "micro_batch": 8, "length": 2048, "final_ratio": 0.0}
LLAMA2 |= {"decay": "linear", "decay_vectors": 1, "warmup": 500, "windows": 100}


class Loss(nn.Module):
    """The model's mean loss, as a module whose forward pass DistributedDataParallel can wrap."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.model.loss(inputs, targets)
        return loss


def learning_rate(s: Settings, step: int) -> float:
    """Return the learning rate of an update: a linear warm-up, then the decay."""
    if step < s.warmup:
        return s.lr * ((step + 1) / (s.warmup + 1))
    done = (step - s.warmup) / (s.steps - s.warmup)
    shape = 0.5 * (1 + math.cos(math.pi * done)) if s.decay == "cosine" else 1 - done
    return s.lr * (s.final_ratio + (1 - s.final_ratio) * shape)


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description="Train GPT-2 or Llama 2 in few bits")
    for setting in fields(Settings):
        parser.add_argument(f"--{setting.name}", type=type(setting.default), default=setting.default)
    if parser.parse_args(arguments).model.startswith("llama2"):
        parser.set_defaults(**LLAMA2)
    s = Settings(**vars(parser.parse_args(arguments)))

    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else "cpu"
    if device != "cpu":
        torch.cuda.set_device(device)
    if ranks > 1:
        dist.init_process_group("gloo" if device == "cpu" else "nccl")
    accumulation, rest = divmod(s.batch, s.micro_batch * ranks)
    if rest:
        raise SystemExit(f"--batch {s.batch} is no multiple of --micro_batch times the ranks, {s.micro_batch * ranks}")

    if not Path(s.data).exists():
        raise SystemExit(f"--data {s.data}: there is no such file or folder")
    kind = "bin" if Path(s.data).is_dir() else "text"
    corpus = load(DataConfig(kind=kind, path=s.data), Path(s.out) / "data")
    model = build(s.model, seed=derive_seed(s.seed, INITIAL), device=device)
    if corpus.vocab > model.config.vocab:
        raise SystemExit(f"{s.data} has {corpus.vocab} tokens, {s.model} only {model.config.vocab}")
    quantization = quantize(model, s.recipe, seed=derive_seed(s.seed, ROUNDING))
    parameters = list(model.parameters())
    decayed = [p for p in parameters if p.ndim >= 2 or s.decay_vectors]
    others = [p for p in parameters if not (p.ndim >= 2 or s.decay_vectors)]
    groups = [{"params": decayed, "weight_decay": s.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=s.lr, betas=(0.9, s.beta2), fused=True)
    loss_of: Any = Loss(model)
    quantization.attach(loss_of, optimizer, steps=s.steps)  # counts updates and micro-batches, which seed the noise
    if ranks > 1:
        loss_of = DistributedDataParallel(loss_of)
    if rank == 0:
        print(quantization)

    checkpoint, first, losses = Path(s.out) / "checkpoint.pt", 0, []
    if checkpoint.exists():
        saved = torch.load(checkpoint, map_location=device, weights_only=True)
        free = ("out", "steps", "evaluate_every", "windows", "save_every")
        for key, value in saved["settings"].items():
            if value != getattr(s, key) and key not in free:
                raise SystemExit(f"{checkpoint} was trained with --{key} {value}: resume with it, or set another --out")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first, losses = saved["step"], saved["losses"]

    for step in range(first, s.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(s, step)
        total = torch.zeros((), device=device)
        for micro in range(accumulation):
            window = step * s.batch + (micro * ranks + rank) * s.micro_batch
            inputs, targets = corpus.batch("train", window, s.micro_batch, s.length, derive_seed(s.seed, ORDER))
            last = micro == accumulation - 1
            with nullcontext() if last or ranks == 1 else loss_of.no_sync():
                loss = loss_of(inputs.to(device), targets.to(device))
                total += loss.detach()
                loss = loss / accumulation
                if micro == 0 and (penalty := quantization.penalty()) is not None:  # of learned bit widths, once
                    loss = loss + penalty
                loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, s.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

        total /= accumulation
        if ranks > 1:
            dist.all_reduce(total)
        losses.append(total.item() / ranks)
        line = f"step {step + 1}/{s.steps}  loss {losses[-1]:.4f}"
        if rank == 0 and ((step + 1) % s.evaluate_every == 0 or step + 1 == s.steps):
            held_out = evaluate_loss(
                model, corpus, "validation", windows=s.windows, length=s.length, batch=s.micro_batch
            )
            line += f"  validation {held_out:.4f}"
        if rank == 0:
            print(line, flush=True)
        if rank == 0 and ((step + 1) % s.save_every == 0 or step + 1 == s.steps):
            state: dict[str, Any] = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"step": step + 1, "losses": losses, "settings": vars(s)}
            torch.save(state, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").replace(checkpoint)  # a run that is killed here leaves the older checkpoint
    if ranks > 1:
        dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
