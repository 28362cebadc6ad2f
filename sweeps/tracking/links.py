"""Make the lines that tell where a sweep's trials can be seen in MLflow: links, or the command `fewbits ui`."""

from __future__ import annotations

import os
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

from fewbits.common.store_folder import runs_option

if TYPE_CHECKING:
    from fewbits.sweeps.tracking.synced import Synced

WAIT = 0.5  # seconds to wait for an answer of a server on this machine


def link_lines(synced: Synced, store: Path) -> list[str]:
    """Return the lines with links to the comparison views, or one line with the command `fewbits ui`.

    The links are returned if MLflow's tracking URI is an HTTP address, or if `fewbits ui` already runs on this machine.
    If there are no views, no line is returned. store: the sweep's store.
    """
    if not synced.links or synced.uri.startswith("http") or _answers(synced.links[0][1]):
        return synced.lines
    names = ", ".join(name for name, _ in synced.links)
    runs = "" if os.environ.get("MLFLOW_TRACKING_URI") else runs_option(store)
    return [f"`fewbits ui{runs}` shows in MLflow: {names}"]


def _answers(link: str) -> bool:
    """Tell whether an MLflow server answers at the host and port of a link."""
    try:
        with urllib.request.urlopen(f"{link.partition('/#/')[0]}/health", timeout=WAIT) as answer:
            return answer.status == 200
    except OSError:
        return False
