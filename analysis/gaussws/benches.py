"""What `fewbits bench` left beside the trials: training and generators, every single time, by kind of device.

    fewbits bench train --model gpt2-nano,llama2-nano --recipes gaussws,diffq --optimizers adamw,adam-mini --store runs
    fewbits bench kernels --generators --store runs

Turns are the unit here: whatever else the machine does falls on all arms of a turn alike. They say how well timing
resolves a ratio on one device, nothing of other devices.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from fewbits.analysis.frames import Damaged, Results
from fewbits.analysis.statistics import summary
from fewbits.analysis.verdicts import Differences, NoData

FOLDER = "bench"
DEVICES = ("cuda", "cpu")  # the first that was measured is shown
PLAIN = "bf16"


@dataclass(frozen=True)
class Timed:
    """An arm's single times, of so many elements or tokens each."""

    amount: int
    seconds: tuple[float, ...]
    memory: int | None = None  # bytes, of training

    @property
    def speed(self) -> float:
        return self.amount / median(self.seconds)

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
        if (found := _read(results, f"train-{kind}.json")) is not None:
            models = {
                one["model"]: {
                    (row["optimizer"], row["variant"]): Timed(
                        one["batch"] * one["length"], tuple(row["seconds"]), row["memory"]
                    )
                    for row in one["rows"]
                }
                for one in found["models"]
            }
            return Training(_where(found), kind, models)
    return None


def generators(results: Results) -> Generators | None:
    for kind in DEVICES:
        if (found := _read(results, f"generators-{kind}.json")) is not None:
            shapes: dict[tuple[int, int], dict[tuple[str, str], Timed]] = {}
            for one in found["timed"]:
                arms = shapes.setdefault((one["rows"], one["cols"]), {})
                arms[one["what"], one["arm"]] = Timed(one["elements"], tuple(one["seconds"]))
            return Generators(_where(found), kind, shapes)
    return None


def apart(ours: Timed | None, theirs: Timed | None, times: float = 1.0) -> Differences | NoData:
    """How much longer theirs takes than `times` ours, turn by turn: a difference for the kinds of verdicts."""
    if ours is None or theirs is None:
        return NoData("an arm was not measured")
    found = tuple((1 + longer) / times - 1 for longer in theirs.longer_than(ours))
    return Differences(found, True)


def overhead(ours: Timed, plain: Timed) -> tuple[float, float]:
    """The mean share of throughput that is lost over turns, with half of its 95 % interval (0 of one turn)."""
    lost = [1 - 1 / (1 + longer) for longer in ours.longer_than(plain)]
    found = summary(lost)
    return found.mean, 0.0 if found.interval is None else (found.interval.high - found.interval.low) / 2


def _where(found: dict[str, Any]) -> str:
    machine = found["machine"]
    processor = machine.get("processor") or machine.get("cpu") or ""
    device = str(machine["device"])
    named = device if processor in device else f"{processor}, {device}"
    return f"{named}; {found['turns']} turns, load {machine['load']:.1f} when it began"


def _read(results: Results, name: str) -> dict[str, Any] | None:
    store = next((planned.folder.path.parent for planned in results.plan.trials.values()), None)
    path = None if store is None else Path(store) / FOLDER / name
    if path is None or not path.is_file():
        return None
    try:
        found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise Damaged(f"{path} is damaged ({error}): measure again") from None
    return found
