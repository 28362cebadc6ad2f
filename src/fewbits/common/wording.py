"""Write counts with nouns (`3 trials`), lists (`a, b and c`), durations, and what differs between two mappings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

SHOWN = 12  # the number of hexadecimal digits printed of a digest
MISSING = "(none)"  # printed for the value of a field that one side lacks
ALIKE = 2  # fields share a line if their keys begin with the same 2 parts, such as config.recipe, and change alike


def plural(count: int, noun: str) -> str:
    """Return the count and the noun, with an s at its end unless the count is 1: `1 trial`, `3 trials`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


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

    Fields with the same change share a line if the first two parts (ALIKE) of their dotted keys are equal.
    """
    left, right = dict(_flat(a)), dict(_flat(b))
    changes: dict[tuple[str, str], list[str]] = {}
    for key in [*left, *(key for key in right if key not in left)]:
        was, now = left.get(key, MISSING), right.get(key, MISSING)
        if was != now:
            node = ".".join(key.split(".")[:ALIKE])
            changes.setdefault((node, f"{_shown(was)} → {_shown(now)}"), []).append(key)
    return [f"{_joined(node, keys)}: {change}" for (node, change), keys in changes.items()]


def _joined(node: str, keys: list[str]) -> str:
    """Return the keys, separated by commas, with the prefix `node` only on the first: `config.recipe.fprop.x, fprop.w`.

    All keys are dotted and begin with `node`.
    """
    return ", ".join([keys[0], *(key.removeprefix(f"{node}.") for key in keys[1:])])


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flat(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, list(value) if isinstance(value, tuple) else value


def _shown(value: Any) -> str:
    text = str(value)
    digest = len(text) >= 64 and all(c in "0123456789abcdef" for c in text[:64])
    return text[:SHOWN] + text[64:] if digest else text
