"""Remove credentials from output: every message that may contain a tracking URI goes through `redacted`.

`redacted` replaces these by `***`: the password in `scheme://user:password@host`, or the whole user part if it has no
colon (a token); values of parameters such as `?token=…` and `password=…`; and, anywhere in the text, the secrets in
MLflow's environment variables, since libraries quote them in their messages.
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
# Everything between `://` and the last `@`: passwords may hold any of `@:/?#` unencoded.
_USER = re.compile(r"(?<=://)([^\s'\"]+)@")
_HOST = re.compile(r"[^:@]*(?::\d*)?(?:[/?#]|$)")  # the text before the `@` if the `@` belongs to a path
_NAMES = r"pass(?:word|wd|phrase)?|pwd|token|secret|(?:api|access|private)[_-]?key|sig(?:nature)?|credentials?|auth"
_SHORT_NAMES = r"key|jwt|code|pat|pw|session_?id"  # only as the whole name of a parameter
_PARAMETER = re.compile(
    rf"([?&;#](?:[\w.-]*?(?:{_NAMES})[\w.-]*|{_SHORT_NAMES})(?:\[\])?=)([^\s&;#'\"<>)]+)", re.IGNORECASE
)
_WORD = re.compile(
    r"((?:\b|%3B)(?:password|passwd|pwd)(?:\s*=\s*|%3D))('[^']*'|\"[^\"]*\"|(?:(?!%3B)[^\s,;&'\"])+)", re.IGNORECASE
)
_ENTRY = re.compile(rf"(['\"](?:{_NAMES})['\"]\s*:\s*)('[^']*'|\"[^\"]*\")", re.IGNORECASE)


def redacted(text: object) -> str:
    """Return the text with `***` in place of all credentials.

    >>> redacted("postgresql://alice:secret@host/db")
    'postgresql://alice:***@host/db'
    """
    result = str(text)
    # Secrets come before the patterns, which might replace only a part of one.
    for secret in sorted(set(_secrets()), key=len, reverse=True):
        result = result.replace(secret, HIDDEN)
    result = _USER.sub(_without_password, result)
    for pattern in (_PARAMETER, _WORD, _ENTRY):
        result = pattern.sub(rf"\1{HIDDEN}", result)
    return result


def _without_password(match: re.Match[str]) -> str:
    user, colon, _ = match[1].partition(":")
    if _is_host_and_path(match[1]):
        return match[0]
    return f"{user}:{HIDDEN}@" if colon else f"{HIDDEN}@"


def _is_host_and_path(text: str) -> bool:
    """Tell whether the text between `://` and an `@` is a host and the start of a path, not a user and a password."""
    return "/" in text and _HOST.match(text) is not None


def _secrets() -> Iterator[str]:
    """Yield the secrets in MLflow's environment variables, each as written, percent-decoded and percent-encoded."""
    texts = [os.environ.get(name, "") for name in SECRET_VARIABLES]
    for uri in (os.environ.get(name, "") for name in URI_VARIABLES):
        user_info = uri.partition("://")[2].rpartition("@")[0]
        if not _is_host_and_path(user_info):
            texts.append(user_info.partition(":")[2] or user_info)
        texts += [match[2] for match in _PARAMETER.finditer(uri)]
    for text in texts:
        for secret in (text, unquote(text), quote(text, safe="")):
            if len(secret) >= SHORTEST and secret != HIDDEN:
                yield secret
