"""Read papers/planning/seeds.yaml, which lists seeds that shaped a design, so its claims must not use them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from fewbits.common.from_dict import from_dict

FILE = Path(__file__).parents[2] / "papers" / "planning" / "seeds.yaml"


@dataclass(frozen=True)
class Shaped:
    """Seeds that shaped a design."""

    seeds: tuple[int, ...]
    by: str  # the run that used them


@dataclass(frozen=True)
class Design:
    """The scales of a study that share one design, with the seeds that shaped it."""

    study: str
    scales: tuple[str, ...]
    shaped: tuple[Shaped, ...]


@cache
def ledger() -> tuple[Design, ...]:
    """Return the designs of the file."""
    return tuple(from_dict(Design, entry, FILE.name) for entry in yaml.safe_load(FILE.read_text("utf-8")))


def shaping(study: str, scale: str, seeds: Iterable[int]) -> dict[int, str]:
    """Return those of the seeds that shaped the design of this scale, each with the run that used it."""
    runs = {}
    for design in ledger():
        if design.study == study and scale in design.scales:
            runs.update({seed: shaped.by for shaped in design.shaped for seed in shaped.seeds})
    return {seed: runs[seed] for seed in seeds if seed in runs}
