"""Write counts (`3 trials`, `3.3 M`), lists (`a, b and c`), durations, differences, and texts without credentials."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

UNITS = (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3))
MISSING = "(none)"  # printed for the value of a field that one side lacks

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


def plural(count: int, noun: str) -> str:
    """Return the count and the noun, with an s at its end unless the count is 1: `1 trial`, `3 trials`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def amount(count: float) -> str:
    """Return a count with the letter k, M, B or T for its power of ten, for example 3.3 M, 134 M or 8.5 B."""
    for unit, size in UNITS:
        if abs(count) >= size:
            value = count / size
            return f"{value:.0f} {unit}" if abs(value) >= 100 else f"{value:.2g} {unit}"
    return f"{count:g}"


def enumeration(items: Iterable[str]) -> str:
    """Return the items as `a, b and c`, without repeated ones; there has to be at least one."""
    *most, last = dict.fromkeys(items)
    return f"{', '.join(most)} and {last}" if most else last


def clock(seconds: float) -> str:
    """Return a duration in seconds as text: `M:SS`, `H:MM:SS` or, from one day on, `D days H h`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} {'day' if days == 1 else 'days'} {hours} h"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Return a line `KEY: A → B` for each field that differs between the nested mappings `a` and `b`.

    Fields of one section, such as `recipe`, with the same change share a line. The prefix `config.`, which all settings
    of a trial have in its identity, is left out.
    """
    left, right = dict(flat(a)), dict(flat(b))
    changes: dict[tuple[str, str], list[str]] = {}
    for key in left | right:
        was, now = left.get(key, MISSING), right.get(key, MISSING)
        if was != now:
            section, _, field = key.removeprefix("config.").partition(".")
            changes.setdefault((section, f"{_shown(was)} → {_shown(now)}"), []).append(field)
    return [f"{'.'.join(filter(None, (node, ', '.join(fields))))}: {how}" for (node, how), fields in changes.items()]


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of each field of nested mappings; tuples become lists."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from flat(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, list(value) if isinstance(value, tuple) else value


def _shown(value: Any) -> str:
    """Return a value as text, and a digest (64 hexadecimal digits) by its first 12 digits."""
    text = str(value)
    digest = len(text) >= 64 and all(c in "0123456789abcdef" for c in text[:64])
    return text[:12] + text[64:] if digest else text


def redacted(text: object) -> str:
    """Return the text with `***` in place of all credentials; messages that may contain the URI of a server need it.

    These are the password in `scheme://user:password@host`, or all of `token` in `scheme://token@host`; the values of
    parameters such as `?token=…` and `password=…`; and anywhere, the secrets in MLflow's environment variables.

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
    from urllib.parse import quote, unquote  # here, since importing it takes longer than most messages

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
