"""Record which versions of the sources give the same bits, so that stored trials stay valid after a refactoring.

`equal_bits.json`, which `same_bits.py` writes, lists pairs of numerics fingerprints. For each pair, a set of tiny
trials gave the same bytes with both versions, on one kind of device and one instruction set. On other
kinds of device and instruction sets the pair is not valid: there, trials of the older version stay stale.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("equal_bits.json")


@dataclass(frozen=True)
class EqualPair:
    """Two numerics fingerprints (`old`, `new`) whose sources gave the same bits, and where and when this was tested.

    old_commit: the commit with the fingerprint `old`. torch: the version of torch in the test.
    untried: the number of changed statements, of both versions, that no trial executed; if it is above 0, a person has
        reviewed these statements.
    reviewed: the reason why this person considers that these statements do not change bits.
    """

    device: str
    instruction_set: str
    old: str
    new: str
    old_commit: str
    torch: str
    date: str
    untried: int = 0
    reviewed: str = ""


@cache
def declared_pairs(file: Path = FILE) -> tuple[EqualPair, ...]:
    """Return the pairs of fingerprints that the JSON file lists."""
    return tuple(EqualPair(**row) for row in json.loads(file.read_text("utf-8")))


def add_pairs(pairs: list[EqualPair], file: Path = FILE) -> None:
    """Add pairs to the JSON file; pairs that it already has are not repeated."""
    rows = [asdict(pair) for pair in dict.fromkeys([*declared_pairs(file), *pairs])]
    file.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n", "utf-8")
    declared_pairs.cache_clear()


def equal_fingerprints(fingerprint: str, device: str, instruction_set: str | None = None) -> list[str]:
    """Return the fingerprint and all others to which a pair, or a chain of pairs, in `equal_bits.json` connects it.

    The sources of the two fingerprints of a pair gave the same bits. device: the kind of device, `cpu` or `cuda`.
    instruction_set: use only pairs that were tested with this one. None: use the pairs of all instruction sets; then
    it is possible that the sources of two fingerprints in the result compute different bits on some processors.
    """
    equal = [fingerprint]
    for known in equal:  # the list grows during the loop
        equal += [other for other in _neighbours(known, device, instruction_set) if other not in equal]
    return equal


def _neighbours(fingerprint: str, device: str, instruction_set: str | None) -> Iterator[str]:
    for pair in declared_pairs():
        if pair.device == device and instruction_set in (None, pair.instruction_set):
            if pair.old == fingerprint:
                yield pair.new
            if pair.new == fingerprint:
                yield pair.old
