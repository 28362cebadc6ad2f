"""Divide parameters into parts for Adam-mini and Muon; read and write the rows of sharded ones.

The entries of a part share one second moment v of Adam-mini: the running average of the mean of their squared
gradients.

`adam_mini_partition` returns one of these values for every parameter:

    "element"            one v for each entry, as in AdamW
    "tensor"             one v for the whole parameter
    (64, 64, …, 1, 1)    one v for each group of consecutive rows; the tuple lists the groups' sizes from the first row
                         on. Here 64 rows are an attention head, and 1 row is an output neuron.

The rules are those of Adam-mini 1.1.0 and later:

    queries and keys                                 by head
    embeddings, output head, other linear layers     by row
    biases                                           by element
    all others, such as weights of norms             by tensor

The published code recognises parameters by their names, and has no names for Mamba-2. Here the linear layers of Mamba-2
have the rule of an MLP (assumed), and its other parameters follow from their names.

`adam_mini_partition` supports any model whose attention modules have an attribute `head_dim` (the dimension of a head),
as the models of fewbits, transformers and torchtitan do.
"""

from collections.abc import Mapping
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from fewbits.models.networks.decoder import Attention
from fewbits.models.weights import OtherWeight, weights

Partition = Literal["element", "tensor"] | tuple[int, ...]

# The names of linear layers in the models of fewbits, transformers, Meta and torchtitan.
QUERY_KEY: Final = frozenset({"q", "k", "q_proj", "k_proj", "wq", "wk"})
HEAD: Final = frozenset({"head", "lm_head", "output"})


def partition_of(model: nn.Module, kind: str) -> Mapping[str, Partition]:
    """Return the partition that an optimizer (adamw, adam-mini or muon) needs of an unquantized model."""
    if kind == "adam-mini":
        return adam_mini_partition(model)
    return muon_partition(model) if kind == "muon" else {}


def muon_partition(model: nn.Module) -> dict[str, Partition]:
    """Return the parameters that consist of matrices for Muon, by name, with the number of rows of each matrix.

    These are the weights of all linear layers inside the blocks. A fused W_qkv consists of three matrices, and the
    parameter of several experts of one matrix per expert. Mamba-2's fused input projection is one matrix (assumed).
    """
    partition: dict[str, Partition] = {}
    for weight in weights(model):
        if isinstance(weight, OtherWeight):
            if weight.why == "router":
                partition[f"{weight.name}.weight"] = (weight.shape[0],)
        elif weight.expert is not None:
            name = weight.name.rpartition(".")[0]
            matrix = getattr(weight.module, weight.expert.parameter)[0]
            partition[name] = (*partition.get(name, ()), len(matrix))
        else:
            attention = model.get_submodule(weight.name.rpartition(".")[0])
            rows: tuple[int, ...] = (len(weight.module.weight),)  # type: ignore[arg-type]
            if isinstance(attention, Attention) and attention.fused and weight.part == "qkv":
                keys = attention.kv_heads * attention.head_dim
                rows = (rows[0] - 2 * keys, keys, keys)
            partition[f"{weight.name}.weight"] = rows
    return partition


def adam_mini_partition(model: nn.Module) -> dict[str, Partition]:
    """Return the partition of each parameter, by its name in `model.named_parameters()`."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    partition: dict[str, Partition] = {}
    for name, parameter in model.named_parameters():
        path, _, field = name.rpartition(".")
        owner = model.get_submodule(path)
        if id(parameter) in embeddings or _is_head(model, path, field):
            partition[name] = (1,) * parameter.shape[0]
        elif isinstance(owner, nn.Linear) and field == "weight":
            partition[name] = _partition_linear(model, path, owner)
        else:
            partition[name] = "element" if "bias" in field else "tensor"
    return partition


def _is_head(model: nn.Module, path: str, field: str) -> bool:
    """Tell whether the parameter is the weight of the output head. path: its layer's name in the model."""
    outside, _, name = path.rpartition(".")
    return field == "weight" and name in HEAD and not hasattr(model.get_submodule(outside), "head_dim")


def _partition_linear(model: nn.Module, path: str, linear: nn.Linear) -> Partition:
    """Return the partition of the weight of a linear layer in a block. path: the layer's name in the model."""
    outside, _, name = path.rpartition(".")
    parent, rows = model.get_submodule(outside), linear.out_features
    if isinstance(parent, Attention) and name == "qkv":
        values = parent.kv_heads * parent.head_dim
        return _heads(path, rows - values, parent.head_dim) + (1,) * values
    if name in QUERY_KEY:
        return _heads(path, rows, getattr(parent, "head_dim", None))
    return (1,) * rows


def _heads(path: str, rows: int, head_dim: object) -> tuple[int, ...]:
    """Return the partition of a weight's rows by heads; raise ValueError if head_dim is None or does not divide it."""
    if not isinstance(head_dim, int) or head_dim < 1 or rows % head_dim:
        raise ValueError(
            f"layer {path} has {rows} rows of queries or keys, and its attention module has head_dim {head_dim}: give "
            f"this module an attribute head_dim that divides {rows}"
        )
    return (head_dim,) * (rows // head_dim)


# ------------------------------------------------------------------------------------------------ sharded tensors

# A tensor that torch's `fully_shard` has sharded (a DTensor) is split along its first dimension: with R ranks, rank r
# has the r-th of R chunks of ceil(rows / R) rows, and the last ranks may have fewer rows or none. The functions also
# accept ordinary tensors, so that their callers need not know whether a model is sharded. DTensors are recognised by
# their method `full_tensor`, because importing the class DTensor is slow.


def is_sharded(x: Tensor) -> bool:
    return hasattr(x, "full_tensor")


def whole(x: Tensor) -> Tensor:
    """Return all rows of a tensor. For a sharded tensor, all ranks must call this, in the same order of tensors."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def local(x: Tensor) -> Tensor:
    """Return the rows of a tensor that this process has, without copying; for an ordinary tensor, all rows."""
    return x.to_local() if hasattr(x, "to_local") else x


def local_rows(x: Any) -> tuple[int, int]:
    """Return (first, end): this process has the rows first ≤ row < end of the tensor."""
    if not is_sharded(x):
        return 0, len(x)
    chunk = -(-x.shape[0] // x.device_mesh.size())
    first = min(x.device_mesh.get_local_rank() * chunk, x.shape[0])
    return first, min(first + chunk, x.shape[0])


@torch.no_grad()
def fill(x: Tensor, values: Tensor) -> None:
    """Copy `values` into the tensor x. values: all rows of x, or only the rows of x that this process has."""
    own = local(x)
    if is_sharded(x) and values.shape == x.shape:
        values = values[slice(*local_rows(x))]
    if values.shape != own.shape:
        raise ValueError(
            f"values of shape {tuple(values.shape)} do not fit a tensor of shape {tuple(x.shape)}: both shapes must be "
            "equal"
        )
    own.copy_(values)


def copy_like(values: Tensor, x: Tensor) -> Tensor:
    """Return a copy of `values`.

    If x is sharded, and `values` has the shape of x or of this process's rows of x, the copy is sharded like x.
    """
    if not is_sharded(x) or values.shape not in (x.shape, local(x).shape):
        return values.clone()
    copy = torch.zeros_like(x.detach(), dtype=values.dtype)
    fill(copy, values)
    return copy
