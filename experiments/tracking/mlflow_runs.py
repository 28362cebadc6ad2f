"""Find MLflow's runs by their tags, create each once, and adopt old ones, each only for its owner (owner.py)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fewbits.experiments.tracking.owner import STORE, Owner

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

TRIAL, FOLDER = "fewbits.trial", "fewbits.folder"  # tags of trials' runs: the trial's id and its folder


def search(client: MlflowClient, experiment_id: str, key: Mapping[str, str]) -> list[Run]:
    """Return all runs with these tags, the oldest first."""
    query = " and ".join(f"tags.`{tag}` = '{value}'" for tag, value in key.items())
    order = ["attributes.start_time ASC", "attributes.run_id ASC"]
    runs: list[Run] = []
    token: str | None = ""
    while token is not None:
        page = client.search_runs([experiment_id], query, order_by=order, page_token=token or None)
        runs += page
        token = page.token or None
    return runs


def one_run(
    client: MlflowClient,
    experiment_id: str,
    owner: Owner,
    key: Mapping[str, str],
    name: str,
    tags: Mapping[str, str],
    began: float,
) -> Run:
    """Return the owner's run with the tags of the key; create it if there is none.

    If two processes created it at once, the oldest run is kept. Another owner's runs are neither returned nor deleted.
    """
    if not (runs := search(client, experiment_id, {**key, **owner.key})):
        new_run(client, experiment_id, owner, key, name, tags, began)
        runs = search(client, experiment_id, {**key, **owner.key})
    first, *duplicates = runs
    for duplicate in duplicates:
        client.delete_run(duplicate.info.run_id)
    return first


def new_run(
    client: MlflowClient,
    experiment_id: str,
    owner: Owner,
    key: Mapping[str, str],
    name: str,
    tags: Mapping[str, str],
    began: float,
) -> Run:
    """Create the run; the caller knows that there is none."""
    return client.create_run(experiment_id, round(1000 * began), {**key, **owner.tags, **tags}, name)


def adopt(client: MlflowClient, experiment_id: str, owner: Owner, runs: Path, key: Mapping[str, str]) -> list[Run]:
    """Tag and return trials' runs that earlier versions wrote without an owner and whose folder is in this store."""
    adopted = []
    for run in search(client, experiment_id, key):
        tags = run.data.tags
        if TRIAL in tags and STORE not in tags and Path(tags.get(FOLDER, "")).parent == runs.resolve():
            take(client, run, owner)
            adopted.append(run)
    return adopted


def take(client: MlflowClient, run: Run, owner: Owner) -> None:
    """Tag a run as the owner's."""
    for tag, value in owner.tags.items():
        client.set_tag(run.info.run_id, tag, value)
