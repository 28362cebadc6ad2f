"""Define the decoder network; GPT-2, Llama, Nemotron and the Mamba-2 hybrids are configurations of it.

    embedding (+ learned positions) → blocks → norm → head

Each block has residual branches x ← x + mixer(norm(x)): attention and then the feed-forward layer, or, if the
configuration has a `pattern`, the single mixer that the block's letter names. Parameters are FP32. The residual stream
has the dtype `compute_dtype`, to which the embedding is cast; logits and loss are FP32.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fewbits.kernels.layers.attention import causal_attention, fused_causal_attention
from fewbits.kernels.layers.cross_entropy import cross_entropy
from fewbits.models.networks.layers import (
    ACTIVATIONS,
    GATED_ACTIVATIONS,
    NORMS,
    Embedding,
    FeedForward,
    Linear,
    MixtureOfExperts,
    Rope,
    balance_losses,
)
from fewbits.models.networks.mamba2 import Mamba2

POSITIONS: Final = ("learned", "rope", "none")
INITS: Final = ("gpt2", "llama")
LETTERS: Final = {"M": "Mamba-2", "-": "feed-forward", "*": "attention", "E": "mixture of experts"}
# If there are more logits, the loss is computed in parts, and the backward pass recomputes each part. On a CPU: 64 MiB
# in FP32; on other devices, where small parts waste time, 2 GiB in BF16.
LOGITS_AT_ONCE: Final = 1 << 24
LOGITS_AT_ONCE_ON_GPU: Final = 1 << 30
IGNORED: Final = -100  # a token with this target is excluded from the loss


@dataclass(frozen=True)
class DecoderConfig:
    """The configuration of a decoder. All fields are plain values, because it is also the schema of config files."""

    name: str
    vocab: int
    width: int
    layers: int  # number of blocks
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int  # hidden width of the feed-forward layer
    activation: str = "relu2"  # gelu, swiglu (with a gate, so three matrices) or relu2, the squared ReLU
    norm: str = "rmsnorm"  # layernorm, layernorm1p or rmsnorm
    norm_eps: float = 1e-5
    positions: str = "rope"  # learned, rope or none
    rope_fraction: float = 1.0  # the fraction of a head's dimensions that is rotated
    rope_theta: float = 10000.0
    context: int = 2048
    tied: bool = False  # the head shares the embedding's weight
    bias: bool = False  # whether linear layers and LayerNorms have a bias
    fused_qkv: bool = True  # one linear layer for q, k and v, instead of three
    # A letter for each block, as in Megatron: M Mamba-2, - feed-forward, E mixture of experts, * attention; "": every
    # block is *-, or *E with experts.
    pattern: str = ""
    mamba_groups: int = 8  # the number of groups; the heads of a group share B, C and a norm
    mamba_state: int = 128  # N of mamba2.py
    mamba_head_dim: int = 64  # P of mamba2.py
    mamba_expand: int = 2  # channels of x, divided by the model's width
    mamba_conv: int = 4  # taps of the convolution
    init: str = "gpt2"  # gpt2 or llama: see `initialise`
    init_std: float = 0.02
    # The probability with which an element of a branch's result is zeroed in training; no paper here uses dropout.
    dropout: float = field(default=0.0, metadata={"neutral": 0.0})
    experts: int = field(default=0, metadata={"neutral": 0})  # the number of experts of a mixture, each of width `ffn`
    active_experts: int = field(default=2, metadata={"neutral": 2})  # how many of them read a token
    # The hidden width of a further expert that reads every token; 0: there is none.
    shared_ffn: int = field(default=0, metadata={"neutral": 0})
    # The factor α of the loss that keeps the experts' loads even (layers.py); 0: no such loss.
    balance: float = field(default=0.01, metadata={"neutral": 0.01})

    def __post_init__(self) -> None:
        for name, valid, choices in self._rules():
            if not valid:
                value = getattr(self, name)
                raise ValueError(f"{name} {value!r} of model {self.name!r}: valid values are {choices}")

    def _rules(self) -> Iterator[tuple[str, bool, str]]:
        """Yield the rules for valid configurations: a field, whether its value is valid, and the valid values as text.

        A later rule may assume that the rules before it are satisfied, so the caller must stop at the first failure.
        """
        names: Mapping[str, Collection[str]] = {
            "activation": (*ACTIVATIONS, *GATED_ACTIVATIONS),
            "norm": NORMS,
            "positions": POSITIONS,
            "init": INITS,
        }
        for name, choices in names.items():
            yield name, getattr(self, name) in choices, ", ".join(choices)
        sizes = ("vocab", "width", "layers", "heads", "kv_heads", "head_dim", "ffn", "context")
        for name in (*sizes, "mamba_groups", "mamba_state", "mamba_head_dim", "mamba_expand", "mamba_conv"):
            yield name, getattr(self, name) >= 1, "integers ≥ 1"
        yield "kv_heads", self.heads % self.kv_heads == 0, f"divisors of heads, {self.heads}"
        for name in ("init_std", "norm_eps"):
            yield name, getattr(self, name) > 0, "numbers > 0"
        yield "dropout", 0 <= self.dropout < 1, "numbers from 0 up to 1, without 1"
        if self.positions == "rope":
            yield "rope_theta", self.rope_theta > 1, "numbers > 1"
            rotated = self.head_dim * self.rope_fraction
            even = 0 < rotated <= self.head_dim and int(rotated) == rotated and rotated % 2 == 0
            yield "rope_fraction", even, f"fractions that give an even number ≥ 2 of head_dim {self.head_dim}"
        if self.pattern:
            letters = ", ".join(f"{letter} {mixer}" for letter, mixer in LETTERS.items())
            yield "pattern", set(self.pattern) <= set(LETTERS), letters
            length = len(self.pattern)
            yield "layers", self.layers == length, f"{length}, the length of pattern {self.pattern!r}"
        yield "experts", self.experts >= 0, "integers ≥ 0"
        if self.pattern:
            yield "experts", (self.experts > 0) == ("E" in self.pattern), "0 exactly if the pattern has no E"
        if self.experts:
            yield "active_experts", 1 <= self.active_experts <= self.experts, f"1 to experts, {self.experts}"
            yield "shared_ffn", self.shared_ffn >= 0, "integers ≥ 0"
            yield "balance", self.balance >= 0, "numbers ≥ 0"
        if "M" in self.pattern:
            inner, heads = self.mamba_inner, self.mamba_heads
            yield "mamba_head_dim", inner % self.mamba_head_dim == 0, f"divisors of {inner}, expand × width"
            yield "mamba_groups", heads % self.mamba_groups == 0, f"divisors of the {heads} heads"

    @property
    def blocks(self) -> tuple[str, ...]:
        """A string for each block, with one of the signs in LETTERS for each of its residual branches, in order.

        A Transformer block is `*-`: attention (`*`), then feed-forward (`-`), or a mixture of experts (`E`).
        """
        return tuple(self.pattern) if self.pattern else ("*E" if self.experts else "*-",) * self.layers

    @property
    def branches(self) -> int:
        """The number of residual branches of all blocks, that is, of terms that are added to the residual stream."""
        return sum(map(len, self.blocks))

    @property
    def mamba_inner(self) -> int:
        """The number of channels of Mamba-2's x: mamba_expand · width."""
        return self.mamba_expand * self.width

    @property
    def mamba_heads(self) -> int:
        return self.mamba_inner // self.mamba_head_dim


