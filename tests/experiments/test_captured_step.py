"""Test that a trial whose steps are captured and replayed gives the bits of one whose steps run as usual.

The CUDA backend runs on the stand-ins for NVIDIA's driver and torch.cuda (tests/kernels/backends/gpu/stubbed.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fewbits.experiments import captured_step
from fewbits.kernels.backends.choice import replaced_by
from tests.experiments.trial_inputs import GAUSSWS_MOR, MOR, left, train
from tests.kernels.backends.gpu import stubbed
from tests.kernels.backends.gpu.stubbed import Stub
from tests.messages import naming

NVFP4 = ("recipe=nvfp4", "recipe.keep.first=0", "recipe.keep.last=0")
TRIALS = {  # overrides, and how often each captured graph is replayed in six steps
    "mixture": ((*MOR, "training.recompute=true"), [5]),
    "sampler, measured steps": (
        (*GAUSSWS_MOR, "recipe.sampler.parts=[od]", "observer.every=3", "evaluation.every=2"),
        [3],
    ),
    "stochastic, switch": ((*NVFP4, "recipe.switch.at=0.5", "recipe.switch.passes=forward"), [2, 2]),
    "drawn signs": (("recipe=nvfp4-ms-eden", "recipe.keep.first=0", "recipe.keep.last=0"), [5]),
}
FEW = (
    *("model.layers=1", "training.steps=6", "training.length=64", "training.batch=2", "training.micro_batch=1"),
    *("evaluation.windows=1", "observer.every=0", "observer.gradients_every=0"),
)


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    if reason := stubbed.unavailable():
        pytest.skip(reason)
    with stubbed.stubbed(monkeypatch, tmp_path / "cache") as stub, replaced_by(stub.device):
        yield stub


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.deep if name in ("mixture", "drawn signs") else ()) for name in TRIALS],
)
def test_a_trial_with_replayed_steps_has_the_same_bits(
    stub: Stub, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    overrides, replays = TRIALS[name]
    asked = {override.partition("=")[0]: override for override in (*FEW, *overrides)}.values()
    usual, _ = train(cache, tmp_path / "usual", *asked)
    graphs: list[stubbed.Graph] = []

    def graph() -> stubbed.Graph:
        graphs.append(stub.capture())
        return graphs[-1]

    monkeypatch.setattr(captured_step, "complaint", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: graph)
    replayed, _ = train(cache, tmp_path / "replayed", *asked, "runtime.cuda_graph=on")
    assert left(replayed.path) == left(usual.path)
    assert [graph.replays for graph in graphs] == replays


def test_a_trial_that_cannot_be_captured_is_refused(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=naming("runtime.cuda_graph", "on: needs a GPU")):
        train(cache, tmp_path, "runtime.cuda_graph=on")
    train(cache, tmp_path, "runtime.cuda_graph=auto", "training.steps=1")
