"""Initialise the parameters of a decoder, each from a random generator seeded by the seed and the parameter's name.

The bits of a parameter therefore do not depend on the other layers, on torch's global generator or on the device (all
numbers are drawn on the CPU). A deeper model starts with the same first blocks, except where the published scheme
scales the standard deviation by the number of layers.

N(0, σ) is the normal distribution with standard deviation σ. DecoderConfig.init selects one of two schemes:

`gpt2` (GPT-2 and nanoGPT; also Megatron's default, with which Nemotron and the hybrids were trained): N(0, init_std),
but N(0, init_std/√branches) for the layers whose result is added to the residual stream. branches is the number of
residual branches: 2·layers, or `layers` for a model with a `pattern`.

`llama` (torchtitan's): embedding N(0, 1); q, k, v and gate N(0, init_std); out, up and down of block l, counted from 0,
N(0, init_std/√(2(l + 1))); head N(0, 1/√width), truncated at 3 standard deviations. init_std is 0.02 in torchtitan,
which also truncates the parameters of blocks at ±2. This is 100 standard deviations, so it is omitted here.

Mamba-2's own parameters are initialised as in its published code: A uniform in [1, 16], D = 1, and the
convolution as torch does. The bias dt_bias is chosen so that the step size softplus(dt_bias) is log-uniform in
[0.001, 0.1].
"""

import math
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor, nn

from fewbits.kernels.seeds import derive_seed
from fewbits.models.networks.decoder import Decoder, DecoderConfig
from fewbits.models.networks.layers import Linear, Norm, Rope
from fewbits.models.networks.mamba2 import Mamba2
from fewbits.models.quantized_linear import QuantizedLinear

Draw = Callable[[Tensor, torch.Generator], object]  # fills an FP32 CPU tensor with random numbers of the generator

A_RANGE: Final = (1.0, 16.0)
DT_RANGE: Final = (0.001, 0.1)
DT_FLOOR: Final = 1e-4


@torch.no_grad()
def initialise(model: Decoder, seed: int) -> None:
    """Fill all parameters of a model with initial values."""
    initialise_outside_blocks(model, seed)
    for number in range(len(model.blocks)):
        initialise_block(model, number, seed)


@torch.no_grad()
def initialise_outside_blocks(model: Decoder, seed: int) -> None:
    """Fill the parameters outside the blocks: embeddings, last norm and head."""
    config = model.config
    llama = config.init == "llama"
    _fill(model.embed.weight, "embed.weight", seed, _normal(1.0 if llama else config.init_std))
    if model.positions is not None:
        _fill(model.positions.weight, "positions.weight", seed, _normal(config.init_std))
    if not config.tied:
        draw = _truncated_normal(config.width**-0.5) if llama else _normal(config.init_std)
        _fill(model.head.weight, "head.weight", seed, draw)
    model.norm.reset_parameters()


@torch.no_grad()
def initialise_block(model: Decoder, number: int, seed: int) -> None:
    """Fill the parameters of the block with this number, whose linear layers may be QuantizedLinear already."""
    for name, module in model.blocks[number].named_modules(prefix=f"blocks.{number}"):
        if isinstance(module, Norm):
            module.reset_parameters()
        elif isinstance(module, Linear | QuantizedLinear):
            _fill(module.weight, f"{name}.weight", seed, _normal(_deviation(model.config, number, name, module)))
            if module.bias is not None:
                module.bias.zero_()
            if isinstance(module, QuantizedLinear) and module.bit_scale is not None:
                module.bit_scale.fill_(1.0)
        elif isinstance(module, Mamba2):
            _mamba2(module, name, seed)


def initialise_positions(model: Decoder, device: torch.device) -> None:
    """Compute the rotary angles of a model that was built on the meta device, and store them on `device`."""
    for module in model.modules():
        if isinstance(module, Rope):
            module.reset(device)


def _deviation(config: DecoderConfig, number: int, name: str, linear: Linear | QuantizedLinear) -> float:
    """Return the standard deviation of a linear layer's weight.

    number: the number of the layer's block. name: the layer's name in the model.
    """
    if config.init == "llama":
        scaled, terms = name.rpartition(".")[2] in ("out", "up", "down"), 2 * (number + 1)
    else:
        scaled, terms = linear.part in ("out", "down"), config.branches
    return config.init_std / math.sqrt(terms) if scaled else config.init_std


def _mamba2(mixer: Mamba2, name: str, seed: int) -> None:
    _fill(mixer.A_log, f"{name}.A_log", seed, lambda x, generator: x.uniform_(*A_RANGE, generator=generator).log_())
    _fill(mixer.dt_bias, f"{name}.dt_bias", seed, _inverse_softplus_of_steps)
    bound = len(mixer.conv_weight) ** -0.5  # as in nn.Conv1d: 1 / √(inputs of a channel), which are its taps here
    for parameter, field in ((mixer.conv_weight, "conv_weight"), (mixer.conv_bias, "conv_bias")):
        _fill(parameter, f"{name}.{field}", seed, lambda x, generator: x.uniform_(-bound, bound, generator=generator))
    mixer.D.fill_(1.0)
    mixer.norm_weight.fill_(1.0)


def _inverse_softplus_of_steps(x: Tensor, generator: torch.Generator) -> None:
    """Fill x with dt_bias such that softplus(dt_bias) is log-uniform in DT_RANGE."""
    step = x.uniform_(*map(math.log, DT_RANGE), generator=generator).exp_().clamp_(min=DT_FLOOR)
    x.copy_(step + torch.log(-torch.expm1(-step)))


def _normal(std: float) -> Draw:
    return lambda x, generator: x.normal_(0.0, std, generator=generator)


def _truncated_normal(std: float) -> Draw:
    return lambda x, generator: nn.init.trunc_normal_(x, 0.0, std, -3 * std, 3 * std, generator=generator)


def _fill(parameter: Tensor, name: str, seed: int, draw: Draw) -> None:
    """Fill a parameter on any device with random numbers drawn on the CPU.

    draw: a function that fills a given FP32 CPU tensor with random numbers of a given generator, whose seed is derived
    from `seed` and `name`. name: the parameter's name in the model.
    """
    values = torch.empty(parameter.shape)
    draw(values, torch.Generator().manual_seed(derive_seed(seed, *name.encode())))
    parameter.copy_(values)
