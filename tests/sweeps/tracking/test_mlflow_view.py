"""Test that MLflow shows the trials of the store, even if workers and drivers are killed or the database is deleted."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fewbits import cli
from fewbits.experiments.run_trial import run as run_trial
from fewbits.experiments.session import Progress
from fewbits.experiments.storage.lease import leased
from fewbits.experiments.storage.run_folder import RunFolder
from fewbits.experiments.tracking import connection, mlflow_runs, sqlite_database
from fewbits.experiments.tracking import tracker as tracking
from fewbits.experiments.tracking.owner import owner_of
from fewbits.sweeps.planning.plan import Plan, Planned, plan
from fewbits.sweeps.planning.sweep import load_sweeps
from fewbits.sweeps.running import store
from fewbits.sweeps.tracking import comparison
from fewbits.sweeps.tracking.mlflow_view import Mirror
from fewbits.sweeps.tracking.sent import CACHE
from fewbits.sweeps.tracking.synced import Synced
from tests.effort import DEEP
from tests.experiments.trial_inputs import TINY, Interrupted, Reporter
from tests.forked_python import run_python
from tests.messages import names

SWEEP = """
about: what a recipe costs
seeds: [0, 1]
axes: {recipe.threshold: [0.03, 0.045]}
arms:
  bf16: {overrides: [recipe=bf16], axes: []}
  mor: {overrides: [recipe=mor/tensor]}
exclude: [{recipe.threshold: 0.03, seed: 1}]
"""
ONE = """
arms: {bf16: {overrides: [recipe=bf16]}}
"""
STEPS = 4


def planned(where: Path, cache: Path, sweep: str = SWEEP) -> Plan:
    return plan(*load_sweeps(overrides(where, cache, sweep)))


def overrides(where: Path, cache: Path, sweep: str = SWEEP) -> list[str]:
    """Write the sweep file WHERE/cost.yaml for tiny trials of STEPS steps, and return the overrides that select it.

    The trials write a checkpoint after every second step. The store is WHERE/runs.
    """
    tiny = TINY | {"training.steps": STEPS, "training.checkpoint_every": 2, "evaluation.every": 2}
    tiny |= {"runtime.device": "cpu", "runtime.cache": cache, "runtime.runs": where / "runs"}
    where.mkdir(exist_ok=True)
    (where / "cost.yaml").write_text(sweep)
    return [str(where / "cost.yaml"), *(f"{key}={value}" for key, value in tiny.items())]


def train(trial: Planned, until: int = STEPS) -> None:
    """Train a trial; if `until` is less than STEPS, interrupt it after this step, before the step's checkpoint."""

    def say(progress: Progress) -> None:
        if progress.step == until < STEPS:
            raise Interrupted

    try:
        assert run_trial(trial.trial, trial.runtime, Reporter(say))[0].id == trial.id
    except Interrupted:
        assert until < STEPS


def copied(folder: RunFolder, path: Path, trial: str) -> RunFolder:
    """Copy a run folder to `path` with the trial id changed to `trial`, so that two trials have the same results."""
    shutil.copytree(folder.path, path, ignore=shutil.ignore_patterns("checkpoints"))
    for name in ("result.json", "provenance.json"):
        data = json.loads((path / name).read_text())
        (path / name).write_text(json.dumps({**data, "id": trial}))
    return RunFolder(path, trial)


def seen(mirror: Mirror) -> dict[str, Any]:
    """Return MLflow's runs of the mirror's user and store: runs of trials by trial id, runs of sweeps by sweep name."""
    client = connection.connect(mirror._runs, mirror.uri)
    found: dict[str, Any] = {}
    for study in client.search_experiments():
        for one in mlflow_runs.search(client, study.experiment_id, (mirror._owner or owner_of(mirror._runs)).key):
            key = one.data.tags.get(mlflow_runs.TRIAL, one.data.tags[comparison.SWEEP])
            assert key not in found, "a run is there twice"
            found[key] = one
    return found


def steps(mirror: Mirror, run: Any, key: str = "loss") -> list[int]:
    client = connection.connect(mirror._runs, mirror.uri)
    return [point.step for point in client.get_metric_history(run.info.run_id, key)]


