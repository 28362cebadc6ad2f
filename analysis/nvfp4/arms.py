"""NVFP4's arms: their names in tables, and which of the study's sweeps compare with each other.

Arms' names are a sweep's own. Sweeps of one model whose arms branch from one trunk are looked at together, so that an
arm that several have is one arm, and the spread of a pair is known from all of them.
"""

from __future__ import annotations

from fewbits.analysis.engine.frames import Results

SAME_MODEL = ("recipe", "rounding", "hadamard", "consistency", "switch", "outlook")
FAMILIES = {"transformer": "recipe", "hybrid": "hybrid", "12B": "large"}  # sweeps that have the recipe beside FP8
TITLES = {
    "bf16": "BF16",
    "bf16-again": "BF16 again (micro-batches of 2)",
    "bf16-fp32-wgrad": "BF16, weight gradients in FP32",
    "fp8": "FP8",
    "nvfp4": "NVFP4, the whole recipe",
    "no-sr": "without stochastic rounding",
    "no-rht": "without the Hadamard transform",
    "no-2d": "without 2-D weights",
    "nvfp4-base": "plain NVFP4 in every block",
    "kept": "plain NVFP4, last blocks in BF16",
    "with-2d": "and 2-D weights",
    "with-rht": "and the Hadamard transform",
    "with-sr": "and stochastic rounding",
    "mxfp4": "MXFP4",
    "mxfp4-ocp": "MXFP4, OCP's scales",
    "bad-arm": "E2M1 per tensor (control)",
    "sr-gradients": "stochastic: gradients",
    "sr-backward": "stochastic: all of the backward pass",
    "sr-activations": "stochastic: activations",
    "sr-weights": "stochastic: weights",
    "rht-none": "Hadamard: none",
    "rht-wgrad": "Hadamard: Wgrad",
    "rht-fprop": "Hadamard: Fprop",
    "rht-dgrad": "Hadamard: Dgrad",
    "rht-2": "Hadamard: size 2",
    "rht-4": "Hadamard: size 4",
    "rht-16": "Hadamard: size 16",
    "rht-128": "Hadamard: size 128",
    "signs-none": "signs: none",
    "signs-one": "signs: one vector for all",
    "signs-each": "signs: drawn for each GEMM",
    "weights-different": "weights alone: 1×16, along either dimension",
    "weights-same": "weights alone: 1×16, along one",
    "weights-squares": "weights alone: 16×16",
    "activations-different": "activations alone: 1×16, along either dimension",
    "activations-same": "activations alone: 1×16, along one",
    "nvfp4-trunk": "NVFP4 before the decay",
    "nvfp4-long": "NVFP4 before the decay and in it",
    "long-no-sr": "the same, in the decay without stochastic rounding",
    "long-no-rht": "the same, in the decay without the Hadamard transform",
    "long-no-2d": "the same, in the decay without 2-D weights",
    "switch-both": "switch: both passes",
    "switch-forward": "switch: forward",
    "switch-backward": "switch: backward",
    "switch-after": "NVFP4's weights, evaluated in BF16",
    "switch-late": "switch: both passes, at the end",
    "last-1": "last block in BF16",
    "last-2": "last 2 blocks in BF16",
    "last-4": "last 4 blocks in BF16",
    "first-4": "first 4 blocks in BF16",
    "first-2-last-2": "first 2 and last 2 blocks in BF16",
    "bf16-whole": "BF16",
    "nvfp4-whole": "NVFP4, the whole recipe",
    "base-whole": "plain NVFP4 in every block",
    "mxfp4-1.00": "MXFP4",
    "mxfp4-1.25": "MXFP4, 1.25 times the tokens",
    "mxfp4-1.36": "MXFP4, 1.36 times the tokens",
    "mxfp4-1.50": "MXFP4, 1.5 times the tokens",
    "mxfp4-deterministic": "MXFP4, no random signs, nearest rounding",
    "four-over-six": "Four Over Six",
    "ue5m3": "UE5M3 scales",
    "ms-eden": "MS-EDEN",
}


def part(results: Results, sweep: str) -> Results:
    """Of the sweeps that compare with this one, itself among them; of none where the scale leaves them out."""
    sweeps = SAME_MODEL if sweep in SAME_MODEL else (sweep,)
    return results.remembered(
        f"part of {', '.join(sweeps)}",
        lambda: results.of_places(tuple(m for m in results.members if m.cell.sweep in sweeps)),
    )


def families(results: Results, *arms: str) -> dict[str, Results]:
    """Of the families in which this scale runs all of these arms, what they are compared in."""
    found = {name: part(results, sweep) for name, sweep in FAMILIES.items()}
    return {name: one for name, one in found.items() if all(one.has(arm) for arm in arms)}
