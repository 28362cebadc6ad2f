"""Run a trial: train it, or, if it is a probe, measure its recipe at a checkpoint.

`run` is the one contract for both. It holds the lease of the run folder while the trial runs.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from fewbits.experiments import devices, training
from fewbits.experiments.evaluation.evaluate import evaluate_missing_tasks
from fewbits.experiments.probes import probe_trial
from fewbits.experiments.session import Events, prepare
from fewbits.experiments.storage.lease import leased
from fewbits.experiments.storage.run_folder import RunFolder
from fewbits.experiments.trial import Runtime, Trial

DONE = "already done"


def run(trial: Trial, runtime: Runtime, events: Events | None = None) -> tuple[RunFolder, dict[str, Any]]:
    """Run or resume a trial unless it is done; return its run folder and the content of its result.json.

    Ranks above 0 get an empty result. Raise Held if another process runs the trial, Lost if another process has taken
    it over, and KeyboardInterrupt if `events.stopping` or `fewbits stop` ended it before its last step; then a later
    call continues. events: what reports the progress.
    """
    kind = probe_trial if trial.is_probe else training
    world = devices.choose(runtime)
    try:
        session = prepare(trial, runtime, world, events or Events())
        folder, leads = session.folder, session.leads
        session.events.begin(folder, session.identity)
        (finished,) = world.agree(leads and session.finished)
        if not finished:
            kind.check_inputs(session)
            with leased(folder.path) if leads else nullcontext(threading.Event()) as lost:
                session = replace(session, lost=lost.is_set)
                finished = leads and session.finished  # another process may have finished this trial meanwhile
                if leads and not finished:
                    session.begin()
                (finished,) = world.agree(finished)
                if not finished:
                    return folder, kind.run(session)
        if not leads:
            return folder, {}
        evaluate_missing_tasks(session)
        session.events.saved(folder)
        session.events.message(DONE)
        return folder, folder.result() or {}
    finally:
        devices.leave(world)