# ------------------------------------------------------------------------------------------------ blocks


class Attention(nn.Module):
    """Causal attention, in which each key and value head is shared by `heads // kv_heads` query heads.

    The rows of a fused W_qkv are those of q, then k, then v.
    """

    def __init__(self, config: DecoderConfig, rope: Rope | None) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        linear = partial(Linear, config.width, part="qkv", bias=config.bias)
        self.fused = config.fused_qkv
        if self.fused:
            self.qkv = linear(queries + 2 * keys)
        else:
            self.q, self.k, self.v = linear(queries), linear(keys), linear(keys)
        self.out = Linear(queries, config.width, part="out", bias=config.bias)
        self.rope = rope

    def forward(self, x_BTD: Tensor) -> Tensor:
        turns = None if self.rope is None else self.rope.turns
        if self.fused:
            qkv_BTHE = self.qkv(x_BTD).unflatten(-1, (-1, self.head_dim))
            y_BTHE = fused_causal_attention(qkv_BTHE, self.heads, turns)
        else:
            q, k, v = (linear(x_BTD).unflatten(-1, (-1, self.head_dim)) for linear in (self.q, self.k, self.v))
            y_BTHE = causal_attention(q, k, v, turns)
        return self.out(y_BTHE.flatten(2))


def _mamba2(config: DecoderConfig) -> Mamba2:
    return Mamba2(
        width=config.width,
        inner=config.mamba_inner,
        heads=config.mamba_heads,
        groups=config.mamba_groups,
        state=config.mamba_state,
        conv=config.mamba_conv,
        eps=config.norm_eps,
        bias=config.bias,
    )


# The letter of a branch: the name and the constructor of its module.
MIXERS: Final[dict[str, tuple[str, Callable[[DecoderConfig, Rope | None], nn.Module]]]] = {
    "*": ("attention", Attention),
    "-": ("ffn", lambda config, rope: FeedForward(config)),
    "E": ("ffn", lambda config, rope: MixtureOfExperts(config)),
    "M": ("mamba", lambda config, rope: _mamba2(config)),
}


