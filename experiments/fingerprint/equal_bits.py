"""Record which numerics fingerprints are proven to give the same bits, so that a refactoring keeps the stored trials.

`equal_bits.json` lists pairs of fingerprints, each with the kind of device and the instruction set on which a set of
tiny trials gave the same bytes under both (`same_bits.py` writes it). A pair says nothing about any other device or
instruction set: there, trials of the older sources remain different trials.
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
    """Two fingerprints that gave the same bits, and where and when this was tested.

    untried: the number of changed statements, of both versions, that no trial executed; above 0 only if a person has
        reviewed them.
    reviewed: why that person considers them to compute the same.
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
    """Add pairs of equal fingerprints to the JSON file, unless it has them already."""
    rows = [asdict(pair) for pair in dict.fromkeys([*declared_pairs(file), *pairs])]
    file.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n", "utf-8")
    declared_pairs.cache_clear()


def equal_fingerprints(fingerprint: str, device: str, instruction_set: str | None = None) -> list[str]:
    """Return the fingerprint and all fingerprints that are proven equal to it, through any number of pairs.

    Without an instruction set, pairs for any instruction set count; the caller then has to compare the pair's
    instruction set with the one that computed the trial.
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
