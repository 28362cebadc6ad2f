"""Whose runs are whose in MLflow: every run of ours carries the store and the user that it belongs to.

Several users may share a store, and several stores an MLflow server. A driver creates, changes and deletes only runs
with its own store and user. The store's id is a random number in `.store.json`, so that a store keeps its id wherever
it is mounted; a copy of a store keeps it too.
"""

from __future__ import annotations

import getpass
import hashlib
import json
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fewbits.common.redaction import redacted

FILE = ".store.json"  # in the store
STORE, USER, MLFLOW_USER = "fewbits.store", "fewbits.user", "mlflow.user"  # tags of runs


@dataclass(frozen=True)
class Owner:
    store: str  # its id
    user: str

    @property
    def key(self) -> dict[str, str]:
        """The tags that a run is found by."""
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
        return self.key.items() <= tags.items()

    def cache_key(self, uri: str) -> str:
        """Return the key of notes about this owner's runs in an MLflow; no credential can be computed from it."""
        return hashlib.sha256(f"{redacted(uri)}\n{self.store}\n{self.user}".encode()).hexdigest()[:32]


def owner_of(runs: Path) -> Owner:
    return Owner(store_id(runs), user())


def user() -> str:
    """Return FEWBITS_USER, else MLFLOW_TRACKING_USERNAME, else the name of the operating system's user."""
    for variable in ("FEWBITS_USER", "MLFLOW_TRACKING_USERNAME"):
        if name := os.environ.get(variable, "").strip():
            break
    else:
        variable, name = "the user's name", _system_user()
    if not re.fullmatch(r"[^'\"`%\x00-\x1f\x7f]{1,80}", name):
        raise ValueError(
            f"{variable} {name!r}: at most 80 characters without quotes, % and control characters are valid; "
            "set FEWBITS_USER"
        )
    return name


def _system_user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # in a container, a number may have no name
        return f"uid-{os.getuid()}"


def store_id(runs: Path) -> str:
    """Return the store's id; the first process to ask makes it."""
    path = runs / FILE
    if not path.exists():
        runs.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{FILE}.{secrets.token_hex(4)}.partial")
        partial.write_text(json.dumps({"id": secrets.token_hex(8)}) + "\n", "utf-8")
        try:
            os.link(partial, path)
        except FileExistsError:
            pass  # another process was faster, and its id counts
        finally:
            partial.unlink()
    try:
        found = json.loads(path.read_text("utf-8"))["id"]
    except (ValueError, KeyError, TypeError):
        found = None
    if not isinstance(found, str) or not re.fullmatch(r"[0-9a-f]{16}", found):
        raise ValueError(f'{path} holds no store id, {{"id": "<16 hexadecimal digits>"}}: restore or remove it')
    return found
