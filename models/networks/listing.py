"""Implement `fewbits models`: list the models by name, with parameter counts and a description."""

import json
from collections.abc import Sequence

from fewbits.common.arguments import CommandParser
from fewbits.common.tables import print_table
from fewbits.models.networks.decoder import DecoderConfig
from fewbits.models.networks.presets import MODELS
from fewbits.models.networks.registry import linear_parameters, parameters

_LABELS = {
    "gelu": "GELU",
    "swiglu": "SwiGLU",
    "relu2": "squared ReLU",
    "layernorm": "LayerNorm",
    "layernorm1p": "LayerNorm1p",
    "rmsnorm": "RMSNorm",
    "learned": "learned positions",
    "none": "no positions",
}


def main(argv: Sequence[str]) -> int:
    parser = CommandParser(
        "fewbits models",
        about="List the models with their parameters, those in quantizable linear layers, and a description.",
        examples="example: fewbits models --json",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list of objects")
    options = parser.parse_args(argv)
    rows: list[dict[str, str | int]] = [
        {
            "name": name,
            "parameters": parameters(config),
            "linear_parameters": linear_parameters(config),
            "description": describe(config),
        }
        for name, config in MODELS.items()
    ]
    if options.json:
        print(json.dumps(rows, indent=2))
    else:
        cells = [[f"{value:,}" if isinstance(value, int) else value for value in row.values()] for row in rows]
        print_table(("name", "parameters", "linear", "description"), cells, right=("parameters", "linear"))
    return 0


def describe(config: DecoderConfig) -> str:
    """Describe a model in one line, such as `12 blocks of width 768, 12 heads, SwiGLU 2048, RMSNorm, RoPE, …`."""
    heads = f"{config.heads} heads"
    if config.kv_heads < config.heads:
        heads += f" on {config.kv_heads}"
    if config.positions == "rope":
        positions = "RoPE" if config.rope_fraction == 1 else f"RoPE on {config.rope_fraction:.0%}"
    else:
        positions = _LABELS[config.positions]
    return ", ".join(
        [
            f"{config.layers} blocks" + (f" {config.pattern}" if config.pattern else "") + f" of width {config.width}",
            heads,
            f"{_LABELS[config.activation]} {config.ffn}",
            _LABELS[config.norm],
            positions,
            f"context {config.context}",
            f"vocabulary {config.vocab}" + (" tied" if config.tied else ""),
        ]
    )
