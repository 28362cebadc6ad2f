"""The result of an update of MLflow, with the links that commands print."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from fewbits.common.redaction import redacted
from fewbits.common.store_folder import runs_option
from fewbits.experiments.tracking import sqlite_database
from fewbits.sweeps.tracking import comparison
from fewbits.sweeps.tracking.comparison import View


@dataclass(frozen=True)
class Synced:
    """The result of an update of MLflow."""

    uri: str
    views: tuple[View, ...]  # of the sweeps that MLflow has runs of
    sent: int  # runs that were created or changed
    away: bool  # MLflow did not get everything
    runs: Path | None = field(default=None, compare=False)  # the store

    @property
    def links(self) -> tuple[tuple[str, str], ...]:
        """The names and URLs of the comparison views; without a server, at the address of `fewbits ui`."""
        base = _without_user(self.uri) if self.uri.startswith("http") else comparison.UI
        return tuple((view.name, view.link(base)) for view in self.views)

    @property
    def lines(self) -> list[str]:
        """The links as lines, and the command that serves them if there is no server."""
        links = [f"{name}: {link}" for name, link in self.links]
        return [*links, self._served] if links and self._served else links

    @property
    def _served(self) -> str:
        """The line that names the `fewbits ui` command; empty if a server has the runs."""
        if self.uri.startswith("http"):
            return ""
        runs = self.runs or sqlite_database.path_of(self.uri).parent
        return f"(served by `fewbits ui{'' if os.environ.get('MLFLOW_TRACKING_URI') else runs_option(runs)}`)"


def _without_user(uri: str) -> str:
    """Return a server's address without user and password, since a browser asks for them."""
    scheme, separator, rest = uri.partition("://")
    host, slash, path = rest.partition("/")
    return redacted(f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{path}")
