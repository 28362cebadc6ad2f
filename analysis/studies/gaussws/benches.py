"""Timings that `fewbits bench` stored beside the trials: training and generators, every single time, by device.

    fewbits bench train --model gpt2-nano,llama2-nano --recipes gaussws,diffq --optimizers adamw,adam-mini --store runs
    fewbits bench kernels --generators --store runs

Turns are the unit: whatever else the machine does affects all arms of a turn alike. They show how well timing resolves
a ratio on one device, and nothing about other devices.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from fewbits.analysis.engine.frames import Damaged, Results
from fewbits.analysis.engine.statistics import Interval, median_interval

FOLDER = "bench"
DEVICES = ("cuda", "cpu")  # the first that was measured is shown
PLAIN = "bf16"
QUIET = 0.05  # of the processors, for other processes
T = TypeVar("T")


@dataclass(frozen=True)
class Timed:
    """An arm's single times, of so many elements or tokens each."""

    amount: int
    seconds: tuple[float, ...]
    others: tuple[float | None, ...] = ()  # the share of the processors that other processes used, turn by turn
    memory: int | None = None  # bytes, of training

    def __post_init__(self) -> None:
        if not (self.amount > 0 and self.seconds and all(s > 0 for s in self.seconds)):
            raise ValueError(f"{self.amount} in {list(self.seconds)} s: positive numbers are expected")

    @property
    def speed(self) -> float:
        return self.amount / median(self.seconds)

    @property
    def quiet(self) -> tuple[bool, ...]:
        """Whether other processes used little of the machine, turn by turn; in none where that was not measured."""
        shares = self.others or (None,) * len(self.seconds)
        return tuple(share is not None and share <= QUIET for share in shares)

    def longer_than(self, other: Timed) -> tuple[float, ...]:
        """Time for the same amount, as a part of the other's, less one; turn by turn."""
        mine = (s / self.amount for s in self.seconds)
        return tuple(a / b - 1 for a, b in zip(mine, (s / other.amount for s in other.seconds), strict=True))


@dataclass(frozen=True)
class Training:
    device: str
    kind: str
    models: dict[str, dict[tuple[str, str], Timed]]  # by name; of each by optimizer and recipe


@dataclass(frozen=True)
class Generators:
    device: str
    kind: str
    shapes: dict[tuple[int, int], dict[tuple[str, str], Timed]]  # of each by what and arm


def training(results: Results) -> Training | None:
    for kind in DEVICES:
        if (found := _read(results, f"train-{kind}.json", _training)) is not None:
            return Training(found[0], kind, found[1])
    return None


def _training(found: dict[str, Any]) -> dict[str, dict[tuple[str, str], Timed]]:
    return {
        one["model"]: {
            (row["optimizer"], row["variant"]): Timed(
                one["batch"] * one["length"], tuple(row["seconds"]), tuple(row.get("others", ())), row["memory"]
            )
            for row in one["rows"]
        }
        for one in found["models"]
    }


def generators(results: Results) -> Generators | None:
    for kind in DEVICES:
        if (found := _read(results, f"generators-{kind}.json", _generators)) is not None:
            return Generators(found[0], kind, found[1])
    return None


def _generators(found: dict[str, Any]) -> dict[tuple[int, int], dict[tuple[str, str], Timed]]:
    shapes: dict[tuple[int, int], dict[tuple[str, str], Timed]] = {}
    for one in found["timed"]:
        arms = shapes.setdefault((one["rows"], one["cols"]), {})
        arms[one["what"], one["arm"]] = Timed(one["elements"], tuple(one["seconds"]), tuple(one.get("others", ())))
    return shapes


def lost(ours: Timed, plain: Timed) -> tuple[float, ...]:
    """Return the shares of throughput that are lost, turn by turn."""
    return tuple(1 - 1 / (1 + longer) for longer in ours.longer_than(plain))


def overhead(ours: Timed, plain: Timed) -> tuple[float, Interval | None]:
    """Return the share of throughput that is lost, the median over turns, with its 95 % interval."""
    shares = lost(ours, plain)
    return median(shares), median_interval(shares)


def _where(found: dict[str, Any]) -> str:
    machine = found["machine"]
    processor = machine.get("processor") or machine.get("cpu") or ""
    device = str(machine["device"])
    named = device if processor in device else f"{processor}, {device}"
    return f"{named}; {found['turns']} turns, load {machine['load']:.1f} when it began"


def _read(
    results: Results, name: str, make: Callable[[dict[str, Any]], dict[T, dict[tuple[str, str], Timed]]]
) -> tuple[str, dict[T, dict[tuple[str, str], Timed]]] | None:
    """Return where it was measured, and the times by model or shape."""
    store = next((planned.folder.path.parent for planned in results.plan.trials.values()), None)
    path = None if store is None else Path(store) / FOLDER / name
    if path is None or not path.is_file():
        return None
    try:
        found: dict[str, Any] = json.loads(path.read_text("utf-8"))
        where, measured = _where(found), make(found)
        for of in measured.values():
            for first in {first for first, _ in of}:  # what is compared turn by turn; a slow kind has fewer turns
                if len({len(one.seconds) for (kind, _), one in of.items() if kind == first}) != 1:
                    raise ValueError(f"arms of {first} did not take as many turns as each other")
            if not of:
                raise ValueError("no arm was measured")
        if not measured:
            raise ValueError("nothing was measured")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{path} is damaged ({type(error).__name__}: {error}): delete it, and measure again") from None
    return where, measured
