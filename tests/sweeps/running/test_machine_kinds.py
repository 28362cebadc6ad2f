"""Test, with a simulated backend, that all trials of a seed run on one kind of machine if possible."""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fewbits import cli
from fewbits.experiments.environment import processor_kind
from fewbits.sweeps.cluster.ray_machines import selector
from fewbits.sweeps.planning.plan import Plan, Planned
from fewbits.sweeps.planning.replacing import move_aside, reasons_to_rerun, require_kind
from fewbits.sweeps.planning.sweep import Resources
from fewbits.sweeps.running import driver, placement, store
from fewbits.sweeps.running.backend import Ended
from fewbits.sweeps.running.driver import Driver, Stage
from fewbits.sweeps.running.machine_kinds import Machine, alike, computed, describe, this_machine
from fewbits.sweeps.running.placement import Placement
from fewbits.sweeps.running.worker import Job, Outcome
from tests.messages import names, naming
from tests.sweeps.sweep_inputs import planned, tiny_file

ARMS = {
    "seeds": [0, 1],
    "arms": {
        "trunk": {"overrides": ["recipe=bf16"]},
        "branch": {"overrides": ["recipe=nvfp4"], "parent": "trunk", "at": 4},
        "scratch": {"overrides": ["recipe=nvfp4"]},
    },
}


def machine(kind: str, cpus: float = 1.0, torch: str = "2.13.0", **more: Any) -> Machine:
    return Machine(kind, None, torch, {"CPU": cpus}, id=f"id-{kind}", **more)


AVX, AMX = machine("amd-avx2"), machine("intel-amx")


class Machines:
    """A simulated backend with these machines: each trial ends one turn of the driver's loop after it starts.

    The run folder of an ended trial has a record of the kind that computed it. The backend runs one trial at a time on
    each kind. `started` lists pairs (trial id, kind); `killed` lists trial ids.
    """

    def __init__(self, *machines: Machine, alone: bool = False) -> None:
        self.there, self.alone = list(machines), alone
        self.started: list[tuple[str, str | None]] = []
        self.killed: list[str] = []
        self._jobs: list[tuple[Job, str | None]] = []

    def machines(self) -> list[Machine]:
        return self.there

    def require(self, demands: object, log: object) -> None: ...

    def room(self, resources: Resources, like: str | None = None) -> bool:
        return not any(kind == like for _, kind in self._jobs)

    def start(self, job: Job, resources: Resources, like: str | None = None) -> None:
        self.started.append((job.id, like))
        self._jobs.append((job, like))

    def wait(self, seconds: float) -> list[Ended]:
        time.sleep(0.01)
        there = {one.processor for one in self.there}
        done = [(job, kind) for job, kind in self._jobs if kind in there]
        self._jobs = [(job, kind) for job, kind in self._jobs if kind not in there and job.id not in self.killed]
        for job, kind in done:
            leave(job, str(kind))
        return [Ended(job.id, Outcome("over", speed=1.0)) for job, _ in done]

    def kill(self, trial: str) -> None:
        self.killed.append(trial)

    def close(self) -> None: ...


def leave(job: Job, *kinds: str, torch: str = "2.13.0") -> None:
    """Write the run folder of a finished trial whose steps were computed on these kinds, one after the other.

    torch: the version of torch that computed all steps.
    """
    for step in job.runtime.keep_steps:
        (job.folder.kept / f"step-{step:08d}").mkdir(parents=True, exist_ok=True)
    job.path.mkdir(parents=True, exist_ok=True)
    environments = [{"kind": kind, "backend": "cpu", "torch": torch} for kind in kinds]
    segments = [{"step": step, "environment": one} for step, one in enumerate(environments)]
    (job.path / "provenance.json").write_text(json.dumps({"id": job.id, "segments": segments}))
    result = {"id": job.id, "status": "done", "step": job.trial.training.steps}
    (job.path / "result.json").write_text(json.dumps(result))


@pytest.fixture
def plan(cache: Path, tmp_path: Path) -> Plan:
    return planned(tiny_file(tmp_path, cache, ARMS, "arms"), f"runtime.runs={tmp_path / 'runs'}")


