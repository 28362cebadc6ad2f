"""The ledger of seeds, papers/planning/seeds.yaml: which seeds shaped a design, so that they never judge it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from fewbits.common.from_dict import from_dict

FILE = Path(__file__).parents[1] / "papers" / "planning" / "seeds.yaml"


@dataclass(frozen=True)
class Shaped:
    seeds: tuple[int, ...]
    by: str  # the run in which they did


@dataclass(frozen=True)
class Design:
    """Scales of a study that share one design."""

    study: str
    scales: tuple[str, ...]
    shaped: tuple[Shaped, ...]


@cache
def ledger() -> tuple[Design, ...]:
    return tuple(from_dict(Design, one, FILE.name) for one in yaml.safe_load(FILE.read_text("utf-8")))


def shaping(study: str, scale: str, seeds: Iterable[int]) -> dict[int, str]:
    """Return those of the seeds that shaped the design of this scale, with the run in which they did."""
    found = {}
    for design in ledger():
        if design.study == study and scale in design.scales:
            found.update({seed: one.by for one in design.shaped for seed in one.seeds})
    return {seed: found[seed] for seed in seeds if seed in found}
