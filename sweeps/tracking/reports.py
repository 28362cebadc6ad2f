"""Send reports to MLflow: a report is the artifact folder `report/` of a run in its study's experiment.

There is one such run for each study and scale. A report is sent only if MLflow has a sweep of this study and scale from
the same store and user. Before it is sent, it is listed in the cache file (sent.py). So if MLflow cannot be reached,
the next driver or `fewbits sync` sends it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from fewbits.experiments.tracking.connection import Patience, connect, experiment, locked, tracking_uri
from fewbits.experiments.tracking.mlflow_runs import OwnedRuns
from fewbits.experiments.tracking.owner import Owner, owner_of
from fewbits.sweeps.tracking.comparison import KIND, SCALE
from fewbits.sweeps.tracking.sent import CACHE, SentReport, SentStore, look_at_database, read_sent, write_sent

if TYPE_CHECKING:
    from mlflow import MlflowClient

ARTIFACT = "report"  # the folder of the run's artifacts


def track_report(runs: Path, study: str, scale: str, folder: Path) -> None:
    """Send the report that `fewbits report` wrote into `folder`, unless MLflow has it already. runs: the store."""
    if not (runs / CACHE).exists():  # nothing of this store was sent to MLflow; also, the store may be read-only
        return
    with Patience().guarding("the next `fewbits sync` sends the report"):
        uri, owner = tracking_uri(runs), owner_of(runs)
        if not _remember(runs, uri, owner, f"{study}/{scale}", folder.resolve()):
            return
        client = connect(runs, uri)
        with locked(runs):
            sent = read_sent(runs, uri, owner)
            alone = sent.database == look_at_database(uri)  # False: another program has changed it since our last write
            try:
                send_reports(client, runs, uri, owner, sent)
            finally:
                sent.database = look_at_database(uri) if alone else sent.database
                write_sent(runs, uri, owner, sent)


def _remember(runs: Path, uri: str, owner: Owner, key: str, folder: Path) -> bool:
    """List the report's folder in the cache file; return True if the report has to be sent.

    key: STUDY/SCALE. Return False, and list nothing, if MLflow has no sweep of this study and scale.
    """
    with locked(runs):
        sent = read_sent(runs, uri, owner)
        study, _, scale = key.partition("/")
        if not any(sweep.startswith(f"{study}/") and sweep.endswith(f"/{scale}") for sweep in sent.sweeps):
            return False
        if key not in sent.reports or sent.reports[key].folder != str(folder):
            sent.reports[key] = SentReport(str(folder))
            write_sent(runs, uri, owner, sent)
        return sent.reports[key].unsent is not None


def send_reports(client: MlflowClient, runs: Path, uri: str, owner: Owner, sent: SentStore) -> None:
    """Send each report listed in `sent` whose index.html differs from the one last sent, and record that in `sent`.

    runs: the store. uri: MLflow's tracking URI. owner: the store and user to which the reports' runs in MLflow belong.
    """
    for key, report in sent.reports.items():
        if (look := report.unsent) is None:
            continue
        study, _, scale = key.partition("/")
        owned = OwnedRuns(client, experiment(client, study, runs, uri), owner)
        run = owned.find_or_create({KIND: "report", SCALE: scale}, f"report {scale}", {}, time.time())
        client.log_artifacts(run.info.run_id, report.folder, ARTIFACT)
        client.set_terminated(run.info.run_id)
        report.look = look
