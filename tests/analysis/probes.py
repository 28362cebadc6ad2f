"""Write simulated result files of probe trials, without running them, with known true values and chosen noise."""

from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from fewbits.experiments.probes.errors import WHOLE, summarize
from fewbits.experiments.probes.probe_trial import TABLE
from fewbits.experiments.trial import Trial
from fewbits.models.recipe import GEMMS, SLOTS

# Arm without the prefix `probe-` → (relative error of the gradient, increase of the loss); other arms have DEFAULT.
TRUE = {
    "tensor": (0.05, 0.002),
    "always-tensor": (0.06, 0.002),
    "block": (0.03, 0.001),
    "always-block": (0.04, 0.001),
    "channel": (0.025, 0.001),
    "e5m2": (0.08, 0.004),
    "fp8": (0.03, 0.001),
    "nvfp4": (0.20, 0.020),
    "no-sr": (0.15, 0.020),
    "no-2d": (0.20, 0.015),
    "base": (0.18, 0.020),
    "rht-wgrad": (0.16, 0.020),
    "rht-fprop": (0.19, 0.020),
    "rht-dgrad": (0.185, 0.020),
    "mxfp4": (0.25, 0.030),
    "ue5m3": (0.17, 0.020),
    "four-over-six": (0.18, 0.020),
    "gaussws-6": (0.05, 0.001),
    "gaussws-5": (0.10, 0.004),
    "gaussws-4": (0.20, 0.016),
    "diffq-5": (0.05, 0.001),
    "diffq-4": (0.10, 0.004),
}
DEFAULT = (0.1, 0.01)
PERSISTENT = {"no-sr": 0.01}  # arm → cross_error: inner product of the gradient errors of two successive batches
# Arm → what the recipe takes from the expected decrease of the loss by a small step; other arms: NVFP4's.
SLOWED = {"base": 0.03, "with-2d": 0.02, "no-sr": 0.015, "no-rht": 0.015, "no-2d": 0.015, "nvfp4": 0.01}
SLOWED |= {"sr-forward": 0.05, "rht-wgrad": 0.02, "rht-fprop": 0.04, "rht-dgrad": 0.04}
SLOWED |= {"weights-different": 0.02, "activations-different": 0.02}
# GEMM → the error if only this GEMM is quantized, as a fraction of the error of the whole recipe.
SHARES = {"fprop": 0.8, "dgrad": 0.4, "wgrad": 0.4}


def write_probe(path: Path, arm: str, trial: Trial, *, noise: float) -> dict[str, float]:
    """Write probe.parquet with the true values times (1 + noise), and return the numbers for result.json.

    The file is written again only if the arm, the probe's parts or the noise have changed.
    """
    content = arm, trial.probe.parts, noise
    if path not in _WRITTEN or _WRITTEN[path][0] != content or not (path / TABLE).exists():
        _WRITTEN[path] = content, _written(path, arm, trial, noise)
    return _WRITTEN[path][1]


_WRITTEN: dict[Path, tuple[object, dict[str, float]]] = {}  # run folder → (inputs of its file, numbers of the result)


def _written(path: Path, arm: str, trial: Trial, noise: float) -> dict[str, float]:
    name = arm.partition("-")[2]
    error, increase = (value * (1 + noise) for value in TRUE.get(name, DEFAULT))
    persistent = PERSISTENT.get(name, 0.001) * (1 + noise)
    slowed = SLOWED.get(name, 0.01) * (1 + noise)
    rows = pd.DataFrame(list(_rows(trial, error, increase, persistent, slowed, noise)))
    rows.to_parquet(path / TABLE)
    return {key: value for key, value in summarize(rows).items() if value is not None}


def _rows(
    trial: Trial, error: float, increase: float, persistent: float, slowed: float, noise: float
) -> Iterator[dict[str, object]]:
    variants = {"all": 1.0}
    for part, names in (("gemms", GEMMS), ("slots", SLOTS), ("blocks", [f"block {i}" for i in range(2)])):
        for name in names if part in trial.probe.parts else ():
            share = SHARES.get(name.partition(".")[0], 0.5) * (1 + noise * (len(name) + "fdw".find(name[0])))
            variants |= {f"only {name}": share, f"without {name}": 1 - share / 2}
    for batch in range(2):
        for variant, share in variants.items():
            yield {
                "batch": batch,
                "variant": variant,
                "layer": WHOLE,
                "loss": 2 + share * increase,
                "reference": 2.0,
                "increase": share * increase,
                "cosine": 1 - error**2,
                "error": share * error,
                "bias": 0.001,
                "noise": 0.0,
                "systematic": share * error,
                "zeros": 0.1,
                "zeros_exact": 0.1,
                "cross_error": persistent if variant == "all" and batch else float("nan"),
                "cross_gradient": 1.0 if variant == "all" and batch else float("nan"),
                "cross_progress": -slowed if variant == "all" and batch else float("nan"),
                "decrease_own_exact": 0.01,
                "decrease_own_quantized": 0.01 * (1 - error),
                "decrease_next_exact": 0.01,
                "decrease_next_quantized": 0.01 * (1 - error),
            }
