"""Test `quantize` on models of fewbits and of other libraries: layers that are quantized or kept, switches, errors."""

from __future__ import annotations

import re
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fewbits.kernels.api import fake_quantize
from fewbits.models.networks.decoder import Decoder
from fewbits.models.networks.presets import MODELS
from fewbits.models.networks.registry import on_meta
from fewbits.models.observer import Observer, ObserverConfig
from fewbits.models.quantize import Quantization, quantize
from fewbits.models.quantized_linear import QuantizedLinear
from fewbits.models.recipe import Recipe
from fewbits.models.weights import linear_layers
from tests.models.quantized import E4M3, MIXED, NVFP4, batch, equal, linear, normal, one_layer, recipe, tiny, train

SQUARE = "e4m3:16x16:amax"
SR = f"{E4M3}:stochastic"
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama2": {},
    "nemotron": {},
    "hybrid": {"layers": 3, "pattern": "M-*", "mamba_head_dim": 32, "mamba_groups": 2},
}


# ---- nothing quantized, nothing changed


@pytest.mark.parametrize(
    ("text", "dtype"), [("high", torch.bfloat16), ("bf16", torch.bfloat16), ("high", torch.float32)]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_recipe_that_quantizes_nothing_trains_exactly_as_the_plain_model(
    family: str, text: str, dtype: torch.dtype
) -> None:
    runs = []
    for quantized in (False, True):
        model = tiny(family, dtype=dtype, **FAMILIES[family], bias=True)
        spec = recipe(text, output="bf16" if dtype == torch.bfloat16 else "fp32")
        runs.append(train(model, quantize(model, spec) if quantized else None))
    assert equal(*runs)


# ---- layers that are found


def named(model: nn.Module) -> list[tuple[str, int, str | None]]:
    return [(layer.name, layer.block, layer.part) for layer in linear_layers(model)]


@pytest.mark.parametrize("name", MODELS)
def test_every_linear_layer_of_every_model_but_the_head_is_found_and_has_a_part(name: str) -> None:
    model = on_meta(MODELS[name])
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    layers = named(model)
    assert {name for name, _, _ in layers} == {name for name in linears if not name.endswith(("head", "router"))}
    assert all(part for _, _, part in layers)
    assert [block for _, block, _ in layers] == sorted(block for _, block, _ in layers)


def hugging_face() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=64,
        )
    )


class NanoGptBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.ModuleDict({"c_attn": nn.Linear(8, 24), "c_proj": nn.Linear(8, 8)})
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(8, 32), "c_proj": nn.Linear(32, 8)})


class NanoGpt(nn.Module):
    """A model like nanoGPT, whose blocks are in an nn.ModuleList inside an nn.ModuleDict."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {"wte": nn.Embedding(9, 8), "h": nn.ModuleList([NanoGptBlock(), NanoGptBlock()]), "ln_f": nn.LayerNorm(8)}
        )
        self.lm_head = nn.Linear(8, 9)


class Titan(nn.Module):
    """A model like torchtitan's, whose blocks are in an nn.ModuleDict with their numbers as keys.

    Blocks 0 and 1 are missing, as in a process that trains another stage of a pipeline.
    """

    def __init__(self) -> None:
        super().__init__()
        block = {"wq": nn.Linear(8, 8), "wo": nn.Linear(8, 8), "w1": nn.Linear(8, 8), "w2": nn.Linear(8, 8)}
        self.layers = nn.ModuleDict({str(n): nn.ModuleDict(dict(block)) for n in (2, 3)})
        self.output = nn.Linear(8, 9)


def test_the_layers_of_others_models_are_found_with_their_parts_and_heads_left_alone() -> None:
    llama = ["qkv"] * 3 + ["out"] + ["up"] * 2 + ["down"]
    assert [layer[1:] for layer in named(hugging_face())] == [(block, part) for block in (0, 1) for part in llama]
    assert [layer[1:] for layer in named(NanoGpt())] == [
        (block, part) for block in (0, 1) for part in ("qkv", "out", "up", "down")
    ]
    assert named(Titan())[0] == ("layers.2.wq", 0, "qkv")
    assert [layer[1:] for layer in named(Titan())][:4] == [(0, part) for part in ("qkv", "out", "up", "down")]


def test_what_multihead_attention_multiplies_by_itself_is_not_called_quantized() -> None:
    """Check that the layers of nn.MultiheadAttention are not quantized: it uses their weights without calling them."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False)
    assert [name for name, _, _ in named(encoder)] == [f"layers.{block}.linear{n}" for block in (0, 1) for n in (1, 2)]


