"""Train a small GPT, defined in this file, on bytes of a text with a recipe: own_model.py [TEXT_FILE [RECIPE]]."""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from fewbits import quantize

WIDTH, HEADS, BLOCKS, LENGTH, BATCH, STEPS = 64, 2, 2, 64, 8, 20


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.out_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(self.ln_1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out_proj(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.fc2(gelu(self.fc1(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))  # `quantize` quantizes the linear layers of blocks
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)  # outside of blocks, `head` stays in FP32

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def main(text: str = __file__, recipe: str = "mor/block") -> float:
    torch.manual_seed(1)
    data = torch.frombuffer(bytearray(Path(text).read_bytes()), dtype=torch.uint8).long()
    model = GPT()
    quantization = quantize(model, recipe, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    quantization.attach(model, optimizer, steps=STEPS)
    for step in range(STEPS):
        windows = torch.stack([data[i : i + LENGTH + 1] for i in torch.randint(len(data) - LENGTH, (BATCH,)).tolist()])
        loss = cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step + 1}/{STEPS}  loss {loss:.4f}")
    return loss.item()


if __name__ == "__main__":
    main(*sys.argv[1:])
