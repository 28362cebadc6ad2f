"""Why two trials are not the same: what their ids are made of, field by field."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

SHOWN = 12  # hexadecimal digits of a digest
MISSING = "(none)"


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """A line for each field that differs, `key: a → b`."""
    left, right = dict(_flat(a)), dict(_flat(b))
    keys = [*left, *(key for key in right if key not in left)]
    pairs = [(key, left.get(key, MISSING), right.get(key, MISSING)) for key in keys]
    return [f"{key}: {_shown(was)} → {_shown(now)}" for key, was, now in pairs if was != now]


def _flat(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flat(item, f"{where}.{key}" if where else str(key))
    else:
        yield where, list(value) if isinstance(value, tuple) else value


def _shown(value: Any) -> str:
    text = str(value)
    digest = len(text) >= 64 and all(c in "0123456789abcdef" for c in text[:64])
    return text[:SHOWN] + text[64:] if digest else text
