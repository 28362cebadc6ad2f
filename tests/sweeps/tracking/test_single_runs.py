"""Test the MLflow runs of `fewbits train`: every step is sent once, and no failure of MLflow affects the trial."""

import json
import os
import warnings
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from fewbits import cli
from fewbits.experiments.storage.run_folder import RunFolder
from fewbits.experiments.trial import Runtime
from fewbits.sweeps.tracking import connection, points, runs
from fewbits.sweeps.tracking.mirror import SINGLE, Tracker
from tests.experiments.trial_inputs import MOR, left, metric, train, train_until
from tests.forked_python import run_python
from tests.sweeps.tracking.tracked import everything, seen
from tests.sweeps.tracking.tracked import points as sent_points

TRACKED = Runtime(tracking="mlflow")
ON = ("runtime.tracking=mlflow", "training.steps=9", "evaluation.every=4")


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    where = tmp_path_factory.mktemp("mlflow")
    connection.connect(where, f"sqlite:///{where / 'mlflow.db'}")
    return f"sqlite:///{where / 'mlflow.db'}"


@pytest.fixture
def uri(database: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", database)
    return database


def the_run(uri: str, folder: RunFolder) -> Any:
    return seen(uri, folder.path.parent, SINGLE)[f"single/{folder.id}"]


def steps(uri: str, run: Any, key: str = "loss/loss") -> list[int]:
    return sorted(sent_points(uri, run, key))


@pytest.fixture(scope="module")
def untracked(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return train(cache, tmp_path_factory.mktemp("untracked"), *ON, "runtime.tracking=none")[0]


def test_every_step_is_there_once(uri: str, untracked: RunFolder, cache: Path, tmp_path: Path) -> None:
    folder, result = train(cache, tmp_path, *ON)
    assert folder.id == untracked.id
    assert left(folder.path) == left(untracked.path)
    run = the_run(uri, folder)
    assert (run.info.status, run.info.run_name) == ("FINISHED", folder.path.name)
    assert run.data.params == {"model": "nemotron-nano", "recipe": "bf16", "data": "synthetic", "seed": "0"}
    for name in ("loss/loss", "loss/loss_max", "optimizer/learning_rate", "tokens", "speed/tokens_per_second"):
        assert steps(uri, run, name) == list(range(9))
    assert steps(uri, run, "loss/validation_loss") == [3, 7, 8]
    assert [value for _, value in sorted(sent_points(uri, run).items())] == metric(folder, "loss")
    assert run.data.metrics["loss/validation_loss"] == result["validation_loss"]


def test_only_steps_whose_tables_are_complete_are_sent_while_a_trial_runs(cache: Path, tmp_path: Path) -> None:
    """Check that without a result, only steps in timing.parquet are sent, because training writes this table last."""
    folder, _ = train(cache, tmp_path, *ON, "runtime.tracking=none", "seed=6")
    result, timing = (folder.path / name for name in ("result.json", "timing.parquet"))
    kept = result.read_bytes()
    result.unlink()
    pd.read_parquet(timing).head(4).to_parquet(timing)
    assert {point.step for point in points.trial_points(folder, after=1)} == {2, 3}
    result.write_bytes(kept)
    assert {2, 8} < {point.step for point in points.trial_points(folder, after=1)}


def test_a_run_shows_numerics_origin_and_tables_and_sending_again_adds_nothing(
    uri: str, cache: Path, tmp_path: Path
) -> None:
    folder, result = train(cache, tmp_path, *ON, *MOR, "training.steps=10")
    run = the_run(uri, folder)
    numerics = pd.read_parquet(folder.path / "numerics.parquet")
    assert sorted(set(numerics["step"])) == [4, 9]
    for name in ("share/bf16", "share_bf16/fprop.x", "operand_error/fprop.x", "weight_gradient/error"):
        assert steps(uri, run, name) == [4, 9]
    last = numerics[(numerics["step"] == 9) & (numerics["slot"] == "fprop.x")]
    assert run.data.metrics["operand_error/fprop.x"] == pytest.approx(last["error"].mean())
    assert run.data.metrics["share_bf16/fprop.x"] == pytest.approx(last["share_1"].mean())
    assert run.data.metrics["loss/validation_loss_unquantized"] == result["validation_loss_unquantized"]
    assert min(name for name in run.data.metrics if "/" in name) == "loss/loss"  # the first chart on MLflow's page

    origin = (folder.provenance() or {})["segments"][-1]
    assert run.data.tags["mlflow.source.git.commit"] == origin["git"]
    assert run.data.tags["mlflow.user"] == run.data.tags["fewbits.user"]
    assert run.data.tags["provenance.torch"] == origin["environment"]["torch"]
    client = connection.connect(tmp_path, uri)
    artifacts = {artifact.path for artifact in client.list_artifacts(run.info.run_id)}
    assert artifacts == {runs.CONFIG, *runs.AT_END} - {"precision.parquet"}
    kept = Path(client.download_artifacts(run.info.run_id, "numerics.parquet", str(tmp_path)))
    assert kept.read_bytes() == (folder.path / "numerics.parquet").read_bytes()

    before = everything(uri, tmp_path, SINGLE)
    for tag in (run.data.tags[runs.SENT], "3 ", "-1 ", "of a user"):  # current, after a kill, of nothing sent, invalid
        client.set_tag(run.info.run_id, runs.SENT, tag)
        Tracker(TRACKED).saved(folder)
        assert everything(uri, tmp_path, SINGLE) == before


def test_an_interrupted_trial_continues_in_its_run(uri: str, cache: Path, tmp_path: Path) -> None:
    """Check a trial that is interrupted before its first checkpoint, after it, and while MLflow lacks some steps."""
    for step in (2, 5):
        train_until(step, cache, tmp_path, *ON, "seed=1")
    path = next(tmp_path.glob("nemotron-*"))
    folder = RunFolder(path, json.loads((path / "provenance.json").read_text())["id"])
    run = the_run(uri, folder)
    assert (run.info.status, steps(uri, run)) == ("RUNNING", [0, 1, 2])
    train_until(8, cache, tmp_path, *ON, "seed=1", "runtime.tracking=none")
    assert steps(uri, run) == [0, 1, 2]
    Tracker(TRACKED).close()  # has sent nothing
    tracker = Tracker(TRACKED)
    tracker.saved(folder)
    tracker.close()
    assert the_run(uri, folder).info.status == "KILLED"
    assert train(cache, tmp_path, *ON, "seed=1")[0] == folder
    last = the_run(uri, folder)
    assert (last.info.status, last.info.run_id) == ("FINISHED", run.info.run_id)
    for name in ("loss/loss", "speed/tokens_per_second"):
        assert steps(uri, last, name) == list(range(9))


def test_a_trial_that_diverges_has_failed(uri: str, cache: Path, tmp_path: Path) -> None:
    folder, _ = train(cache, tmp_path, *ON, "optimizer.lr=1e30", "optimizer.clip=null")
    run = the_run(uri, folder)
    assert run.info.status == "FAILED"
    assert run.data.tags[runs.NOTE].startswith("diverged at step")
    assert steps(uri, run) == [0]  # NaN is not sent
    assert steps(uri, run, "tokens") == [0, 1]


def nowhere(folder: Path) -> str:
    """Return the URI of a database that cannot be created, because its folder would be inside a file."""
    (folder / "file").write_text("")
    return f"sqlite:///{folder / 'file' / 'mlflow.db'}"


@pytest.mark.parametrize("address", ["http://127.0.0.1:9", ""])
def test_mlflow_being_away_is_one_warning(
    address: str, untracked: RunFolder, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address or nowhere(tmp_path))
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        folder, _ = train(cache, tmp_path / "runs", *ON)
    (message,) = (str(w.message) for w in caught if "MLflow was not updated" in str(w.message))
    assert "\n" not in message
    assert left(folder.path) == left(untracked.path)


def test_fewbits_ui_sends_trials_that_were_trained_without_mlflow(
    uri: str, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = train(cache, tmp_path, *ON, "runtime.tracking=none", "seed=5")
    file = folder.path / "provenance.json"
    origin = json.loads(file.read_text())
    for command in ("train", "sweep", ""):  # also a trial of a sweep without a stored plan
        file.write_text(json.dumps(origin | {"command": ["fewbits", command, "seed=5"]}))
        for number in (1, 0):
            assert cli.main(["ui", "--sync-only", "--runs", str(tmp_path)]) == 0
            assert capsys.readouterr().err.startswith(f"{number} trial")
    assert the_run(uri, folder).info.status == "FINISHED"


def test_a_trial_is_sent_by_default_once_the_store_has_a_database(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check runtime.tracking=auto: without a database, nothing of MLflow is created; `none` never sends."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder, _ = train(cache, tmp_path, *ON, "runtime.tracking=auto", "seed=7")
    assert [path.name for path in tmp_path.iterdir()] == [folder.path.name]
    assert cli.main(["ui", "--sync-only", "--runs", str(tmp_path)]) == 0
    uri = f"sqlite:///{tmp_path / connection.DATABASE}"
    for seed, tracking, more in ((8, "none", 0), (9, "auto", 1)):
        train(cache, tmp_path, *ON, f"runtime.tracking={tracking}", f"seed={seed}")
        assert len(seen(uri, tmp_path, SINGLE)) == 1 + more


AT_ONCE = 4
MANY = """
import os, sys, warnings
warnings.simplefilter("error", RuntimeWarning)
from pathlib import Path
import mlflow, pandas
from fewbits.experiments.storage.run_folder import opened
from fewbits.experiments.trial import Runtime
from fewbits.sweeps.tracking.connection import connect
from fewbits.sweeps.tracking.mirror import Tracker
other, *folders = map(Path, sys.argv[1:])
connect(other, f"sqlite:///{other / 'mlflow.db'}")  # imports the modules that all of them need
ready, go = os.pipe()
for folder in folders:
    if not os.fork():
        os.close(go)
        os.read(ready, 1)  # until the other end is closed, so that all start at once
        Tracker(Runtime(tracking="mlflow")).saved(opened(folder))
        os._exit(0)
os.close(go)
sys.exit(sum(os.wait()[1] != 0 for _ in folders))
"""


def test_processes_at_once_create_one_database_and_lose_no_metric(untracked: RunFolder, tmp_path: Path) -> None:
    folders = []
    for number in range(AT_ONCE):
        path = tmp_path / "runs" / f"trial-{number:08x}"
        path.mkdir(parents=True)
        for name in ("config.yaml", "metrics.parquet", "timing.parquet", "result.json", "provenance.json"):
            content = (untracked.path / name).read_bytes()
            (path / name).write_bytes(content.replace(untracked.id.encode(), f"{number:064x}".encode()))
        folders.append(path)
    environment = {key: value for key, value in os.environ.items() if key != "MLFLOW_TRACKING_URI"}
    done = run_python(["-c", MANY, str(tmp_path), *map(str, folders)], folder=tmp_path, environment=environment)
    assert (done.returncode, done.stderr) == (0, "")
    uri = f"sqlite:///{tmp_path / 'runs' / connection.DATABASE}"
    found = seen(uri, tmp_path / "runs", SINGLE)
    assert sorted(found) == [f"single/{number:064x}" for number in range(AT_ONCE)]
    for run in found.values():
        assert (run.info.status, steps(uri, run)) == ("FINISHED", list(range(9)))


# ------------------------------------------------------------------------------------------------ numerics
