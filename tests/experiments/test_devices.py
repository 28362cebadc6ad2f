"""Test the peak speeds of GPUs by name, and that attention's gradients are deterministic in a trial."""

from collections.abc import Iterator

import pytest
import torch
from torch.nn.attention import SDPBackend

from fewbits.experiments import devices
from fewbits.kernels.layers.attention import causal_attention

NAMES = {
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA GH200 480GB": 989e12,
    "NVIDIA GB200": 2500e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA GeForce RTX 5070 Ti": 87.9e12,
    "NVIDIA GeForce RTX 5090": 209.5e12,
    "NVIDIA GeForce RTX 5090 Laptop GPU": None,
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None,
    "NVIDIA RTX A1000": None,
}


@pytest.mark.parametrize("name", NAMES)
def test_the_peak_of_a_gpu_is_that_of_the_longest_matching_name(name: str) -> None:
    assert devices.peak_of(name) == NAMES[name]


@pytest.fixture
def deterministic() -> Iterator[None]:
    before = torch.get_deterministic_debug_mode(), torch.backends.cuda.cudnn_sdp_enabled()
    devices._be_deterministic()
    yield
    torch.set_deterministic_debug_mode(before[0])
    torch.backends.cuda.enable_cudnn_sdp(before[1])


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_in_a_trial_is_flash_attention_with_the_same_gradients_twice(device: str, kv_heads: int) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    made = [torch.randn(2, 512, n, 64, device=device).bfloat16() for n in (4, kv_heads, kv_heads)]
    q, k, v = (t.transpose(1, 2) for t in made)
    assert torch._fused_sdp_choice(q, k, v, is_causal=True, enable_gqa=kv_heads < 4) == SDPBackend.FLASH_ATTENTION.value

    def gradients() -> tuple[torch.Tensor, ...]:
        leaves = [t.clone().requires_grad_() for t in made]
        return torch.autograd.grad(causal_attention(*leaves).float().square().sum(), leaves)

    assert all(torch.equal(a, b) for a, b in zip(gradients(), gradients(), strict=True))
