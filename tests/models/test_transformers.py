"""Test `quantize` on small random models of transformers: what is quantized, to which values, and resumed training."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fewbits.kernels.api import fake_quantize
from fewbits.models.experts import ExpertLinear
from fewbits.models.layer_table import layer_table
from fewbits.models.quantize import Quantization, quantize
from fewbits.models.quantized_linear import StepContext
from fewbits.models.recipe import Recipe
from fewbits.models.weights import BlockLinear, weights
from tests.models.quantized import NVFP4, equal, normal, recipe

SQUARES = "e4m3:16x16:amax"
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
GPT2 = {"vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 64}
OPT = {"vocab_size": 128, "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
# Name of the family's classes: the settings of a small model, and what is not quantized in its first block.
FAMILIES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "GPT2": ({**GPT2, "bos_token_id": 0, "eos_token_id": 0, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}, set()),
    "Llama": (SIZES, set()),
    "OPT": ({**OPT, "word_embed_proj_dim": 64, "max_position_embeddings": 64, "dropout": 0.0}, set()),
    "GPTNeoX": ({key: SIZES[key] for key in SIZES if key not in ("num_key_value_heads", "head_dim")}, set()),
    "Gemma3": (SIZES, set()),
    "Mixtral": ({**SIZES, **EXPERTS}, {"mlp.gate"}),
    "Qwen3Moe": ({**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}, {"mlp.gate"}),
    "GptOss": ({**SIZES, **EXPERTS, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, {"mlp.router"}),
    "Llama4": (
        {**SIZES, "intermediate_size_mlp": 96, "num_local_experts": 4, "interleave_moe_layer_step": 1},
        {"feed_forward.router"},
    ),
    "JetMoe": (
        {**{k: v for k, v in SIZES.items() if k not in ("num_attention_heads", "head_dim")}, **EXPERTS}
        | {"kv_channels": 32},
        {"mlp.router.layer", "self_attention.experts.router.layer"},
    ),
}
MIXTURES = ("Mixtral", "GptOss", "Llama4", "JetMoe")
SHORT = ("GPT2", "Llama", "Mixtral", "JetMoe")  # the families that are resumed in every run, not only in deep ones
RESUMED = [*SHORT, *(pytest.param(name, marks=pytest.mark.deep) for name in FAMILIES if name not in SHORT)]


def made(family: str, **settings: Any) -> Any:
    """Return a small model of a family of transformers, with random weights that are the same in each call."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    name = f"{family}LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    model = getattr(transformers, name)(config(**FAMILIES[family][0], **settings)).float()
    with torch.no_grad():  # larger weights, so that the loss depends on the layers
        for weight in weights(model):
            if isinstance(weight, BlockLinear) and (weight.expert is None or weight.expert.number == 0):
                parameter = getattr(weight.module, weight.expert.parameter if weight.expert else "weight")
                parameter.mul_(5)
    return model


def tokens(seed: int = 0) -> Tensor:
    return torch.randint(1, 128, (2, 32), generator=torch.Generator().manual_seed(seed))


def loss_of(model: Any, seed: int = 0) -> Tensor:
    loss: Tensor = model(input_ids=tokens(seed), labels=tokens(seed)).loss
    return loss


