"""The arms of the GaussWS study: their names, their looks, and the sweeps that have them.

Each family has a sweep under AdamW and one under Adam-mini, whose arms have names of their own; `bf16`, `gaussws` and
`diffq` are other trials in each family, so a family's sweep is chosen first.
"""

from __future__ import annotations

from fewbits.analysis import plots
from fewbits.analysis.arms import BASELINE, Where
from fewbits.analysis.curves import Arm
from fewbits.analysis.engine.frames import Results
from fewbits.analysis.plots import LOOKS
from fewbits.analysis.results import NotRun

OURS, DIFFQ = "gaussws", "diffq"
MINI, MINI_OURS, MINI_DIFFQ = "adam-mini", "adam-mini-gaussws", "adam-mini-diffq"
FAMILIES = {"GPT-2": "gpt2", "Llama 2": "llama2"}  # with their sweeps
PARTS = ("qkv", "out", "up", "down", "od")

ARMS = {
    arm.name: arm
    for arm in (
        Arm(BASELINE, "BF16", plots.BASELINE),
        Arm(OURS, "GaussWS", LOOKS[0]),
        Arm(DIFFQ, "DiffQ", LOOKS[1]),
        Arm("bf16-low", "BF16", plots.BASELINE),
        Arm("gaussws-low", "GaussWS", LOOKS[0]),
        Arm("diffq-low", "DiffQ", LOOKS[1]),
        Arm(MINI, "BF16", plots.BASELINE),
        Arm(MINI_OURS, "GaussWS", LOOKS[0]),
        Arm(MINI_DIFFQ, "DiffQ", LOOKS[1]),
        Arm("gaussws-8-6", "GaussWS, 8 to 6 bits", LOOKS[2]),
        Arm("all", "GaussWS", LOOKS[0]),
        Arm("qkv", "qkv", LOOKS[6]),  # parts stand beside DiffQ, which has the second look
        Arm("out", "out", LOOKS[2]),
        Arm("up", "up", LOOKS[3]),
        Arm("down", "down", LOOKS[4]),
        Arm("od", "out and down", LOOKS[5]),
    )
}
TITLES = {name: arm.label for name, arm in ARMS.items()} | {
    "bf16-again": "BF16 again (larger micro-batches)",
    "all": "all parts",
    "bf16-low": "BF16, low rate",
    "gaussws-low": "GaussWS, low rate",
    "diffq-low": "DiffQ, low rate",
    MINI: "BF16, Adam-mini",
    MINI_OURS: "GaussWS, Adam-mini",
    MINI_DIFFQ: "DiffQ, Adam-mini",
}
TRUNKS = {"trunk": "trunk, BF16", "mini-trunk": "trunk, BF16, Adam-mini"}


def chosen(results: Results, sweep: str, where: Where | None = None) -> Results | NotRun:
    """Of one sweep its places, or those of one value of its axes, trunks left in."""
    if sweep not in {one.name for one in results.plan.sweeps}:
        return NotRun(results.scale_name)
    one = results.of_sweep(sweep)
    axes = set((where or {}).items())
    members = tuple(m for m in one.members if not m.cell.axes or axes <= set(m.cell.axes))
    if not members:
        return NotRun(results.scale_name)
    return results.remembered(f"places {sweep} {sorted(axes)}", lambda: one.of_places(members)) if axes else one
