"""Print the configs of a Hydra group with their descriptions, or one config's settings (groups.py has the commands)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from fewbits.common.tables import print_table
from fewbits.experiments.config import resolved
from fewbits.experiments.config_files import FOLDER, Folders, check_choice, folders, is_path, names, with_config_dir
from fewbits.experiments.data.load import KINDS
from fewbits.experiments.data.tokenizing import SPELLINGS

COLUMNS = ("name", "about", "settings")
GLOBAL = "scale"  # the group whose configs also set keys outside their own group
DATA_NOTES = (
    f"data.tokenizer: {SPELLINGS}; the default is bytes. A folder of tokens has its own tokenizer.",
    "data=text data.path=FILE trains on a text file of your own, whose last tenth is for validation.",
    "`fewbits data prepare NAME` downloads and tokenizes openwebtext, c4 and c4-nemotron; data=bin data.path=DIR reads "
    "a folder of train.bin and val.bin.",
)


def print_group(group: str, name: str | None, directory: str | None, as_json: bool) -> None:
    """Print the names and descriptions of all configs in a group, or the settings of the config `name`.

    directory: a further config folder of the user. Raise ValueError if the group has no config of this name.
    """
    own = folders(searched := with_config_dir([], directory))
    if name is not None:
        check_choice(group, name, own)
    chosen = names(group, own) if name is None else [name]
    rows = [(name, _about(group, name, own), _settings(group, name, searched, own)) for name in chosen]
    if as_json:
        print(json.dumps([dict(zip(COLUMNS, row, strict=True)) for row in rows], indent=2, ensure_ascii=False))
    elif name is None:
        print_table(COLUMNS[:2], [(name, about) for name, about, _ in rows])
    else:
        _, about, settings = rows[0]
        print("\n".join([name, f"  {about}", *_setting_lines(settings)]))
    if group == "data" and not as_json:
        print("", *DATA_NOTES, sep="\n")


def _about(group: str, name: str, own: Folders) -> str:
    """Return a config's description: the comment at the head of its file.

    For one of fewbits' own kinds of data, return its summary from `data.load.KINDS` instead.
    own: the user's config folders.
    """
    if group == "data" and name in KINDS:
        return KINDS[name].summary
    head = re.match(r"(?:#.*\n)*", _file(group, name, own).read_text("utf-8"))
    comments = [line.removeprefix("#").strip() for line in head[0].splitlines()] if head else []
    return " ".join(comment for comment in comments if not comment.startswith("@package"))


def _file(group: str, name: str, own: Folders) -> Path:
    return Path(name).expanduser() if is_path(name) else own.file(group, name) or FOLDER / group / f"{name}.yaml"


def _settings(group: str, name: str, searched: Sequence[str], own: Folders) -> dict[str, Any]:
    """Return a config's settings: the value of each, by the key of its override, such as `optimizer.lr`.

    For a scale, return only what the scale's own file sets: settings, and choices of other groups' configs.
    searched: the overrides that set the search path of config folders. own: the user's config folders.
    """
    if group != GLOBAL:
        config = resolved([*searched, f"{group}={name}"])
        also = {"training.dtype": config["training"]["dtype"]} if group == "precision" else {}
        return also | dict(_flat(config[group], group))
    content = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.load(_file(group, name, own))))
    items = [item for item in content.pop("defaults", []) if isinstance(item, Mapping)]
    choices = {str(key).removeprefix("override").strip(" /"): value for item in items for key, value in item.items()}
    return choices | dict(_flat(content))


def _flat(value: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        name = f"{path}.{key}" if path else str(key)
        if isinstance(item, Mapping) and item:
            yield from _flat(item, name)
        else:
            yield name, item


def _setting_lines(settings: Mapping[str, Any]) -> Iterator[str]:
    width = max(map(len, settings), default=0)
    yield "  settings, changed by KEY=VALUE:"
    yield from (f"    {key:{width}}  {json.dumps(value)}" for key, value in settings.items())
