"""Divide parameters into parts for optimizers: the second moments of Adam-mini, and the matrices of Muon.

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
from typing import Final, Literal

from torch import nn

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
    """Return the partition of a weight's rows by heads; raise ValueError if head_dim is None or does not divide `rows`.

    path: the layer's name, for the message. rows: the number of rows.
    """
    if not isinstance(head_dim, int) or head_dim < 1 or rows % head_dim:
        raise ValueError(
            f"layer {path} has {rows} rows of queries or keys, and its attention module has head_dim {head_dim}: give "
            f"this module an attribute head_dim that divides {rows}"
        )
    return (head_dim,) * (rows // head_dim)
