"""Test several users and stores with one MLflow: commands change only runs of their own user and store."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fewbits.experiments.storage.run_folder import opened
from fewbits.experiments.tracking import connection, mlflow_runs
from fewbits.experiments.tracking import tracker as tracking
from fewbits.experiments.tracking.owner import MLFLOW_USER, STORE, USER, Owner, owner_of, store_id
from fewbits.experiments.tracking.tracker import Tracker
from fewbits.experiments.trial import Runtime
from fewbits.sweeps.planning.plan import Plan
from fewbits.sweeps.tracking import comparison
from fewbits.sweeps.tracking.mlflow_view import PARENT, Mirror
from fewbits.sweeps.tracking.sent import CACHE
from tests.sweeps.sweep_inputs import started
from tests.sweeps.tracking.test_mlflow_view import ONE, overrides, planned, train


@dataclass(frozen=True)
class Stores:
    """Two stores, each with the same trial: the same sweep, id and name of the run folder."""

    ours: Path
    theirs: Path
    cache: Path

    def plan(self, store: Path) -> Plan:
        return planned(store, self.cache, ONE)

    def owner(self, store: Path, user: str) -> Owner:
        return Owner(store_id(store / "runs"), user)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Stores:
    made = Stores(tmp_path_factory.mktemp("ours"), tmp_path_factory.mktemp("theirs"), cache)
    (trial,) = made.plan(made.ours).trials.values()
    train(trial)
    (copied,) = made.plan(made.theirs).trials.values()
    shutil.copytree(trial.folder.path, copied.folder.path)
    assert trial.id == copied.id
    return made


@pytest.fixture(scope="module", params=["database", "server"])
def uri(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the URI of an MLflow that the tests share: an SQLite database, or a server."""
    if request.param == "server":
        return str(request.getfixturevalue("shared_server"))
    where = tmp_path_factory.mktemp("mlflow")
    connection.connect(where, f"sqlite:///{where / 'shared.db'}")
    return f"sqlite:///{where / 'shared.db'}"


def all_runs(uri: str, where: Path) -> dict[str, Any]:
    """Return run id → (status, lifecycle stage, tags, parameters, metrics) of all runs in MLflow, also deleted ones."""
    client = connection.connect(where, uri)
    return {
        run.info.run_id: (run.info.status, run.info.lifecycle_stage, run.data.tags, run.data.params, run.data.metrics)
        for study in client.search_experiments()
        for run in client.search_runs([study.experiment_id], run_view_type=3)
    }


def views(uri: str, where: Path) -> set[str]:
    """Return the names of the tags that store comparison views, over all experiments."""
    studies = connection.connect(where, uri).search_experiments()
    return {tag for study in studies for tag in study.tags if tag.startswith(comparison.TAG)}


def of(found: dict[str, Any], owner: Owner) -> dict[str, Any]:
    return {key: run for key, run in found.items() if owner.owns(run[2])}


