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
    """Run or resume a trial unless it is done; return its run folder and the content of its result.json.

    With several ranks, `say` and `saved` are called on rank 0 only; after training, other ranks get an empty result.

    say: called with the progress after every step of training, or after every batch of a probe.
    stop: called after every step or batch. If it returns true and steps or batches are left, the trial ends with
        KeyboardInterrupt; a later call continues with the next step or batch.
    expected: the id that the trial was planned with. If the id on this machine differs, raise OtherTrial.
    saved: called with the run folder, each time the config, a checkpoint or the result was written there.
    tell: called with a message if the trial is resumed, evaluated again or already done; for a probe, only if it is
        already done.
    """
    return (run_probe if trial.is_probe else training.run)(trial, runtime, say, stop, expected, saved, tell)
