"""A study as a job that also makes the report, where the store is: beside it, in `reports/`.

The job runs `fewbits report … --sweep`. Afterwards the report is copied to this machine if the store's folder is seen
from here; else a line says where it lies on the cluster.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from fewbits.common.atomic import folder_atomically, remove_folder
from fewbits.sweeps.cluster.submit import FEWBITS, lasting_store, watch_job


def is_study(words: Sequence[str]) -> bool:
    """Return whether the words name a whole study: one sweep of it, or a file of one's own, is no report."""
    keys = [word.partition("=")[0] for word in words]
    return "study" in keys and "sweep" not in keys


def submit_study(
    words: Sequence[str], address: str, reports: Path, options: Sequence[str] = (), named: Sequence[str] = ()
) -> int:
    """Run the study's trials and its report as a job, and return its exit status: that of `fewbits report --sweep`.

    reports: the folder on this machine that the report is copied into.
    """
    there = lasting_store(words).parent / "reports"
    command = [*FEWBITS, "report", *words, "--sweep", "--address", "auto", "--out", str(there), *options]
    status, log = watch_job(command, address, named=named)
    name = report_name(log, there)
    if name is not None and status in (0, 1):  # 1: trials failed, which the report names
        print(fetch(Path(there, name), reports))
    return status


def report_name(log: str, reports: PurePosixPath) -> str | None:
    """Return the name of the report that a job's log says it has made in `reports`; None if there is none."""
    found = re.findall(rf"^{re.escape(str(reports))}/([^/\n]+)/index\.html$", log, re.MULTILINE)
    return found[-1] if found else None


def fetch(report: Path, reports: Path) -> str:
    """Copy a report's folder into `reports`, in place of an older one; return a line that says where the report lies.

    A report that is not seen from here stays where it is, and the line says so.
    """
    here = reports / report.name
    if not (report / "index.html").is_file():
        return f"the report lies on the cluster: {report / 'index.html'}"
    if here.resolve() == report.resolve():
        return str(here / "index.html")
    if here.exists() and not (here / "index.html").is_file():
        print(f"fewbits: {here} holds something that is no report: the report is not copied", file=sys.stderr)
        return str(report / "index.html")
    try:
        reports.mkdir(parents=True, exist_ok=True)
        with folder_atomically(here) as partial:
            shutil.copytree(report, partial, dirs_exist_ok=True)
            if here.exists():
                remove_folder(here)
    except OSError as error:
        print(f"fewbits: {here}: {error.strerror or error}: the report is not copied", file=sys.stderr)
        return str(report / "index.html")
    return str(here / "index.html")
