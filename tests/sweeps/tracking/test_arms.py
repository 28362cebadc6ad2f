"""Test that MLflow shows a sweep's arms and trials, even if workers and drivers are killed or runs are deleted."""

import shutil
import statistics
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from fewbits import cli
from fewbits.experiments.storage.lease import leased
from fewbits.experiments.storage.run_folder import RunFolder
from fewbits.sweeps.planning import store
from fewbits.sweeps.planning.plan import Plan, Planned
from fewbits.sweeps.planning.stored_plans import save_plan
from fewbits.sweeps.tracking import connection
from fewbits.sweeps.tracking.mirror import Mirror
from fewbits.sweeps.tracking.runs import PARENT, SENT
from tests.messages import names
from tests.sweeps.tracking.tracked import ONE, STEPS, everything, overrides, planned, points, seen, train

ARM = "bf16 (smoke)"


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
    connection.connect(where, f"sqlite:///{where / connection.DATABASE}")
    return where / connection.DATABASE


@pytest.fixture
def uri(tmp_path: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URI of an empty database, which MLFLOW_TRACKING_URI names."""
    shutil.copy(empty_database, tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / connection.DATABASE}?timeout=30")
    return f"sqlite:///{tmp_path / connection.DATABASE}?timeout=30"


@pytest.fixture
def one(tmp_path: Path, cache: Path, uri: str) -> tuple[Plan, Planned]:
    made = planned(tmp_path, cache, ONE)
    (trial,) = made.trials.values()
    return made, trial


def test_arms_are_top_level_runs_with_means_of_their_seeds_and_trials_are_nested(done: Plan, uri: str) -> None:
    assert Mirror(done).sync(last=True)
    runs = seen(uri, done.store)
    arms = {key: run for key, run in runs.items() if PARENT not in run.data.tags}
    assert arms.keys() == {ARM, "mor threshold=0.03 (smoke)", "mor threshold=0.045 (smoke)"}
    assert {run.info.run_name for run in arms.values()} == arms.keys()
    assert len(runs) == 3 + 5
    arm = arms[ARM]
    assert (arm.info.status, arm.data.tags["fewbits.sweep"]) == ("FINISHED", "cost")
    assert arm.data.params == {"model": "nemotron-nano", "recipe": "bf16", "data": "synthetic", "arm": "bf16"}
    assert arms["mor threshold=0.03 (smoke)"].data.params["recipe.threshold"] == "0.03"
    folders = [done.trials[member.id].folder for member in done.members if member.cell.arm == "bf16"]
    tables = [pd.read_parquet(folder.path / "metrics.parquet").set_index("step") for folder in folders]
    for name in ("loss", "validation_loss", "ood_loss"):
        columns = pd.concat([table[name].dropna() for table in tables], axis=1)
        means = {int(step): pytest.approx(statistics.mean(values)) for step, *values in columns.itertuples()}
        deviations = {int(step): pytest.approx(statistics.stdev(values)) for step, *values in columns.itertuples()}
        assert points(uri, arm, f"loss/{name}") == means
        assert points(uri, arm, f"loss/{name}_sd") == deviations
    assert (arm.data.metrics["seeds"], arm.data.metrics["tokens"]) == (2, tables[0]["tokens"].iloc[-1])
    single = arms["mor threshold=0.03 (smoke)"].data.metrics  # has one seed
    assert single["seeds"] == 1
    assert "loss/loss_sd" not in single
    assert single["share_bf16"] + single["share_e4m3"] == pytest.approx(1)
    for member in done.members:
        cell = member.cell
        label = " ".join([cell.arm, *(f"{key.rpartition('.')[2]}={value}" for key, value in cell.axes)])
        parent = arms[f"{label} (smoke)"]
        child = runs[f"{parent.info.run_name}/{member.id}"]
        assert child.data.tags[PARENT] == parent.info.run_id
        assert child.data.params == parent.data.params | {"seed": str(member.cell.seed)}
        assert child.info.run_name == f"{parent.info.run_name.removesuffix(' (smoke)')}, seed {member.cell.seed}"
        assert sorted(points(uri, child)) == list(range(STEPS))


def test_sending_again_changes_nothing_and_deleted_runs_and_databases_are_made_again(
    done: Plan, uri: str, tmp_path: Path
) -> None:
    mirror = Mirror(done)
    assert mirror.sync()
    first, ids = everything(uri, done.store), {run.info.run_id for run in seen(uri, done.store).values()}
    assert mirror.sync()
    assert Mirror(done).sync(last=True)
    assert everything(uri, done.store) == first
    assert {run.info.run_id for run in seen(uri, done.store).values()} == ids
    client = connection.connect(done.store, uri)
    for run in list(seen(uri, done.store).values())[::2]:
        client.delete_run(run.info.run_id)
    assert Mirror(done).sync(last=True)
    assert everything(uri, done.store) == first
    (tmp_path / connection.DATABASE).unlink()  # while the driver, which has sent all before, still runs
    assert mirror.sync(last=True)
    assert everything(uri, done.store) == first


def test_what_a_killed_writer_left_is_completed(one: tuple[Plan, Planned], uri: str) -> None:
    """Check tags, parents and duplicates as they are if a driver is killed between two requests."""
    made, trial = one
    train(trial)
    Mirror(made).sync(last=True)
    before = everything(uri, made.store)
    client, runs = connection.connect(made.store, uri), seen(uri, made.store)
    child = runs[f"{ARM}/{trial.id}"]
    client.create_run(child.info.experiment_id, child.info.start_time + 1, child.data.tags)
    for run in runs.values():
        client.set_tag(run.info.run_id, SENT, "1 ")
        client.update_run(run.info.run_id, status="RUNNING")
    client.set_tag(child.info.run_id, PARENT, "of a deleted arm")
    Mirror(made).sync(last=True)
    assert everything(uri, made.store) == before
    last = seen(uri, made.store)
    assert last[f"{ARM}/{trial.id}"].info.run_id == child.info.run_id
    assert last[f"{ARM}/{trial.id}"].data.tags[PARENT] == last[ARM].info.run_id


def test_a_run_shows_whether_its_trial_is_trained_and_a_killed_one_continues(
    one: tuple[Plan, Planned], uri: str
) -> None:
    made, trial = one
    mirror, key = Mirror(made), f"{ARM}/{trial.id}"
    mirror.sync()
    assert seen(uri, made.store) == {}
    train(trial, until=3)
    with leased(trial.folder.path):
        mirror.sync()
        first = seen(uri, made.store)
        assert (first[key].info.status, first[ARM].info.status) == ("RUNNING", "RUNNING")
        assert sorted(points(uri, first[key])) == sorted(points(uri, first[ARM])) == [0, 1]
    Mirror(made).sync(last=True)
    assert seen(uri, made.store)[key].info.status == "KILLED"
    with leased(trial.folder.path):
        mirror.sync(last=True)
        assert seen(uri, made.store)[key].info.status == "RUNNING"
    train(trial)
    mirror.sync()
    last = seen(uri, made.store)
    assert last[key].info.run_id == first[key].info.run_id
    assert (last[key].info.status, last[ARM].info.status) == ("FINISHED", "FINISHED")
    assert sorted(points(uri, last[key])) == sorted(points(uri, last[ARM])) == list(range(STEPS))
    shutil.rmtree(trial.folder.path)
    mirror.sync()
    assert seen(uri, made.store)[key].info.status == "KILLED"


def test_seeds_of_two_commands_are_one_arm_and_an_edited_sweep_replaces_it(
    tmp_path: Path, cache: Path, uri: str
) -> None:
    halves = [planned(tmp_path, cache, f"seeds: [{seed}]{ONE}") for seed in (0, 1)]
    for half in halves:
        for trial in half.trials.values():
            train(trial)
    mirrors = [Mirror(half, [f"seeds=[{seed}]"]) for seed, half in enumerate(halves)]
    together = threading.Barrier(2)

    def send(mirror: Mirror) -> None:
        together.wait()
        mirror.sync()
        mirror.sync(last=True)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(send, mirrors))
    both = everything(uri, halves[0].store)
    assert len(both) == 3
    assert both[ARM][4]["seeds"][0][1] == 2
    mirrors[0].sync(last=True)
    assert everything(uri, halves[0].store) == both
    edited = planned(tmp_path, cache, f"overrides: [optimizer.lr=0.5]\n{ONE}")
    (trial,) = edited.trials.values()
    train(trial)
    Mirror(edited).sync(last=True)
    assert seen(uri, edited.store).keys() == {ARM, f"{ARM}/{trial.id}"}
    Mirror(edited, ["a.yaml", "optimizer.lr=0.5"]).sync(last=True)
    assert "bf16 (smoke, optimizer.lr=0.5)" in seen(uri, edited.store)


def test_failures_and_divergence_are_shown_with_their_reason(tmp_path: Path, cache: Path, uri: str) -> None:
    made = planned(tmp_path, cache, f"seeds: [0, 1]\noverrides: [optimizer.lr=1e30, optimizer.clip=null]{ONE}")
    fails, diverges = made.trials.values()
    store.write_failure(fails.folder, store.Failure("out of memory", False, 0, ["a line", "the last line"]))
    train(diverges)
    Mirror(made).sync(last=True)
    runs = seen(uri, made.store)
    assert {run.info.status for run in runs.values()} == {"FAILED"}
    assert "out of memory" in runs[f"{ARM}/{fails.id}"].data.tags["mlflow.note.content"]
    assert "the last line" in runs[f"{ARM}/{fails.id}"].data.tags["mlflow.note.content"]
    assert "diverged at step" in runs[f"{ARM}/{diverges.id}"].data.tags["mlflow.note.content"]
    assert all(text in runs[ARM].data.tags["mlflow.note.content"] for text in ("seed 0: out of", "seed 1: diverged"))
    assert runs[ARM].data.metrics["diverged"] == 1
    assert 0 in points(uri, runs[ARM])
    (fails.folder.path / store.FAILURE).unlink()
    Mirror(made).sync(last=True)
    assert "mlflow.note.content" not in seen(uri, made.store)[f"{ARM}/{fails.id}"].data.tags


def test_two_stores_and_two_users_leave_each_others_runs_alone(
    one: tuple[Plan, Planned], uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, trial = one
    train(trial)
    folder = RunFolder(tmp_path / "other" / trial.folder.path.name, trial.id)
    shutil.copytree(trial.folder.path, folder.path)
    other = Plan(made.sweeps, made.members, {trial.id: replace(trial, folder=folder)})
    for user, plan in (("alice", made), ("bob", made), ("alice", other)):
        monkeypatch.setenv("FEWBITS_USER", user)
        Mirror(plan).sync(last=True)
    client = connection.connect(made.store, uri)
    study = client.get_experiment_by_name("cost")
    assert study is not None
    runs = client.search_runs([study.experiment_id])
    assert len(runs) == 3 * 2
    for run in runs:
        client.update_run(run.info.run_id, status="RUNNING")
    monkeypatch.setenv("FEWBITS_USER", "bob")
    Mirror(made).sync(last=True)
    after = {run.info.run_id: run for run in client.search_runs([study.experiment_id])}
    assert after.keys() == {run.info.run_id for run in runs}
    ended = [run for run in after.values() if run.info.status == "FINISHED"]
    assert {run.data.tags["mlflow.user"] for run in ended} == {"bob"}
    assert len(ended) == 2


def test_fewbits_ui_sends_stored_plans_and_names_damaged_files(
    tmp_path: Path, cache: Path, uri: str, capsys: pytest.CaptureFixture[str]
) -> None:
    selection, made = overrides(tmp_path, cache, f"seeds: [0, 1]{ONE}"), planned(tmp_path, cache, f"seeds: [0, 1]{ONE}")
    save_plan(made, selection)
    for trial in made.trials.values():
        train(trial)
    table = next(iter(made.trials.values())).folder.path / "metrics.parquet"
    content = table.read_bytes()
    table.write_bytes(content[: len(content) // 2])
    command = ["ui", "--sync-only", "--runs", str(made.store)]
    assert cli.main(command) == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert names(lines[0], table.parent.name, str(table))
    assert lines[1].startswith("1 trial sent")
    table.write_bytes(content)
    for sent in ("1 trial sent", "0 trials sent"):
        assert cli.main(command) == 0
        assert capsys.readouterr().err.startswith(sent)
    (label,) = (key for key in seen(uri, made.store) if "/" not in key)
    assert seen(uri, made.store)[label].data.metrics["seeds"] == 2
    Mirror(made, selection).sync(last=True)  # the driver's arms have the same labels
    assert len(seen(uri, made.store)) == 3
