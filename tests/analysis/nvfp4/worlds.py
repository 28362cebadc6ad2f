"""Simulated results of NVFP4's sweeps: a World that also has the errors of weight gradients (see ../worlds.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from fewbits.models.networks.decoder import DecoderConfig
from fewbits.models.networks.layers import Linear
from fewbits.models.networks.registry import on_meta
from fewbits.sweeps.planning.plan import Member, Plan
from tests.analysis import worlds
from tests.analysis.worlds import results, wave

__all__ = ["BAD", "PAPER", "World", "results"]


@dataclass
class World(worlds.World):
    gradients: Callable[[int, str], float] | None = None  # (block from 1, part) → relative error of the gradient
    measured: tuple[str, ...] = ("layers/nvfp4-base",)  # the SWEEP/ARM, or the recipes, that have measured these errors
    wobble: float = 1e-5  # the size of the noise of these errors over seeds

    def numerics(self, of: Plan, member: Member) -> list[dict[str, Any]]:
        """Return gradient errors of the arms in `measured`, in two windows, which are 0 in blocks that stay in BF16.

        In the first window all errors are 0.9, so that tests fail if the analysis does not use the last window.
        """
        trial, found = of.trials[member.id].trial, []
        names = {f"{member.cell.sweep}/{member.cell.arm}", trial.recipe.name}
        if self.gradients is None or not names & set(self.measured):
            return []
        keep, blocks = trial.recipe.keep, _parts(trial.model)
        for i, part in ((i, part) for i, parts in enumerate(blocks) for part in parts):
            chance = self.wobble * wave(f"{i + 1} {part}", member.cell.seed)
            error = self.gradients(i + 1, part) + chance if keep.first <= i < len(blocks) - keep.last else 0.0
            row = {"layer": f"blocks.{i}.{part}", "block": i, "part": part, "slot": "weight"}
            for step, value in ((trial.training.steps // 2, 0.9), (trial.training.steps - 1, error)):
                found.append({"step": step, **row, "gradient_error": value})
        return found


@cache
def _parts(model: DecoderConfig) -> list[list[str]]:
    """Return, for each block of the model, the parts of its linear layers, such as qkv, out, up and down."""
    blocks = on_meta(model).blocks
    assert isinstance(blocks, Iterable)
    return [[str(m.part) for m in block.modules() if isinstance(m, Linear)] for block in blocks]


BAD = {"recipe/bad-arm": 0.05, "layers/bad-arm": 0.05, "mxfp4-1.00": 0.02}
PAPER = World(
    effect=BAD
    | {"recipe/fp8": 0.001, "recipe/nvfp4": 0.01, "no-sr": 0.012, "no-rht": 0.013, "no-2d": 0.0125}
    | {"recipe/nvfp4-base": 0.03, "kept": 0.02, "with-2d": 0.015, "recipe/mxfp4": 0.016}
    | {"hybrid/fp8": 0.001, "hybrid/nvfp4": 0.01, "hybrid/mxfp4": 0.016}
    | {"base-whole": 0.05, "nvfp4-whole": 0.012}
    | {"mxfp4-1.25": 0.015, "mxfp4-1.36": 0.012, "mxfp4-1.50": 0.008}
    | {"sr-gradients": 0.017, "sr-backward": 0.0171, "sr-activations": 0.05, "sr-weights": 0.06}
    | {"rht-wgrad": 0.017, "rht-fprop": 0.025, "rht-dgrad": 0.024}
    | {"rht-2": 0.0101, "rht-4": 0.0102, "rht-128": 0.0099, "signs-none": 0.0101, "signs-each": 0.01}
    | {"weights-different": 0.02, "weights-same": 0.015, "weights-squares": 0.014}
    | {"activations-different": 0.004, "activations-same": 0.002}
    | {
        "nvfp4-trunk": 0.005,
        "nvfp4-long": 0.012,
        "long-no-sr": 0.0135,
        "long-no-rht": 0.014,
        "long-no-2d": 0.0131,
        "switch-both": 0.001,
        "switch-forward": 0.003,
    }
    | {"switch-backward": 0.0121, "switch-late": 0.009}
    | {"first-4": 0.03, "last-4": 0.01, "first-2-last-2": 0.012, "layers/nvfp4-base": 0.04}
    | {"mxfp4-deterministic": 0.0158, "four-over-six": 0.008},
    gradients=lambda block, part: 0.18 if block > 16 else 0.12,
)
