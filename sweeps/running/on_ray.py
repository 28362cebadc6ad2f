"""Run trials as plain Ray tasks, either on this machine, with a Ray that fewbits starts, or on an existing cluster.

A task is one trial, or one rank of it. The ranks of a trial share a placement group. They find each other through a TCP
store, which an actor serves on the node of rank 0 as long as the trial runs, so that no other program can take the
port. Ray retries nothing, since only the driver knows whether another attempt makes sense. If one rank fails or its
node is lost, all ranks of the trial end.

On a cluster, every ready trial is started as a task, up to --parallel, so that an autoscaler adds nodes for waiting
tasks. A trial that no node can hold waits too, since such a node may join; after WAIT seconds, a warning says so.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fewbits.common.process import extras
from fewbits.common.wording import plural
from fewbits.sweeps.cluster.access import check_reachable
from fewbits.sweeps.planning.plan import Planned
from fewbits.sweeps.planning.store import plain
from fewbits.sweeps.planning.sweep import Resources
from fewbits.sweeps.running.driver import Ended, Job, Outcome
from fewbits.sweeps.running.local import (
    amounts,
    bundle,
    bundles_that_fit,
    meeting_place,
    rank_environments,
    require_here,
)
from fewbits.sweeps.running.worker import work

STARTS = 3  # attempts to start Ray on this machine: Ray's limit of 30 s for an attempt is short on a busy machine
QUEUED = 2  # on this machine: the number of trials that wait in Ray, so that they start as soon as others end
LEADER = 5.0  # seconds for which the driver waits for rank 0's outcome after another rank has failed
WAIT = 60.0  # seconds after which a warning names the trials that no node of the cluster can hold
SHOWN = 3  # the largest number of trials that this warning names
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_DEDUP_LOGS": "0"}


@dataclass
class _Running:
    name: str  # of the run folder
    resources: Resources
    tasks: list[Any]  # Ray's references to the tasks, one for each rank, rank 0 first
    since: float  # when the tasks were submitted, by time.monotonic()
    group: Any = None  # the placement group; None: one rank
    meeting: Any = None  # the actor that serves the ranks' TCP store; it ends when this reference is dropped


class OnRay:
    """The backend that runs trials as Ray tasks."""

    def __init__(
        self, address: str | None = None, parallel: int | None = None, variables: Mapping[str, str] | None = None
    ) -> None:
        """Connect to a Ray cluster, or start Ray on this machine.

        address: the cluster's address; None: the address in RAY_ADDRESS or, without it, start Ray on this machine.
        parallel: the largest number of trials at a time, or None. variables: those of a cluster's workers.
        """
        os.environ.update({name: value for name, value in _QUIET.items() if name not in os.environ})
        with extras():
            import ray
        self._ray = ray
        address = address or os.environ.get("RAY_ADDRESS") or None
        self._alone = address is None  # Ray is started on this machine only, so no other machine can join
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "namespace": "fewbits"}
        if address is None:
            options |= {"include_dashboard": False, "num_cpus": len(os.sched_getaffinity(0))}
            problem = f"Ray did not start on this machine; without Ray: {_local()}"
        else:
            check_reachable(address)
            options |= {"runtime_env": {"env_vars": dict(variables)}} if variables else {}
            problem = f"cannot connect to Ray at {address}, which --address or RAY_ADDRESS names"
        try:
            _start(lambda: ray.init(address, **options))
        except Exception as error:  # Ray raises errors of many types
            raise ValueError(f"{problem}: {_one_line(error)}") from error
        # Ray prints a paragraph on stdout for each worker that dies. It is discarded, since the driver reports the
        # death in one line on stderr.
        self._silenced = contextlib.ExitStack()
        null = self._silenced.enter_context(open(os.devnull, "w"))  # noqa: SIM115, closed with the stack
        self._silenced.enter_context(contextlib.redirect_stdout(null))
        self._parallel = parallel
        self._running: dict[str, _Running] = {}
        self._named: set[str] = set()  # ids of trials that a warning has named since no node can hold them

    def require(self, trials: Sequence[Planned]) -> None:
        if self._alone:
            (machine,) = self._nodes()
            for planned in trials:
                require_here(planned.folder.path.name, planned.resources, machine)

    def _nodes(self) -> list[Mapping[str, float]]:
        return [node["Resources"] for node in self._ray.nodes() if node["Alive"]]

    def room(self, resources: Resources) -> bool:
        if self._parallel is not None:
            return len(self._running) < self._parallel
        if not self._alone:
            return True
        (machine,) = self._nodes()
        wanted = bundle(resources)
        at_once = bundles_that_fit(machine, wanted) // resources.ranks if wanted else 1.0
        return len(self._running) < at_once + QUEUED

    def start(self, job: Job, resources: Resources) -> None:
        running = self._running[job.id] = _Running(job.path.name, resources, [], time.monotonic())
        options: dict[str, Any] = {"num_cpus": resources.cpus, "num_gpus": resources.gpus, "max_retries": 0}
        if resources.ranks == 1:
            running.tasks.append(self._ray.remote(work).options(name=running.name, **options).remote(job))
            return
        from ray.util.placement_group import placement_group

        running.group = placement_group([bundle(resources)] * resources.ranks, strategy="PACK")
        in_group = _in_group(running.group, 0)
        running.meeting = self._ray.remote(num_cpus=0, scheduling_strategy=in_group)(_Meeting).remote()
        place = running.meeting.place.remote()
        for rank in range(resources.ranks):
            of_rank = {"name": f"{running.name} rank {rank}", "scheduling_strategy": _in_group(running.group, rank)}
            task = self._ray.remote(_rank).options(**options, **of_rank)
            running.tasks.append(task.remote(job, place, rank, resources.ranks))

    def wait(self, seconds: float) -> list[Ended]:
        self._name_waiting()
        owner = {task: trial for trial, running in self._running.items() for task in running.tasks}
        if not owner:
            time.sleep(seconds)
            return []
        ready, _ = self._ray.wait(list(owner), num_returns=1, timeout=seconds)
        if ready:
            ready, _ = self._ray.wait(list(owner), num_returns=len(owner), timeout=0)
        ends = []
        for trial in dict.fromkeys(owner[task] for task in ready):
            running = self._running[trial]
            if (ended := self._read(trial, running, [task for task in running.tasks if task in ready])) is not None:
                del self._running[trial]
                ends.append(ended)
        return ends

    def _name_waiting(self) -> None:
        """Warn once about trials that no node of the cluster can hold, WAIT seconds after the first was submitted."""
        before = time.monotonic() - WAIT
        late = {key: one for key, one in self._running.items() if key not in self._named}
        if not any(one.since < before for one in late.values()):
            return
        self._named |= late.keys()
        nodes, waiting = self._nodes(), defaultdict[str, list[str]](list)
        for running in late.values():
            wanted, ranks = bundle(running.resources), running.resources.ranks
            if sum(bundles_that_fit(node, wanted) for node in nodes) < ranks:
                waiting[f"{ranks} × ({amounts(wanted)})" if ranks > 1 else amounts(wanted)].append(running.name)
        for wanted_text, names in waiting.items():
            shown = ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")
            verb = "waits" if len(names) == 1 else "wait"
            text = f"{verb} for {wanted_text} each: no node of the cluster has them ({shown})"
            warnings.warn(f"{plural(len(names), 'trial')} {text}", stacklevel=2)

    def _read(self, trial: str, running: _Running, done: list[Any]) -> Ended | None:
        """Return how a trial ended, or None if it still runs: if rank 0 has not ended and no other rank has failed.

        Free what the ended trial still has. done: those of its tasks that have ended.
        """
        outcomes: dict[Any, Outcome] = {}
        reason = ""
        for task in done:
            try:
                outcomes[task] = self._ray.get(task)
            except Exception as error:  # `get` raises the error of the task, its worker or its node, of any type
                reason = f"{type(error).__name__}: {_one_line(error)}"
        leader = outcomes.get(running.tasks[0]) or (self._late_outcome(running.tasks[0]) if reason else None)
        if leader is None and not reason:
            return None
        if leader is None or leader.kind != "over":
            self._end(running)
        if running.group is not None:
            from ray.util.placement_group import remove_placement_group

            remove_placement_group(running.group)
        return Ended(trial, leader, "" if leader else reason)

    def _late_outcome(self, leader: Any) -> Outcome | None:
        """Return rank 0's outcome after a rank has failed; None if rank 0 fails or still runs after LEADER seconds.

        If a trial stops at a checkpoint, rank 0 ends first, and other ranks fail since they lose the connection to it.
        """
        with contextlib.suppress(Exception):
            outcome: Outcome = self._ray.get(leader, timeout=LEADER)
            if outcome.kind != "failed":
                return outcome
        return None

    def _end(self, running: _Running) -> None:
        """Cancel the trial's unfinished tasks, and no others: Ray (2.60) may abort if told to cancel an ended task."""
        _, unfinished = self._ray.wait(running.tasks, num_returns=len(running.tasks), timeout=0)
        for task in unfinished:
            with contextlib.suppress(Exception):
                self._ray.cancel(task, force=True)

    def kill(self, trial: str) -> None:
        if trial in self._running:
            self._end(self._running[trial])

    def close(self) -> None:
        for running in self._running.values():
            self._end(running)
        self._ray.shutdown()
        self._silenced.close()


