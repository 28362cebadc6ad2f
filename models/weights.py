"""List the weights of any model: those that recipes apply to, and the others with the reason why not.

Recipes apply to the linear layers inside the model's blocks: nn.Linear, the Conv1D of transformers' GPT-2, and the
weights of experts, which modules of transformers and torchtitan hold as one parameter of experts × out × in (or
experts × in × out). The blocks are the items of the outermost nn.ModuleList or nn.Sequential, or of an outermost
nn.ModuleDict whose keys are numbers; an item's position there, from 0, is its block number. A module without blocks
counts as one block. A layer's part (qkv, out, up, down, in) is its attribute `part`; without this attribute,
PART_OF_NAME gives the part for the names of common models.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

# The last one or two components of a linear layer's module name: its part. The names are those of Hugging Face's,
# torchtitan's and nanoGPT's models.
PART_OF_NAME = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "qkv_proj", "c_attn", "q_attn", "wq", "wk", "wv"), "qkv"),
    **dict.fromkeys(("query_key_value", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"), "qkv"),
    **dict.fromkeys(("o_proj", "wo", "out_proj", "attn.c_proj", "attention.dense", "self_attention.dense"), "out"),
    **dict.fromkeys(("gate_proj", "up_proj", "gate_up_proj", "w1", "w3", "v1", "c_fc", "fc1", "dense_h_to_4h"), "up"),
    **dict.fromkeys(("down_proj", "w2", "fc2", "mlp.c_proj", "dense_4h_to_h", "output_linear"), "down"),
    **dict.fromkeys(("input_linear",), "up"),
    "in_proj": "in",
}
ROUTERS = ("router", "shared_expert_gate")  # layers that choose experts; `gate`, too, if it is beside experts
HEADS = ("lm_head", "head", "output", "embed_out", "score", "classifier")
ATTENTION = "inside nn.MultiheadAttention"
ADAPTERS = ("lora_A", "lora_B", "lora_magnitude_vector", "lora_embedding_A", "lora_embedding_B")  # PEFT's


@dataclass(frozen=True)
class Expert:
    """One matrix of a parameter that holds those of all experts."""

    parameter: str  # its name in the module
    number: int
    transposed: bool  # the parameter is experts × in × out


@dataclass(frozen=True)
class BlockLinear:
    """A linear layer inside a model's blocks, which a recipe can quantize."""

    name: str  # its name in the model; of an expert, NAME OF THE PARAMETER.NUMBER
    block: int  # the block's number, from 0
    part: str | None  # one of PARTS of recipe.py; None: unknown
    module: nn.Module  # the layer, or the module that has the experts
    shape: tuple[int, int]  # out, in
    expert: Expert | None = None

    @property
    def is_expert(self) -> bool:
        """Tell whether the layer reads only the tokens that a router sends to it."""
        return self.expert is not None or "experts" in self.name.split(".")

    @property
    def key(self) -> tuple[int, int]:
        """What tells weights apart that are not tied."""
        parameter = getattr(self.module, self.expert.parameter if self.expert else "weight")
        return id(parameter), self.expert.number if self.expert else 0


@dataclass(frozen=True)
class OtherWeight:
    """A weight to which recipes do not apply, and the reason."""

    name: str  # the module's name in the model
    shape: tuple[int, ...]
    why: str
    is_linear: bool  # it is multiplied with its input, as a head or a router is, but an embedding is not
    key: tuple[int, int]


def linear_layers(model: nn.Module) -> Iterator[BlockLinear]:
    """Yield the linear layers to which recipes apply, in the order of `named_modules`."""
    return (weight for weight in weights(model) if isinstance(weight, BlockLinear))


def weights(model: nn.Module) -> Iterator[BlockLinear | OtherWeight]:
    """Yield the weights of a model (parameters with at least two dimensions), in the order of `named_modules`."""
    if is_linear(model):
        raise ValueError(
            "the model is itself a linear layer, which cannot be replaced in place: put it into an nn.Sequential"
        )
    containers = {n: list(m._modules) for n, m in model.named_modules() if _holds_blocks(m)}
    outermost = [n for n in containers if not any(_inside(n, outer) for outer in containers if outer != n)]
    for name, module in model.named_modules():
        container = next((n for n in outermost if _inside(name, n)), None)
        inner = name if container is None else name[len(container) :].lstrip(".")
        block = containers[container].index(inner.split(".")[0]) if container is not None and inner else 0
        outside = container is None and bool(outermost)
        for parameter, weight in module.named_parameters(recurse=False):
            if weight.ndim < 2 or parameter == "bit_scale" or parameter.endswith("bias"):
                continue
            own = name if parameter == "weight" else f"{name}.{parameter}".lstrip(".")
            last = name.rpartition(".")[2]
            if why := _why_not(model, module, name, weight.ndim, outside):
                linear = is_linear(module) or why in ("router", ATTENTION) or "expert" in own.lower()
                yield OtherWeight(own, tuple(weight.shape), why, linear, (id(weight), is_linear(module)))
            elif is_linear(module):
                out, inner_size = weight.shape[::-1] if is_conv1d(module) else weight.shape
                yield BlockLinear(own, block, part_of(module, name), module, (out, inner_size))
            else:
                transposed = _is_transposed(module, last if parameter == "weight" else parameter, *weight.shape[1:])
                out, inner_size = weight.shape[:0:-1] if transposed else weight.shape[1:]
                for number in range(len(weight)):
                    expert = Expert(parameter, number, transposed)
                    yield BlockLinear(f"{own}.{number}", block, part_of(module, own), module, (out, inner_size), expert)


