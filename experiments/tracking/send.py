"""Send the new content of a run folder to its MLflow run, by MLflow's public client.

The run's tag `fewbits.sent` records what was sent: the last step, the number of system samples, and the digests of the
artifacts. It is sent with each batch of points and written after them, so that the next call sends only what is new. If
a process ends before the tag is written, the batch is sent again, which changes nothing, because MLflow's databases
store equal points once. A trial that was killed continues in the same MLflow run, and a deleted MLflow run can be
created again from the folder's files.

Artifacts are sent last, after the run's status, because sending them can fail when everything else succeeds, for
example without access to an object store.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit
from urllib.request import url2pathname

from fewbits.experiments.storage.run_folder import RunFolder
from fewbits.experiments.tracking.connection import ARTIFACTS
from fewbits.experiments.tracking.numerics import last_window
from fewbits.experiments.tracking.origin import dataset_inputs, origin_tags
from fewbits.experiments.tracking.points import (
    Point,
    ended,
    key_of,
    score_points,
    step_points,
    system_points,
    table,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Param, Run, RunTag

T = TypeVar("T")
SENT = "fewbits.sent"  # the name of the tag
BATCH = 800  # points per request: MLflow allows 1,000 values, and up to 100 parameters and 100 tags are sent with them
STATUS = {"done": "FINISHED", "diverged": "FAILED"}  # status in result.json: status of the MLflow run
CONFIG = "config.yaml"
NUMERICS = "numerics.parquet"
TABLES = ("metrics.parquet", NUMERICS, "precision.parquet", "timing.parquet", "evaluation.parquet")
AT_END = ("result.json", "provenance.json", *TABLES)
LAST_WINDOW = "numerics.csv"  # an artifact that is made from numerics.parquet; the run folder has no such file


@dataclass(frozen=True)
class Sent:
    """A record of the data that were sent to MLflow from a run folder; the tag `fewbits.sent` contains it as JSON."""

    step: int = -1  # the last step whose points were sent
    samples: int = 0  # how many samples of system metrics were sent
    artifacts: Mapping[str, str] = field(default_factory=dict)  # file name: digest

    @classmethod
    def of(cls, tags: Mapping[str, str]) -> Sent:
        """Return the record in the tags of an MLflow run, or if it is missing or invalid, a record of nothing sent."""
        try:
            return cls(**json.loads(tags.get(SENT, "{}")))
        except (ValueError, TypeError):  # a user has edited the tag: send everything again
            return cls()

    def tag(self) -> RunTag:
        from mlflow.entities import RunTag

        return RunTag(SENT, json.dumps(asdict(self)))


def send(
    client: MlflowClient,
    run: Run,  # as it is in MLflow now
    folder: RunFolder,
    status: str,  # the run's new status, in MLflow's terms
    params: Mapping[str, str],  # existing parameters are not changed
    tags: Mapping[str, str | None],  # None: delete the tag
) -> None:
    """Send the content of a run folder that the MLflow run does not have yet, and set the run's status.

    params: parameters for the MLflow run; those that it already has are not changed. tags: tags to set on the MLflow
    run, besides those of `origin_tags`. A tag whose value is empty or None is deleted.
    """
    run_id = run.info.run_id
    if run.info.lifecycle_stage == "deleted":
        client.restore_run(run_id)
    tags = {**origin_tags(folder), **tags}
    for key in tags:
        if not tags[key] and key in run.data.tags:
            client.delete_tag(run_id, key)
    sent = _send_data(client, run, folder, _new_params(run, params), _new_tags(run, tags))
    if run.info.status != status:
        if status == "RUNNING":
            client.update_run(run_id, status=status)
        else:
            client.set_terminated(run_id, status, round(1000 * ended(folder)))
    _send_datasets(client, run, folder)
    _send_artifacts(client, run, folder, sent)


def _new_params(run: Run, params: Mapping[str, str]) -> list[Param]:
    """Return the parameters that the MLflow run does not have, cut to the length that MLflow allows."""
    from mlflow.entities import Param

    named = {key_of(key): value for key, value in params.items()}
    return [Param(key, value[:6000]) for key, value in named.items() if key not in run.data.params]


def _new_tags(run: Run, tags: Mapping[str, str | None]) -> list[RunTag]:
    """Return the tags that are new or differ in the MLflow run, cut to the length that MLflow allows.

    Tags with an empty value or None are left out.
    """
    from mlflow.entities import RunTag

    texts = {key: value[:5000] for key, value in tags.items() if value}
    return [RunTag(key, value) for key, value in texts.items() if run.data.tags.get(key) != value]


def _send_data(
    client: MlflowClient, run: Run, folder: RunFolder, params: Sequence[Param], tags: Sequence[RunTag]
) -> Sent:
    """Send parameters, tags and new points in as few requests as possible; return the record of all points sent."""
    from mlflow.entities import Metric

    sent = before = Sent.of(run.data.tags)
    for points, sent in packed(_groups(folder, before, run.data.metrics)):
        if points or params or tags:
            metrics = [Metric(*point) for point in points]
            client.log_batch(run.info.run_id, metrics, params, [*tags, *([sent.tag()] if points else [])])
            params = tags = ()
    return sent


def _groups(folder: RunFolder, sent: Sent, known: Collection[str]) -> Iterator[tuple[list[Point], Sent]]:
    """Yield the new points in groups, each to be sent in one request, with the `Sent` to record after sending it.

    sent: what was sent before. known: the names of the metrics that the MLflow run has; a score is sent only if its
    name is not among them.
    """
    for step, points in step_points(folder, sent.step):
        sent = replace(sent, step=step)
        yield points, sent
    for number, points in system_points(folder, sent.samples):
        sent = replace(sent, samples=number)
        yield points, sent
    yield [point for point in score_points(folder) if point.key not in known], sent


def packed(groups: Iterable[tuple[Sequence[Point], T]]) -> Iterator[tuple[list[Point], T]]:
    """Combine groups of points into batches, each for one request.

    groups: pairs (points, value). Yield pairs (points of one or more groups, value of the last of these groups). A
    batch has at most BATCH points, or consists of one larger group.
    """
    batch: list[Point] = []
    before: list[T] = []
    for points, after in groups:
        if len(batch) + len(points) > BATCH and batch:
            yield batch, before[-1]
            batch = []
        batch += points
        before = [after]
    if before:
        yield batch, before[-1]


def _send_datasets(client: MlflowClient, run: Run, folder: RunFolder) -> None:
    from mlflow.exceptions import MlflowException

    known = run.inputs is not None and run.inputs.dataset_inputs
    if not known and (inputs := dataset_inputs(folder)):
        try:
            client.log_inputs(run.info.run_id, inputs)
        except MlflowException:  # MLflow fails if two processes log the same new data set at the same time: try again
            client.log_inputs(run.info.run_id, inputs)


def _send_artifacts(client: MlflowClient, run: Run, folder: RunFolder, sent: Sent) -> None:
    """Send the files that are new or have changed since they were last sent, and record their digests in MLflow.

    config.yaml is sent even while the trial runs; tables, result and provenance only after the trial has ended.
    sent: the record of what was sent, with the digests of the files.
    """
    digests = dict(sent.artifacts)
    with TemporaryDirectory(prefix="fewbits-") as staged:
        for name in (CONFIG, *(AT_END if folder.over else ())):
            path = folder.path / name
            if path.exists() and (digest := _digest(path)) != digests.get(name):
                (Path(staged) / name).symlink_to(path.resolve())
                digests[name] = digest
                if name == NUMERICS and (frame := table(path)) is not None:
                    (Path(staged) / LAST_WINDOW).write_text(last_window(frame))
        if digests != sent.artifacts and _has_place(run):
            client.log_artifacts(run.info.run_id, staged)
            client.log_batch(run.info.run_id, tags=[replace(sent, artifacts=digests).tag()])


def _has_place(run: Run) -> bool:
    """Tell whether artifacts can be written: False if they go into a store that does not exist any more."""
    place = run.info.artifact_uri or ""
    if not place.startswith("file://"):
        return True
    path = Path(url2pathname(urlsplit(place).path))
    return all(above.name != ARTIFACTS or above.parent.exists() for above in path.parents)


def _digest(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=6).hexdigest()
