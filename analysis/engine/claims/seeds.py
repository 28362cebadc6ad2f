"""Read seeds.yaml: the seeds of pilot runs whose results influenced a study's design.

The design is, for example, the margins, the lengths of runs or the wording of claims. A study's claims must not be
tested with these seeds, since they are no independent evidence.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from fewbits.common.from_dict import from_dict

FILE = Path(__file__).with_name("seeds.yaml")


@dataclass(frozen=True)
class UsedSeeds:
    """The seeds of one pilot whose results influenced a study's design."""

    seeds: tuple[int, ...]
    by: str  # a description of the pilot


@dataclass(frozen=True)
class Design:
    """One entry of seeds.yaml: scales of a study that share a design, and the seeds that influenced this design."""

    study: str
    scales: tuple[str, ...]
    shaped: tuple[UsedSeeds, ...]


@cache
def ledger() -> tuple[Design, ...]:
    """Return the entries of seeds.yaml, in order."""
    return tuple(from_dict(Design, entry, FILE.name) for entry in yaml.safe_load(FILE.read_text("utf-8")))


def pilots_of(study: str, scale: str, seeds: Iterable[int]) -> dict[int, str]:
    """Return {seed: description of the pilot} for those of `seeds` whose pilot influenced the design of this scale."""
    runs = {}
    for design in ledger():
        if design.study == study and scale in design.scales:
            runs.update({seed: used.by for used in design.shaped for seed in used.seeds})
    return {seed: runs[seed] for seed in seeds if seed in runs}
