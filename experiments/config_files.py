"""Find the config files that overrides can choose: fewbits' own files and the user's files.

    ./conf                       a folder of the user's own: recipes in conf/recipe, models in conf/model, and so on
    hydra.searchpath=[DIR,…]     further such folders; the option `--config-dir DIR` adds one
    recipe=./mine.yaml           one file, which needs no folder; every group accepts a path

If a file in the user's folders has the same group and name as one of fewbits' own configs, choosing this name raises
ValueError, because Hydra would use fewbits' config without notice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Glob
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from fewbits.experiments.composition import nearest_first, override_values, parse_override, read_override, spelled

FOLDER = Path(__file__).parent / "config"
ROOT = "trial"  # name of the main config file, which includes one config of each group
GROUPS = ("model", *sorted(folder.name for folder in FOLDER.iterdir() if folder.is_dir()))
SWEEPS = "sweep"  # the subfolder of a user's config folder that holds sweep files
SEARCH_PATH = "hydra.searchpath"
CONF = "conf"  # the user's config folder in the working directory


@dataclass(frozen=True)
class Folders:
    """The user's configs: folders, in the order of Hydra's search path, and single files that overrides choose."""

    paths: tuple[Path, ...] = ()
    chosen: tuple[tuple[str, str], ...] = ()  # the single files: the group and the value, which is a path
    # Path, modification time (ns) and size of each file, so that a cache with this key never gives an outdated result.
    state: tuple[tuple[str, int, int], ...] = ()

    @property
    def overrides(self) -> tuple[str, ...]:
        """The override that sets Hydra's search path to these folders; an empty tuple if there are no folders."""
        return (f"{SEARCH_PATH}={spelled([f'file://{path}' for path in self.paths])}",) if self.paths else ()

    @property
    def texts(self) -> list[tuple[str, str]]:
        """The path and text of each config file."""
        return [(file, Path(file).read_bytes().decode("utf-8", "surrogateescape")) for file, _, _ in self.state]

    def file(self, group: str, name: object) -> Path | None:
        """Return the path of GROUP/NAME.yaml in the first folder that has this file; None if no folder has it."""
        candidates = (path / group / f"{name}.yaml" for path in self.paths)
        return next((path for path in candidates if path.is_file()), None)


def folders(overrides: Sequence[str] = ()) -> Folders:
    """Return the user's configs: folders of `hydra.searchpath`, `./conf` if it has a folder of a group, and files."""
    paths = [path for text in overrides if is_search_path(text) for path in _named(text)]
    conf = Path(CONF).absolute()
    if any((conf / group).is_dir() for group in (*GROUPS, SWEEPS)):
        paths.append(conf)
    paths = list(dict.fromkeys(paths))
    groups = [text for text in overrides if text.partition("=")[0] in GROUPS and ".y" in text]
    chosen = [(text.partition("=")[0], value) for text in groups for value in override_values(text) if is_path(value)]
    try:
        files = [file for path in paths for file in yaml_files(path)]
        files += [Path(value).expanduser().absolute() for _, value in chosen]
        stats = [(str(file), file.stat()) for file in files]
    except OSError as error:
        raise ValueError(f"{error.filename}: {error.strerror}") from None
    for group, value in chosen:
        is_model = value.removesuffix(".yaml") in _models(group)
        if is_model or any(Path(f"{path}/{group}/{value}").is_file() for path in (FOLDER, *paths)):
            file = Path(value).expanduser().absolute()
            raise ValueError(f"{group}={value}: Hydra would read its own {group}/{value}; write {group}={file}")
    return Folders(tuple(paths), tuple(chosen), tuple((file, stat.st_mtime_ns, stat.st_size) for file, stat in stats))


def yaml_files(folder: Path) -> list[Path]:
    """Return the YAML files below a folder, sorted, without hidden files and dangling links, such as Emacs makes."""
    return [
        file
        for file in sorted(folder.rglob("*.yaml"))
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    ]


def is_search_path(override: str) -> bool:
    return override.partition("=")[0] == SEARCH_PATH


def with_config_dir(overrides: Sequence[str], directory: str | None) -> list[str]:
    """Return the overrides, preceded by `hydra.searchpath=[DIR]` if `--config-dir DIR` is given."""
    if directory is None:
        return [*overrides]
    path = Path(directory).expanduser()
    if not path.is_dir():
        raise ValueError(f"--config-dir {directory}: no such folder")
    return [f"{SEARCH_PATH}={spelled([str(path.absolute())])}", *overrides]


