"""Trials as plain Ray tasks: on this machine, where Ray starts by itself, or on the cluster at an address.

A task is one trial, or one rank of it; ranks share a placement group. Ray retries nothing: whether to go on is for the
driver to say, who knows the checkpoints.

A cluster with an autoscaler is given every trial that is ready, up to --parallel, so that their waiting tasks are the
demand that it grows for. `ray.autoscaler.sdk.request_resources` is not used: a cluster holds one such request, which a
second sweep would overwrite, which stays when its driver is killed, and which the autoscaler ignores as a whole when it
is more than the cluster may grow to. Tasks that wait go with their driver, whatever ends it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fewbits.sweeps.cluster.capacity import Demand, ask_autoscaler, bundle, nodes, require_capacity, slots
from fewbits.sweeps.cluster.ray_machines import RayMachines, selector
from fewbits.sweeps.planning.sweep import Resources
from fewbits.sweeps.running.backend import Ended
from fewbits.sweeps.running.local import rank_environments
from fewbits.sweeps.running.machine_kinds import Machine
from fewbits.sweeps.running.store import plain
from fewbits.sweeps.running.worker import Job, Outcome, work

STARTS = 3  # attempts to start Ray here; each has Ray's own limit of 30 seconds, too few on a machine that is busy
QUEUED = 2  # tasks beyond those there is room for on a cluster that does not grow: the next ones start without delay
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
}


@dataclass
class _Running:
    tasks: list[Any]  # of rank 0 first
    group: Any = None  # of placement
    like: str | None = None  # the kind of machine that it must run on


class OnRay:
    def __init__(
        self, address: str | None = None, parallel: int | None = None, variables: Mapping[str, str] | None = None
    ) -> None:
        """address: None starts Ray here, unless RAY_ADDRESS names a cluster; parallel: trials at a time, at most;
        variables: of the environment of a cluster's workers."""
        os.environ.update({name: value for name, value in _QUIET.items() if name not in os.environ})
        import ray

        self._ray = ray
        address = address or os.environ.get("RAY_ADDRESS") or None
        self.alone = address is None  # on this machine, in a Ray of its own
        if address is not None:
            _answers(address)
        if self.alone:
            how: dict[str, Any] = {"include_dashboard": False, "num_cpus": _cores()}
        else:
            how = {"runtime_env": {"env_vars": dict(variables)}} if variables else {}
        try:
            _start(
                lambda: ray.init(address, log_to_driver=False, logging_level=logging.ERROR, namespace="fewbits", **how)
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ValueError(f"no Ray at {address}: {' '.join(str(error).split())[:300]}") from error
        # Ray prints a paragraph on stdout for each worker that dies; the driver reports that in one line on stderr.
        self._silenced = contextlib.ExitStack()
        nowhere = self._silenced.enter_context(open(os.devnull, "w"))  # noqa: SIM115, closed with the stack
        self._silenced.enter_context(contextlib.redirect_stdout(nowhere))
        self._task = ray.remote(max_retries=0)(work)
        self._parallel = parallel
        self._grows = False  # an autoscaler adds nodes for what waits
        self._machines = RayMachines(self.alone)
        self._running: dict[str, _Running] = {}
        self._ended: list[Ended] = []

    def require(self, demands: Sequence[Demand], say: Callable[[str], None]) -> None:
        """ValueError where a trial asks for what no node can ever give; to be called before the first `start`."""
        require_capacity(demands, say, self.alone)
        self._grows = not self.alone and bool(ask_autoscaler().exists)

    def machines(self) -> Sequence[Machine]:
        return self._machines()

    def room(self, resources: Resources, like: str | None = None) -> bool:
        if self._parallel is not None:
            return len(self._running) < self._parallel
        if self._grows:
            return True
        wanted = bundle(resources)
        machines = self.machines()
        there, running = nodes(), len(self._running)
        if selector(machines, like, resources) is not None:
            there = [machine.resources for machine in machines if machine.kind(resources) == like]
            running = sum(one.like == like for one in self._running.values())
        at_once = sum(slots(node, wanted) for node in there) // resources.ranks if wanted else 1
        return running < at_once + QUEUED

    def start(self, job: Job, resources: Resources, like: str | None = None) -> None:
        chosen = selector(self.machines(), like, resources)
        if resources.ranks == 1:
            more = {"label_selector": chosen} if chosen else {}
            task = self._task.options(name=job.path.name, **_options(resources), **more).remote(job)
            self._running[job.id] = _Running([task], like=like)
            return
        from ray.util.placement_group import placement_group

        of_bundles = {"bundle_label_selector": [dict(chosen)] * resources.ranks} if chosen else {}
        group = placement_group([bundle(resources)] * resources.ranks, strategy="PACK", **of_bundles)
        first = self._ray.remote(max_retries=0, **_options(resources, group, 0))(_meeting_point).remote()
        self._running[job.id] = _Running(
            [
                self._ray.remote(max_retries=0, **_options(resources, group, rank))(_rank).remote(
                    job, first, rank, resources.ranks
                )
                for rank in range(resources.ranks)
            ],
            group,
            like,
        )

    def wait(self, seconds: float) -> list[Ended]:
        owner = {task: trial for trial, running in self._running.items() for task in running.tasks}
        if not owner:
            time.sleep(seconds)
            return []
        ready, _ = self._ray.wait(list(owner), num_returns=1, timeout=seconds)
        if ready:
            ready, _ = self._ray.wait(list(owner), num_returns=len(owner), timeout=0)
        found = []
        for trial in dict.fromkeys(owner[task] for task in ready):
            running = self._running[trial]
            done = [task for task in running.tasks if task in ready]
            ended = self._read(trial, running, done)
            if ended is not None:
                del self._running[trial]
                found.append(ended)
        return found

    def _read(self, trial: str, running: _Running, done: list[Any]) -> Ended | None:
        """The end of rank 0 is the trial's; that of another one is, if it died."""
        outcomes: dict[Any, Outcome] = {}
        why = ""
        for task in done:
            try:
                outcomes[task] = self._ray.get(task)
            except Exception as error:  # whatever may befall a task, a worker or a node
                why = _why(error)
        leader = outcomes.get(running.tasks[0])
        if leader is None and not why:
            return None
        if leader is None or leader.kind != "over":
            self._end(running)
        if running.group is not None:
            from ray.util.placement_group import remove_placement_group

            remove_placement_group(running.group)
        return Ended(trial, leader, "" if leader else why)

    def _end(self, running: _Running) -> None:
        """What is over is left alone: Ray (2.60) may abort when told to cancel what it has just booked as ended."""
        _, going = self._ray.wait(running.tasks, num_returns=len(running.tasks), timeout=0)
        for task in going:
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


def _why(error: Exception) -> str:
    text = plain(str(error))
    if module := re.search(r"No module named '([\w.]+)'", text):
        return (
            f"the cluster's workers have no module {module[1]!r}: call `ray start` on its nodes in the environment in "
            "which fewbits is installed"
        )
    return f"{type(error).__name__}: {' '.join(text.split())[:300]}"


def _start(init: Callable[[], object]) -> None:
    """Call ray.init; once more where the machine was too busy for Ray's time limit, which is a plain Exception."""
    for attempt in range(1, STARTS + 1):
        try:
            init()
            return
        except Exception as error:
            if "timed out" not in str(error):
                raise
            if attempt == STARTS:
                raise ValueError(
                    f"Ray did not start on this machine in {STARTS} attempts ({error}): the machine may be too busy; "
                    "--backend local trains without Ray"
                ) from error


def _answers(address: str) -> None:
    """Ray itself would try for minutes, with a line for each time. `auto` is Ray's to find."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        except OSError as error:
            raise ValueError(f"no Ray at {address}: {error.strerror or error}") from None


def _meeting_point() -> tuple[str, int]:
    import ray

    with socket.socket() as probe:
        probe.bind(("", 0))
        return str(ray.util.get_node_ip_address()), int(probe.getsockname()[1])


def _rank(job: Job, meeting_point: tuple[str, int], rank: int, ranks: int) -> Outcome:
    return work(replace(job, environment=rank_environments(ranks, *meeting_point)[rank]))


def _options(resources: Resources, group: Any = None, rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = {"num_cpus": resources.cpus, "num_gpus": resources.gpus}
    if resources.memory:
        found["memory"] = resources.memory * 2**30
    if group is not None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        found["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
    return found


def _cores() -> int:
    return len(os.sched_getaffinity(0))