def everything(mirror: Mirror) -> dict[str, Any]:
    """Return all contents of the runs in MLflow, except ids and other values that MLflow itself generates.

    The result maps the keys of `seen` to (name, status, parameters, tags, points of each metric, artifacts).
    """
    client = connection.connect(mirror._runs, mirror.uri)
    found = {}
    for key, one in seen(mirror).items():
        history = {
            name: [
                (point.step, point.value, point.timestamp) for point in client.get_metric_history(one.info.run_id, name)
            ]
            for name in one.data.metrics
        }
        tags = {name: value for name, value in one.data.tags.items() if name != "mlflow.parentRunId"}
        artifacts = [artifact.path for artifact in client.list_artifacts(one.info.run_id)]
        found[key] = (one.info.run_name, one.info.status, one.data.params, tags, history, artifacts)
    return found


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Plan:
    """Return the plan of SWEEP, whose five trials were trained without MLflow."""
    made = planned(tmp_path_factory.mktemp("done"), cache)
    for trial in made.trials.values():
        train(trial)
    return made


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an empty MLflow database that tests copy, since it takes MLflow seconds to create one."""
    where = tmp_path_factory.mktemp("database")
    connection.connect(where, connection.tracking_uri(where))
    return where / connection.DATABASE


@pytest.fixture(scope="module")
def mirrored(done: Plan, empty_database: Path) -> Mirror:
    mirror = Mirror(done)
    shutil.copy(empty_database, next(iter(done.trials.values())).folder.path.parent)
    assert mirror.sync(last=True).sent == 5
    return mirror


@pytest.fixture
def one(tmp_path: Path, cache: Path, empty_database: Path) -> tuple[Plan, Planned]:
    """Return a plan of one trial, whose store has an MLflow database."""
    made = planned(tmp_path, cache, ONE)
    (tmp_path / "runs").mkdir()
    shutil.copy(empty_database, tmp_path / "runs")
    (trial,) = made.trials.values()
    return made, trial


def test_a_study_is_an_experiment_a_sweep_a_parent_a_trial_a_child(mirrored: Mirror, done: Plan) -> None:
    runs = seen(mirrored)
    assert runs.keys() == {"cost", *done.trials}
    parent = runs["cost"]
    assert parent.info.status == "FINISHED"
    assert (parent.data.tags["fewbits.sweep"], parent.data.tags["fewbits.scale"]) == ("cost", "smoke")
    for member in done.members:
        child, folder = runs[member.id], done.trials[member.id].folder
        assert child.info.status == "FINISHED"
        assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert child.data.tags["fewbits.folder"] == str(folder.path)
        assert child.data.params.items() >= member.cell.place.items()
        assert child.data.params["model"] == "nemotron-nano"
        assert steps(mirrored, child) == list(range(STEPS))
        assert child.data.metrics["validation_loss"] == (folder.result() or {})["validation_loss"]


def test_what_has_not_changed_is_not_sent_and_mlflow_not_even_imported(
    mirrored: Mirror, done: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)  # from now on, `import mlflow` raises an error
    before = mirrored.sync()
    assert Mirror(done).sync(last=True) == before == Synced(mirrored.uri, before.views, sent=0, away=False)
    assert len(before.links) == 1


def test_rebuilt_from_nothing_it_equals_the_live_one(
    mirrored: Mirror, done: Plan, empty_database: Path, tmp_path: Path
) -> None:
    live = everything(mirrored)
    shutil.copy(empty_database, tmp_path)
    again = Mirror(done, f"sqlite:///{tmp_path / connection.DATABASE}")
    assert again.sync(afresh=True).sent == 5
    assert everything(again) == live
    assert again.sync(afresh=True).sent == 5
    assert everything(again) == live


def test_neither_a_lost_note_of_what_was_sent_nor_a_lost_database_matters(
    one: tuple[Plan, Planned], empty_database: Path
) -> None:
    made, trial = one
    train(trial)
    mirror = Mirror(made)
    mirror.sync(last=True)
    before = everything(mirror)
    (trial.folder.path.parent / CACHE).unlink()
    assert Mirror(made).sync(last=True).sent == 1
    assert everything(mirror) == before
    shutil.copy(empty_database, mirror.uri.removeprefix("sqlite:///"))
    assert Mirror(made).sync(last=True).sent == 1
    assert everything(mirror) == before


def test_runs_that_a_user_has_deleted_are_made_again(one: tuple[Plan, Planned]) -> None:
    """The driver notices the deletion by the modification time of the SQLite file, and then creates the runs again."""
    made, trial = one
    train(trial)
    mirror = Mirror(made)
    mirror.sync(last=True)
    before = everything(mirror)
    client = connection.connect(mirror._runs, mirror.uri)
    for run in seen(mirror).values():
        client.delete_run(run.info.run_id)
    assert Mirror(made).sync(last=True).sent == 1
    assert everything(mirror) == before


def test_a_database_that_is_deleted_while_a_sweep_runs_is_made_again(
    one: tuple[Plan, Planned], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that has the SQLite database open when a user deletes it creates a new one."""
    monkeypatch.setattr(connection, "SHARE", 0)
    made, trial = one
    train(trial)
    mirror = Mirror(made)
    mirror.sync()
    before = everything(mirror)
    sqlite_database.path_of(mirror.uri).unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # this attempt may fail with a warning; the next one must not
        mirror.sync()
    mirror.sync(last=True)
    assert everything(mirror) == before


