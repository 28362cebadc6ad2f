"""List fewbits' own models and the models in the user's config folders (`fewbits models`)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fewbits.common.arguments import CommandParser
from fewbits.common.from_dict import from_dict
from fewbits.common.tables import print_table

if TYPE_CHECKING:
    from fewbits.models.networks.decoder import DecoderConfig


def main(argv: Sequence[str]) -> int:
    parser = CommandParser(
        "fewbits models",
        about="List the models with their number of parameters, the number in quantizable linear layers, and a "
        "description.",
        examples="example: fewbits models --json",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="show this model only: a name or ./FILE.yaml")
    parser.add_argument("-cd", "--config-dir", metavar="DIR", help="also list the models of DIR/model")
    parser.add_argument("--json", action="store_true", help="print a JSON list of objects")
    options = parser.parse_args(argv)

    from fewbits.experiments.config_files import folders, names, with_config_dir
    from fewbits.models.networks.listing import describe
    from fewbits.models.networks.registry import linear_parameters, parameters

    searched, configs, wrong = with_config_dir([], options.config_dir), {}, []
    for name in names("model", folders(searched)) if options.name is None else [options.name]:
        try:
            configs[name] = _config(name, searched)
        except ValueError as error:
            wrong.append(str(error) if options.name else f"model {name}: {error}")
    rows: list[dict[str, str | int]] = [
        {
            "name": name,
            "parameters": parameters(config),
            "linear_parameters": linear_parameters(config),
            "description": describe(config),
        }
        for name, config in configs.items()
    ]
    if options.json:
        print(json.dumps(rows, indent=2))
    elif rows:
        cells = [[f"{value:,}" if isinstance(value, int) else value for value in row.values()] for row in rows]
        print_table(("name", "parameters", "linear", "description"), cells, right=("parameters", "linear"))
    if wrong:
        raise ValueError("; ".join(wrong))
    return 0


def _config(name: str, searched: Sequence[str]) -> DecoderConfig:
    from fewbits.experiments.config import resolved
    from fewbits.models.networks.decoder import DecoderConfig
    from fewbits.models.networks.presets import MODELS

    if name in MODELS:
        return MODELS[name]
    return from_dict(DecoderConfig, resolved([*searched, f"model={name}"])["model"], "model")
