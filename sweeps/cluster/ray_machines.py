"""Find out the kind of each node of a Ray cluster, by running on each node a task that reserves no resources.

If all nodes of a kind have a label that no other node has, trials select nodes by that label: so they also run on nodes
that join later or that an autoscaler starts. Otherwise trials select nodes by their ids.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fewbits.sweeps.planning.sweep import Resources
from fewbits.sweeps.running.machine_kinds import Machine, this_machine

FIRST = 120.0  # seconds that the first answers may take, in which a node's worker starts and imports torch
ATTEMPTS = 3  # how often a node is asked whose answer fails: on a busy machine Ray may lose a worker as it starts
NODE = "ray.io/node-id"
SHARED = ("ray.io/accelerator-type", "ray.io/node-group")  # labels that nodes of one kind may have in common
_NAMED = ("CPU", "GPU", "memory")


class RayMachines:
    """The machines of the connected cluster whose kinds are known. Calling the object returns them."""

    def __init__(self, alone: bool) -> None:
        """Start with no known machine. alone: all of Ray runs on this machine, so no node is asked."""
        self._alone = alone
        self._answers: dict[str, Machine | None] = {}  # by node; None: its kind cannot be known
        self._asked: dict[Any, str] = {}
        self._attempts: Counter[str] = Counter()

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
        """Start a task that reports the kind on each node that has none yet. Only the first call waits for reports."""
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
        except Exception as error:  # the node is gone, has no fewbits, or lost the worker
            if self._attempts[node] < ATTEMPTS:
                self._ask_node(node)
                return
            self._answers[node] = None
            reason = " ".join(str(error).split())[-300:]
            warnings.warn(f"the kind of processor or GPU of node {node[:8]} is unknown: {reason}", stacklevel=2)


def selector(machines: Sequence[Machine], like: str | None, resources: Resources) -> Mapping[str, str] | None:
    """Return a label selector of Ray for the nodes of the kind `like`; None if all nodes may be used."""
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
