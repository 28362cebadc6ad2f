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
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any, cast

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from fewbits.experiments.composed_cache import digest_of_files, digest_of_texts, yaml_files
from fewbits.experiments.composition import nearest_first, override_values, parse_override, spelled
from fewbits.models.networks.presets import MODELS

FOLDER = Path(__file__).parent / "config"
ROOT = "trial"  # name of the main config file, which includes one config of each group
GROUPS = ("model", *sorted(folder.name for folder in FOLDER.iterdir() if folder.is_dir()))
SWEEPS = "sweep"  # the subfolder of a user's config folder that holds sweep files
SEARCH_PATH = "hydra.searchpath"
CONF = "conf"  # the user's config folder in the working directory
_YAML = (".yaml", ".yml")
_registered: dict[tuple[str, str], str] = {}  # the files that are registered with Hydra, by group and name


@dataclass(frozen=True)
class Folders:
    """The user's config folders, in the order of Hydra's search path.

    state: path, modification time (ns) and size of each config file. If a file changes, a later call of
        `folders` returns a different `Folders`, so a cache whose keys are `Folders` never gives an outdated result.
    """

    paths: tuple[Path, ...] = ()
    state: tuple[tuple[str, int, int], ...] = ()

    @property
    def overrides(self) -> tuple[str, ...]:
        """The override that sets Hydra's search path to these folders; an empty tuple if there are no folders."""
        return (f"{SEARCH_PATH}={spelled([f'file://{path}' for path in self.paths])}",) if self.paths else ()

    @property
    def digests(self) -> tuple[str, ...]:
        """The digest of the config files in each folder."""
        return tuple(digest_of_files(path) for path in self.paths)

    def file(self, group: str, name: object) -> Path | None:
        """Return the path of GROUP/NAME.yaml in the first folder that has this file; None if no folder has it."""
        candidates = (path / group / f"{name}.yaml" for path in self.paths)
        return next((path for path in candidates if path.is_file()), None)


def folders(overrides: Sequence[str] = ()) -> Folders:
    """Return the user's config folders: the folders in overrides of `hydra.searchpath`, then `./conf`.

    `./conf` counts only if it has a subfolder for a group or for sweeps.
    """
    paths = [path for text in overrides if is_search_path(text) for path in _named(text)]
    conf = Path(CONF).absolute()
    if any((conf / group).is_dir() for group in (*GROUPS, SWEEPS)):
        paths.append(conf)
    paths = list(dict.fromkeys(paths))
    stats = ((str(file), file.stat()) for path in paths for file in yaml_files(path))
    return Folders(tuple(paths), tuple((file, stat.st_mtime_ns, stat.st_size) for file, stat in stats))


def is_search_path(override: str) -> bool:
    """Tell whether an override sets Hydra's search path, `hydra.searchpath=[…]`."""
    return override.partition("=")[0] == SEARCH_PATH


def with_config_dir(overrides: Sequence[str], directory: str | None) -> list[str]:
    """Return the overrides, preceded by `hydra.searchpath=[DIR]` for the option `--config-dir DIR`.

    directory: DIR; None: the option is not given, so return the overrides unchanged.
    """
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
    for item in cast(list[str], value):
        scheme, colon, rest = item.partition("://")
        if not colon or scheme == "file":
            path = Path(rest if colon else item).expanduser().absolute()
        elif scheme == "pkg":
            path = _package_folder(rest)
        else:
            raise ValueError(f"{override!r}: {item}: valid items are paths of folders, file://PATH and pkg://PACKAGE")
        if not path.is_dir():
            raise ValueError(f"{override!r}: no such folder: {path}")
        yield path


def _package_folder(name: str) -> Path:
    """Return the path of a folder in an installed Python package; raise ValueError if there is no such package.

    name: the package, then the folders below it, separated by `/` or `.`, for example `my_package/configs`.
    """
    package, *below = re.split(r"[./]", name)
    try:
        return Path(str(package_files(package))).joinpath(*below)
    except (ModuleNotFoundError, TypeError, ValueError):
        raise ValueError(f"{SEARCH_PATH}: pkg://{name}: there is no Python package {package!r}") from None


def names(group: str, own: Folders | None = None) -> list[str]:
    """Return the names of all configs in a group, for example of all recipes in the group `recipe`.

    own: the user's config folders, whose configs are listed last; None: list only fewbits' own configs.
    """
    stored = MODELS if group == "model" else ()
    offered = [*stored, *_files(FOLDER / group)]
    return [*offered, *(name for path in (own.paths if own else ()) for name in _files(path / group))]