def trials(plan: Plan, seed: int) -> dict[str, Planned]:
    """Return the trials of this seed, by arm."""
    return {str(m.cell.arm): plan.trials[m.id] for m in plan.members if m.cell.seed == seed}


def kinds(plan: Plan) -> Mapping[int, set[str | None]]:
    """Return seed → the set of kinds that computed the first steps of its trials."""
    seeds = {member.cell.seed for member in plan.members}
    return {seed: {computed(one.folder)[0][0] for one in trials(plan, seed).values()} for seed in seeds}


def run(plan: Plan, backend: Machines, like: str | None = None) -> list[str]:
    """Run the plan on this backend; return the lines logged by `Placement`, which chooses kinds of machines for seeds.

    like: the value of `--like`.
    """
    logged: list[str] = []
    Driver(plan, backend, placement=Placement(plan, backend, like, logged.append)).run()
    return logged


# ------------------------------------------------------------------------------------------------ where trials run


def test_a_seed_stays_on_one_kind_and_seeds_are_spread(plan: Plan) -> None:
    logged = run(plan, Machines(AVX, AMX))
    assert sorted(str(*one) for one in kinds(plan).values()) == ["amd-avx2", "intel-amx"]
    (line,) = logged
    assert names(line, "amd-avx2 (1 ", "intel-amx (1 ")


def test_with_one_kind_nothing_is_said(plan: Plan) -> None:
    assert run(plan, Machines(AVX, machine("amd-avx2"))) == []
    assert kinds(plan) == {0: {"amd-avx2"}, 1: {"amd-avx2"}}


def test_a_backend_that_knows_no_kind_runs_trials_anywhere(plan: Plan) -> None:
    backend = Machines()
    backend.wait = lambda seconds: []  # type: ignore[method-assign]
    one = Driver(plan, backend, placement=Placement(plan, backend))
    one._start_ready()
    assert [like for _, like in backend.started] == [None]


def test_a_larger_kind_gets_more_seeds(cache: Path, tmp_path: Path) -> None:
    file = tiny_file(tmp_path, cache, {"seeds": [0, 1, 2, 3]}, "seeds")
    plan = planned(file, f"runtime.runs={tmp_path / 'runs'}")
    run(plan, Machines(machine("amd-avx2", cpus=3), AMX))
    assert sorted(str(*kinds) for kinds in kinds(plan).values()) == ["amd-avx2"] * 3 + ["intel-amx"]


def test_a_seed_goes_on_where_its_trunk_was_computed(plan: Plan) -> None:
    first = trials(plan, 0)
    leave(driver.job(first["scratch"]), "amd-avx2")
    leave(driver.job(first["trunk"]), "intel-amx")
    run(plan, Machines(AVX, AMX))
    assert computed(first["branch"].folder)[0][0] == "intel-amx"
    assert kinds(plan)[1] == {"amd-avx2"}, "seed 1 runs on the kind that has fewer trials to run"


def test_a_kind_that_is_gone_is_waited_for_and_then_replaced(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "WAIT", 0.2)
    leave(driver.job(trials(plan, 0)["trunk"]), "intel-amx")
    began = time.monotonic()
    logged = run(plan, Machines(AVX))
    assert time.monotonic() - began >= 0.2
    assert kinds(plan) == {0: {"intel-amx", "amd-avx2"}, 1: {"amd-avx2"}}
    assert [line.partition(":")[0] for line in logged] == ["no machine has the kind intel-amx now", "seed 0"]
    assert "run on amd-avx2" in logged[-1]


def test_one_machine_does_not_wait_for_another_kind(plan: Plan) -> None:
    leave(driver.job(trials(plan, 0)["trunk"]), "intel-amx")
    logged = run(plan, Machines(AVX, alone=True))
    assert len(logged) == 1
    assert kinds(plan)[0] == {"intel-amx", "amd-avx2"}


