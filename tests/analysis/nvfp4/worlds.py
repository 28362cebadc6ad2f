"""Simulated results of NVFP4's sweeps: a World that also has the errors of weight gradients (see ../worlds.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fewbits.sweeps.planning.plan import Member, Plan
from tests.analysis import worlds
from tests.analysis.worlds import results, wave

__all__ = ["BAD", "PAPER", "World", "results"]

PARTS = ("qkv", "out", "up", "down")


@dataclass
class World(worlds.World):
    gradients: Callable[[int, str], float] | None = None  # (block from 1 to 20, part) → relative error of the gradient
    wobble: float = 1e-5  # the size of the noise of these errors over seeds

    def numerics(self, of: Plan, member: Member) -> list[dict[str, Any]]:
        """Return gradient errors of the arm layers/nvfp4-base (20 blocks) in two windows; other arms have no rows.

        In the first window all errors are 0.9, so that tests fail if the analysis does not use the last window.
        """
        if self.gradients is None or (member.cell.sweep, member.cell.arm) != ("layers", "nvfp4-base"):
            return []
        steps = of.trials[member.id].trial.training.steps
        places = [(block, part) for block in range(1, 21) for part in PARTS]
        return [
            {"step": step, "layer": f"blocks.{block - 1}.{part}", "block": block - 1, "part": part, "slot": "weight"}
            | {
                "gradient_error": self.gradients(block, part) + self.wobble * wave(f"{block} {part}", member.cell.seed)
                if end
                else 0.9
            }
            for step, end in ((steps // 2, False), (steps - 1, True))
            for block, part in places
        ]


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
