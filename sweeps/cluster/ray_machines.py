"""The kinds of the nodes of a Ray cluster: a task without resources on each node says it, once per node.

Nodes of one kind are named to Ray by a label that they share and no other node has, if there is one: nodes that join
later have it too, and an autoscaler can start them. Else they are named by their ids.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from fewbits.sweeps.planning.sweep import Resources
from fewbits.sweeps.running.machine_kinds import Machine, this_machine

FIRST = 60.0  # seconds that the first answers may take: a node's worker starts and imports torch
NODE = "ray.io/node-id"
SHARED = ("ray.io/accelerator-type", "ray.io/node-group")  # labels that nodes of one kind may have in common
_NAMED = ("CPU", "GPU", "memory")


class RayMachines:
    """Return the machines of the cluster that this process is connected to, as far as their kinds are known."""

    def __init__(self, alone: bool) -> None:
        """alone: all of Ray runs on this machine, so no node is asked."""
        self._alone = alone
        self._answers: dict[str, Machine | None] = {}  # by node; None: it cannot be told
        self._asked: dict[Any, str] = {}

    def __call__(self) -> list[Machine]:
        import ray

        nodes = [node for node in ray.nodes() if node["Alive"] and _useful(node["Resources"])]
        if self._alone:
            self._answers |= {node["NodeID"]: this_machine() for node in nodes if node["NodeID"] not in self._answers}
        else:
            self._ask([node["NodeID"] for node in nodes])
        return [
            Machine(
                there.processor,
                there.gpu,
                there.torch,
                {name: node["Resources"].get(name, 0.0) for name in _NAMED},
                node["NodeID"],
                node.get("Labels") or {},
            )
            for node in nodes
            if (there := self._answers.get(node["NodeID"])) is not None
        ]

    def _ask(self, nodes: Sequence[str]) -> None:
        """Ask the nodes that were not asked yet. Only the first call waits for answers."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        asked = {*self._answers, *self._asked.values()}
        for node in nodes:
            if node not in asked:
                where = NodeAffinitySchedulingStrategy(node, soft=False)
                question = ray.remote(max_retries=0)(this_machine)
                self._asked[question.options(num_cpus=0, scheduling_strategy=where).remote()] = node
        give_up = time.monotonic() + (0.0 if self._answers else FIRST)
        while self._asked:
            done, _ = ray.wait(list(self._asked), timeout=max(0.0, give_up - time.monotonic()))
            if not done:
                return
            for task in done:
                node = self._asked.pop(task)
                try:
                    self._answers[node] = ray.get(task)
                except Exception:  # the node is gone, or has no fewbits: a trial that starts there says so
                    self._answers[node] = None


def selector(machines: Sequence[Machine], like: str | None, resources: Resources) -> Mapping[str, str] | None:
    """Return the labels of the nodes of that kind; None if all nodes may be used."""
    ours = [one for one in machines if one.kind(resources) == like]
    others = [one for one in machines if one.kind(resources) != like]
    if like is None or not others:
        return None
    for label in SHARED:
        values = {one.labels.get(label, "") for one in ours}
        if ours and "" not in values and not values & {one.labels.get(label, "") for one in others}:
            return {label: _among(values)}
    return {NODE: _among({one.id for one in ours})} if ours else None


def _among(values: set[str]) -> str:
    return f"in({','.join(sorted(values))})"


def _useful(resources: Mapping[str, float]) -> bool:
    return resources.get("CPU", 0.0) > 0 or resources.get("GPU", 0.0) > 0
