"""Test optimizers: groups of parameters, clipping, equal bits in every process, saved states, parameter versions."""

import copy
import hashlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fewbits.experiments.optimization.adam_mini import AdamMini
from fewbits.experiments.optimization.optimizers import (
    KINDS,
    OptimizerConfig,
    clip_gradients,
    load_optimizer_state,
    make_optimizer,
    optimizer_state,
    set_learning_rate,
)
from fewbits.models.networks.partition import Partition
from tests.messages import naming


class Sampled(nn.Linear):
    """A linear layer with a parameter for learned bit widths, one for each square of 32 × 32 weights."""

    def __init__(self, rows: int, cols: int) -> None:
        super().__init__(cols, rows)
        self.bit_scale = nn.Parameter(torch.ones(-(-rows // 32), -(-cols // 32)))


class Mixer(nn.Module):
    """A module with the parameters of a Mamba-2 mixer, without linear layers; A_log is a matrix, as in Mamba-1."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(6, 6, 4, groups=6)
        self.A_log, self.D = nn.Parameter(torch.zeros(6, 2)), nn.Parameter(torch.ones(6))
        self.dt_bias = nn.Parameter(torch.zeros(6))


class Model(nn.Module):
    def __init__(self, *, sampled: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(20, 40)
        self.up: nn.Linear = Sampled(70, 40) if sampled else nn.Linear(40, 70)
        self.norm = nn.LayerNorm(70)
        self.mixer = Mixer()
        self.head = nn.Linear(40, 20, bias=False)
        self.head.weight = self.embed.weight  # tied
        self.frozen = nn.Parameter(torch.zeros(3, 3), requires_grad=False)
        self.linear_D = nn.Linear(4, 4)  # its name contains D, but it is not Mamba-2's parameter D
        torch.manual_seed(4)
        with torch.no_grad():
            for param in self.parameters():
                if param is not getattr(self.up, "bit_scale", None):
                    param.add_(torch.randn_like(param), alpha=0.1)


def partition(model: nn.Module) -> dict[str, Partition]:
    """Return a partition of all parameters except the bit widths: by tensor, by element and by rows."""
    found: dict[str, Partition] = {
        name: "tensor" for name, _ in model.named_parameters() if not name.endswith("bit_scale")
    }
    return found | {"embed.weight": "element", "up.weight": (7,) * 10}


MATRICES = {"up.weight": (30, 40), "linear_D.weight": (4,)}


def build(kind: str, model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    parts = MATRICES if kind == "muon" else partition(model)
    return make_optimizer(model, OptimizerConfig(kind=kind, **settings), partition=parts)


def members(optimizer: torch.optim.Optimizer) -> dict[str, set[str]]:
    return {group["name"]: set(group["param_names"]) for group in optimizer.param_groups}


def backward(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        if param.requires_grad:
            param.grad = torch.randn(param.shape, generator=generator).to(param.device)


def digest(model: nn.Module) -> str:
    return hashlib.sha256(b"".join(param.detach().cpu().numpy().tobytes() for param in model.parameters())).hexdigest()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> str:
    for step in steps:
        backward(model, step)
        clip_gradients(model.parameters(), 1.0)
        set_learning_rate(optimizer, 1 / (step + 1))
        optimizer.step()
    return digest(model)


@pytest.mark.parametrize("kind", KINDS)
def test_matrices_are_decayed_vectors_and_mambas_recurrence_are_not_and_bit_widths_are_apart(kind: str) -> None:
    found = members(build(kind, Model()))
    matrices = found.pop("matrices", set())
    assert matrices == (MATRICES.keys() if kind == "muon" else set())
    assert found == {
        "decay": {"embed.weight", "up.weight", "mixer.conv.weight", "linear_D.weight"} - matrices,
        "plain": {"up.bias", "norm.weight", "norm.bias", "mixer.conv.bias", "mixer.A_log", "mixer.D", "mixer.dt_bias"}
        | {"linear_D.bias"},
        "bits": {"up.bit_scale"},
    }


@pytest.mark.parametrize("kind", KINDS)
def test_without_gradients_an_update_is_the_decay_alone(kind: str) -> None:
    model = Model()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer = build(kind, model, lr=0.5, weight_decay=0.1, bits_lr_ratio=0.5, bits_weight_decay=0.2)
    for param in model.parameters():
        param.grad = torch.zeros_like(param) if param.requires_grad else None
    set_learning_rate(optimizer, 0.25)
    optimizer.step()
    after = dict(model.named_parameters())
    decayed = 1 - 0.25 * 0.5 * 0.1
    for group, kept in (("matrices", decayed), ("decay", decayed), ("plain", 1.0), ("bits", 1 - 0.25 * 0.25 * 0.2)):
        for name in members(optimizer).get(group, ()):
            torch.testing.assert_close(after[name].detach(), before[name] * kept, rtol=1e-6, atol=0)
    assert torch.equal(after["frozen"], before["frozen"])


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_moves_the_version_of_what_it_changes(kind: str) -> None:
    """Caches of quantized weights check versions, which torch's fused AdamW alone does not increment."""
    model = Model()
    optimizer = build(kind, model)
    for step in range(3):
        backward(model, step)
        model.norm.weight.grad = None
        before = {name: (param._version, param.detach().clone()) for name, param in model.named_parameters()}
        optimizer.step()
        for name, param in model.named_parameters():
            version, value = before[name]
            assert (param._version > version) == (not torch.equal(param, value)) == (param.grad is not None), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("saved", [0, 2])
def test_an_optimizer_goes_on_bit_identically_from_its_state_by_name(kind: str, saved: int) -> None:
    model = Model()
    optimizer = build(kind, model)
    train(model, optimizer, range(saved))
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    state = copy.deepcopy(optimizer_state(optimizer))
    straight = train(model, optimizer, range(saved, 5))

    resumed = Model()
    resumed.load_state_dict(weights)
    other = build(kind, resumed)
    load_optimizer_state(other, state)
    assert train(resumed, other, range(saved, 5)) == straight


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("parent", "arm"), [(False, True), (True, False)])
def test_a_branch_may_add_or_drop_bit_widths_and_keeps_all_other_state(kind: str, parent: bool, arm: bool) -> None:
    model, branched = Model(sampled=parent), Model(sampled=arm)
    optimizer, other = build(kind, model), build(kind, branched)
    train(model, optimizer, range(2))
    load_optimizer_state(other, optimizer_state(optimizer))
    states, branch_states = optimizer_state(optimizer), optimizer_state(other)
    assert branch_states.keys() == states.keys() - {"up.bit_scale"}
    for name in branch_states:
        assert states[name].keys() == branch_states[name].keys()
        assert all(torch.equal(value, branch_states[name][key]) for key, value in states[name].items())
    train(branched, other, range(2, 3))
    assert ("up.bit_scale" in optimizer_state(other)) == arm


def test_the_state_of_other_parameters_another_optimizer_or_partition_is_refused() -> None:
    model = Model()
    adamw, mini = build("adamw", model), build("adam-mini", model)
    train(model, adamw, range(1))
    train(model, mini, range(1))
    with pytest.raises(ValueError, match=naming("up.weight", "optimizer", "partition")):
        load_optimizer_state(mini, optimizer_state(adamw))
    with pytest.raises(ValueError, match=naming("optimizer", "partition")):
        load_optimizer_state(adamw, optimizer_state(mini))
    with pytest.raises(ValueError, match=naming("up.weight", "optimizer")):
        load_optimizer_state(build("muon", model), optimizer_state(adamw))
    fewer = {name: state for name, state in optimizer_state(adamw).items() if name != "norm.bias"}
    with pytest.raises(ValueError, match=r"only one of the two has norm\.bias"):
        load_optimizer_state(adamw, fewer)


def test_clipping_bounds_the_common_norm_and_returns_the_one_before() -> None:
    model = Model()
    backward(model, 0)
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    expected = torch.cat([grad.flatten() for grad in grads]).double().norm()
    torch.testing.assert_close(clip_gradients(model.parameters(), 1.0).double(), expected, rtol=1e-6, atol=0)
    after = torch.cat([grad.flatten() for grad in grads]).norm()
    torch.testing.assert_close(after, torch.tensor(1.0), rtol=1e-5, atol=0)
    assert clip_gradients([nn.Parameter(torch.ones(2))], 1.0) == 0


@pytest.mark.parametrize("max_norm", [None, 1e6])
def test_gradients_within_the_bound_keep_their_bits(max_norm: float | None) -> None:
    model = Model()
    backward(model, 0)
    before = [None if param.grad is None else param.grad.clone() for param in model.parameters()]
    assert clip_gradients(model.parameters(), max_norm) > 1
    for param, grad in zip(model.parameters(), before, strict=True):
        assert param.grad is grad is None or torch.equal(param.grad, grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_shows_in_the_norm_and_is_not_hidden(bad: float) -> None:
    param = nn.Parameter(torch.ones(3))
    param.grad = torch.tensor([1.0, bad, 2.0])
    assert not clip_gradients([param], 1.0).isfinite()
    assert param.grad.isnan().any()


def test_adam_mini_follows_the_partition_and_takes_a_layers_bit_widths_together() -> None:
    model = Model()
    optimizer = build("adam-mini", model)
    train(model, optimizer, range(1))
    assert isinstance(optimizer, AdamMini)
    sizes = {name: state["exp_avg_sq"].numel() for name, state in optimizer_state(optimizer).items()}
    assert sizes["up.weight"] == 10
    assert sizes["norm.weight"] == sizes["mixer.conv.weight"] == 1
    assert sizes["embed.weight"] == model.embed.weight.numel()
    assert sizes["up.bit_scale"] == 1


@pytest.mark.parametrize(("scale", "theirs"), [("match-rms", "match_rms_adamw"), ("original", "original")])
def test_muon_has_torchs_bits_for_each_matrix_and_adamws_for_the_rest(scale: str, theirs: str) -> None:
    ours, other, plain = Model(), Model(), Model()
    optimizer = build("muon", ours, lr=0.01, momentum=0.9, matrix_lr_ratio=2.0, matrix_scale=scale)
    matrices = {  # the two matrices of up.weight share its memory
        name: [nn.Parameter(part) for part in other.get_parameter(name).detach().split(rows)]
        for name, rows in MATRICES.items()
    }
    every = [part for parts in matrices.values() for part in parts]
    muon = torch.optim.Muon(every, lr=0.02, weight_decay=0.1, momentum=0.9, adjust_lr_fn=theirs)
    adamw = build("adamw", plain, lr=0.01)
    for step in range(5):
        for model in (ours, other, plain):
            backward(model, step)
        for name, rows in MATRICES.items():
            grad = other.get_parameter(name).grad
            assert grad is not None
            for part, own in zip(matrices[name], grad.split(rows), strict=True):
                part.grad = own.contiguous()
        for each in (optimizer, muon, adamw):
            each.step()
    for name, value in ours.state_dict().items():
        assert torch.equal(value, (other if name in MATRICES else plain).state_dict()[name]), name


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda parts: None, "adam-mini needs a partition"),
        (lambda parts: parts.pop("norm.bias") and parts, r"the partition has no entry for norm\.bias"),
    ],
)
def test_a_partition_must_speak_of_every_parameter(broken: Callable[[Any], Any], message: str) -> None:
    model = Model()
    with pytest.raises(ValueError, match=message):
        make_optimizer(model, OptimizerConfig(kind="adam-mini"), partition=broken(partition(model)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "sgd"}, "unknown optimizer 'sgd'.*adamw, adam-mini"),
        ({"lr": -1.0}, "lr=-1.0.*finite numbers"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"beta2": 1.0}, r"beta2=1.0.*numbers from 0 to below 1"),
        ({"clip": 0.0}, r"clip=0.0.*finite numbers above 0"),
        ({"clip": float("inf")}, r"clip=inf.*finite numbers above 0"),
        ({"bits_weight_decay": -0.1}, "bits_weight_decay=-0.1"),
        ({"momentum": 0.9}, "momentum=0.9: only optimizer=muon"),
        ({"kind": "muon", "matrix_scale": "rms"}, "matrix_scale.*match-rms, original"),
    ],
)
def test_a_wrong_setting_is_named_with_what_is_valid(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**settings)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu_versions_move_and_the_state_by_name_goes_on_bit_identically(kind: str) -> None:
    def run(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> str:
        versions = [param._version for param in model.parameters() if param.requires_grad]
        result = train(model, optimizer, steps)
        moved = [param._version for param in model.parameters() if param.requires_grad]
        assert all(new >= old + len(steps) for old, new in zip(versions, moved, strict=True))
        return result

    model = Model().cuda()
    optimizer = build(kind, model)
    run(model, optimizer, range(2))
    weights = {name: value.cpu() for name, value in model.state_dict().items()}
    state = {name: {k: v.cpu() for k, v in entry.items()} for name, entry in optimizer_state(optimizer).items()}
    straight = run(model, optimizer, range(2, 5))
    resumed = Model().cuda()
    resumed.load_state_dict(weights)
    other = build(kind, resumed)
    load_optimizer_state(other, state)
    assert run(resumed, other, range(2, 5)) == straight
