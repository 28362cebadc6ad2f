"""Remove credentials from output: every message that may contain a tracking URI goes through `redacted`.

It replaces by `***`: the password in `scheme://user:password@host`, or the whole user part if it has no colon
(a token); values of parameters such as `?token=…` and `password=…`; and, anywhere in the text, the secrets that
MLflow's environment variables hold, since libraries quote them in their messages.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from urllib.parse import quote, unquote

HIDDEN = "***"
URI_VARIABLES = ("MLFLOW_TRACKING_URI", "MLFLOW_BACKEND_STORE_URI", "MLFLOW_REGISTRY_URI")
SECRET_VARIABLES = ("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")
SHORTEST = 4  # characters of a secret that is replaced anywhere; a shorter one would match parts of other words
_USER = re.compile(r"(?<=://)(?:([^\s:/@?#'\"]*):([^\s@]*(?:@[^\s@/]*)*)|([^\s:/@?#'\"]+))@")
_NAMES = r"pass(?:word|wd|phrase)?|pwd|token|secret|(?:api|access|private)[_-]?key|sig(?:nature)?|credentials?|auth"
_PARAMETER = re.compile(rf"([?&;][\w.-]*?(?:{_NAMES})[\w.-]*=)([^\s&;#'\"<>)]+)", re.IGNORECASE)
_WORD = re.compile(r"(\b(?:password|passwd|pwd)\s*=\s*)('[^']*'|[^\s,;&'\"]+)", re.IGNORECASE)


def redacted(text: object) -> str:
    """Return the text with `***` in place of all credentials.

    >>> redacted("postgresql://alice:secret@host/db")
    'postgresql://alice:***@host/db'
    """
    result = _USER.sub(_without_password, str(text))
    result = _PARAMETER.sub(rf"\1{HIDDEN}", result)
    result = _WORD.sub(rf"\1{HIDDEN}", result)
    for secret in sorted(set(_secrets()), key=len, reverse=True):
        result = result.replace(secret, HIDDEN)
    return result


def _without_password(match: re.Match[str]) -> str:
    return f"{match[1]}:{HIDDEN}@" if match[2] is not None else f"{HIDDEN}@"


def _secrets() -> Iterator[str]:
    """Yield the secrets in this process's environment: as written, percent-decoded and percent-encoded."""
    texts = [os.environ.get(name, "") for name in SECRET_VARIABLES]
    for uri in (os.environ.get(name, "") for name in URI_VARIABLES):
        texts += [match[2] or "" for match in _USER.finditer(uri)]
        texts += [match[2] for match in _PARAMETER.finditer(uri)]
    for text in texts:
        for secret in (text, unquote(text), quote(text, safe="")):
            if len(secret) >= SHORTEST and secret != HIDDEN:
                yield secret