def test_owners_that_sync_at_once_have_runs_of_their_own_and_leave_others_alone(
    uri: str, stores: Stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [(stores.ours, "alice"), (stores.ours, "bob"), (stores.theirs, "alice")]
    of_others, views_of_others = all_runs(uri, tmp_path), views(uri, tmp_path)
    commands = [
        started(
            tmp_path / str(number),
            "sync",
            *overrides(store, stores.cache, ONE),
            environment={"MLFLOW_TRACKING_URI": uri, "FEWBITS_USER": user},
        )
        for number, (store, user) in enumerate(cases)
    ]
    for command in commands:
        assert command.end() == 0, command.printed
    owners = [stores.owner(store, user) for store, user in cases]
    found = {key: run for key, run in all_runs(uri, tmp_path).items() if key not in of_others}
    assert len(found) == 2 * len(cases)
    for owner in owners:
        runs = of(found, owner)
        ((parent, of_sweep),) = ((key, run) for key, run in runs.items() if mlflow_runs.TRIAL not in run[2])
        ((_, of_trial),) = ((key, run) for key, run in runs.items() if mlflow_runs.TRIAL in run[2])
        assert of_trial[2][PARENT] == parent
        assert {run[2][MLFLOW_USER] for run in runs.values()} == {owner.user}
        assert (of_sweep[0], of_trial[0]) == ("FINISHED", "FINISHED")
        assert of_trial[4]["loss"] > 0
    assert len(views(uri, tmp_path) - views_of_others) == len(cases)  # each owner has a view of its own runs

    # Set all runs to RUNNING, as if all drivers had been killed. Then let one owner, whose cache file is missing,
    # update MLflow: only this owner's runs may change.
    client = connection.connect(tmp_path, uri)
    for key in found:
        client.update_run(key, status="RUNNING")
    before = all_runs(uri, tmp_path)
    (stores.ours / "runs" / CACHE).unlink()
    monkeypatch.setenv("FEWBITS_USER", "alice")
    assert Mirror(stores.plan(stores.ours), uri).sync(afresh=True).sent == 1
    after = all_runs(uri, tmp_path)
    assert {run[0] for run in of(after, owners[0]).values()} == {"FINISHED"}
    for owner in owners[1:]:
        assert of(after, owner) == of(before, owner)
    assert len(after) == len(before)


def test_notes_of_two_users_lie_side_by_side(stores: Stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    for user in ("alice", "bob"):
        monkeypatch.setenv("FEWBITS_USER", user)
        assert Mirror(stores.plan(stores.ours), uri).sync(last=True).sent == 1
    for user in ("alice", "bob"):
        monkeypatch.setenv("FEWBITS_USER", user)
        assert Mirror(stores.plan(stores.ours), uri).sync(last=True).sent == 0
    assert len(all_runs(uri, tmp_path)) == 4


def test_only_ones_own_killed_trials_are_reaped(
    stores: Stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`reap`, which ends MLflow runs of killed trials, leaves runs of other users and stores unchanged.

    The runs are those of `fewbits train`: of two users of one store, and of another store with the same trial.
    """
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    client, owners = connection.connect(tmp_path, uri), []
    for store, user in ((stores.ours, "alice"), (stores.ours, "bob"), (stores.theirs, "alice")):
        monkeypatch.setenv("FEWBITS_USER", user)
        (trial,) = stores.plan(store).trials.values()
        Tracker(Runtime(tracking="mlflow")).saved(opened(trial.folder.path))
        owners.append(owner_of(store / "runs"))
        provenance = trial.folder.path / "provenance.json"
        provenance.write_text(json.dumps({**json.loads(provenance.read_text()), "process": 1 << 30}))
    before = all_runs(uri, tmp_path)
    assert len(before) == 3
    for key in before:
        client.update_run(key, status="RUNNING")
    monkeypatch.setenv("FEWBITS_USER", "bob")
    assert tracking.reap(client, stores.ours / "runs") == 1
    after = all_runs(uri, tmp_path)
    assert [run[0] for owner in owners for run in of(after, owner).values()] == ["RUNNING", "FINISHED", "RUNNING"]


def as_before_owners(client: Any, uri: str, where: Path) -> None:
    """Delete the tags of owners, which earlier versions of fewbits did not write, from all runs."""
    for key, run in all_runs(uri, where).items():
        for tag in (STORE, USER, MLFLOW_USER):
            if tag in run[2]:
                client.delete_tag(key, tag)


def test_runs_without_an_owner_are_adopted_by_the_store_that_has_their_folder(
    stores: Stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("FEWBITS_USER", "alice")
    (trial,) = stores.plan(stores.ours).trials.values()
    for store in (stores.ours, stores.theirs):
        Mirror(stores.plan(store), uri).sync(last=True)
    Tracker(Runtime(tracking="mlflow")).saved(opened(trial.folder.path))
    client = connection.connect(tmp_path, uri)
    as_before_owners(client, uri, tmp_path)
    before = all_runs(uri, tmp_path)
    assert len(before) == 5
    (stores.ours / "runs" / CACHE).unlink()
    Mirror(stores.plan(stores.ours), uri).sync(afresh=True)
    Tracker(Runtime(tracking="mlflow")).saved(opened(trial.folder.path))
    after = all_runs(uri, tmp_path)
    assert after.keys() == before.keys()
    adopted = of(after, stores.owner(stores.ours, "alice"))
    assert len(adopted) == 3  # the sweep's run, its trial's run, and the run of `fewbits train`
    assert {key: run for key, run in after.items() if key not in adopted} == {
        key: run for key, run in before.items() if key not in adopted
    }


def test_a_parent_with_children_of_another_store_is_not_adopted(
    stores: Stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store does not adopt a parent run that also has children of another store.

    An earlier version of fewbits created one such parent run for the same sweep of all stores.
    """
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.setenv("FEWBITS_USER", "alice")
    for store in (stores.ours, stores.theirs):
        Mirror(stores.plan(store), uri).sync(last=True)
    client = connection.connect(tmp_path, uri)
    ours, theirs = (of(all_runs(uri, tmp_path), stores.owner(one, "alice")) for one in (stores.ours, stores.theirs))
    (shared,) = (key for key, run in theirs.items() if mlflow_runs.TRIAL not in run[2])
    ((parent, child),) = ((run[2][PARENT], key) for key, run in ours.items() if mlflow_runs.TRIAL in run[2])
    client.set_tag(child, PARENT, shared)
    as_before_owners(client, uri, tmp_path)
    client.delete_run(parent)
    before = all_runs(uri, tmp_path)
    (stores.ours / "runs" / CACHE).unlink()
    Mirror(stores.plan(stores.ours), uri).sync(afresh=True)
    after = all_runs(uri, tmp_path)
    assert {key: after[key] for key in theirs} == {key: before[key] for key in theirs}
    (made,) = after.keys() - before.keys()
    assert after[child][2][PARENT] == made