def test_a_kind_that_comes_back_in_time_is_used(plan: Plan) -> None:
    leave(driver.job(trials(plan, 0)["trunk"]), "intel-amx")
    backend = Machines(AVX)
    one = Driver(plan, backend, placement=Placement(plan, backend))
    one._start_ready()
    assert {plan.trials[key].trial.seed for key, _ in backend.started} == {1}
    backend.there.append(AMX)
    one.run()
    assert kinds(plan) == {0: {"intel-amx"}, 1: {"amd-avx2"}}


def test_trials_queued_for_a_kind_that_is_gone_are_taken_back(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "WAIT", 0.05)
    monkeypatch.setattr(driver, "REST", 0.05)
    backend = Machines(AVX, AMX)
    one = Driver(plan, backend, placement=Placement(plan, backend))
    one._start_ready()
    assert {kind for _, kind in backend.started} == {"amd-avx2", "intel-amx"}
    backend.there.remove(AMX)
    one.run()
    assert len(backend.killed) == 1
    assert len(one.of(Stage.OVER)) == len(plan.trials)
    assert kinds(plan) == {0: {"amd-avx2"}, 1: {"amd-avx2"}}


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (({}, {}), {"ray.io/node-id": "in(id-intel-amx)"}),
        (({"ray.io/node-group": "small"}, {"ray.io/node-group": "large"}), {"ray.io/node-group": "in(large)"}),
        (({"ray.io/node-group": "all"}, {"ray.io/node-group": "all"}), {"ray.io/node-id": "in(id-intel-amx)"}),
    ],
)
def test_ray_finds_a_kind_by_a_label_of_its_own_else_by_its_nodes(labels: Any, expected: dict[str, str]) -> None:
    there = [machine(kind, labels=own) for kind, own in zip(("amd-avx2", "intel-amx"), labels, strict=True)]
    assert selector(there, "intel-amx", Resources(cpus=1, gpus=0)) == expected
    assert selector(there[1:], "intel-amx", Resources(cpus=1, gpus=0)) is None, "all machines are of that kind"


def test_a_trial_on_gpus_has_the_kind_of_the_gpu() -> None:
    one = Machine("amd-avx2", "nvidia-h100", "2.13.0", {"CPU": 8, "GPU": 1})
    assert one.kind(Resources(cpus=1, gpus=1)) == "nvidia-h100"
    assert one.kind(Resources(cpus=1, gpus=0)) == "amd-avx2"


# ------------------------------------------------------------------------------------------------ runs that are alike


def test_runs_are_alike_if_kind_backend_and_torch_are() -> None:
    avx, amx = (("amd-avx2", "cpu", "2.13", None),), (("intel-amx", "cpu", "2.13", None),)
    newer, limited = (("amd-avx2", "cpu", "2.15", None),), (("amd-avx2", "cpu", "2.13", "MKL_CBWR=AVX"),)
    assert alike(avx, avx)
    assert alike((), ()), "both unknown"
    assert not any(alike(avx, other) for other in (amx, newer, limited, ()))
    assert not alike(avx + amx, avx + amx), "the runs may have changed machines at different steps"
    assert describe(avx, [amx]) == "amd-avx2"
    assert describe(avx, [newer]) == "amd-avx2 (torch 2.13)"
    assert describe(limited, [avx]) == "amd-avx2 (limits MKL_CBWR=AVX)"
    assert describe(avx + amx) == "amd-avx2, then intel-amx"


# ------------------------------------------------------------------------------------------------ --like


