"""MoR's arms: their names in tables, and the two configurations that they are run in."""

from __future__ import annotations

from fewbits.analysis.arms import Where

AXIS = "configuration"
ONE, TWO = {AXIS: "1"}, {AXIS: "2"}
CONFIGURATIONS: dict[str, Where] = {"configuration 1": ONE, "configuration 2": TWO}
PARTITIONS = ("tensor", "block", "channel")  # from the most tensors that fall back to the fewest
TITLES = {
    "bf16": "BF16",
    "block": "Block 128×128",
    "tensor": "Tensor",
    "channel": "Channel",
    "block-64": "Block 64×64",
    "threshold-5": "Threshold 5.0 %",
    "amax": "FP32 amax",
    "e8m0": "E8M0",
    "two-way": "Two-way",
    "three-way": "Three-way",
    "bad-arm": "E2M1 per tensor (control)",
    "bf16-again": "BF16 again (micro-batches of 2)",
    "block-again": "Block again (micro-batches of 2)",
    "sub-channel": "Sub-channel 1×128",
    "watched": "BF16, watched",
}
