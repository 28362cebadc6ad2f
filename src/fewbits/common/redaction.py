"""Credentials do not appear in output: every message that can carry a tracking URI goes through `redacted`.

What is replaced by `***`: the password in `scheme://user:password@host`, or the whole user part where it has no colon
(a token); values of parameters such as `?token=…` and `password=…`; and the secrets themselves of the variables in
which MLflow takes them, wherever a library quotes them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from urllib.parse import quote, unquote

HIDDEN = "***"
URI_VARIABLES = ("MLFLOW_TRACKING_URI", "MLFLOW_BACKEND_STORE_URI", "MLFLOW_REGISTRY_URI")
SECRET_VARIABLES = ("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")
SHORTEST = 4  # characters of a secret that is replaced wherever it stands; a shorter one would spoil other words
_USER = re.compile(r"(?<=://)(?:([^\s:/@?#'\"]*):([^\s@]*(?:@[^\s@/]*)*)|([^\s:/@?#'\"]+))@")
_NAMES = r"pass(?:word|wd|phrase)?|pwd|token|secret|(?:api|access|private)[_-]?key|sig(?:nature)?|credentials?|auth"
_PARAMETER = re.compile(rf"([?&;][\w.-]*?(?:{_NAMES})[\w.-]*=)([^\s&;#'\"<>)]+)", re.IGNORECASE)
_WORD = re.compile(r"(\b(?:password|passwd|pwd)\s*=\s*)('[^']*'|[^\s,;&'\"]+)", re.IGNORECASE)


def redacted(text: object) -> str:
    """Return the text with `***` in place of all credentials.

    >>> redacted("postgresql://alice:secret@host/db")
    'postgresql://alice:***@host/db'
    """
    found = _USER.sub(_without_password, str(text))
    found = _PARAMETER.sub(rf"\1{HIDDEN}", found)
    found = _WORD.sub(rf"\1{HIDDEN}", found)
    for secret in sorted(set(_secrets()), key=len, reverse=True):
        found = found.replace(secret, HIDDEN)
    return found


def _without_password(match: re.Match[str]) -> str:
    return f"{match[1]}:{HIDDEN}@" if match[2] is not None else f"{HIDDEN}@"


def _secrets() -> Iterator[str]:
    """Yield the secrets in this process's environment, as written and percent-decoded."""
    texts = [os.environ.get(name, "") for name in SECRET_VARIABLES]
    for uri in (os.environ.get(name, "") for name in URI_VARIABLES):
        texts += [match[2] or "" for match in _USER.finditer(uri)]
        texts += [match[2] for match in _PARAMETER.finditer(uri)]
    for text in texts:
        for secret in (text, unquote(text), quote(text, safe="")):
            if len(secret) >= SHORTEST and secret != HIDDEN:
                yield secret