def test_parameters_stay_the_same_objects() -> None:
    model = tiny("llama2")
    before = dict(model.named_parameters())
    quantize(model, recipe(E4M3))
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)
    assert not isinstance(model.head, QuantizedLinear)


def test_a_quantized_model_can_be_quantized_by_another_recipe() -> None:
    """Check that the second recipe gives the same bits as on a new model, so that one model can compare recipes."""
    results = []
    for earlier in (None, recipe(SR), Recipe.from_dict(NVFP4)):
        model = tiny("gpt2")
        if earlier is not None:
            train(tiny("gpt2"), quantize(model, earlier), steps=1)
        results.append(train(model, quantize(model, recipe(MIXED)), steps=1))
    assert equal(results[0], results[1])
    assert equal(results[0], results[2])


# ---- layers that are kept


def kept(model: nn.Module, **keep: Any) -> list[str]:
    return quantize(model, recipe(E4M3, keep=keep)).kept


@pytest.mark.parametrize(
    ("name", "first", "last", "blocks", "layers", "linears"),
    [
        ("hybrid-12b", 2, 8, 10, 62, (20, 124)),  # 16 % of the layers
        ("hybrid-8b", 0, 8, 8, 52, (16, 104)),  # 15 % of the layers
        ("nvfp4-1.2b", 0, 4, 4, 20, (16, 80)),  # 20 % of the layers
        ("hybrid-12b", 1, 2, 3, 62, (6, 124)),  # the paper's FP8 baseline
    ],
)
def test_the_layers_that_nvfp4s_models_keep_in_bf16(
    name: str, first: int, last: int, blocks: int, layers: int, linears: tuple[int, int]
) -> None:
    """Check claim N26: NVFP4 keeps 16 % of the linear layers of the 12B model and about 15 % of the 8B model."""
    model = on_meta(MODELS[name])
    quantization = quantize(model, recipe(E4M3, keep={"first": first, "last": last}))
    assert (len(quantization.kept), len(quantization.layers)) == linears
    in_blocks = {layer.block for layer in quantization.layers if layer.name in quantization.kept}
    assert 1 + max(layer.block for layer in quantization.layers) == layers
    assert in_blocks == {*range(first), *range(layers - last, layers)}
    assert len(in_blocks) == blocks


def test_layers_are_kept_by_block_part_and_name() -> None:
    names = [name for name, _, _ in named(tiny("gpt2", layers=3))]
    assert kept(tiny("gpt2", layers=3)) == []
    assert kept(tiny("gpt2", layers=3), first=1) == names[:4]
    assert kept(tiny("gpt2", layers=3), last=2) == names[4:]
    assert kept(tiny("gpt2", layers=3), parts=["od"]) == [name for name in names if name.endswith((".out", ".down"))]
    assert kept(tiny("gpt2", layers=3), names=["*.1.ffn.*", "blocks.2.attention.qkv"]) == [*names[6:8], names[8]]
    assert kept(tiny("gpt2", layers=3), first=1, parts=["up"]) == [*names[:4], names[6], names[10]]


@pytest.mark.parametrize("by", ["high", "bf16", SQUARE])
def test_what_is_kept_is_computed_as_the_recipe_says(by: str) -> None:
    model = nn.Sequential(linear(32, 32, seed=1), linear(32, 32, seed=2))
    first, last = quantize(model, recipe("e2m1", keep={"last": 1, "by": by})).layers
    x = normal(24, 32, seed=1, dtype=torch.bfloat16)
    for layer, text in ((first, "e2m1"), (last, by)):
        w = layer.weight.detach().bfloat16()
        expected = x @ w.t() if text == "high" else fake_quantize(x, text) @ fake_quantize(w, text).t()
        with torch.no_grad():
            assert torch.equal(layer(x), expected)


# ---- the switch