class Block(nn.Module):
    """Residual branches in sequence, x ← x + mixer(norm(x)); a branch has two modules, such as `ffn_norm` and `ffn`.

    The addition of a branch's result is fused with the next branch's norm. A block therefore receives the result of
    the previous block's last branch separately from x, and returns the result of its own last branch separately.
    """

    def __init__(self, config: DecoderConfig, letters: str, rope: Rope | None) -> None:
        super().__init__()
        self.branches = tuple(MIXERS[letter][0] for letter in letters)
        self.dropout = config.dropout
        for letter in letters:
            name, mixer = MIXERS[letter]
            self.add_module(f"{name}_norm", NORMS[config.norm](config.width, config.norm_eps, config.bias))
            self.add_module(name, mixer(config, rope))

    def forward(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (x, y): y is the result of this block's last branch, x the residual stream before y is added.

        y (argument): the result of the previous block's last branch, which is added to x first; None for the first
        block.
        """
        for name in self.branches:
            norm, mixer = getattr(self, f"{name}_norm"), getattr(self, name)
            if y is None:
                normed = norm(x)
            else:
                x, normed = norm.add(x, y)
            y = mixer(normed)
            if self.dropout and self.training and torch.is_grad_enabled():  # evaluations compute no gradients
                y = functional.dropout(y, self.dropout)
        assert y is not None  # a block has at least one branch
        return x, y


# ------------------------------------------------------------------------------------------------ the model


def logits_at_once(device: str) -> int:
    """Return about how many logits a loss keeps in memory at a time; device: the kind of device, such as `cpu`."""
    return LOGITS_AT_ONCE if device == "cpu" else LOGITS_AT_ONCE_ON_GPU


class Decoder(nn.Module):
    """A decoder, whose constructor leaves parameters uninitialised; `registry.build` creates and initialises one."""

    def __init__(self, config: DecoderConfig, compute_dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.config, self.compute_dtype = config, compute_dtype
        self.embed = Embedding(config.vocab, config.width)
        self.positions = Embedding(config.context, config.width) if config.positions == "learned" else None
        rope = None
        if config.positions == "rope":
            rope = Rope(config.head_dim, config.rope_fraction, config.rope_theta, config.context)
        self.blocks = nn.ModuleList(Block(config, letters, rope) for letters in config.blocks)
        self.norm = NORMS[config.norm](config.width, config.norm_eps, config.bias)
        self.head = Linear(config.width, config.vocab, part="head")
        if config.tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return logits [B, T, vocab] in FP32."""
        return self.head(self.hidden(tokens_BT)).float()

    def hidden(self, tokens_BT: Tensor) -> Tensor:
        """Return the input of the head: [B, T, width] in the compute dtype."""
        tokens = tokens_BT.shape[1]
        if tokens > self.config.context and self.config.positions != "none":
            raise ValueError(
                f"{tokens} tokens: model {self.config.name} supports 1 to {self.config.context}, its `context`"
            )
        x = self.embed(tokens_BT)
        if self.positions is not None:
            x = x + self.positions.weight[:tokens]
        first, *others = self.blocks
        x, y = first(x.to(self.compute_dtype))
        for block in others:
            x, y = block(x, y)
        return self.norm.add(x, y)[1]

    def loss(self, tokens_BT: Tensor, targets_BT: Tensor, reduction: Literal["mean", "none"] = "mean") -> Tensor:
        """Return the cross entropy in nats, in FP32.

        reduction: "mean" returns the mean over the tokens, without those whose target is −100, and in training adds the
            gradient of the mixtures' balance losses; "none" returns the loss
            of each token, [B, T], which is 0 where the target is −100.

        At most about `logits_at_once` logits are in memory at a time: if there are more, tokens are processed in parts.
        """
        if reduction not in ("mean", "none"):
            raise ValueError(f"reduction {reduction!r}: valid values are mean, none")
        balance: list[Tensor] = []
        if self.config.experts:
            with balance_losses() as balance:
                hidden = self.hidden(tokens_BT)
        else:
            hidden = self.hidden(tokens_BT)
        x, targets = hidden.flatten(0, 1), targets_BT.flatten()
        rows = max(1, logits_at_once(x.device.type) // self.config.vocab)
        if len(x) <= rows:
            losses = self._losses(x, targets)
        else:
            parts = zip(x.split(rows), targets.split(rows), strict=True)
            losses = torch.cat([self._recomputed_losses(*part) for part in parts])
        if reduction == "none":
            return losses.view_as(targets_BT)
        mean = losses.sum() / (targets != IGNORED).sum()
        if balance:  # their gradient counts, but not their value, so that losses of all models mean the same
            extra = torch.stack(balance).sum()
            mean = mean + (extra - extra.detach())
        return mean

    def _losses(self, x: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(self.head(x), targets, ignored=IGNORED, overwrite=True)

    def _recomputed_losses(self, x: Tensor, targets: Tensor) -> Tensor:
        return checkpoint(self._losses, x, targets, use_reentrant=False, preserve_rng_state=False)
