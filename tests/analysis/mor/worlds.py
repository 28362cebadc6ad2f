"""Simulated results of MoR's sweeps: a World that also has quantization errors and fallback shares of tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fewbits.analysis.engine.results.places import PROBE
from fewbits.analysis.studies.mor.tensors import PARTS, high
from fewbits.kernels.quantizer import Mixture
from fewbits.sweeps.planning.plan import Member, Plan
from tests.analysis import worlds
from tests.analysis.worlds import results, wave

__all__ = ["FLOOR", "World", "planned", "results"]

BATCHES = 100  # the number of mini-batches in a window
FLOOR = 0.0225  # the usual relative error of a tensor in E4M3

# (arm, configuration, block from 1, part, slot, whether it is the last window) → error or share of the tensor
Tensors = Callable[[str, str, int, str, str, bool], float]


def _floor(arm: str, configuration: str, block: int, part: str, slot: str, end: bool) -> float:
    return FLOOR


def _none(arm: str, configuration: str, block: int, part: str, slot: str, end: bool) -> float:
    return 0.0


@dataclass
class World(worlds.World):
    wobble: float = 1e-5  # the size of the noise of errors and shares over seeds
    error: Tensors = _floor  # relative quantization errors
    fallback: Tensors = _none  # shares of mini-batches in which the tensor falls back to BF16
    # The share of mini-batches in bin 8 of the histogram of errors; the others are in bin 9. If None, all mini-batches
    # are in the bin of the error.
    below: float | None = None
    flush: float = 1.0  # the share of an error's excess over FLOOR that comes from flushed values

    def numerics(self, of: Plan, member: Member) -> list[dict[str, Any]]:
        trial, arm, seed = of.trials[member.id].trial, str(member.cell.arm).removeprefix(PROBE), member.cell.seed
        configuration = dict(member.cell.axes).get("configuration", "1")
        operands = {slot: str(o.spec) for slot, o in trial.recipe.operands.items() if isinstance(o.spec, Mixture)}
        if not any(":channel:" in spelled or "1x" in spelled for spelled in operands.values()):
            shared = ("fprop.x", "fprop.w", "dgrad.dy")
            operands = {slot: spelled for slot, spelled in operands.items() if slot in shared}
        rows = []
        for end in (True,) if trial.is_probe else (False, True):
            for block in range(trial.model.layers):
                for part in PARTS:
                    step = trial.training.steps - 1 if end else 9
                    labels = {"step": step, "layer": "", "block": block, "part": part}
                    rows.append(labels | {"slot": "weight"})
                    for slot, spelled in operands.items():
                        of_this = (arm, configuration, block + 1, part, slot, end)
                        wobble = self.wobble * (wave(slot + part + configuration, seed) + (5 * seed % 7 - 3) / 3)
                        share = min(1.0, max(0.0, self.fallback(*of_this) + wobble))
                        rows.append(
                            labels
                            | {"slot": slot}
                            | _row(spelled, self.error(*of_this) + wobble, share, self.below, seed, self.flush)
                        )
        return rows


def planned(folder: Path, cache_folder: Path, *words: str) -> Plan:
    return worlds.planned("mor", folder, cache_folder, *words, "model.layers=4")


def _row(spelled: str, error: float, share: float, below: float | None, seed: int, flush: float) -> dict[str, object]:
    counts = [0] * 21
    if below is None:
        counts[min(int(error / 0.005), 20)] = BATCHES
    else:
        under = round(BATCHES * below) + seed % 2
        counts[8], counts[9] = under, BATCHES - under
    shares = [1 - share, 0.0, 0.0, 0.0]
    place = high(spelled)
    assert place
    shares[place] += share
    taken = {f"share_{entry}": value for entry, value in enumerate(shares)}
    seen = {"quantizer": spelled, "batches": BATCHES, "error": error, "error_max": 1.1 * error, "histogram": counts}
    flushed = (
        flush * max(0.0, error - FLOOR) / (1 - FLOOR)
    )  # the share of values flushed to 0, whose relative error is 1
    return seen | taken | {"flushed": flushed}
