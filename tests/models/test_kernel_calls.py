"""Test that `calls_of` lists all kernels that training launches, so that they can be compiled before training."""

from pathlib import Path

import pytest
import torch

from fewbits.commands.doctor import main
from fewbits.experiments.config import load_recipe
from fewbits.kernels.backends.choice import replaced_by
from fewbits.kernels.backends.gpu.device import Device
from fewbits.kernels.backends.gpu.warm import Recorder, kernels_of
from fewbits.models.kernel_calls import calls_of
from fewbits.models.networks.registry import build, model, on_meta
from fewbits.models.observer import Observer, ObserverConfig
from fewbits.models.quantize import quantize
from tests.kernels.backends.gpu import stubbed


@pytest.mark.parametrize("recipe", ["nvfp4", "mor/block", "mor/tensor", "gaussws"])
def test_training_launches_only_kernels_that_were_listed(recipe: str) -> None:
    """Check that `calls_of` lists all kernels of training steps with and without statistics for the observer.

    Kernels are recorded instead of launched, so the values of all tensors are undefined.
    """
    name, tokens, recorder = "nemotron-nano", 64, Recorder()
    listed = kernels_of(calls_of(quantize(on_meta(model(name)), load_recipe(recipe)), tokens, torch.bfloat16))
    network = build(name, seed=0)
    quantization = quantize(network, load_recipe(recipe), observer=Observer(ObserverConfig(every=2)))
    with replaced_by(Device(recorder)):
        for step in range(2):
            quantization.begin(step)
            network(torch.zeros(1, tokens, dtype=torch.long)).float().sum().backward()
    assert recorder.variants
    assert not set(recorder.variants) - set(listed)


@pytest.mark.skipif(stubbed.unavailable() is not None, reason=str(stubbed.unavailable()))
def test_kernels_are_compiled_beforehand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with stubbed.stubbed(monkeypatch, tmp_path) as stub:
        before = stub.nvrtc.stub_compiled()
        assert main(["--warm", "nvfp4", "nemotron-nano", "--architecture", "sm_90"]) == 0
        compiled = stub.nvrtc.stub_compiled() - before
        assert capsys.readouterr().out.startswith(f"{compiled} kernels for sm_90")
        assert compiled == len(list(tmp_path.glob("cuda-*.cubin"))) > 5
        assert main(["--warm", "nvfp4", "nemotron-nano"]) == 0  # for the architecture of this (stubbed) GPU
        assert stub.nvrtc.stub_compiled() - before == compiled
        with pytest.raises(ValueError, match=r"'hopper'.* sm_90, sm_100"):
            main(["--warm", "nvfp4", "nemotron-nano", "--architecture", "hopper"])


def test_without_a_gpu_an_architecture_is_needed() -> None:
    with pytest.raises(ValueError, match="--architecture"):
        main(["--warm", "nvfp4", "nemotron-nano"])
