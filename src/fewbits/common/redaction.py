"""Remove credentials from output: every message that may contain the URI of an MLflow server goes through `redacted`.

`redacted` replaces three kinds of text by `***`:
- the password in `scheme://user:password@host`, or all of `token` in `scheme://token@host`;
- the values of parameters such as `?token=…` and `password=…`;
- anywhere in the text, the secrets in MLflow's environment variables, since messages of libraries may contain them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from urllib.parse import quote, unquote

HIDDEN = "***"
URI_VARIABLES = ("MLFLOW_TRACKING_URI", "MLFLOW_BACKEND_STORE_URI", "MLFLOW_REGISTRY_URI")
SECRET_VARIABLES = ("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")
SHORTEST = 4  # the least length of a secret that is replaced anywhere; shorter ones would match parts of other words
# Everything between `://` and the last `@`, since passwords may contain any of `@:/?#` unencoded.
_USER = re.compile(r"(?<=://)([^\s'\"]+)@")
_HOST = re.compile(r"[^:@]*(?::\d*)?(?:[/?#]|$)")  # a host with an optional port, in front of a path or the end
_NAMES = r"pass(?:word|wd|phrase)?|pwd|token|secret|(?:api|access|private)[_-]?key|sig(?:nature)?|credentials?|auth"
_SHORT_NAMES = r"key|jwt|code|pat|pw|session_?id"  # these have to be the whole name of a parameter, not a part of it
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
    # The known secrets are replaced first, since a pattern might replace only a part of a secret.
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
    """Tell whether the text between the `://` and the last `@` of a URI is a host and the beginning of a path.

    If so, the `@` belongs to the path. If not, the text is a user and a password, or a token.
    """
    return "/" in text and _HOST.match(text) is not None


def _secrets() -> Iterator[str]:
    """Yield the secrets in MLflow's environment variables, each in three forms: as it is, URL-decoded, URL-encoded."""
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