def _one_line(error: Exception) -> str:
    return " ".join(plain(str(error)).split())[:300]


def _start(init: Callable[[], object]) -> None:
    """Call `init`, which starts Ray; repeat it up to STARTS times if it exceeds Ray's time limit."""
    for attempt in range(1, STARTS + 1):
        try:
            init()
            return
        except Exception as error:
            if attempt == STARTS or "timed out" not in str(error):
                raise


def _local() -> str:
    """Return, as text for a message, the command of this process with `--backend local`, which trains without Ray."""
    command = sys.argv if Path(sys.argv[0]).name in ("fewbits", "cli.py") else ["fewbits", "sweep", "…"]
    return f"`fewbits {shlex.join(command[1:])} --backend local`"


class _Meeting:
    """A Ray actor that serves the TCP store of a trial's ranks, in its own process on the node of rank 0."""

    def __init__(self) -> None:
        import ray

        self._address = str(ray.util.get_node_ip_address())
        self._store = meeting_place()  # it listens on all network interfaces of the node

    def place(self) -> tuple[str, int]:
        return self._address, self._store.port


def _rank(job: Job, place: tuple[str, int], rank: int, ranks: int) -> Outcome:
    served = {"TORCHELASTIC_USE_AGENT_STORE": "True"}  # rank 0 uses the actor's store and opens no port itself
    return work(replace(job, environment={**rank_environments(ranks, *place)[rank], **served}))


def _in_group(group: Any, rank: int) -> Any:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
