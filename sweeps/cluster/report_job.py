"""Run a study as a Ray job that also writes the report, into `reports/` beside the store.

The job runs `fewbits report … --sweep`. Afterwards the report is copied into a folder of this machine if
the cluster's `reports/` is mounted here too; otherwise a line prints the report's path on the cluster.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from fewbits.common.atomic import folder_atomically, remove_folder
from fewbits.common.terminal import notice
from fewbits.sweeps.cluster.submit import FEWBITS, lasting_store, watch_job


def is_study(overrides: Sequence[str]) -> bool:
    """Tell whether the overrides name a whole study, which has a report; one sweep or a sweep file has none."""
    keys = [override.partition("=")[0] for override in overrides]
    return "study" in keys and "sweep" not in keys


def submit_study(
    overrides: Sequence[str], address: str, reports: Path, options: Sequence[str] = (), named: Sequence[str] = ()
) -> int:
    """Submit a job that runs a study's trials and writes its report, and return the job's exit status.

    reports: the folder on this machine into which the report is copied. options: further options of the job's command,
    `fewbits report --sweep`. named: environment variables that the job gets in addition to the usual ones.
    """
    on_cluster = lasting_store(overrides).parent / "reports"
    command = [*FEWBITS, "report", *overrides, "--sweep", "--address", "auto", "--out", str(on_cluster), *options]
    status, log = watch_job(command, address, named=named)
    name = report_name(log, on_cluster)
    if name is not None and status in (0, 1):  # 1: trials failed, which the report names
        print(fetch(Path(on_cluster, name), reports))
    return status


def report_name(log: str, reports: PurePosixPath) -> str | None:
    """Return the name of the last report in the folder `reports` whose path a job's log contains, or None."""
    names = re.findall(rf"^{re.escape(str(reports))}/([^/\n]+)/index\.html$", log, re.MULTILINE)
    return names[-1] if names else None


def fetch(report: Path, reports: Path) -> str:
    """Copy a report's folder into `reports`, and return the line to print: the path of the copied report.

    An older copy is replaced. If the report's folder does not exist on this machine, copy nothing and return a line
    with the report's path on the cluster.
    """
    copy = reports / report.name
    if not (report / "index.html").is_file():
        return f"the report is on the cluster: {report / 'index.html'}"
    if copy.resolve() == report.resolve():
        return str(copy / "index.html")
    if copy.exists() and not (copy / "index.html").is_file():
        notice(f"{copy} exists but is no report: the new report is not copied")
        return str(report / "index.html")
    try:
        reports.mkdir(parents=True, exist_ok=True)
        with folder_atomically(copy) as partial:
            shutil.copytree(report, partial, dirs_exist_ok=True)
            if copy.exists():
                remove_folder(copy)
    except OSError as error:
        notice(f"{copy}: {error.strerror or error}: the report is not copied")
        return str(report / "index.html")
    return str(copy / "index.html")
