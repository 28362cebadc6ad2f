"""Find MLflow runs by their tags, and send the content of a run folder to its MLflow run, by MLflow's public client.

The run's tag SENT is `STEP STAMP`: the last step whose points were sent, written together with these points, and a hash
of the files, written last, when everything was sent. So a further call sends nothing twice, and one after a kill sends
what is missing. Points that are sent again change nothing, because MLflow stores equal points once.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import url2pathname

from fewbits.experiments.storage.run_folder import RunFolder
from fewbits.sweeps.planning import store
from fewbits.sweeps.planning.store import State
from fewbits.sweeps.tracking.connection import ARTIFACTS, USER
from fewbits.sweeps.tracking.points import ended, key_of, trial_points

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Run

# Names of tags. The value of KIND is arm, trial or single (a trial of `fewbits train`).
# The number in SENT rises when metrics get other names: then all points are sent again.
SENT, KIND, TRIAL, FOLDER = "fewbits.sent.2", "fewbits.kind", "fewbits.trial", "fewbits.folder"
ARM, SWEEP, SCALE, STATE = "fewbits.arm", "fewbits.sweep", "fewbits.scale", "fewbits.state"
PARENT, SOURCE, NOTE = "mlflow.parentRunId", "mlflow.source.name", "mlflow.note.content"
BATCH = 800  # points per request: MLflow allows 1,000 values, and parameters and tags are sent with them
# A trial that has a run, and so has started, is PLANNED if no worker trains it now.
STATUS = dict(zip(State, ("KILLED", "RUNNING", "FINISHED", "FAILED", "FAILED", "KILLED"), strict=True))
TABLES = tuple(f"{name}.parquet" for name in ("metrics", "numerics", "precision", "timing", "evaluation"))
CONFIG, AT_END = "config.yaml", ("result.json", "provenance.json", *TABLES)  # artifacts


def search(client: MlflowClient, experiment: str, key: Mapping[str, str]) -> list[Run]:
    """Return the MLflow runs of an experiment that have the tags `key` and are not deleted, the oldest first."""
    query = " and ".join(f"tags.`{tag}` = '{value}'" for tag, value in key.items())
    order = ["attributes.start_time ASC", "attributes.run_id ASC"]
    runs, token = list["Run"](), None
    while True:
        page = client.search_runs([experiment], query, order_by=order, page_token=token)
        runs += page
        if not (token := page.token):
            return runs


def only(client: MlflowClient, runs: Sequence[Run]) -> Run | None:
    """Return the first of the runs and delete the others, which other processes created at the same time."""
    for other in runs[1:]:
        client.delete_run(other.info.run_id)
    return runs[0] if runs else None


def make(
    client: MlflowClient, experiment: str, key: Mapping[str, str], name: str, params: Mapping[str, str], start: float
) -> Run:
    """Create an MLflow run with the tags `key`, among them the owner's, unless another process just did; return it."""
    from mlflow.entities import Param

    run = client.create_run(experiment, round(1000 * start), {**key, "mlflow.user": key[USER]}, name)
    client.log_batch(run.info.run_id, params=[Param(key_of(name), text[:6000]) for name, text in params.items()])
    return only(client, search(client, experiment, key)) or run


def set_tags(client: MlflowClient, run: Run, tags: Mapping[str, str | None]) -> None:
    """Set those of the tags that differ; a tag whose value is empty or None is deleted."""
    from mlflow.entities import RunTag

    present = run.data.tags
    texts = {name: (value or "")[:5000] for name, value in tags.items()}
    for name in (name for name, value in texts.items() if not value and name in present):
        client.delete_tag(run.info.run_id, name)
    if changed := [RunTag(name, value) for name, value in texts.items() if value and present.get(name) != value]:
        client.log_batch(run.info.run_id, tags=changed)


def set_status(client: MlflowClient, run: Run, status: str, end: float) -> None:
    """Set an MLflow run's status; if it is not RUNNING, the run has ended at `end`, in seconds since 1970."""
    if run.info.status != status and status == "RUNNING":
        client.update_run(run.info.run_id, status=status)
    elif run.info.status != status:
        client.set_terminated(run.info.run_id, status, round(1000 * end))


