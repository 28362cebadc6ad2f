"""Compare the gradient of every parameter of a model that computes in BF16 with its gradient when computed in FP32."""

import pytest
import torch
from torch import Tensor

from fewbits.models.networks.presets import MODELS
from fewbits.models.networks.registry import build

# The largest valid relative error of a gradient. Measured are 0.4 to 1.7 %, from the rounding of activations. If sums
# over tokens were computed in BF16, as in torch's layer norm on CPUs, the weights and biases of norms would have errors
# of 2.3 to 9 %, so this bound detects it.
BOUND = 0.02
# The gradients of these parameters have one number per head, a sum whose terms nearly cancel. Its relative error is
# therefore larger: up to 4.8 % were measured.
PER_HEAD, BOUND_PER_HEAD = ("A_log", "dt_bias", "D"), 0.1


def gradients(name: str, compute_dtype: torch.dtype) -> dict[str, Tensor]:
    model = build(MODELS[name], seed=1, compute_dtype=compute_dtype)
    tokens = torch.randint(0, 256, (4, 129), generator=torch.Generator().manual_seed(0))
    model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("name", ["gpt2-nano", "llama2-nano", "nemotron-nano", "hybrid-nano"])
def test_the_gradient_of_every_parameter_in_bf16_is_near_that_in_fp32(name: str) -> None:
    in_bf16, in_fp32 = (gradients(name, dtype) for dtype in (torch.bfloat16, torch.float32))
    assert in_bf16.keys() == in_fp32.keys()
    errors = {n: float((in_bf16[n] - exact).norm() / exact.norm()) for n, exact in in_fp32.items()}
    too_large = {
        n: error
        for n, error in errors.items()
        if error > (BOUND_PER_HEAD if n.rpartition(".")[2] in PER_HEAD else BOUND)
    }
    assert not too_large
