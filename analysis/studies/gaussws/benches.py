"""Read the timings of training and of noise generators that `fewbits bench` stores, in a file for each device.

    fewbits bench train --model gpt2-nano,llama2-nano --recipes gaussws,diffq --optimizers adamw,adam-mini --store runs
    fewbits bench kernels --generators --store runs

An arm of the first command is an optimizer with a recipe. An arm of the second is a noise generator in one of two
operations: drawing noise alone, or computing the whole sampled weight (eq. 3 of the paper). The commands time arms in
turns. One turn times each arm once, so that other load on the machine affects all arms alike; therefore arms are
compared within a turn. The spread over turns shows how precise a ratio is on this device, not on others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, Generic, TypeVar

from fewbits.analysis.engine.results.frames import Damaged, Results
from fewbits.analysis.engine.statistics.estimates import Interval, median_interval
from fewbits.common.store_folder import BENCH

DEVICES = ("cuda", "cpu")  # reports show the first device in this order that has measurements
PLAIN = "bf16"  # the recipe without quantization and noise
QUIET = 0.05  # a turn is quiet if other processes use at most this share of the processors
T = TypeVar("T")


@dataclass(frozen=True)
class Timed:
    """The timings of one arm: an optimizer with a recipe, or a generator in one of the timed operations."""

    amount: int  # the number of tokens or elements that the arm processes in a turn
    seconds: tuple[float, ...]  # by turn
    others: tuple[float | None, ...] = ()  # by turn, the share of the processors that other processes used
    memory: int | None = None  # bytes at the peak of a training step

    def __post_init__(self) -> None:
        if not (self.amount > 0 and self.seconds and all(s > 0 for s in self.seconds)):
            raise ValueError(
                f"{self.amount} tokens or elements in {list(self.seconds)} seconds: expected a number > 0, and one or "
                "more times, all > 0"
            )

    @property
    def speed(self) -> float:
        """The tokens or elements per second: `amount` divided by the median over turns of this arm's time."""
        return self.amount / median(self.seconds)

    @property
    def quiet_turns(self) -> tuple[bool, ...]:
        """Tell for each turn (one timing of each arm) whether it was quiet.

        A turn is quiet if other processes used at most the share QUIET of the processors' time. The value is False for
        turns in which this share was not measured.
        """
        shares = self.others or (None,) * len(self.seconds)
        return tuple(share is not None and share <= QUIET for share in shares)

    def longer_than(self, other: Timed) -> tuple[float, ...]:
        """Return for each turn (one timing of each arm) the number (time of this arm) / (time of the other arm) − 1.

        Each time is first divided by its arm's `amount`, because the arms may process different numbers of tokens or
        elements.
        """
        mine = (s / self.amount for s in self.seconds)
        return tuple(a / b - 1 for a, b in zip(mine, (s / other.amount for s in other.seconds), strict=True))


Arms = Mapping[tuple[str, str], Timed]  # by (optimizer, recipe), or by (timed operation, generator)


@dataclass(frozen=True)
class Bench(Generic[T]):
    """The timings of one device."""

    device: str  # a description of the machine and of the measurement
    kind: str  # one of DEVICES
    timed: Mapping[T, Arms]  # by name of the model, or by shape (rows, columns) of the matrix


def training(results: Results) -> Bench[str] | None:
    """Return the timings of training steps, by model; None if the plan's store has none."""
    return _first(results, "train", _training)


def generators(results: Results) -> Bench[tuple[int, int]] | None:
    """Return the timings of noise generators, by shape of the matrix; None if the plan's store has none."""
    return _first(results, "generators", _generators)


def _training(found: dict[str, Any]) -> dict[str, Arms]:
    return {
        one["model"]: {
            (row["optimizer"], row["variant"]): _timed(row, one["batch"] * one["length"], row["memory"])
            for row in one["rows"]
        }
        for one in found["models"]
    }


def _generators(found: dict[str, Any]) -> dict[tuple[int, int], Arms]:
    shapes: dict[tuple[int, int], dict[tuple[str, str], Timed]] = {}
    for one in found["timed"]:
        shapes.setdefault((one["rows"], one["cols"]), {})[one["what"], one["arm"]] = _timed(one, one["elements"])
    return dict(shapes)


def _timed(row: dict[str, Any], amount: int, memory: int | None = None) -> Timed:
    return Timed(amount, tuple(row["seconds"]), tuple(row.get("others", ())), memory)


def lost_throughput(ours: Timed, plain: Timed) -> tuple[float, ...]:
    """Return for each turn (one timing of each arm) the share of plain BF16's throughput that the arm `ours` loses.

    plain: plain BF16, without quantization and noise.
    """
    return tuple(1 - 1 / (1 + longer) for longer in ours.longer_than(plain))


def overhead(arms: Arms, optimizer: str, recipe: str) -> tuple[float, Interval | None] | None:
    """Return the share of plain BF16's throughput that the recipe loses: the median over turns and its 95 % interval.

    A turn is one timing of each arm. Return None if the recipe is plain BF16, or if the recipe or plain BF16 has no
    timings with this optimizer.
    """
    ours, plain = arms.get((optimizer, recipe)), arms.get((optimizer, PLAIN))
    if recipe == PLAIN or ours is None or plain is None:
        return None
    shares = lost_throughput(ours, plain)
    return median(shares), median_interval(shares)


def _where(found: dict[str, Any]) -> str:
    """Return a line with the machine, the number of timed turns, and the machine's load average before the first turn.

    found: the content of a file of timings.
    """
    machine = found["machine"]
    processor = machine.get("processor") or machine.get("cpu") or ""
    device = str(machine["device"])
    named = device if processor in device else f"{processor}, {device}"
    return f"{named}; {found['turns']} turns, load average {machine['load']:.1f} at the start"


def _first(results: Results, name: str, read: Callable[[dict[str, Any]], Mapping[T, Arms]]) -> Bench[T] | None:
    """Return the timings in the file of the first device in DEVICES that has a file; None if there is no file.

    name: `train` or `generators`, the first part of the file's name. read: converts the content of the file.

    Raise Damaged if the file cannot be read or has invalid content.
    """
    for kind in DEVICES:
        if (found := results.files.benches(results.plan).get(f"{name}-{kind}")) is not None:
            try:
                return Bench(_where(found), kind, _checked(read(found)))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                reason = f"{type(error).__name__}: {error}"
                raise Damaged(
                    f"{BENCH}/{name}-{kind}.json is damaged ({reason}): delete the file, and run `make "
                    "reproduce-gaussws` to measure again"
                ) from None
    return None


def _checked(measured: Mapping[T, Arms]) -> Mapping[T, Arms]:
    """Check that a file's timings can be compared turn by turn, and return them unchanged.

    Raise ValueError if a model or shape has no timings, or if arms with the same optimizer or the same timed operation
    have different numbers of turns. A turn is one timing of each arm.
    """
    if not measured or not all(measured.values()):
        raise ValueError("the file has no timings")
    for arms in measured.values():
        for first in {first for first, _ in arms}:  # for each operation, since slow ones are timed in fewer turns
            if len({len(one.seconds) for (kind, _), one in arms.items() if kind == first}) != 1:
                raise ValueError(f"the compared variants of {first} were timed different numbers of times")
    return measured