def test_a_run_says_whether_somebody_is_at_its_trial(one: tuple[Plan, Planned]) -> None:
    """A run in MLflow shows whether its trial is being trained, was killed, or has finished.

    After a killed trial is resumed, it has the same MLflow run as before, with each step once.
    """
    made, trial = one
    mirror = Mirror(made)
    mirror.sync()
    assert seen(mirror).keys() == {"cost"}
    train(trial, until=3)
    with leased(trial.folder.path):
        mirror.sync()
        first = seen(mirror)
        assert (first[trial.id].info.status, first["cost"].info.status) == ("RUNNING", "RUNNING")
        assert steps(mirror, first[trial.id]) == [0, 1]
    mirror.sync(last=True)
    assert [run.info.status for run in seen(mirror).values()] == ["KILLED", "KILLED"]
    with leased(trial.folder.path):
        mirror.sync()
        assert seen(mirror)[trial.id].info.status == "RUNNING"
    train(trial)
    mirror.sync(last=True)
    last = seen(mirror)
    assert last[trial.id].info.run_id == first[trial.id].info.run_id
    assert (last[trial.id].info.status, last["cost"].info.status) == ("FINISHED", "FINISHED")
    assert steps(mirror, last[trial.id]) == list(range(STEPS))


HOLD = "import sys; from pathlib import Path; from fewbits.experiments.storage.lease import leased\n"
HOLD += "with leased(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"


