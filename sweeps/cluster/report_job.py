"""Run a study's sweeps as a Ray job that also writes the study's report, into `reports/` beside the cluster's store.

The job runs `fewbits report … --sweep`. If the cluster's `reports/` is also mounted on this machine, the report is then
copied into a folder of this machine; otherwise its path on the cluster is printed.
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
    """Tell whether the overrides select a whole study, as `study=NAME` without `sweep=NAME` does.

    Only whole studies have a report.
    """
    keys = [override.partition("=")[0] for override in overrides]
    return "study" in keys and "sweep" not in keys


def submit_study(
    overrides: Sequence[str], address: str, reports: Path, options: Sequence[str] = (), named: Sequence[str] = ()
) -> int:
    """Submit a job that runs a study's trials and writes its report, and return the job's exit status.

    overrides: as for `fewbits sweep`. address: the URL of the dashboard. reports: the folder on this machine into which
    the report is copied. options: further options of the job's command, `fewbits report --sweep`. named: names of
    environment variables that the job gets in addition to the usual ones (environment.py).
    """
    on_cluster = lasting_store(overrides).parent / "reports"
    command = [*FEWBITS, "report", *overrides, "--sweep", "--address", "auto", "--out", str(on_cluster), *options]
    status, log = watch_job(command, address, named=named)
    name = report_name(log, on_cluster)
    if name is not None and status in (0, 1):  # 1: some trials failed; the report exists and names them
        print(fetch(Path(on_cluster, name), reports))
    return status


def report_name(log: str, reports: PurePosixPath) -> str | None:
    """Return the folder name of the report that a job wrote, from the last report path in its log, or None.

    log: the job's log, which contains `REPORTS/NAME/index.html` on a line. reports: the folder REPORTS on the cluster.
    """
    names = re.findall(rf"^{re.escape(str(reports))}/([^/\n]+)/index\.html$", log, re.MULTILINE)
    return names[-1] if names else None


def fetch(report: Path, reports: Path) -> str:
    """Copy the folder `report` into `reports`, and return the line to print: the path of the copied page.

    An older copy of the report is replaced. If `report` does not exist on this machine, nothing is copied, and the line
    has the report's path on the cluster. If the copy fails, the line is the path of the original page.
    """
    copy = reports / report.name
    if not (report / "index.html").is_file():
        return f"the report is on the cluster: {report / 'index.html'}"
    if copy.resolve() == report.resolve():
        return str(copy / "index.html")
    if copy.exists() and not (copy / "index.html").is_file():
        notice(f"{copy} exists but has no index.html, so it is not a report: the new report is not copied over it")
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