def test_unlike_trials_and_the_branches_of_replaced_trunks_run_again(plan: Plan) -> None:
    first, second = trials(plan, 0), trials(plan, 1)
    for arm, kind in {"trunk": "intel-amx", "branch": "amd-avx2", "scratch": "amd-avx2"}.items():
        leave(driver.job(first[arm]), kind)
    leave(driver.job(second["trunk"]), "amd-avx2", torch="2.12.0")
    leave(driver.job(second["scratch"]), "amd-avx2", "intel-amx")
    again = reasons_to_rerun(plan, "amd-avx2", AVX)
    assert again == {
        first["trunk"].id: "computed on intel-amx",
        first["branch"].id: f"its parent {first['trunk'].folder.path.name} runs again",
        second["trunk"].id: "computed on amd-avx2 (torch 2.12.0)",
        second["scratch"].id: "computed on amd-avx2, then intel-amx",
    }
    moved = move_aside(plan, again)
    assert {path.parent.name for path in moved} == {"replaced"}
    assert all((path / "result.json").is_file() for path in moved)
    run(plan, Machines(AVX, AMX), like="amd-avx2")
    assert kinds(plan) == {0: {"amd-avx2"}, 1: {"amd-avx2"}}
    assert reasons_to_rerun(plan, "amd-avx2", AVX) == {}
    leave(driver.job(first["scratch"]), "intel-amx")
    assert move_aside(plan, {first["scratch"].id: ""})[0].name == f"{first['scratch'].folder.path.name}.1"
    leave(driver.job(first["scratch"]), "intel-amx")
    assert move_aside(plan, {first["scratch"].id: ""})[0].name == f"{first['scratch'].folder.path.name}.2"


def test_the_kinds_of_a_cluster_are_named_where_none_is_the_one_asked_for(plan: Plan) -> None:
    with pytest.raises(ValueError, match=naming("--like amd-sse", "amd-avx2, intel-amx")):
        require_kind(plan, "amd-sse", [AMX, AVX])


def test_a_trial_of_an_unknown_kind_runs_again(plan: Plan) -> None:
    one = trials(plan, 0)["scratch"]
    leave(driver.job(one))
    assert reasons_to_rerun(plan, "amd-avx2", AVX) == {one.id: "computed on an unknown kind"}


def test_a_trial_that_is_being_trained_is_not_moved(plan: Plan) -> None:
    from fewbits.experiments.storage import lease

    one = trials(plan, 0)["scratch"]
    leave(driver.job(one), "intel-amx")
    with lease.leased(one.folder.path), pytest.raises(ValueError, match=naming(os.getpid())):
        move_aside(plan, {one.id: "computed on intel-amx"})
    assert store.state(one.folder) in store.OVER


def test_a_kind_that_this_machine_has_not_is_one_line_and_moves_nothing(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["sweep", str(tmp_path / "arms.yaml"), "--runs", str(tmp_path / "runs"), "--like", "intel-amx2"]
    leave(driver.job(trials(plan, 0)["scratch"]), "amd-none")
    for more in ([], ["--backend", "local"], ["--dry-run"]):
        assert cli.main([*arguments, *more]) == 2
        shown = capsys.readouterr().err
        assert shown.count("\n") == 1
        assert names(shown, "--like intel-amx2", processor_kind())
    assert not (tmp_path / "runs" / "replaced").exists()


def test_a_dry_run_says_what_would_run_again(plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = this_machine()
    for arm, kind in {"trunk": own.processor, "scratch": "amd-none"}.items():
        leave(driver.job(trials(plan, 0)[arm]), kind, torch=own.torch)
    arguments = ["sweep", str(tmp_path / "arms.yaml"), "--runs", str(tmp_path / "runs"), "--dry-run"]
    assert cli.main([*arguments, "--like", own.processor]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "runs again" in line]
    assert len(lines) == 1
    assert lines[0].endswith("done, runs again: computed on amd-none")
    assert cli.main(arguments) == 0
    assert "runs again" not in capsys.readouterr().out


def test_status_has_a_column_of_kinds_where_they_differ(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["status", str(tmp_path / "arms.yaml"), "--runs", str(tmp_path / "runs")]
    leave(driver.job(trials(plan, 0)["trunk"]), "amd-avx2")
    assert cli.main(arguments) == 0
    assert "amd-avx2" not in capsys.readouterr().out
    leave(driver.job(trials(plan, 0)["scratch"]), "intel-amx", "amd-avx2")
    assert cli.main(arguments) == 0
    assert "intel-amx, then amd-avx2" in capsys.readouterr().out
    assert cli.main([*arguments, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["place"]["arm"]: row["kind"] for row in rows if row["place"]["seed"] == "0"} == {
        "trunk": "amd-avx2",
        "branch": None,
        "scratch": "intel-amx, then amd-avx2",
    }
