"""Run a trial: train it, or, if the trial is a probe, measure its recipe at a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fewbits.experiments import training
from fewbits.experiments.probes.probe_trial import run_probe
from fewbits.experiments.storage.run_folder import RunFolder
from fewbits.experiments.training import Saved, Say
from fewbits.experiments.trial import Runtime, Trial


def run(
    trial: Trial,
    runtime: Runtime,
    say: Say = lambda _: None,
    stop: Callable[[], bool] = lambda: False,
    expected: str | None = None,
    saved: Saved = lambda _: None,
    tell: Callable[[str], None] = lambda _: None,
) -> tuple[RunFolder, dict[str, Any]]:
    """Run or resume a trial unless it is done; return its run folder and result. Arguments: see `training.run`."""
    return (run_probe if trial.is_probe else training.run)(trial, runtime, say, stop, expected, saved, tell)
