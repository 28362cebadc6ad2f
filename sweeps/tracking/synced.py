"""Define the result of an update of MLflow, with the links to comparison views that commands print."""

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
    """The result of `Mirror.sync`, an update of a plan's trials in MLflow."""

    uri: str  # MLflow's tracking URI
    views: tuple[View, ...]  # the comparison views of the plan's sweeps that MLflow has
    sent: int  # the number of runs that were created or changed
    away: bool  # True: something has not been sent yet
    runs: Path | None = field(default=None, compare=False)  # the store

    @property
    def links(self) -> tuple[tuple[str, str], ...]:
        """Pairs (name, URL) of the comparison views.

        The URL has the server's address if `uri` is an HTTP address, else the address of `fewbits ui`.
        """
        base = _without_user(self.uri) if self.uri.startswith("http") else comparison.UI
        return tuple((view.name, view.link(base)) for view in self.views)

    @property
    def lines(self) -> list[str]:
        """The lines to print: `NAME: URL` for each comparison view; the list is empty if there are no views.

        If `uri` is not an HTTP address, a last line names the command `fewbits ui`, which serves the URLs.
        """
        links = [f"{name}: {link}" for name, link in self.links]
        return [*links, self._served] if links and self._served else links

    @property
    def _served(self) -> str:
        """The text `(served by `fewbits ui …`)`, which names the command that serves the URLs in `links`.

        It is empty if `uri` is an HTTP address, since a server then serves these URLs already.
        """
        if self.uri.startswith("http"):
            return ""
        runs = self.runs or sqlite_database.path_of(self.uri).parent
        return f"(served by `fewbits ui{'' if os.environ.get('MLFLOW_TRACKING_URI') else runs_option(runs)}`)"


def _without_user(uri: str) -> str:
    """Return a server's address without user and password; a browser will ask the user for them."""
    scheme, separator, rest = uri.partition("://")
    host, slash, path = rest.partition("/")
    return redacted(f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{path}")
