"""Convert a run's provenance.json to MLflow's tags and data sets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fewbits.experiments.storage.run_folder import RunFolder

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput

SPLITS = {"train": "training", "validation": "validation", "ood": "out of domain"}  # split: its context in MLflow
ENVIRONMENT = {"device": "device", "kind": "machine"}  # key of the environment in provenance.json: name in the tag
DIGEST = 8  # length of a data set's digest in MLflow, where the profile of the data set has the whole SHA-256
COMMIT, SOURCE_TYPE = "mlflow.source.git.commit", "mlflow.source.type"


def origin_tags(folder: RunFolder) -> dict[str, str | None]:
    """Return tags for the commit, the command and the environment that computed the trial's newest steps.

    The tags are named `provenance.NAME`, except MLflow's own tags for the commit and the type of source. The commit's
    tag has the value None if the commit is unknown. The result is empty if the trial has no provenance.json.
    """
    origin = folder.provenance()
    if origin is None:
        return {}
    newest = (origin.get("segments") or [{}])[-1]
    parent = origin.get("parent")
    facts = {
        "host": newest.get("host") or origin.get("host"),
        "command": " ".join(origin.get("command", ())),
        "uncommitted_changes": "yes" if origin.get("git_dirty") else None,
        "parent": str(parent).rpartition("/")[2] if parent else None,
        "segments": str(len(origin.get("segments", ()))),
        **{ENVIRONMENT.get(key, key): value for key, value in newest.get("environment", {}).items()},
    }
    tags: dict[str, str | None] = {f"provenance.{key}": str(value) for key, value in facts.items() if value}
    return tags | {COMMIT: newest.get("git") or origin.get("git"), SOURCE_TYPE: "LOCAL"}


def dataset_inputs(folder: RunFolder) -> list[DatasetInput]:
    """Return the trial's data as MLflow's inputs: a data set for each split, with the digest of the split's tokens."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    data: Mapping[str, Any] = (folder.provenance() or {}).get("data") or {}
    facts = {key: data[key] for key in ("vocab", "tokenizer", "fingerprint") if data.get(key) is not None}
    source = {key.partition(".")[2]: value for key, value in data.items() if key.startswith("source.")}
    inputs = []
    for split, context in SPLITS.items():
        if digest := data.get(f"{split}.sha256"):
            of_split = {key: data.get(f"{split}.{key}") for key in ("tokens", "bytes", "sha256")}
            dataset = Dataset(
                name=f"{data['kind']}/{split}",
                digest=str(digest)[:DIGEST],
                source_type=str(data["kind"]),
                source=json.dumps(source),
                profile=json.dumps({**of_split, **facts}),
            )
            inputs.append(DatasetInput(dataset, [InputTag("mlflow.data.context", context)]))
    return inputs
