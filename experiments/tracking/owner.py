"""Identify the owner of MLflow's runs: each run of ours has tags for the store and the user that it belongs to.

Several users may share a store, and several stores an MLflow server. A driver creates, changes and deletes only runs
with its own store and user. The store's id is a random number in `.store.json`, so that a store keeps its id wherever
it is mounted; a copy of a store has the same id.
"""

from __future__ import annotations

import getpass
import hashlib
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fewbits.common.atomic import create_once, read_json
from fewbits.common.redaction import redacted

FILE = ".store.json"  # in the store
STORE, USER, MLFLOW_USER = "fewbits.store", "fewbits.user", "mlflow.user"  # tags of runs


@dataclass(frozen=True)
class Owner:
    """The owner of runs in MLflow: a user together with a store."""

    store: str  # its id
    user: str

    @property
    def key(self) -> dict[str, str]:
        """The tags by which this owner's runs are found."""
        return {STORE: self.store, USER: self.user}

    @property
    def tags(self) -> dict[str, str]:
        """The tags that a run of this owner gets."""
        return {**self.key, MLFLOW_USER: self.user}

    @property
    def name(self) -> str:
        """A short name that is different for different owners, valid in MLflow's keys."""
        digest = hashlib.sha256(f"{self.store}\n{self.user}".encode()).hexdigest()
        return f"{re.sub(r'[^A-Za-z0-9_.-]', '-', self.user)[:20]}-{digest[:8]}"

    def owns(self, tags: Mapping[str, str]) -> bool:
        """Tell whether a run with these tags belongs to this owner."""
        return self.key.items() <= tags.items()

    def cache_key(self, uri: str) -> str:
        """Return the key for cached facts about this owner's runs at an MLflow URI; it reveals no credential."""
        return hashlib.sha256(f"{redacted(uri)}\n{self.store}\n{self.user}".encode()).hexdigest()[:32]


def owner_of(runs: Path) -> Owner:
    """Return the owner of runs that this process creates for a store."""
    return Owner(store_id(runs), user())


def user() -> str:
    """Return FEWBITS_USER, else MLFLOW_TRACKING_USERNAME, else the name of the operating system's user.

    Raises ValueError for a name that MLflow's queries cannot contain.
    """
    for variable in ("FEWBITS_USER", "MLFLOW_TRACKING_USERNAME"):
        if name := os.environ.get(variable, "").strip():
            break
    else:
        variable, name = "the user's name", _system_user()
    if not re.fullmatch(r"[^'\"`%\x00-\x1f\x7f]{1,80}", name):
        raise ValueError(
            f"{variable} {name!r}: at most 80 characters without quotes, % and control characters are valid; "
            "set FEWBITS_USER to such a name"
        )
    return name


def _system_user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # in a container, a user id may have no name
        return f"uid-{os.getuid()}"


def store_id(runs: Path) -> str:
    """Return the store's id; the first process that needs it creates it."""
    path = runs / FILE
    if not path.exists():
        runs.mkdir(parents=True, exist_ok=True)
        create_once(path, f'{{"id": "{secrets.token_hex(8)}"}}\n'.encode())
    identifier = (read_json(path) or {}).get("id")
    if not isinstance(identifier, str) or not re.fullmatch(r"[0-9a-f]{16}", identifier):
        raise ValueError(
            f'{path} has no valid store id, {{"id": "<16 hexadecimal digits>"}}: restore or remove the file'
        )
    return identifier