def test_the_run_of_a_killed_worker_does_not_stay_running(one: tuple[Plan, Planned], cache: Path) -> None:
    """The next driver, even one with another plan, sets the MLflow run of a killed worker's trial to KILLED."""
    made, trial = one
    train(trial, until=3)
    worker = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(trial.folder.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"held\n"
        mirror = Mirror(made)
        mirror.sync()
        assert seen(mirror)[trial.id].info.status == "RUNNING"
        worker.send_signal(signal.SIGKILL)
    other = planned(trial.folder.path.parent.parent, cache, f"seeds: [7]{ONE}")
    Mirror(other).sync()
    assert seen(mirror)[trial.id].info.status == "KILLED"


@pytest.mark.parametrize("planned_still", [True, False])
def test_the_run_of_a_removed_folder_does_not_stay_running(
    planned_still: bool, one: tuple[Plan, Planned], cache: Path
) -> None:
    made, trial = one
    train(trial, until=3)
    mirror = Mirror(made)
    with leased(trial.folder.path):
        mirror.sync()
        assert seen(mirror)[trial.id].info.status == "RUNNING"
        shutil.rmtree(trial.folder.path)
    next_one = made if planned_still else planned(trial.folder.path.parent.parent, cache, f"seeds: [7]{ONE}")
    assert Mirror(next_one).sync().sent == 1
    assert seen(mirror)[trial.id].info.status == "KILLED"
    assert Mirror(next_one).sync().sent == 0


def test_what_another_store_runs_is_not_ours_to_end(one: tuple[Plan, Planned], tmp_path: Path) -> None:
    """A driver does not end runs of another store in the same database: it cannot see whether they are trained."""
    made, trial = one
    train(trial, until=3)
    theirs, ours = Mirror(made), tmp_path / "ours"
    with leased(trial.folder.path):
        theirs.sync()
        moved = replace(trial, folder=RunFolder(ours / trial.folder.path.name, trial.id))
        ours.mkdir()
        hidden = trial.folder.path.rename(tmp_path / "hidden")
        Mirror(Plan(made.sweeps, made.members, {trial.id: moved}), theirs.uri).sync(afresh=True)
        assert seen(theirs)[trial.id].info.status == "RUNNING"
        hidden.rename(trial.folder.path)


def test_a_database_may_be_named_with_options(done: Plan, empty_database: Path, tmp_path: Path) -> None:
    shutil.copy(empty_database, tmp_path)
    uri = f"sqlite:///{tmp_path / connection.DATABASE}?timeout=30"
    assert Mirror(done, uri).sync(last=True).sent == 5
    assert Mirror(done, uri).sync(last=True).sent == 0


def test_a_failure_is_told_with_its_reason_until_the_trial_goes_on(one: tuple[Plan, Planned]) -> None:
    made, trial = one
    store.write_failure(trial.folder, store.Failure("out of memory", False, 0, ["a line", "the last line"]))
    mirror = Mirror(made)
    mirror.sync(last=True)
    failed = seen(mirror)
    assert {run.info.status for run in failed.values()} == {"FAILED"}
    assert failed[trial.id].data.tags["fewbits.state"] == "failed"
    assert failed[trial.id].data.tags["fewbits.reason"] == "out of memory"
    assert "the last line" in failed[trial.id].data.tags["mlflow.note.content"]
    train(trial)
    (trial.folder.path / store.FAILURE).unlink()
    mirror.sync(last=True)
    run = seen(mirror)[trial.id]
    assert run.info.status == "FINISHED"
    assert "fewbits.reason" not in run.data.tags


def test_of_trials_in_the_same_place_the_newest_plans_is_current(one: tuple[Plan, Planned]) -> None:
    """If the code changes and changes back, only the trial of the newest plan is marked as current in MLflow."""
    made, trial = one
    train(trial)
    other = replace(trial, folder=copied(trial.folder, trial.folder.path.with_name("nemotron-other"), "f" * 64))
    (member,) = made.members
    changed = Plan(made.sweeps, (replace(member, id=other.id),), {other.id: other})
    for now, current in ((made, trial.id), (changed, other.id), (made, trial.id)):
        mirror = Mirror(now)
        mirror.sync(last=True)
        marked = {key for key, run in seen(mirror).items() if run.data.tags.get(comparison.CURRENT) == "yes"}
        assert marked == {current}


def test_two_drivers_that_tell_at_once_make_nothing_twice(done: Plan, empty_database: Path, tmp_path: Path) -> None:
    shutil.copy(empty_database, tmp_path)
    mirrors = [Mirror(done, f"sqlite:///{tmp_path / connection.DATABASE}") for _ in range(3)]
    together = threading.Barrier(len(mirrors))

    def tell(mirror: Mirror) -> None:
        together.wait()
        mirror.sync(afresh=mirror is mirrors[0], last=True)

    threads = [threading.Thread(target=tell, args=(mirror,)) for mirror in mirrors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    runs = seen(mirrors[0])
    assert len(runs) == 6
    assert all(steps(mirrors[0], runs[trial]) == list(range(STEPS)) for trial in done.trials)


def test_of_runs_made_by_two_stores_at_once_one_stays(one: tuple[Plan, Planned]) -> None:
    made, trial = one
    train(trial)
    mirror = Mirror(made)
    mirror.sync()
    client = connection.connect(mirror._runs, mirror.uri)
    first = seen(mirror)[trial.id]
    client.create_run(first.info.experiment_id, first.info.start_time + 1, first.data.tags)
    mirror.sync(afresh=True)
    assert seen(mirror)[trial.id].info.run_id == first.info.run_id


def test_mlflow_being_away_is_said_once_and_made_up_for(
    done: Plan, empty_database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "SHARE", 0)
    below = tmp_path / "file"
    below.write_text("")
    mirror = Mirror(done, f"sqlite:///{below / 'mlflow.db'}")
    with pytest.warns(RuntimeWarning, match="MLflow was not updated") as warned:
        first = mirror.sync()
    assert len(warned) == 1
    assert "\n" not in str(warned[0].message)
    assert (first.away, first.sent) == (True, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert mirror.sync().away
        below.unlink()
        below.mkdir()
        shutil.copy(empty_database, below / "mlflow.db")
        assert mirror.sync(last=True).sent == 5
    assert len(seen(mirror)) == 6


def test_a_damaged_table_is_named_and_the_other_trials_are_sent(
    done: Plan, empty_database: Path, tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = next(iter(done.trials.values())).folder.path.parent.parent
    shutil.copytree(where / "runs", tmp_path / "runs", ignore=shutil.ignore_patterns("mlflow.db", ".mlflow*"))
    shutil.copy(empty_database, tmp_path / "runs")
    tables = [tmp_path / "runs" / trial.folder.path.name / "metrics.parquet" for trial in done.trials.values()]
    content = tables[0].read_bytes()
    tables[0].write_bytes(content[: len(content) // 2])
    assert cli.main(["sync", *overrides(tmp_path, cache)]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("4 runs updated")
    assert printed.err.count("\n") == 1
    assert names(printed.err, tables[0].parent.name, str(tables[0]))
    tables[0].write_bytes(content)
    assert cli.main(["sync", *overrides(tmp_path, cache)]) == 0
    assert capsys.readouterr().out.startswith("5 runs updated")
    assert len(seen(Mirror(planned(tmp_path, cache)))) == 6


def test_fewbits_sync_says_how_many_and_where_to_look(
    done: Plan, mirrored: Mirror, capsys: pytest.CaptureFixture[str], cache: Path
) -> None:
    where = next(iter(done.trials.values())).folder.path.parent.parent
    before = everything(mirrored)
    assert cli.main(["sync", *overrides(where, cache)]) == 0
    first_line, *lines = capsys.readouterr().out.splitlines()
    assert first_line == f"5 runs updated in {mirrored.uri}"
    ((name, _),) = mirrored.sync().links
    (line,) = lines  # not a link, since no server answers at its address
    assert f"`fewbits ui --runs {where / 'runs'}`" in line
    assert name in line
    assert everything(mirrored) == before


AT_ONCE = 16 if DEEP else 6
MANY = """
import os, sys, warnings
warnings.simplefilter("error", RuntimeWarning)
from pathlib import Path
import mlflow, pandas
from fewbits.experiments.storage.run_folder import opened
from fewbits.experiments.tracking.connection import connect
from fewbits.experiments.tracking.tracker import Tracker
from fewbits.experiments.trial import Runtime
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


def test_processes_at_once_lose_no_metric(done: Plan, empty_database: Path, tmp_path: Path) -> None:
    """If several processes send trials to a new database at the same time, it has all their runs and metrics."""
    original = next(iter(done.trials.values())).folder
    named = ((tmp_path / "runs" / f"trial-{number:08x}", f"{number:064x}") for number in range(AT_ONCE))
    folders = [copied(original, path, trial).path for path, trial in named]
    environment = {key: value for key, value in os.environ.items() if key != "MLFLOW_TRACKING_URI"}
    arguments = ["-c", MANY, *map(str, [empty_database.parent, *folders])]
    ended = run_python(arguments, folder=tmp_path, environment=environment)
    assert (ended.returncode, ended.stderr) == (0, "")
    client = connection.connect(tmp_path / "runs", connection.tracking_uri(tmp_path / "runs"))
    study = client.get_experiment_by_name(tracking.EXPERIMENT)
    assert study is not None
    runs = client.search_runs([study.experiment_id])
    assert sorted(run.data.tags[mlflow_runs.TRIAL] for run in runs) == [f"{number:064x}" for number in range(AT_ONCE)]
    assert {run.info.status for run in runs} == {"FINISHED"}
    for run in runs:
        assert [point.step for point in client.get_metric_history(run.info.run_id, "loss")] == list(range(STEPS))
        assert run.data.metrics == runs[0].data.metrics
