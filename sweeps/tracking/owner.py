"""Identify the owner of MLflow runs: a store and a user; fewbits changes and deletes only runs of its own owner.

Several users may use the same store, and several stores the same MLflow server. The store's id is a random number in
the file `.store.json`, so it does not depend on the path of the store, and a copy of a store has the same id.
"""

from __future__ import annotations

import getpass
import os
import re
import secrets
from pathlib import Path

from fewbits.common.atomic import create_once, read_json

FILE = ".store.json"  # in the store's folder
STORE, USER = "fewbits.store", "fewbits.user"  # tags of every MLflow run that fewbits creates


def owner_of(runs: Path) -> dict[str, str]:
    """Return the tags (name: value) that identify the MLflow runs of this user and the store `runs`."""
    return {STORE: store_id(runs), USER: user()}


def user() -> str:
    """Return FEWBITS_USER, else MLFLOW_TRACKING_USERNAME, else the name of the operating system's user.

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
