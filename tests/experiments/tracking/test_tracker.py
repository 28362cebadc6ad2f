"""Test tracking: every step is sent to MLflow exactly once, and no failure of MLflow affects the trial."""

import json
import subprocess
import warnings
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from fewbits.experiments.session import Progress
from fewbits.experiments.storage.run_folder import RunFolder
from fewbits.experiments.tracking import connection, mlflow_runs, points, send
from fewbits.experiments.tracking import tracker as tracking
from fewbits.experiments.tracking.points import Point
from tests.experiments.trial_inputs import MOR, Interrupted, left, metric, train, train_until

ON = ("runtime.tracking=mlflow", "training.steps=9", "evaluation.every=4")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'mlflow.db'}"


@pytest.fixture
def mlflow(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a client for the MLflow database of all tests of this file; artifacts are in the test's own folder."""
    import mlflow

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    return mlflow.MlflowClient()


def the_run(client: Any, folder: RunFolder) -> Any:
    experiment = client.get_experiment_by_name(tracking.EXPERIMENT).experiment_id
    (run,) = client.search_runs([experiment], f"tags.`{mlflow_runs.TRIAL}` = '{folder.id}'")
    return run


def steps(client: Any, run: Any, key: str) -> list[int]:
    return [point.step for point in client.get_metric_history(run.info.run_id, key)]


@pytest.fixture(scope="module")
def untracked(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return train(cache, tmp_path_factory.mktemp("untracked"), *ON, "runtime.tracking=none")[0]


def test_every_step_is_there_once(mlflow: Any, untracked: RunFolder, cache: Path, tmp_path: Path) -> None:
    folder, result = train(cache, tmp_path, *ON)
    assert folder.id == untracked.id
    assert left(folder.path) == left(untracked.path)
    run = the_run(mlflow, folder)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == folder.path.name
    assert run.data.params == {"model": "nemotron-nano", "recipe": "bf16", "data": "synthetic", "seed": "0"}
    for name in ("loss", "loss_max", "optimizer/learning_rate", "tokens", "speed/tokens_per_second"):
        assert steps(mlflow, run, name) == list(range(9))
    assert steps(mlflow, run, "validation_loss") == [3, 7, 8]
    history = mlflow.get_metric_history(run.info.run_id, "loss")
    assert [point.value for point in history] == metric(folder, "loss")
    assert [point.timestamp for point in history] == sorted(point.timestamp for point in history)
    assert history[0].timestamp < history[-1].timestamp
    assert run.data.metrics["validation_loss"] == result["validation_loss"]
    assert mlflow.list_artifacts(run.info.run_id)[0].path == "config.yaml"


def histories(client: Any, run: Any) -> dict[str, Any]:
    return {key: sorted(client.get_metric_history(run.info.run_id, key), key=str) for key in run.data.metrics}


def test_a_run_shows_numerics_origin_data_and_tables(mlflow: Any, cache: Path, tmp_path: Path) -> None:
    folder, result = train(cache, tmp_path, *ON, *MOR, "training.steps=10")
    run = the_run(mlflow, folder)
    numerics = pd.read_parquet(folder.path / "numerics.parquet")
    assert sorted(set(numerics["step"])) == [4, 9]
    for name in (
        "decisions/bf16",
        "decisions_bf16/fprop.x",
        "error/fprop.x",
        "flushed/fprop.w",
        "weight_gradient/error",
    ):
        assert steps(mlflow, run, name) == [4, 9]
    last = numerics[(numerics["step"] == 9) & (numerics["slot"] == "fprop.x")]
    assert run.data.metrics["error/fprop.x"] == pytest.approx(last["error"].mean())
    assert run.data.metrics["decisions_bf16/fprop.x"] == pytest.approx(last["share_1"].mean())
    assert run.data.metrics["validation_loss_unquantized"] == result["validation_loss_unquantized"]

    provenance = folder.provenance() or {}
    assert run.data.tags["mlflow.source.git.commit"] == provenance["segments"][-1]["git"]
    assert run.data.tags["mlflow.user"] == run.data.tags["fewbits.user"]
    assert run.data.tags["provenance.torch"] == provenance["segments"][-1]["environment"]["torch"]
    inputs = {given.tags[0].value: given.dataset for given in run.inputs.dataset_inputs}
    assert {context: dataset.name for context, dataset in inputs.items()} == {
        "training": "synthetic/train",
        "validation": "synthetic/validation",
        "out of domain": "synthetic/ood",
    }
    assert json.loads(inputs["training"].profile)["sha256"] == provenance["data"]["train.sha256"]

    assert {artifact.path for artifact in mlflow.list_artifacts(run.info.run_id)} == {
        *(name for name in (send.CONFIG, *send.AT_END, send.LAST_WINDOW) if name != "precision.parquet"),
    }
    kept = Path(mlflow.download_artifacts(run.info.run_id, "numerics.parquet", str(tmp_path)))
    assert kept.read_bytes() == (folder.path / "numerics.parquet").read_bytes()


def test_sending_again_adds_nothing(mlflow: Any, cache: Path, tmp_path: Path) -> None:
    """Check a tag `fewbits.sent` that is current, behind (after a kill between two requests), or invalid."""
    folder, _ = train(cache, tmp_path, *ON, "recipe=gaussws")
    run = the_run(mlflow, folder)
    before = histories(mlflow, run)
    assert len(before["bits/mean"]) == 2
    behind = json.dumps(json.loads(run.data.tags[send.SENT]) | {"step": 3})
    for tag in (run.data.tags[send.SENT], behind, "{}", "not json"):
        mlflow.set_tag(run.info.run_id, send.SENT, tag)
        send.send(mlflow, mlflow.get_run(run.info.run_id), folder, "FINISHED", {}, {})
        assert histories(mlflow, the_run(mlflow, folder)) == before
        assert the_run(mlflow, folder).data.tags == run.data.tags


def test_only_steps_whose_tables_are_complete_are_sent_while_a_trial_runs(cache: Path, tmp_path: Path) -> None:
    """Check that without a result, only steps in timing.parquet are sent, because training writes this table last."""
    folder, _ = train(cache, tmp_path, *ON, "runtime.tracking=none", "seed=6")
    result, timing = (folder.path / name for name in ("result.json", "timing.parquet"))
    kept = result.read_bytes()
    result.unlink()
    pd.read_parquet(timing).head(4).to_parquet(timing)
    assert [step for step, _ in points.step_points(folder, after=1)] == [2, 3]
    result.write_bytes(kept)
    assert [step for step, _ in points.step_points(folder, after=1)] == list(range(2, 9))


def test_an_interrupted_trial_goes_on_in_its_run(
    mlflow: Any, untracked: RunFolder, cache: Path, tmp_path: Path
) -> None:
    """Check a trial that is interrupted before its first checkpoint, after it, and while MLflow lacks some steps."""
    for step in (2, 5):
        train_until(step, cache, tmp_path, *ON, "seed=1")
    folder = RunFolder(next(tmp_path.glob("nemotron-*")), "")
    folder = RunFolder(folder.path, folder.provenance()["id"])  # type: ignore[index]
    run = the_run(mlflow, folder)
    assert (run.info.status, steps(mlflow, run, "loss")) == ("RUNNING", [0, 1, 2])
    with pytest.MonkeyPatch.context() as patch:  # in this block, nothing is sent to MLflow
        patch.setattr(tracking.Tracker, "saved", lambda *_: None)
        train_until(8, cache, tmp_path, *ON, "seed=1")
    assert steps(mlflow, run, "loss") == [0, 1, 2]
    again, _ = train(cache, tmp_path, *ON, "seed=1")
    assert again == folder
    run = the_run(mlflow, folder)
    assert run.info.status == "FINISHED"
    for name in ("loss", "speed/tokens_per_second"):
        assert steps(mlflow, run, name) == list(range(9))


def test_the_run_of_a_killed_trial_can_be_ended(mlflow: Any, cache: Path, tmp_path: Path) -> None:
    """Check that `reap` ends the MLflow run if the trial's process does not exist any more, and only then."""
    train_until(2, cache, tmp_path, *ON, "seed=5")
    path = next(tmp_path.glob("nemotron-*"))
    origin = json.loads((path / "provenance.json").read_text())
    folder = RunFolder(path, origin["id"])
    assert tracking.reap(mlflow, tmp_path) == 0
    with subprocess.Popen(["true"]) as gone:
        pass
    (path / "provenance.json").write_text(json.dumps({**origin, "process": gone.pid}))
    assert tracking.reap(mlflow, tmp_path) == 1
    assert the_run(mlflow, folder).info.status == "KILLED"
    train(cache, tmp_path, *ON, "seed=5")
    assert the_run(mlflow, folder).info.status == "FINISHED"


def test_a_trial_whose_end_was_not_written_down_ends_again(mlflow: Any, cache: Path, tmp_path: Path) -> None:
    asked = (*ON, "seed=2", "training.steps=3", "data=python", "data.size=65536")
    folder, result = train(cache, tmp_path, *asked)
    (folder.path / "result.json").unlink()
    train(cache, tmp_path, *asked)
    run = the_run(mlflow, folder)
    assert steps(mlflow, run, "loss") == [0, 1, 2]
    assert steps(mlflow, run, "validation_loss_unquantized") == [3]
    assert run.data.metrics["validation_loss_unquantized"] == result["validation_loss_unquantized"]


def test_a_trial_that_diverges_has_failed(mlflow: Any, cache: Path, tmp_path: Path) -> None:
    folder, _ = train(cache, tmp_path, *ON, "optimizer.lr=1e30", "optimizer.clip=null")
    run = the_run(mlflow, folder)
    assert run.info.status == "FAILED"
    assert steps(mlflow, run, "loss") == [0]  # NaN is not sent
    assert steps(mlflow, run, "tokens") == [0, 1]


def nowhere(folder: Path) -> str:
    """Return the URI of a database that cannot be created, because its folder would be inside a file."""
    (folder / "file").write_text("")
    return f"sqlite:///{folder / 'file' / 'mlflow.db'}"


@pytest.mark.parametrize("uri", ["http://127.0.0.1:9", ""])
def test_mlflow_being_away_is_one_warning(
    uri: str, untracked: RunFolder, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri or nowhere(tmp_path))
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        folder, _ = train(cache, tmp_path / "runs", *ON)
    (message,) = (str(w.message) for w in caught if "MLflow was not updated" in str(w.message))
    assert "\n" not in message
    assert left(folder.path) == left(untracked.path)


def test_what_mlflow_missed_while_it_was_away_is_made_up_for(
    mlflow: Any, store: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "SHARE", 0)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", nowhere(tmp_path))

    def say(progress: Progress) -> None:
        if progress.step == 5:
            monkeypatch.setenv("MLFLOW_TRACKING_URI", store)

    with pytest.warns(RuntimeWarning, match="MLflow was not updated"):
        folder, _ = train(cache, tmp_path / "runs", *ON, "seed=3", say=say)
    assert steps(mlflow, the_run(mlflow, folder), "loss") == list(range(9))


def test_ctrl_c_is_no_fault_of_mlflow(
    mlflow: Any, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise Interrupted

    monkeypatch.setattr(tracking.Tracker, "_send", interrupted)
    with pytest.raises(Interrupted):
        train(cache, tmp_path, *ON, "seed=4")
    monkeypatch.undo()


def test_steps_are_sent_whole_in_batches_that_mlflow_takes() -> None:
    steps = [([Point(name, 1.0, 0, step) for name in "abcdefgh"], step) for step in range(350)]
    batches = list(send.packed(steps))
    assert [point for batch, _ in batches for point in batch] == [point for group, _ in steps for point in group]
    assert [last for _, last in batches] == [batch[-1].step for batch, _ in batches]
    assert [len(batch) for batch, _ in batches] == [800, 800, 800, 400]
    assert list(send.packed([])) == []
    assert list(send.packed([([], "nothing new")])) == [([], "nothing new")]


def test_a_table_that_is_replaced_while_it_is_read_is_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a table is read completely before it is parsed.

    Parquet is parsed from the end, and a running trial may replace the file before the rest is read.
    """
    path, read = tmp_path / "metrics.parquet", pd.read_parquet
    pd.DataFrame({"step": range(3)}).to_parquet(path)

    def replaced(source: Any) -> Any:
        path.write_bytes(b"another")
        return read(source)

    monkeypatch.setattr(pd, "read_parquet", replaced)
    assert points._rows(path) == [{"step": 0}, {"step": 1}, {"step": 2}]


def test_a_store_that_was_moved_makes_nothing_at_its_old_place(tmp_path: Path) -> None:
    """Check that no artifacts are written to the old folder, which may not be writable and which nothing would read."""
    client = connection.connect(tmp_path / "old", f"sqlite:///{tmp_path / 'old' / connection.DATABASE}")
    study = connection.experiment(client, "study", tmp_path / "old", client.tracking_uri)
    (tmp_path / "old").rename(tmp_path / "new")
    moved = connection.connect(tmp_path / "new", f"sqlite:///{tmp_path / 'new' / connection.DATABASE}")
    run = moved.create_run(study)
    config = tmp_path / "config.yaml"
    config.write_text("seed: 1")
    send._send_artifacts(moved, run, RunFolder(tmp_path, ""), send.Sent())
    assert not (tmp_path / "old").exists()


def test_mlflows_default_experiment_stores_artifacts_beside_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the artifact folder is in the store, and not in the working directory of the process, as in MLflow."""
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        client = connection.connect(tmp_path / name, f"sqlite:///{tmp_path / name / connection.DATABASE}")
        location = client.get_experiment("0").artifact_location
        assert location == (tmp_path / name / connection.ARTIFACTS / "Default").as_uri()


def test_a_database_whose_making_was_cut_short_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that an incomplete database, as after a full disk or a kill, is never used: MLflow would refuse it."""
    import mlflow

    def cut_short(tracking_uri: str) -> None:
        Path(tracking_uri.removeprefix("sqlite:///")).write_bytes(b"half a database")
        raise RuntimeError("the disk is full")

    monkeypatch.setenv("FEWBITS_CACHE", str(tmp_path / "cache"))
    runs = tmp_path / "runs"
    uri = f"sqlite:///{runs / connection.DATABASE}"
    with monkeypatch.context() as patched:
        patched.setattr(mlflow, "MlflowClient", cut_short)
        with pytest.raises(RuntimeError, match="full"):
            connection.connect(runs, uri)
    assert [path.name for path in runs.iterdir()] == [connection.LOCK]
    assert connection.connect(runs, uri).search_experiments()
