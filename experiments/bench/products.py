"""Run the matrix products of a model's linear layers without the rest of a training step.

No step in BF16 can take less time than its products. So their time shows how much of a step everything else takes.
"""

from __future__ import annotations

import torch

from fewbits.kernels.products import matmul
from fewbits.models.networks.decoder import DecoderConfig
from fewbits.models.networks.layers import Linear
from fewbits.models.networks.registry import on_meta


class LinearProducts:
    """A callable that runs the three products (fprop, dgrad, wgrad) of each linear layer and the output head, in BF16.

    The operands are random; layers of the same shape use the same operands. tokens: the number of rows of x and dy.
    """

    def __init__(self, config: DecoderConfig, tokens: int, device: torch.device) -> None:
        layers = [module for module in on_meta(config).modules() if isinstance(module, Linear)]
        self.shapes = [(layer.out_features, layer.in_features) for layer in layers]
        generator = torch.Generator().manual_seed(0)

        def operand(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, generator=generator).to(device, torch.bfloat16)

        self.operands = {
            (out, width): (operand(tokens, width), operand(out, width), operand(tokens, out))
            for out, width in dict.fromkeys(self.shapes)
        }

    def __call__(self) -> None:
        for shape in self.shapes:
            x, w, dy = self.operands[shape]
            matmul(x, w.t())
            matmul(dy, w)
            matmul(dy.t(), x)
