"""Define Adam-mini's partition: which entries of a parameter share one second moment v.

v is the running average of the mean of these entries' squared gradients.

`adam_mini_partition` returns one of these values for every parameter:

    "element"            one v for each entry, as in AdamW
    "tensor"             one v for the whole parameter
    (64, 64, …, 1, 1)    one v for each group of consecutive rows; the tuple lists the groups' sizes from the first row
                         on. Here 64 rows are an attention head, and 1 row is an output neuron.

Adam-mini was published with two sets of rules, both of which are here:

    parameter                                   adam-mini (1.1.0 and later)     adam-mini-1.0 (earlier)
    queries and keys                            by head                         by head
    embeddings, output head                     by row                          by element
    values, attention output, MLP               by row                          by tensor
    biases                                      by element                      by tensor
    all others, such as weights of norms        by tensor                       by tensor

The published code recognises parameters by their names, and has no names for Mamba-2. Here the linear layers of Mamba-2
have the rule of an MLP (assumed), and its other parameters follow from their names.

`adam_mini_partition` supports any model whose attention modules have an attribute `head_dim` (the dimension of a head),
as the models of fewbits, transformers and torchtitan do.
"""

from typing import Final, Literal

from torch import nn

from fewbits.common.from_dict import one_of
from fewbits.models.networks.decoder import Attention

Partition = Literal["element", "tensor"] | tuple[int, ...]

OLDER: Final = "adam-mini-1.0"  # the optimizer with the earlier rules

# The names of linear layers in the models of fewbits, transformers, Meta and torchtitan.
QUERY_KEY: Final = frozenset({"q", "k", "q_proj", "k_proj", "wq", "wk"})
HEAD: Final = frozenset({"head", "lm_head", "output"})


def adam_mini_partition(model: nn.Module, kind: str = "adam-mini") -> dict[str, Partition]:
    """Return the partition of each parameter, by its name in `model.named_parameters()`.

    kind: the optimizer; AdamW, which needs no partition, gets that of adam-mini.
    """
    one_of("optimizer", kind, ("adam-mini", OLDER, "adamw"))
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    partition: dict[str, Partition] = {}
    for name, parameter in model.named_parameters():
        path, _, field = name.rpartition(".")
        owner = model.get_submodule(path)
        if id(parameter) in embeddings or _is_head(model, path, field):
            partition[name] = "element" if kind == OLDER else (1,) * parameter.shape[0]
        elif isinstance(owner, nn.Linear) and field == "weight":
            partition[name] = _partition_linear(model, path, owner, kind)
        else:
            partition[name] = "element" if "bias" in field and kind != OLDER else "tensor"
    return partition


def _is_head(model: nn.Module, path: str, field: str) -> bool:
    """Tell whether the parameter is the weight of the output head. path: its layer's name in the model."""
    outside, _, name = path.rpartition(".")
    return field == "weight" and name in HEAD and not hasattr(model.get_submodule(outside), "head_dim")


def _partition_linear(model: nn.Module, path: str, linear: nn.Linear, kind: str) -> Partition:
    """Return the partition of the weight of a linear layer in a block. path: the layer's name in the model."""
    outside, _, name = path.rpartition(".")
    parent, rows = model.get_submodule(outside), linear.out_features
    if isinstance(parent, Attention) and name == "qkv":
        values = parent.kv_heads * parent.head_dim
        return _heads(path, rows - values, parent.head_dim) + ((1,) * values if kind != OLDER else (values,))
    if name in QUERY_KEY:
        return _heads(path, rows, getattr(parent, "head_dim", None))
    return (1,) * rows if kind != OLDER else "tensor"


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
