"""Compose a folder of config files with Hydra's loader, without the rest of Hydra.

Hydra's public `compose` gives the same tree, but takes several times longer: it also composes Hydra's own settings,
which trials do not use, reads every file again, and initialises Hydra's global state.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, IConfigRepository
from hydra._internal.defaults_list import create_defaults_list
from hydra._internal.utils import create_config_search_path
from hydra.core.default_element import ResultDefault
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf


class ConfigFolder:
    """A folder of config files, plus the nodes in Hydra's config store when it is created. Each file is read once."""

    def __init__(self, folder: Path) -> None:
        version.setbase(None)
        self._loader = _Loader(create_config_search_path(str(folder)))
        self._files = CachingConfigRepository(self._loader.repository)

    def compose(self, root: str, overrides: Sequence[str]) -> DictConfig:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        chosen = create_defaults_list(self._files, root, parsed, prepend_hydra=False, skip_missing=False)
        config = self._loader._compose_config_from_defaults_list(chosen.defaults, self._files)
        OmegaConf.set_struct(config, True)
        self._loader._apply_overrides_to_config(chosen.config_overrides, config)
        return config


class _Loader(ConfigLoaderImpl):
    def _load_single_config(self, default: ResultDefault, repo: IConfigRepository) -> ConfigResult:
        """Return a copy, because composing changes the nodes of the cached config."""
        loaded = super()._load_single_config(default, repo)
        return replace(loaded, config=copy.deepcopy(loaded.config))