@pytest.mark.parametrize("family", FAMILIES)
def test_every_product_of_a_blocks_weight_reads_its_quantized_values(family: str) -> None:
    """Compare with a plain model whose weights were quantized beforehand: no product may read another weight."""
    model, plain = made(family), made(family)
    quantization = quantize(model, recipe("high", SQUARES, "high", "high", "high", "high", name="weights"))
    unchanged = float(loss_of(plain).detach())
    with torch.no_grad():
        for weight in weights(plain):
            if isinstance(weight, BlockLinear):
                number = weight.expert.number if weight.expert else slice(None)
                matrix = getattr(weight.module, weight.expert.parameter if weight.expert else "weight")[number]
                matrix.copy_(fake_quantize(matrix.contiguous(), SQUARES))
    expected = float(loss_of(plain))
    assert float(loss_of(model)) == pytest.approx(expected, abs=2e-6)
    assert abs(expected - unchanged) > 1e-4
    table = layer_table(model).set_index("layer")
    first = re.compile(r"\.(layers|h)\.0\.")
    left = {name for name in table.index[table["why"] != ""] if first.search(f".{name}")}
    assert {first.split(f".{name}")[2] for name in left} == FAMILIES[family][1]
    total = sum(parameter.numel() for parameter in model.parameters())
    done = sum(layer.shape[0] * layer.shape[1] for layer in quantization.layers)
    assert f"{done / total:.0%} of the parameters" in repr(quantization)
    assert "(embedding)" in repr(quantization)
    assert "(head)" in repr(quantization)