@pytest.mark.parametrize("passes", ["both", "forward", "backward"])
def test_a_recipe_switches_the_passes_it_names_at_its_time_and_nothing_before(passes: str) -> None:
    runs = []
    for switch in ({}, {"at": 2 / 3, "passes": passes, "to": "bf16"}):
        model = tiny("nemotron", layers=1)
        runs.append(train(model, quantize(model, Recipe.from_dict({**NVFP4, "switch": switch})), micro_batches=1))
    begins = len(runs[0]) * 2 // 3
    never, switched = runs
    assert equal(switched[:begins], never[:begins])
    assert torch.equal(switched[begins], never[begins]) == (passes == "backward")  # the loss of the third step
    assert not equal(switched[begins + 1 :], never[begins + 1 :])


def test_forward_alone_switched_leaves_backward_with_the_quantized_original() -> None:
    """Check that dgrad and wgrad still read quantized w and x after only the forward pass is switched to `high`.

    Their slots are `same`, which here means w and x quantized as for fprop before the switch.
    """
    spec = recipe(E4M3, E4M3, "high", "same", "high", "same", switch={"at": 0.5, "passes": "forward"})
    layer, quantization = one_layer(spec, 32, 48)
    x, dy = normal(24, 32, seed=1, dtype=torch.bfloat16), normal(24, 48, seed=2, dtype=torch.bfloat16)
    outputs: list[Tensor] = []
    gradients: list[list[Tensor]] = []
    for progress in (0.4, 0.6):
        quantization.begin(0, progress=progress)
        y = layer(x.requires_grad_())
        outputs.append(y.detach())
        gradients.append(list(torch.autograd.grad(y, (x, layer.weight), dy)))
    assert not torch.equal(*outputs)
    assert torch.equal(outputs[1], x.detach() @ layer.weight.detach().bfloat16().t())
    assert equal(*gradients)


# ---- models from other libraries


@cache
def foreign_training(
    spec: Recipe | None, *, reentrant: bool | None = None, keep_weights: bool = True
) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """Train transformers' Llama for four steps of two micro-batches; return the losses and the observer's slot rows.

    spec: the recipe; None: do not quantize. reentrant: the kind of activation checkpointing; None: none.
    """
    model = hugging_face()
    if reentrant is not None:
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
        model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    observer, layers = Observer(ObserverConfig(window=4, every=1)), []
    if spec is not None:
        quantization = quantize(model, spec, observer=observer, keep_weights=keep_weights)
        quantization.attach(model, optimizer)
        layers = quantization.layers
    losses: list[Tensor] = []
    tokens, _ = batch(0)
    for _ in range(4):
        for _ in range(2):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses, [row for row in observer.rows(3, layers) if row["slot"] != "weight"] if layers else []


def test_a_hugging_face_llama_trains_with_an_optimizer_attached() -> None:
    plain, _ = foreign_training(None)
    high, _ = foreign_training(recipe("high", output="fp32"))
    assert equal(plain, high)
    # slots: the number of quantized slots per layer, where two slots of a tensor that is quantized once count as one.
    for spec, slots in ((recipe(MIXED), 3), (Recipe.from_dict(NVFP4), 5)):
        losses, rows = foreign_training(spec)
        assert len(rows) == 14 * slots
        assert not any(map(torch.equal, losses, plain))
        assert losses[-1] < losses[0] - 0.2
        assert equal(losses, foreign_training.__wrapped__(spec)[0])


RECOMPUTED = {
    "nvfp4": Recipe.from_dict(NVFP4),
    "sampled mixture": recipe(MIXED, sampler={"kind": "gaussws"}),
    "signs drawn for every GEMM": recipe(f"{SR}:rht16:signs=each"),
}


@pytest.mark.parametrize(
    ("name", "reentrant", "keep_weights"),
    [
        ("nvfp4", None, False),
        *product(("nvfp4",), (False, True), (True, False)),
        ("sampled mixture", True, False),
        ("signs drawn for every GEMM", False, False),
    ],
)
def test_activation_checkpointing_and_weights_that_are_not_kept_change_neither_losses_nor_what_is_observed(
    name: str, reentrant: bool | None, keep_weights: bool
) -> None:
    losses, rows = foreign_training(RECOMPUTED[name])
    recomputed, their_rows = foreign_training(RECOMPUTED[name], reentrant=reentrant, keep_weights=keep_weights)
    assert equal(losses, recomputed)
    assert rows == their_rows


