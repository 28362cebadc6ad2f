"""Test quantized layers on CUDA streams: no capture without seeds, and no cached tensors of another stream.

No GPU is needed: the CUDA tensors are torch's fake tensors, which have a device but no memory, and the two functions of
torch that tell the current stream and whether it is captured are replaced.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fewbits.models.quantize import quantize
from fewbits.models.runtime import current_stream
from tests.models.quantized import E4M3, linear, noisy, one_layer, recipe

CUDA = torch.device("cuda", 0)


def test_a_layer_that_is_captured_without_its_seeds_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, quantization = one_layer(recipe(E4M3), 32, 64)
    quantization.begin(0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with FakeTensorMode():
        x = torch.empty(4, 32, device=CUDA)
    with pytest.raises(RuntimeError, match="same random bits"):
        layer(x)


def test_the_stream_is_that_of_the_tensors_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", {0: 7, 1: 9}.get, raising=False)
    assert [current_stream(torch.device("cuda", i)) for i in (0, 1)] == [7, 9]
    assert current_stream(torch.device("cpu")) == 0


def test_another_stream_quantizes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that weight and input are cached on one stream, and quantized again when the current stream changes."""
    model = torch.nn.Sequential(linear(32, 32, draw=noisy), linear(32, 32, draw=noisy))
    quantization = quantize(model, recipe(E4M3))
    quantization.begin(0)
    layer, x, streams = quantization.layers[0], noisy(16, 32, seed=1, dtype=torch.bfloat16).requires_grad_(), [1]
    for module in ("fewbits.models.runtime", "fewbits.models.quantized_linear"):
        monkeypatch.setattr(f"{module}.current_stream", lambda device: streams[0])
    first = layer(x)
    weights, read = layer._weights, quantization.last_input
    assert torch.equal(layer(x), first)
    assert layer._weights is weights
    assert quantization.last_input is read
    streams[0] = 2
    assert torch.equal(layer(x), first)
    assert layer._weights is not weights
    assert quantization.last_input is not read
