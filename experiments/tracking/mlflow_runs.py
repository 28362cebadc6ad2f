"""Find and create MLflow runs by their tags, and add the owner's tags (owner.py) to old runs without an owner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fewbits.experiments.tracking.owner import STORE, Owner

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

TRIAL, FOLDER = "fewbits.trial", "fewbits.folder"  # tags of an MLflow run: the trial's id, the path of its run folder


def search(client: MlflowClient, experiment_id: str, key: Mapping[str, str]) -> list[Run]:
    """Return all MLflow runs of an experiment that have the tags `key` (name: value), the oldest first."""
    query = " and ".join(f"tags.`{tag}` = '{value}'" for tag, value in key.items())
    order = ["attributes.start_time ASC", "attributes.run_id ASC"]
    runs: list[Run] = []
    token: str | None = ""
    while token is not None:
        page = client.search_runs([experiment_id], query, order_by=order, page_token=token or None)
        runs += page
        token = page.token or None
    return runs


@dataclass(frozen=True)
class OwnedRuns:
    """The MLflow runs of one owner in one experiment. Runs of other owners are neither returned nor changed."""

    client: MlflowClient
    experiment: str  # the experiment's id
    owner: Owner

    def search(self, key: Mapping[str, str]) -> list[Run]:
        """Return the owner's MLflow runs that have the tags `key` (name: value), the oldest first."""
        return search(self.client, self.experiment, {**key, **self.owner.key})

    def find_or_create(self, key: Mapping[str, str], name: str, tags: Mapping[str, str], began: float) -> Run:
        """Return the owner's MLflow run with the tags `key` (name: value); create it if there is none.

        If several runs exist, because processes created them at the same time, the oldest is returned and the others
        are deleted.

        name: the name of a new run. tags: the tags of a new run besides `key` and the owner's. began: the start of a
        new run, in seconds since 1970.
        """
        if not (runs := self.search(key)):
            self.new(key, name, tags, began)
            runs = self.search(key)
        first, *duplicates = runs
        for duplicate in duplicates:
            self.client.delete_run(duplicate.info.run_id)
        return first

    def new(self, key: Mapping[str, str], name: str, tags: Mapping[str, str], began: float) -> Run:
        """Create an MLflow run with the tags `key`, without searching for an existing one.

        name: its name. tags: its tags besides `key` and the owner's. began: its start, in seconds since 1970.
        """
        return self.client.create_run(self.experiment, round(1000 * began), {**key, **self.owner.tags, **tags}, name)

    def adopt(self, store: Path, key: Mapping[str, str]) -> list[Run]:
        """Add the owner's tags to MLflow runs that have the tags `key` but no owner, from earlier versions of fewbits.

        Only runs whose run folder is in `store` are changed. Return the changed runs.
        """
        adopted = []
        for run in search(self.client, self.experiment, key):
            tags = run.data.tags
            if TRIAL in tags and STORE not in tags and Path(tags.get(FOLDER, "")).parent == store.resolve():
                take(self.client, run, self.owner)
                adopted.append(run)
        return adopted


def take(client: MlflowClient, run: Run, owner: Owner) -> None:
    """Set the owner's tags on an MLflow run, which then belongs to this owner."""
    for tag, value in owner.tags.items():
        client.set_tag(run.info.run_id, tag, value)