@lru_cache(maxsize=64)
def _own_names(group: str) -> frozenset[str]:
    return frozenset(names(group))


def _files(folder: Path) -> list[str]:
    return sorted(file.relative_to(folder).with_suffix("").as_posix() for file in yaml_files(folder))


def is_path(value: object) -> bool:
    """Tell whether the chosen value of a group is the path of a YAML file rather than the name of a config."""
    return isinstance(value, str) and value.endswith(_YAML)


def check_choice(group: str, value: object, own: Folders) -> None:
    """Raise ValueError unless a group's value names exactly one config; a path of a YAML file is not checked.

    own: the user's config folders. A name that fewbits and a user's folder both have is refused, and so is a user's
    file that is not UTF-8.
    """
    name = str(value)
    if is_path(value) or (group, name) in _registered:
        return
    file = own.file(group, name)
    if name in _own_names(group):
        if file is not None:
            raise ValueError(
                f"{file}: fewbits itself has a {group} {name}, which Hydra would use instead; rename the file"
            )
    elif file is None:
        valid = nearest_first(name, names(group, own))
        raise ValueError(f"no {group} {value!r} exists: valid names are {valid}; a path of a YAML file is valid, too")
    else:
        _check_utf8(file)


def _check_utf8(file: Path) -> None:
    """Raise ValueError if a file is not text in UTF-8; unlike Hydra's error, the message names the file."""
    try:
        file.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not text in UTF-8: {error.reason} at byte {error.start}") from None


def register_file(group: str, value: str) -> str:
    """Register the user's config file at the path `value` with Hydra; return the name under which Hydra finds it.

    The name contains a digest of the content, so a file that has changed gets another name.
    """
    path = Path(value).expanduser()
    try:
        text = path.read_text("utf-8")
        config = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except OSError as error:
        raise ValueError(f"{group}={value}: {path.absolute()}: {error.strerror}") from None
    except (UnicodeError, YAMLError, OmegaConfBaseException) as error:
        raise ValueError(f"{value}: {' '.join(str(error).split())}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{value}: a mapping is expected (lines KEY: VALUE), as in fewbits' own config files")
    name = f"{_stem(value)}-{digest_of_texts({group: text})[:16]}"
    store: Any = ConfigStore.instance()
    store.store(name, config, group=group, package=_package(text))
    _registered[group, name] = value
    return name


def with_names(override: str) -> str:
    """Register the config files whose paths an override contains; return the override with names in place of paths.

    Hydra's own command line accepts only names.
    """
    group = override.partition("=")[0]
    if group in GROUPS:
        registered = {value: register_file(group, value) for value in override_values(override) if is_path(value)}
        longest_first = sorted(registered, key=len, reverse=True)  # one path may contain another one
        if registered:
            return re.sub("|".join(map(re.escape, longest_first)), lambda match: registered[match[0]], override)
    return override


def with_globs(override: str, own: Folders) -> str:
    """Return an override with its pattern replaced by all matching names, for example in recipe=glob(mor/*).

    Hydra's own patterns do not find names that contain a slash. An override without a pattern is returned unchanged.
    Raise ValueError if no name matches.
    """
    group, _, value = override.partition("=")
    if group not in GROUPS or not value.startswith("glob(") or override_values(override):
        return override
    pattern = cast(Glob, OverridesParser.create().parse_override(override).value())
    if not (matching := pattern.filter(names(group, own))):
        raise ValueError(f"{override!r}: no {group} matches; valid names are {', '.join(names(group, own))}")
    return f"{group}={','.join(matching)}"


def with_paths(override: str) -> str:
    """Return an override with the name of a registered file replaced by its path: the inverse of `with_names`."""
    group, _, value = override.partition("=")
    if (path := _registered.get((group, value))) is None:
        return override
    is_plain = re.fullmatch(r"[./\w-]+", path) is not None
    return f"{group}={path if is_plain else spelled(path)}"


def name_of(value: object) -> object:
    """Return the name of the config that a group's value chooses; for a path, the file's name without its suffix."""
    return _stem(str(value)) if is_path(value) else value


def _stem(path: str) -> str:
    return re.sub(r"[^\w-]", "-", Path(path).stem)


def _package(text: str) -> str | None:
    """Return PACKAGE of a header `# @package PACKAGE` in a config file's text; None if there is no such header.

    In Hydra, the package is the key under which the file's content is placed.
    """
    header = re.match(r"(?:\s*#.*\n)*?\s*#\s*@package[ \t]+(\S+)", text)
    return header[1] if header else None
