"""Find out the kind of processor or GPU of each node of a Ray cluster.

A task on each node reports the kind. The task requests no resources, so it also starts while trials occupy the node.

`selector` restricts a trial to the nodes of one kind. If all known nodes of this kind have one of the labels SHARED,
with values that no node of another kind has, the trial selects nodes by these values. In this case, it can also run on
nodes with such a value that join later or that an autoscaler starts. Otherwise it selects nodes by their ids.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fewbits.sweeps.planning.sweep import Resources
from fewbits.sweeps.running.machine_kinds import Machine, this_machine

FIRST = 120.0  # seconds to wait for nodes' reports if none has reported yet: workers have to start and import torch
ATTEMPTS = 3  # tasks started on a node until one reports: on a busy machine Ray may lose a worker as it starts
NODE = "ray.io/node-id"
SHARED = ("ray.io/accelerator-type", "ray.io/node-group")  # labels that nodes of one kind may have in common
_NAMED = ("CPU", "GPU", "memory")


class RayMachines:
    """The nodes of the connected cluster whose kind of processor or GPU is known.

    A call of the object returns a `Machine` (machine_kinds.py) for each of these nodes that is alive.
    """

    def __init__(self, alone: bool) -> None:
        """Start with no known node. alone: Ray runs on this machine only, so no tasks are needed to learn its kind."""
        self._alone = alone
        self._answers: dict[str, Machine | None] = {}  # by node id; None: all attempts failed
        self._asked: dict[Any, str] = {}  # running tasks, and the ids of their nodes
        self._attempts: Counter[str] = Counter()  # by node id

    def __call__(self) -> list[Machine]:
        import ray

        nodes = [node for node in ray.nodes() if node["Alive"] and _useful(node["Resources"])]
        if self._alone:
            self._answers |= {node["NodeID"]: this_machine() for node in nodes if node["NodeID"] not in self._answers}
        else:
            self._ask([node["NodeID"] for node in nodes])
        return [
            Machine(
                answer.processor,
                answer.gpu,
                answer.torch,
                {name: node["Resources"].get(name, 0.0) for name in _NAMED},
                node["NodeID"],
                node.get("Labels") or {},
            )
            for node in nodes
            if (answer := self._answers.get(node["NodeID"])) is not None
        ]

    def _ask(self, nodes: Sequence[str]) -> None:
        """Start a task on each node on which none was started before, and read the reports of tasks that have ended.

        If no node has reported before this call, wait up to FIRST seconds for the reports; otherwise do not wait.
        nodes: the ids of the cluster's living nodes.
        """
        import ray

        for node in nodes:
            if node not in {*self._answers, *self._asked.values()}:
                self._ask_node(node)
        give_up = time.monotonic() + (0.0 if self._answers else FIRST)
        while self._asked:
            done, _ = ray.wait(list(self._asked), timeout=max(0.0, give_up - time.monotonic()))
            if not done:
                if not self._answers:
                    message = f"no node has reported its kind of processor or GPU within {FIRST:.0f} s"
                    warnings.warn(message, stacklevel=2)
                return
            for task in done:
                self._read(task, self._asked.pop(task))

    def _ask_node(self, node: str) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        question = ray.remote(max_retries=0)(this_machine)
        self._asked[question.options(num_cpus=0, scheduling_strategy=strategy).remote()] = node
        self._attempts[node] += 1

    def _read(self, task: Any, node: str) -> None:
        import ray

        try:
            self._answers[node] = ray.get(task)
        except Exception as error:  # for example: the node is gone, has no fewbits, or its worker died
            if self._attempts[node] < ATTEMPTS:
                self._ask_node(node)
                return
            self._answers[node] = None
            reason = " ".join(str(error).split())[-300:]
            warnings.warn(f"the kind of processor or GPU of node {node[:8]} is unknown: {reason}", stacklevel=2)


def selector(machines: Sequence[Machine], like: str | None, resources: Resources) -> Mapping[str, str] | None:
    """Return Ray's label selector for the nodes of the kind `like`, or None to use all nodes.

    The result is None in three cases: `like` is None; all machines are of this kind, so no selector is needed; or no
    machine is of this kind, so no selector is possible. resources: what the trial requests; if this includes a GPU,
    `like` is a kind of GPU, else a kind of processor.
    """
    alike = [machine for machine in machines if machine.kind(resources) == like]
    others = [machine for machine in machines if machine.kind(resources) != like]
    if like is None or not others:
        return None
    for label in SHARED:
        values = {machine.labels.get(label, "") for machine in alike}
        if alike and "" not in values and not values & {machine.labels.get(label, "") for machine in others}:
            return {label: _among(values)}
    return {NODE: _among({machine.id for machine in alike})} if alike else None


def _among(values: set[str]) -> str:
    return f"in({','.join(sorted(values))})"


def _useful(resources: Mapping[str, float]) -> bool:
    return resources.get("CPU", 0.0) > 0 or resources.get("GPU", 0.0) > 0
