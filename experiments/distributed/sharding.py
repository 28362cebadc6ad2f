"""Distribute a model over the ranks of a trial by torch's `fully_shard`, which treats each block as one unit.

Every rank stores a part of each parameter, and the same part of its gradient and optimizer state. A block's parameters
are gathered before its forward and backward pass and freed afterwards; gradients are reduced to the mean over ranks.
Weights are gathered and gradients reduced in FP32: layers cast and quantize the gathered weights.

The model is built on torch's meta device, without memory. Each block is allocated, initialised and sharded before the
next one, so that a device never has more than one whole block, or the whole embedding and head, in memory.

For a checkpoint (storage/checkpoints.py), every rank writes its file and sends its size and SHA-256 to rank 0, which
writes the state file and renames the folder. If one rank fails, all raise an error, and the older checkpoints stay.
"""

from __future__ import annotations

import errno
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import _current_graph_task_id
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from fewbits.common.atomic import folder_atomically
from fewbits.experiments.devices import World
from fewbits.experiments.storage import checkpoints
from fewbits.models.learned_widths import sampled_layers
from fewbits.models.networks.decoder import Decoder, DecoderConfig
from fewbits.models.networks.initialise import initialise_block, initialise_outside_blocks, initialise_positions
from fewbits.models.networks.partition import is_sharded, local
from fewbits.models.quantize import Quantization
from fewbits.models.quantized_linear import QuantizedLinear


def build_sharded(
    config: DecoderConfig,
    *,
    seed: int,
    device: torch.device,
    ranks: int,
    compute_dtype: torch.dtype,
    quantized: Callable[[Decoder], Quantization],
) -> tuple[Decoder, Quantization]:
    """Return a model with its initial parameters sharded over all ranks, and its quantization.

    The initial parameters have the same bits as those of `fewbits.models.networks.registry.build` with this seed.

    quantized: a function that quantizes the model; called before the parameters have memory. It must not copy weights.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

    with torch.device("meta"):
        model = Decoder(config, compute_dtype)
    quantization = quantized(model)
    mesh = init_device_mesh(device.type, (ranks,))
    for number, block in enumerate(model.blocks):
        block.to_empty(device=device)
        initialise_block(model, number, seed)
        fully_shard(block, mesh=mesh)
    _materialise_rest(model, device)
    initialise_outside_blocks(model, seed)
    initialise_positions(model, device)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no mean; the sum is divided afterwards
    register_fsdp_forward_method(model, "loss")
    return model, quantization


def recompute_blocks(model: Decoder) -> None:
    """Make every block compute its forward pass again in the backward pass, instead of keeping its activations."""
    for block in model.blocks:
        block.forward = partial(
            checkpoint, block.forward, use_reentrant=False, preserve_rng_state=model.config.dropout > 0
        )


def synchronize_gradients(model: nn.Module, now: bool) -> None:
    """Set whether the next backward pass of a sharded model reduces gradients; only the last of a step has to."""
    if callable(set_sync := getattr(model, "set_requires_gradient_sync", None)):
        set_sync(now)


def reshard(model: nn.Module) -> None:
    """Free the gathered parameters outside the blocks of a sharded model, as only a backward pass does by itself."""
    if callable(free := getattr(model, "reshard", None)):
        free()


def _materialise_rest(model: Decoder, device: torch.device) -> None:
    """Allocate the parameters outside the blocks; a tied head uses the embedding's weight."""
    for module in (model.embed, model.positions, model.norm, model.head):
        if module is not None:
            module.to_empty(device=device)
    if model.config.tied:
        model.head.weight = model.embed.weight


class Penalties:
    """The terms of the penalty on learned bit widths (GaussWS eq. 12), collected layer by layer in one forward pass.

    Outside a block's forward pass, a rank has only a part of a layer's bit widths. So a hook computes the layer's term
    during the forward pass of a step's first micro-batch, and the term's gradient is reduced over ranks together with
    that of the loss. There are none if the recipe has no penalty (`sampler.penalty` is 0).
    """

    def __init__(self, quantization: Quantization) -> None:
        self._quantization = quantization
        self._terms: list[Tensor] = []
        if quantization.recipe.sampler.penalty:
            for layer in sampled_layers(quantization):
                layer.register_forward_hook(self._add)

    def take(self) -> Tensor | None:
        """Return the penalty of the last forward pass and forget its terms; None if the recipe has no penalty."""
        terms, self._terms = self._terms, []
        return self._quantization.weighted(terms)

    def _add(self, layer: nn.Module, *_: object) -> None:
        assert isinstance(layer, QuantizedLinear)
        if not layer.training or self._quantization.context.micro_batch or _current_graph_task_id() != -1:
            return  # evaluation, a later micro-batch, or a block that is computed again in the backward pass
        # Save these tensors themselves for the backward pass. With training.recompute, torch would otherwise try to
        # compute them again from the block, before the block's parameters are gathered.
        with saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
            term = self._quantization.penalty_term(layer)
        assert term is not None
        self._terms.append(term)


