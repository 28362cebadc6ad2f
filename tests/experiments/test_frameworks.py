"""Test that quantized models train, and resume to the same bits, in other people's training loops and wrappers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fewbits.experiments.config import load_recipe, quantize
from fewbits.experiments.devices import World
from fewbits.models.networks.partition import whole
from fewbits.models.quantize import Quantization
from tests.experiments.distributed.ranks import on_ranks
from tests.models.test_transformers import loss_of, made, tokens

STEPS = 4


def noisy(family: str = "Llama", **settings: Any) -> tuple[Any, torch.optim.Optimizer, Quantization]:
    model = made(family)
    recipe = load_recipe("nvfp4", {"keep.last": 0})
    quantization = quantize(model, recipe, seed=3, **settings)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), quantization


def weights_of(model: nn.Module) -> list[Tensor]:
    return [whole(parameter.detach()).clone() for parameter in model.parameters()]


def all_equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


class Batches(torch.utils.data.Dataset[dict[str, Tensor]]):
    """The rows of the batches that `loss_of` uses, in their order."""

    def __len__(self) -> int:
        return 2 * 2 * STEPS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = tokens(index // 2)[index % 2]
        return {"input_ids": row, "labels": row}


def test_hugging_faces_trainer_resumes_to_the_same_bits(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    def trained(folder: Path, resume: Path | None = None, steps: int = STEPS) -> list[Tensor]:
        model, optimizer, quantization = noisy()
        quantization.attach(model, optimizer)
        arguments = TrainingArguments(
            str(folder),
            max_steps=steps,
            save_steps=2,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            lr_scheduler_type="constant",
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            train_sampling_strategy="sequential",
        )
        trainer = Trainer(model, arguments, train_dataset=Batches(), optimizers=(optimizer, None))
        trainer.train(resume_from_checkpoint=str(resume) if resume else None)
        return weights_of(model)

    expected = trained(tmp_path / "whole")
    trained(tmp_path / "first", steps=2)
    assert all_equal(trained(tmp_path / "second", tmp_path / "first" / "checkpoint-2"), expected)


def in_a_plain_loop(steps: int = STEPS) -> list[Tensor]:
    """Return the weights after training on one batch per step, in two micro-batches."""
    model, optimizer, quantization = noisy()
    quantization.attach(model, optimizer)
    for step in range(steps):
        for micro_batch in range(2):
            (loss_of(model, 2 * step + micro_batch) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model)


def test_accelerate_resumes_to_the_same_bits(tmp_path: Path) -> None:
    from accelerate import Accelerator

    def trained(first: int, last: int) -> list[Tensor]:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model, optimizer, quantization = noisy()
        quantization.attach(model, optimizer)
        model, optimizer = accelerator.prepare(model, optimizer)
        if first:
            accelerator.load_state(str(tmp_path / "state"))
        for step in range(first, last):
            for micro_batch in range(2):
                with accelerator.accumulate(model):
                    accelerator.backward(loss_of(model, 2 * step + micro_batch))
                    optimizer.step()
                    optimizer.zero_grad()
        if last < STEPS:
            accelerator.save_state(str(tmp_path / "state"))
        return weights_of(model)

    expected = in_a_plain_loop()
    assert all_equal(trained(0, STEPS), expected)
    trained(0, 2)
    assert all_equal(trained(2, STEPS), expected)


def test_lightning_resumes_to_the_same_bits(tmp_path: Path) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.optimizer, self.quantization = noisy()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            self.quantization.attach(self.model, self.optimizer)
            return self.optimizer

        def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
            loss: Tensor = self.model(**batch).loss
            return loss

    def trained(epochs: int, resume: Path | None = None) -> list[Tensor]:
        module = Module()
        trainer = lightning.Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            accumulate_grad_batches=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        epoch = torch.utils.data.Subset(Batches(), range(8))  # two steps: Lightning resumes data only between epochs
        data = torch.utils.data.DataLoader(epoch, batch_size=2)
        trainer.fit(module, data, ckpt_path=resume)
        trainer.save_checkpoint(tmp_path / f"{epochs}.ckpt")
        return weights_of(module)

    expected = trained(2)
    trained(1)
    assert all_equal(trained(2, tmp_path / "1.ckpt"), expected)


@pytest.mark.parametrize("family", ["Llama", "GPT2"])
def test_lora_trains_its_adapters_over_a_quantized_base(family: str) -> None:
    """Check both orders: quantizing a model with adapters, and adding adapters to a quantized model."""
    import peft

    losses = []
    for adapters_first in (True, False):
        model = made(family)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"] if family == "Llama" else ["c_attn", "c_fc"])
        if not adapters_first:
            quantization = quantize(model, "mxfp8", seed=3)
        torch.manual_seed(1)
        model = peft.get_peft_model(model, config)
        if adapters_first:
            quantization = quantize(model, "mxfp8", seed=3)
        base = {name: weight.detach().clone() for name, weight in model.named_parameters() if "lora" not in name}
        assert not any("lora" in layer.name for layer in quantization.layers)
        assert any(layer.part == "qkv" for layer in quantization.layers)
        optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-2)
        quantization.attach(model, optimizer)
        seen = []
        for _ in range(3):
            loss = loss_of(model, 0)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.detach())
        assert seen[-1] < seen[0]
        assert all(torch.equal(weight, base[name]) for name, weight in model.named_parameters() if name in base)
        losses.append(seen)
    assert all_equal(*losses)


def _train_on(world: World, how: str, folder: Path) -> None:
    """Train on two ranks with different batches, save after two of four steps, resume in a new model, and compare."""

    def fresh() -> tuple[nn.Module, Any, torch.optim.Optimizer]:
        model, optimizer, quantization = noisy(keep_weights=how == "ddp")
        wrapped: Any = model
        if how == "fsdp2":
            for layer in model.model.layers:
                fully_shard(layer)
            fully_shard(model)
        else:
            wrapped = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        quantization.attach(model, optimizer)
        assert quantization.context.rank == world.rank
        return model, wrapped, optimizer

    def train(wrapped: Any, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
        for step in range(first, last):
            loss_of(wrapped, 2 * step + world.rank).backward()
            optimizer.step()
            optimizer.zero_grad()

    model, wrapped, optimizer = fresh()
    train(wrapped, optimizer, 0, 2)
    saved = copy.deepcopy(get_state_dict(model, optimizer))
    train(wrapped, optimizer, 2, STEPS)
    expected = weights_of(model)
    model, wrapped, optimizer = fresh()
    set_state_dict(model, optimizer, model_state_dict=saved[0], optim_state_dict=saved[1])
    train(wrapped, optimizer, 2, STEPS)
    assert all_equal(weights_of(model), expected)
    if world.rank == 0:
        torch.save(expected, folder / f"{how}.pt")


def test_ddp_and_fsdp2_train_and_resume_to_the_same_bits_on_two_ranks(tmp_path: Path) -> None:
    for how in ("ddp", "fsdp2"):
        (tmp_path / how).mkdir()
        on_ranks(2, tmp_path / how, _train_on, how, tmp_path)
    assert all_equal(torch.load(tmp_path / "ddp.pt"), torch.load(tmp_path / "fsdp2.pt"))