def test_nothing_holds_a_quantized_weight_that_is_not_kept() -> None:
    """Check with keep_weights=False that autograd saves no quantized weight between forward and backward pass."""

    def bytes_held(keep_weights: bool) -> int:
        model, held = nn.Sequential(linear(32, 48)), set[tuple[int, int]]()
        (layer,) = quantize(model, recipe(E4M3), keep_weights=keep_weights).layers

        def hold(tensor: Tensor) -> Tensor:
            held.add((tensor.data_ptr(), tensor.nbytes))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
            model(normal(24, 32, seed=1).requires_grad_())
        assert (layer._weights is not None) == keep_weights
        return sum(size for place, size in held if place != layer.weight.data_ptr())

    assert bytes_held(True) - bytes_held(False) == 48 * 32 * 4


def test_an_attached_optimizer_counts_steps_and_calls_in_training_between_them() -> None:
    """Check that `attach` counts forward passes with gradients in training mode as micro-batches, and no others."""
    model = nn.Sequential(linear(32, 48))
    quantization = quantize(model, recipe(SR))
    quantization.begin(7, rank=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    quantization.attach(model, optimizer)
    x, seen = normal(24, 32, seed=1), []
    for _ in range(2):
        for _ in range(2):
            model(x)
            seen.append((quantization.context.step, quantization.context.micro_batch, quantization.context.rank))
            with torch.no_grad():
                model(x)
            model.eval()(x)
            model.train()
        step = quantization.context.step
        optimizer.step()
        assert quantization.context.step == step + 1  # before the next forward pass
    assert seen == [(7, 0, 3), (7, 1, 3), (8, 0, 3), (8, 1, 3)]


def test_an_attached_optimizer_switches_by_the_steps_it_is_told() -> None:
    spec = recipe(E4M3, switch={"at": 0.5, "to": "high"})
    model = nn.Sequential(linear(32, 48))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    quantization = quantize(model, spec)
    message = "switches at 0.5 of training: pass steps= to attach, or call begin(step, progress=…) yourself"
    with pytest.raises(ValueError, match=re.escape(message)):
        quantization.attach(model, optimizer)
    quantization.attach(model, optimizer, steps=4)
    seen = []
    for _ in range(4):
        model(normal(24, 32, seed=1)).sum().backward()
        seen.append(quantization.context.switched)
        optimizer.step()
    assert seen == [False, False, True, True]


def test_a_compiled_model_computes_what_the_plain_one_does_and_no_step_compiles_anew() -> None:
    """Check that quantized layers stay eager while the rest of the model is compiled.

    The compiler's backend `eager` only traces, so the bits must not change.
    """
    runs = []
    for compiled in (False, True):
        torch._dynamo.reset()
        model = tiny("nemotron", layers=2)
        quantization = quantize(model, Recipe.from_dict(NVFP4))
        loss_of = torch.compile(model.loss, backend="eager") if compiled else model.loss
        seen: list[Tensor] = []
        for step in range(3):
            quantization.begin(step)
            with torch._dynamo.config.patch(error_on_recompile=step > 0):
                loss = loss_of(*batch(step))
            loss.backward()
            seen += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        runs.append(seen)
    assert equal(*runs)


def test_a_model_whose_layers_are_frozen_still_passes_gradients_through() -> None:
    model = nn.Sequential(linear(32, 48), linear(48, 32))
    quantize(model, recipe(E4M3))
    model.requires_grad_(False)
    x = normal(24, 32, seed=1).requires_grad_()
    model(x).sum().backward()
    assert x.grad is not None
    assert float(x.grad.norm()) > 0


# ---- errors


def bad(model: nn.Module, **others: Any) -> Quantization:
    return quantize(model, recipe(E4M3, name="mine", **others))


def gpt2(layers: int = 2) -> Decoder:
    return tiny("gpt2", layers=layers)


def unknown_parts() -> nn.Module:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))


BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "nothing to quantize": (
        lambda: nn.Sequential(nn.ReLU()),
        {},
        "Sequential has no linear layer in its blocks to quantize",
    ),
    "a linear layer itself": (lambda: nn.Linear(4, 4), {}, "cannot be replaced in place: put it into an nn.Sequential"),
    "all blocks kept": (
        gpt2,
        {"keep": {"first": 1, "last": 1}},
        "recipe mine keeps the first 1 and last 1 of 2 blocks in high precision: no layer would be quantized; use a",
    ),
    "a name that no layer has": (
        gpt2,
        {"keep": {"names": ["*.ffn.gate"]}},
        "keep.names: no layer matches '*.ffn.gate'; the layers are blocks.0.attention.qkv, blocks.0.attention.out, "
        "blocks.0.ffn.up, blocks.0.ffn.down, blocks.1.attention.qkv, blocks.1.attention.out and 2 more",
    ),
    "parts kept of layers whose part is unknown": (
        unknown_parts,
        {"keep": {"parts": ["up"]}},
        "recipe mine selects layers by part, but the part of 0, 1, 2, 3, 4, 5 and 2 more is unknown: give the module "
        "an attribute `part`, one of qkv, out, up, down, in",
    ),
    "a part that no layer has": (
        gpt2,
        {"keep": {"parts": ["in"]}},
        "keep.parts: no layer has the part in; the model has only down, out, qkv, up",
    ),
}


RULES = [
    {"match": {"parts": ["down"], "last": 1}, "slots": {"fprop.x": "high", "wgrad.x": "same"}},
    {"match": {"parts": ["od"]}, "slots": {"fprop.x": SR, "fprop.w": SQUARE}},
]


def test_the_first_rule_that_matches_a_layer_changes_its_slots_and_keep_comes_before() -> None:
    model = gpt2(3)
    base = recipe(E4M3, E4M3, "high", "high", "high", E4M3, keep={"first": 1}, rules=RULES)
    quantization = quantize(model, base)

    def slots(layer: QuantizedLinear) -> list[str]:
        return [str(slot.spec or "high") for slot in layer.plans[0].operands.values()]

    found = {layer.name: slots(layer) for layer in quantization.layers}
    own = [E4M3, E4M3, "high", "high", "high", E4M3]
    assert found["blocks.0.ffn.down"] == ["high"] * 6
    assert found["blocks.1.ffn.up"] == own
    assert found["blocks.1.attention.out"] == found["blocks.1.ffn.down"] == [SR, SQUARE, *own[2:]]
    assert found["blocks.2.ffn.down"] == ["high", E4M3, "high", "high", "high", "high"]
    x = normal(24, 96, seed=1)
    layer = quantization.layers[-1]
    with torch.no_grad():
        expected = nn.functional.linear(x, fake_quantize(layer.weight.detach(), E4M3), layer.bias)
        assert torch.equal(layer(x), expected)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"match": {"parts": ["in"]}, "slots": {"fprop.x": "high"}}, "rules: no layer that `keep` and earlier rules"),
        ({"match": {}, "slots": {"fprop.x": "high"}}, "a rule without conditions"),
        ({"match": {"last": 1}, "slots": {"fprop.y": "high"}}, "rules.slots 'fprop.y'"),
        ({"match": {"last": 1}, "slots": {"fprop.x": "e9m9"}}, "fprop.x:"),
        ({"match": {"last": 1}, "slots": {"fprop.x": f"{E4M3}:rht16"}}, "have different rotations"),
    ],
)
def test_a_rule_that_cannot_apply_is_refused(rule: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        quantize(gpt2(), recipe(E4M3, rules=[rule]))


def test_a_recipe_that_quantizes_nothing_must_be_called_bf16() -> None:
    """Check recipes without a quantizer, and one whose only quantizers are in layers that `keep` leaves high."""
    message = "recipe mine quantizes no operand of any layer; only the recipe bf16 may do so"
    for spec in (
        recipe("high", name="mine", output="compute"),
        recipe(E4M3, name="mine", output="compute", keep={"parts": ["all"]}),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            quantize(gpt2(), spec)
    for spec in (
        recipe("high", name="bf16"),
        recipe("high", name="mine", keep={"last": 1, "by": E4M3}),
        recipe("high", name="mine", switch={"at": 0.5, "to": E4M3}),
        recipe("high", name="mine", sampler={"kind": "gaussws"}),
    ):
        quantize(gpt2(), spec)


@pytest.mark.parametrize("case", BAD)
def test_a_recipe_that_does_not_fit_the_model_is_refused_and_changes_nothing(case: str) -> None:
    make, others, message = BAD[case]
    model = make()
    with pytest.raises(ValueError, match=re.escape(message)):
        bad(model, **others)
    assert not any(isinstance(module, QuantizedLinear) for module in model.modules())
