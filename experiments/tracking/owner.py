"""Identify the owner of MLflow runs: every MLflow run that fewbits creates has tags for its store and its user.

Several users may use the same store, and several stores the same MLflow server. A driver creates, changes and deletes
only runs whose tags have its own store and user. The store's id is a random number in the store's file `.store.json`.
The id therefore does not depend on the path under which a store is mounted, and a copy of a store has the same id.
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

FILE = ".store.json"  # in the store's folder
STORE, USER, MLFLOW_USER = "fewbits.store", "fewbits.user", "mlflow.user"  # names of tags of MLflow runs


@dataclass(frozen=True)
class Owner:
    """The owner of MLflow runs: a user together with a store."""

    store: str  # the store's id
    user: str

    @property
    def key(self) -> dict[str, str]:
        """The tags, by name, that identify this owner's MLflow runs in a search."""
        return {STORE: self.store, USER: self.user}

    @property
    def tags(self) -> dict[str, str]:
        """The tags, by name, of a new MLflow run of this owner: those of `key`, and MLflow's own tag for the user."""
        return {**self.key, MLFLOW_USER: self.user}

    @property
    def name(self) -> str:
        """A short name for this owner, unique because it ends with a hash, with characters that MLflow allows."""
        digest = hashlib.sha256(f"{self.store}\n{self.user}".encode()).hexdigest()
        return f"{re.sub(r'[^A-Za-z0-9_.-]', '-', self.user)[:20]}-{digest[:8]}"

    def owns(self, tags: Mapping[str, str]) -> bool:
        """Tell whether an MLflow run with these tags (name: value) belongs to this owner."""
        return self.key.items() <= tags.items()

    def cache_key(self, uri: str) -> str:
        """Return the key under which data about this owner's runs at an MLflow URI are cached.

        It is a hash of the owner and of the URI without its password.
        """
        return hashlib.sha256(f"{redacted(uri)}\n{self.store}\n{self.user}".encode()).hexdigest()[:32]


def owner_of(runs: Path) -> Owner:
    """Return the owner of the MLflow runs that this process creates for the store `runs`."""
    return Owner(store_id(runs), user())


def user() -> str:
    """Return the user's name in MLflow's tags.

    It is the value of the environment variable FEWBITS_USER, or of MLFLOW_TRACKING_USERNAME if FEWBITS_USER is empty or
    not set, or else the name of the operating system's user.

    Raise ValueError for a name with characters that MLflow's queries cannot contain, such as quotes.
    """
    for variable in ("FEWBITS_USER", "MLFLOW_TRACKING_USERNAME"):
        if name := os.environ.get(variable, "").strip():
            break
    else:
        variable, name = "the user's name", _system_user()
    if not re.fullmatch(r"[^'\"`%\x00-\x1f\x7f]{1,80}", name):
        raise ValueError(
            f"{variable} {name!r}: a valid name has at most 80 characters, without quotes, % and control characters; "
            "set the environment variable FEWBITS_USER to a valid name"
        )
    return name


def _system_user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # in a container, the user's id may have no name
        return f"uid-{os.getuid()}"


def store_id(runs: Path) -> str:
    """Return the id of the store `runs` from its `.store.json`; create the file if it does not exist."""
    path = runs / FILE
    if not path.exists():
        runs.mkdir(parents=True, exist_ok=True)
        create_once(path, f'{{"id": "{secrets.token_hex(8)}"}}\n'.encode())
    identifier = (read_json(path) or {}).get("id")
    if not isinstance(identifier, str) or not re.fullmatch(r"[0-9a-f]{16}", identifier):
        raise ValueError(
            f'{path} has no valid id of the store, which is written as {{"id": "<16 hexadecimal digits>"}}: restore or '
            "remove the file (then the store gets a new id)"
        )
    return identifier