# ------------------------------------------------------------------------------------------------ checkpoints

_NAME = 255  # largest number of bytes in a file's name
_SHA256 = 32  # number of bytes of a digest
OF_RANK = ("observer.", "rng")  # beginnings of the names of tensors that are different on every rank


def local_tree(tree: Any, addresses: set[int]) -> Any:
    """Return a copy of the nested dictionaries `tree` in which this rank's rows replace each sharded tensor.

    Add the memory addresses of these rows to `addresses`.
    """
    if isinstance(tree, Mapping):
        return {key: local_tree(value, addresses) for key, value in tree.items()}
    if isinstance(tree, Tensor) and is_sharded(tree):
        rows = local(tree.detach())
        if rows.numel():
            addresses.add(rows.data_ptr())
        return rows
    return tree


def save(folder: Path, step: int, tree: Mapping[str, Any], world: World, *, keep: int) -> None:
    """Save a checkpoint of `tree` in `folder`, and keep the newest `keep` there. All ranks must call this together."""
    if world.ranks == 1:
        tensors, rest = checkpoints.flatten(tree)
        checkpoints.save(folder, step, tensors, rest, keep=keep)
        return
    addresses: set[int] = set()
    tensors, rest = checkpoints.flatten(local_tree(tree, addresses))
    split = sorted(name for name, tensor in tensors.items() if tensor.data_ptr() in addresses)
    if world.rank:
        tensors = {name: x for name, x in tensors.items() if name in split or name.startswith(OF_RANK) or not x.numel()}
    failure: OSError | None = None
    with ExitStack() as stack:
        path, partial = folder, None
        if not world.rank:
            try:
                path = checkpoints.next_path(folder, step)
                partial = stack.enter_context(folder_atomically(path))
            except OSError as error:
                failure = error
        size, digest = 0, bytes(_SHA256).hex()
        if name := _from_first(partial.name if partial else "", world):
            try:
                size, digest = checkpoints.write_tensors(folder / name / file_name(world.rank, world.ranks), tensors)
            except OSError as error:
                failure = error
        _fail_together(failure, world)
        files = [
            {"name": file_name(rank, world.ranks), "bytes": size, "sha256": digest}
            for rank, (size, digest) in enumerate(_gather(size, digest, world))
        ]
        if partial is not None:
            content = {"format": checkpoints.SHARDED, "step": step, "files": files, "split": split, "state": rest}
            try:
                checkpoints.write_state(partial, content)
                stack.close()  # renames the folder
                checkpoints.retain(path, keep)
            except OSError as error:
                failure = error
        _fail_together(failure, world)


def newest(world: World, *folders: Path) -> checkpoints.Checkpoint | None:
    """Return the newest checkpoint in the folders that is intact on all ranks, or None; all ranks must call this."""
    if world.ranks == 1:
        return checkpoints.newest(*folders)
    for path in checkpoints.newest_first(*folders):
        checkpoint, complaint = None, None
        try:
            checkpoint = checkpoints.load(path, (world.rank, world.ranks))
        except checkpoints.DamagedCheckpoint as error:
            complaint = error
            warnings.warn(f"damaged checkpoint skipped: {error}", stacklevel=2)
        (damaged,) = world.agree(complaint is not None)
        if not damaged:
            return checkpoint
    return None


def file_name(rank: int, ranks: int) -> str:
    return f"tensors-{rank:05d}-of-{ranks:05d}.safetensors"


def _fail_together(failure: OSError | None, world: World) -> None:
    (failed,) = world.agree(failure is not None)
    if failed:
        raise failure or OSError(errno.EIO, "checkpoint not written: another rank could not write its part")


def _from_first(text: str, world: World) -> str:
    """Return rank 0's `text` on all ranks."""
    encoded = text.encode().ljust(_NAME, b"\0") if not world.rank else bytes(_NAME)
    letters = torch.tensor(list(encoded), dtype=torch.uint8, device=world.device)
    dist.broadcast(letters, 0)
    return bytes(letters.tolist()).rstrip(b"\0").decode()


def _gather(size: int, digest: str, world: World) -> Iterable[tuple[int, str]]:
    """Return the size and the SHA-256 of each rank's file, on all ranks, in the order of ranks."""
    own = torch.tensor([size, *bytes.fromhex(digest)], dtype=torch.int64, device=world.device)
    rows = [torch.empty_like(own) for _ in range(world.ranks)]
    dist.all_gather(rows, own)
    return [(int(values[0]), bytes(values[1:]).hex()) for values in (row.tolist() for row in rows)]