def send_points(client: MlflowClient, run: Run, points: Iterable[Metric]) -> None:
    """Send points in batches, each with the last step in the tag SENT. The points are sorted by step."""
    from mlflow.entities import RunTag

    pending = iter(points)
    while batch := list(itertools.islice(pending, BATCH)):
        # The next batch may have more points of the last step, so this step counts only when it is complete.
        sent = RunTag(SENT, f"{batch[-1].step - 1} ")
        client.log_batch(run.info.run_id, batch, tags=[sent])


def last_sent(run: Run) -> tuple[int, str]:
    """Return the step and the stamp in the tag SENT; (-1, "") if nothing, or an invalid tag, is there."""
    step, _, stamp = run.data.tags.get(SENT, "").partition(" ")
    return (int(step), stamp) if step.lstrip("-").isdigit() else (-1, "")


def stamp_of(folder: RunFolder, state: State) -> str:
    """Return a hash of a trial's state and of the modification times and sizes of its files."""
    paths = (folder.path / name for name in (CONFIG, *AT_END, store.FAILURE, "evaluations"))
    facts = [(path.name, (at := path.stat()).st_mtime_ns, at.st_size) for path in paths if path.exists()]
    return hashlib.sha256(repr((state.value, facts)).encode()).hexdigest()[:16]


def send_trial(client: MlflowClient, run: Run, folder: RunFolder, state: State, tags: Mapping[str, str | None]) -> bool:
    """Send what MLflow does not have yet of a run folder; return False if there was nothing to send."""
    stamp, (step, sent) = stamp_of(folder, state), last_sent(run)
    set_tags(client, run, {STATE: state.value, FOLDER: str(folder.path), NOTE: note(folder, state), **tags})
    set_status(client, run, STATUS[state], ended(folder))
    if sent == stamp:
        return False
    set_tags(client, run, _origin(folder))
    points = list(trial_points(folder, step))
    send_points(client, run, points)
    names = [CONFIG, *(AT_END if folder.over else ())] if folder.over or not sent else []
    with TemporaryDirectory(prefix="fewbits-") as staged:  # last, because it fails without access to the artifacts
        for name in names:
            if (folder.path / name).exists():
                (Path(staged) / name).symlink_to((folder.path / name).resolve())
        if names and _has_place(run):
            client.log_artifacts(run.info.run_id, staged)
    step = max([step, *(point.step for point in points)])
    client.set_tag(run.info.run_id, SENT, f"{step} {stamp}")
    return True


def note(folder: RunFolder, state: State) -> str | None:
    """Return why a trial diverged or failed, as a Markdown note; None for trials in other states."""
    if state is State.DIVERGED:
        return f"diverged at step {(folder.result() or {})['step']}"
    if state is not State.FAILED or (failure := store.failure(folder)) is None:
        return None
    return "\n".join([failure.reason, "", "```", *failure.log, "```"])


def _has_place(run: Run) -> bool:
    """Tell whether artifacts can be written: False if they go into a store that was moved away."""
    place = run.info.artifact_uri or ""
    above = Path(url2pathname(urlsplit(place).path)).parents if place.startswith("file://") else ()
    return all(folder.name != ARTIFACTS or folder.parent.exists() for folder in above)


def _origin(folder: RunFolder) -> dict[str, str | None]:
    """Return tags for the commit, the command and the environment that computed the trial's newest steps."""
    if (origin := folder.provenance()) is None:
        return {}
    newest = (origin.get("segments") or [{}])[-1]
    facts = {"host": newest.get("host") or origin.get("host"), "command": " ".join(origin.get("command", ()))}
    facts |= {"uncommitted_changes": origin.get("git_dirty") and "yes", **newest.get("environment", {})}
    tags: dict[str, str | None] = {f"provenance.{key}": str(value) for key, value in facts.items() if value}
    return tags | {"mlflow.source.git.commit": newest.get("git") or origin.get("git"), "mlflow.source.type": "LOCAL"}