def active_share(model: nn.Module, weight: BlockLinear | OtherWeight) -> float:
    """Return the share of a token's products in which a weight takes part: of an expert, top-k of all experts.

    An embedding, which multiplies nothing, has 0. Without a known top-k, every expert counts as if it read every token.
    """
    if isinstance(weight, OtherWeight):
        return float(weight.is_linear)
    if not weight.is_expert:
        return 1.0
    if weight.expert is not None:
        experts: int = len(getattr(weight.module, weight.expert.parameter))
    else:
        outside = weight.name.split(".experts.")[0]
        experts = len(model.get_submodule(f"{outside}.experts")._modules)
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", config)
    chosen = getattr(config, "num_experts_per_tok", None) or getattr(config, "active_experts", None)
    return min(1.0, chosen / experts) if chosen else 1.0


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or is_conv1d(module)


def is_conv1d(module: nn.Module) -> bool:
    """Tell whether a module is transformers' Conv1D: a linear layer whose weight is in × out."""
    return any((c.__module__, c.__name__) == ("transformers.pytorch_utils", "Conv1D") for c in type(module).__mro__)


def part_of(module: nn.Module, name: str) -> str | None:
    """Return the part of a layer: its attribute `part`, else the part of its name; None if both are unknown."""
    components = name.removesuffix(".base_layer").split(".")  # PEFT's name for the layer inside an adapter
    by_name = PART_OF_NAME.get(".".join(components[-2:])) or PART_OF_NAME.get(components[-1])
    return getattr(module, "part", None) or by_name


def _why_not(model: nn.Module, module: nn.Module, name: str, dimensions: int, outside: bool) -> str:
    """Return the reason why recipes do not apply to a weight, or an empty string."""
    components = name.split(".")
    kind = type(module).__name__
    linear = is_linear(module)
    if isinstance(module, nn.Embedding):
        return "embedding"
    if isinstance(module, _ConvNd):
        return "convolution"
    if isinstance(module, NonDynamicallyQuantizableLinear | nn.MultiheadAttention):
        return ATTENTION
    if any(component in ADAPTERS for component in components):
        return "adapter"
    above = components[: components.index("gate")] if "gate" in components[-2:] else None
    beside = () if above is None else model.get_submodule(".".join(above))._modules
    if not {*ROUTERS}.isdisjoint(components[-2:]) or kind.endswith("Router") or any("expert" in n for n in beside):
        return "router"
    if outside and linear:
        return "head" if components[-1] in HEADS else "outside the blocks"
    experts = "expert" in f"{name}.{kind}".lower()
    if linear or (dimensions == 3 and experts and not outside):
        return ""
    return f"parameter of {kind}, not a linear layer"


def _is_transposed(module: nn.Module, name: str, first: int, second: int) -> bool:
    """Tell whether the matrices of a parameter of experts are in × out, instead of out × in as in nn.Linear.

    Without transformers' attribute `is_transposed`, the module's attribute `hidden_size` decides: the number of inputs
    of a first projection, and of outputs of the projection `down`. name: the parameter's name. first, second: the two
    dimensions of the matrices. `experts.py` refuses to compute if this is wrong.
    """
    if isinstance(declared := getattr(module, "is_transposed", None), bool):
        return declared
    if type(module).__name__.startswith("Llama4"):
        return True
    hidden = getattr(module, "hidden_size", None)
    return hidden == (second if PART_OF_NAME.get(name) == "down" else first) and first != second


def _holds_blocks(module: nn.Module) -> bool:
    """Tell whether a module is a ModuleList, a Sequential, or a non-empty ModuleDict whose keys are all numbers."""
    if isinstance(module, nn.ModuleDict):
        return bool(module) and all(key.isdecimal() for key in module)
    return isinstance(module, (nn.ModuleList, nn.Sequential))


def _inside(name: str, container: str) -> bool:
    """Tell whether a module lies inside another, by their names in the model; the model itself is `""`."""
    return container == "" or name == container or name.startswith(f"{container}.")