def _named(override: str) -> Iterator[Path]:
    """Yield the absolute paths of the folders that an override of `hydra.searchpath` lists."""
    value = parse_override(override).value()
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"{override!r}: a list of folders is expected, such as {SEARCH_PATH}=[my-configs]")
    for item in value:
        if "://" in item.removeprefix("file://"):
            raise ValueError(f"{override!r}: {item}: valid items are paths of folders and file://PATH")
        path = Path(item.removeprefix("file://")).expanduser().absolute()
        if not path.is_dir():
            raise ValueError(f"{override!r}: no such folder: {path}")
        yield path


def names(group: str, own: Folders | None = None) -> list[str]:
    """Return the names of all configs in a group: fewbits' own and, with `own`, those in the user's folders."""
    offered = [*_models(group), *_files(FOLDER / group)]
    return [*offered, *(name for path in (own.paths if own else ()) for name in _files(path / group))]


def _models(group: str) -> Sequence[str]:
    """Return the names of the models that are defined in Python if the group is `model`, else none."""
    if group != "model":
        return ()
    from fewbits.models.networks.presets import MODELS  # here, since it imports torch

    return list(MODELS)


@lru_cache(maxsize=64)
def _own_names(group: str) -> frozenset[str]:
    return frozenset(names(group))


def _files(folder: Path) -> list[str]:
    return sorted(file.relative_to(folder).with_suffix("").as_posix() for file in yaml_files(folder))


def is_path(value: object) -> bool:
    """Tell whether the chosen value of a group is the path of a YAML file rather than the name of a config."""
    return isinstance(value, str) and value.endswith((".yaml", ".yml"))


def check_choice(group: str, value: object, own: Folders) -> None:
    """Raise ValueError unless a group's value names exactly one config, in UTF-8; a path is not checked."""
    name = str(value)
    if is_path(value):
        return
    file = own.file(group, name)
    if name in _own_names(group):
        if file is not None:
            raise ValueError(f"{file}: Hydra would use fewbits' own {group} {name} instead; rename the file")
    elif file is None:
        valid = nearest_first(name, names(group, own))
        own_files = f"a path of a YAML file, or a file in ./conf/{group} or DIR/{group} with --config-dir DIR"
        raise ValueError(f"no {group} {value!r} exists: valid names are {valid}; also valid: {own_files}")
    else:
        try:
            file.read_text("utf-8")
        except UnicodeDecodeError as error:  # unlike Hydra's error, this one names the file
            raise ValueError(f"{file} is not text in UTF-8: {error.reason} at byte {error.start}") from None


def register_chosen(own: Folders) -> None:
    """Let Hydra find the single files that overrides choose, under the name that is their path."""
    for group, value in own.chosen:
        try:
            text = Path(value).expanduser().read_text("utf-8")
            config = OmegaConf.to_container(OmegaConf.create(text or "{}"), resolve=False)
        except (OSError, UnicodeError, YAMLError, OmegaConfBaseException) as error:
            raise ValueError(f"{value}: {' '.join(str(error).split())}") from None
        if not isinstance(config, dict):
            raise ValueError(f"{value}: a mapping is expected (lines KEY: VALUE), as in fewbits' own config files")
        *folder, name = value.split("/")
        header = re.match(r"(?:\s*#.*\n)*?\s*#\s*@package[ \t]+(\S+)", text)  # the key that gets the file's content
        store: Any = ConfigStore.instance()
        store.store(name, config, "/".join([group, *filter(None, folder)]), package=header[1] if header else None)


def with_globs(override: str, own: Folders) -> str:
    """Return an override with a pattern such as recipe=glob(mor/*) replaced by all matching names, as Hydra cannot."""
    group = override.partition("=")[0]
    pattern = read_override(override).value() if group in GROUPS else None
    if not isinstance(pattern, Glob):
        return override
    if not (matching := pattern.filter(names(group, own))):
        raise ValueError(f"{override!r}: no {group} matches; valid names are {', '.join(names(group, own))}")
    return f"{group}={','.join(matching)}"


def name_of(value: object) -> object:
    """Return the name of the config that a group's value chooses; for a path, the file's name without its suffix."""
    return re.sub(r"[^\w-]", "-", Path(str(value)).stem) if is_path(value) else value
