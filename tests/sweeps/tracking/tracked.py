"""Make tiny sweeps for tests of MLflow, and read what MLflow has of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fewbits.experiments.training import run as run_trial
from fewbits.sweeps.planning.plan import Plan, Planned, plan
from fewbits.sweeps.planning.studies import load_sweeps
from fewbits.sweeps.tracking import connection
from fewbits.sweeps.tracking.runs import ARM, KIND, TRIAL, search
from tests.experiments.trial_inputs import TINY, Interrupted, Reporter

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


def planned(where: Path, cache: Path, sweep: str = SWEEP, *more: str) -> Plan:
    return plan(*load_sweeps([*overrides(where, cache, sweep), *more]))


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

    def say(progress: Any) -> None:
        if progress.step == until < STEPS:
            raise Interrupted

    try:
        assert run_trial(trial.trial, trial.runtime, Reporter(say))[0].id == trial.id
    except Interrupted:
        assert until < STEPS


def seen(uri: str, store: Path, study: str = "cost") -> dict[str, Any]:
    """Return the runs of a store in MLflow: arms by their label, trials by `LABEL/ID`, others by their kind."""
    client, found = connection.connect(store, uri), dict[str, Any]()
    experiment = client.get_experiment_by_name(study)
    for run in search(client, experiment.experiment_id, connection.owner_of(store)) if experiment else ():
        tags = run.data.tags
        key = "/".join(filter(None, [tags.get(ARM, tags[KIND]), tags.get(TRIAL, "")]))
        assert key not in found, "a run is there twice"
        found[key] = run
    return found


def points(uri: str, run: Any, key: str = "loss/loss") -> dict[int, float]:
    """Return the values of a metric by step, each of which MLflow has once."""
    import mlflow

    history = mlflow.MlflowClient(tracking_uri=uri).get_metric_history(run.info.run_id, key)
    assert len({point.step for point in history}) == len(history)
    return {point.step: point.value for point in history}


def everything(uri: str, store: Path, study: str = "cost") -> dict[str, Any]:
    """Return all contents of a store's runs in MLflow, except values that MLflow generates, by the keys of `seen`."""
    client, found = connection.connect(store, uri), dict[str, Any]()
    for key, run in seen(uri, store, study).items():
        metrics = {
            name: sorted((p.step, p.value, p.timestamp) for p in client.get_metric_history(run.info.run_id, name))
            for name in run.data.metrics
        }
        tags = {name: value for name, value in run.data.tags.items() if name != "mlflow.parentRunId"}
        artifacts = [artifact.path for artifact in client.list_artifacts(run.info.run_id)]
        found[key] = (run.info.run_name, run.info.status, run.data.params, tags, metrics, artifacts)
    return found