@pytest.mark.parametrize("family", ["GPT2", "Mixtral", "GptOss", "Llama4"])
def test_each_layers_operands_are_those_of_fake_quantize(family: str) -> None:
    model = made(family)
    quantization = quantize(model, Recipe.from_dict(NVFP4))
    for layer in quantization.layers[:: max(1, len(quantization.layers) // 9)]:
        x = normal(24, layer.in_features, seed=1)
        with torch.no_grad():
            w = fake_quantize(layer.matrix.detach().contiguous(), "e2m1:16x16:nvfp4")
            expected = fake_quantize(x, "e2m1:1x16:nvfp4") @ w.t()
            assert torch.equal(
                layer(x), expected if layer.bias is None else torch.addmm(layer.bias, x * 0, w.t()) + expected
            )


@pytest.mark.parametrize("family", MIXTURES)
def test_each_expert_has_noise_of_its_own_and_gradients_reach_the_common_parameter(family: str) -> None:
    model = made(family)
    quantization = quantize(model, Recipe.from_dict(NVFP4))
    experts = [layer for layer in quantization.layers if isinstance(layer, ExpertLinear)]
    assert len({layer.seed(StepContext(), "dgrad.dy") for layer in experts}) == len(experts)
    loss_of(model).backward()
    gradients = [layer.gradient for layer in experts]
    assert all(gradient is not None for gradient in gradients)
    assert sum(float(gradient.abs().sum()) > 0 for gradient in gradients if gradient is not None) > len(experts) / 2


def test_the_implementations_of_experts_give_the_same_loss_or_are_refused() -> None:
    losses = {}
    for implementation in ("eager", "grouped_mm"):
        model = made("Mixtral")
        model.set_experts_implementation(implementation)
        quantize(model, Recipe.from_dict(NVFP4))
        losses[implementation] = float(loss_of(model))
    assert losses["eager"] == pytest.approx(losses["grouped_mm"], abs=1e-5)
    model.set_experts_implementation("batched_mm")
    with pytest.raises(RuntimeError, match=re.escape("cannot quantize; for a model of transformers, choose another")):
        loss_of(model)


def test_a_sampler_adds_noise_to_experts_and_to_gpt2s_layers() -> None:
    for family, count in (("Mixtral", 2 * (4 + 2 * 4)), ("GPT2", 8)):
        model = made(family)
        quantization = quantize(model, Recipe(name="noise", sampler=_sampler()))
        quantization.begin(0)
        first = loss_of(model)
        first.backward()
        scales = [parameter for name, parameter in model.named_parameters() if name.endswith("bit_scale")]
        assert len(scales) == count
        assert sum(scale.grad is not None for scale in scales) > count / 2
        quantization.begin(1)
        assert not torch.equal(loss_of(model), first)


def _sampler() -> Any:
    return Recipe.from_dict({"sampler": {"kind": "gaussws"}}).sampler


# ---- training that is resumed


def updates(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[Tensor]:
    """Train from one step to another, two micro-batches each, and return the losses and then the weights."""
    seen = []
    for step in range(first, last):
        for micro_batch in range(2):
            loss = loss_of(model, 2 * step + micro_batch)
            loss.backward()
            seen.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return seen + [parameter.detach().clone() for parameter in model.parameters()] * (last == 4)


def prepared(family: str, **settings: Any) -> tuple[nn.Module, torch.optim.Optimizer, Quantization]:
    model = made(family)
    quantization = quantize(model, Recipe.from_dict({**NVFP4, **settings}), seed=5)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), quantization


@pytest.mark.parametrize("family", RESUMED)
def test_a_resumed_training_has_the_bits_of_an_uninterrupted_one(family: str) -> None:
    model, optimizer, quantization = prepared(family)
    quantization.attach(model, optimizer)
    expected = updates(model, optimizer, 0, 4)

    model, optimizer, quantization = prepared(family)
    quantization.attach(model, optimizer)
    seen = updates(model, optimizer, 0, 2)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    for attach_first in (True, False):
        model, optimizer, quantization = prepared(family)
        if attach_first:
            quantization.attach(model, optimizer)
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
        if not attach_first:
            quantization.attach(model, optimizer)
        assert equal(seen + updates(model, optimizer, 2, 4), expected)


def test_a_step_that_cannot_be_known_is_an_error_and_can_be_given() -> None:
    model, optimizer, quantization = prepared("GPT2")
    quantization.attach(model, optimizer)
    expected = updates(model, optimizer, 0, 4)

    model, optimizer, quantization = prepared("GPT2")
    seen = []
    for step in range(2):  # a loop that calls `begin`, so the optimizer's state has no number of steps
        for micro_batch in range(2):
            quantization.begin(step, micro_batch)
            loss = loss_of(model, 2 * step + micro_batch)
            loss.backward()
            seen.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(ValueError, match="does not say how many"):
        quantization.attach(model, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    quantization.attach(model, optimizer, step=2)
    assert equal(seen + updates(model, optimizer, 2, 4), expected)
    optimizer.load_state_dict(saved)
    with pytest.raises(RuntimeError, match="does not say how many"):
        loss_of(model)


def test_the_state_of_a_quantization_is_loaded_only_into_an_equal_one() -> None:
    model, optimizer, quantization = prepared("GPT2")
    quantization.attach(model, optimizer, step=7)
    state = quantization.state_dict()
    other_model, other_optimizer, other = prepared("GPT2")
    other.attach(other_model, other_optimizer)
    other.load_state_dict(state)
    assert other.context.step == 7
    loss_of(other_model)
    assert other.context.step == 7
    for changed, message in (({"seed": 6}, "rounding seed 6"), ({"recipe": Recipe().to_dict()}, "another recipe")):
        with pytest.raises(ValueError, match=message):
            other.load_state_dict({**state, **changed})


# ---- the penalty of samplers


def test_attach_adds_the_gradient_of_the_penalty_once_for_each_update() -> None:
    settings = {"sampler": {"kind": "gaussws", "penalty": 0.5}}
    bits = []
    for how in ("attach", "attach and penalty()", "begin and penalty()"):
        model, _, quantization = prepared("GPT2", **settings)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if how.startswith("attach"):
            quantization.attach(model, optimizer)
        for step in range(2):
            for micro_batch in range(2):
                if how.startswith("begin"):
                    quantization.begin(step, micro_batch)
                loss = loss_of(model, 2 * step + micro_batch)
                if how.endswith("penalty()") and micro_batch == 0:
                    penalty = quantization.penalty()
                    assert penalty is not None
                    loss = loss + penalty
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        scales = [layer.bit_scale for layer in quantization.layers if layer.bit_scale is not None]
        bits.append(torch.cat([scale.detach().flatten() for scale in scales]))
    torch.testing.assert_close(bits[0], bits[1])
    assert torch.equal(bits[1], bits[2])
    assert float((bits[0] - 1).abs().max()) > 1e-3


@pytest.mark.parametrize("how", ["closure", "scaled and fused", "looked at"])
def test_the_penalty_is_added_whatever_the_optimizer_is_called_with(how: str) -> None:
    bits = []
    for penalty in (0.5, 0.0):
        model, _, quantization = prepared("GPT2", sampler={"kind": "gaussws", "penalty": penalty})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=how == "scaled and fused")
        quantization.attach(model, optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=how == "scaled and fused")

        def closure(model: Any = model, optimizer: Any = optimizer, scaler: Any = scaler) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model)
            scaler.scale(loss).backward()
            return loss

        if how == "closure":
            optimizer.step(closure)
        else:
            closure()
            with torch.no_grad():
                quantization.penalty()
            scaler.step(optimizer)
        scales = [layer.bit_scale for layer in quantization.layers if layer.bit_scale is not None]
        bits.append(torch.cat([scale.detach().flatten() for scale in scales]))
    # d/db of 0.5 · |b_t - target| / squares, times (init - target) = 2 and the rate 0.1, in a layer with 4 × 2 squares
    assert float((bits[1] - bits[0]).max()) == pytest.approx(0.5 * 2 * 0.1 / 4, rel=0.3)


def test_layers_whose_weight_the_model_reads_itself_are_named() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.dt_proj = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc1(x) @ self.dt_proj.weight

    model = Reads()
    quantization = quantize(model, recipe(SQUARES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    quantization.attach(model, optimizer)
    model(normal(8, 32, seed=1)).sum().backward()
    with pytest.warns(UserWarning, match="^dt_proj: never called"):
        optimizer.step()
    optimizer.step()  # a second warning would be an error


class TwoExperts(nn.Module):
    """Experts whose two parameters share one storage, and which uses them in a way that depends on `how`."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        memory = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
        self.w1, self.w3 = nn.Parameter(memory[0]), nn.Parameter(memory[1])

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "stack":
            return x @ torch.stack([self.w1[1].t(), self.w1[2].t()])[0]
        if self.how == "einsum":
            return torch.einsum("ti,oi->to", x, self.w1[1])
        if self.how == "part":
            return nn.functional.linear(x[:, :16], self.w1[1][:, :16])
        return nn.functional.linear(x, self.w1[1]) + nn.functional.linear(x, self.w3[2])


@pytest.mark.parametrize("how", ["stack", "einsum", "part", "linear"])
def test_no_product_of_an_expert_stays_unquantized_in_silence(how: str) -> None:
    model = nn.ModuleDict({"experts": TwoExperts(how)})
    plain = TwoExperts("linear")
    quantize(model, recipe("high", SQUARES, "high", "high", "high", "high", name="weights"))
    x = normal(8, 32, seed=1)
    if how != "linear":
        with pytest.raises(RuntimeError, match="which fewbits cannot quantize"):
            model["experts"](x)
        return
    with torch.no_grad():
        for parameter in (plain.w1, plain.w3):
            for matrix in parameter:
                matrix.copy_(fake_quantize(matrix, SQUARES))
        torch.testing.assert_close(model["experts"](x), plain(x))


def test_noise_that_would_be_the_same_in_every_step_is_an_error() -> None:
    model, optimizer, quantization = prepared("GPT2")
    for seen in range(2):
        if seen:
            with pytest.raises(RuntimeError, match="the step is unknown"):
                loss_of(model)
            with torch.no_grad():
                loss_of(model)
            quantization.begin(1)
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_an_optimizer_without_the_bit_widths_is_named() -> None:
    model = made("GPT2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    quantization = quantize(model, Recipe(name="noise", sampler=_sampler()))
    with pytest.warns(UserWarning, match="create it after quantize"):
        quantization.attach(model, optimizer)


def test_a_penalty_that_nobody_adds_is_a_warning_at_the_second_step() -> None:
    model, optimizer, quantization = prepared("GPT2", sampler={"kind": "gaussws", "penalty": 0.5})
    quantization.begin(0)
    loss_of(model).backward()
    optimizer.step()
    with pytest.warns(UserWarning, match="add quantization.penalty"):
        quantization.begin(1)
    quantization.begin(2)  # a second warning would be an error
