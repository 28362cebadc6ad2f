"""Whether a cluster can ever give what trials ask for, found out before the first of them trains.

A bundle is what one rank takes of one node. A bundle that fits no node that is alive may still fit one that joins (a
young cluster), or one that the cluster's autoscaler starts. Only the autoscaler knows what it can start, so it is
asked: a placement group of that bundle waits as demand, and Ray's second autoscaler (v2: that of KubeRay and `ray up`)
reports the demands that no node type can meet. Ray's first one reports nothing of the kind; there the sweep starts with
a warning. The sweep ends if nothing can give a bundle for as long as nodes may take to join.

Limit: while other work holds as many nodes as the autoscaler may start at all, and none of them could hold the bundle,
v2 reports it like one that no node type can meet.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fewbits.sweeps.planning.sweep import Resources

JOIN = 60.0  # seconds that nodes of a young cluster may take to join; FEWBITS_JOIN_SECONDS is another
POLL = 0.5
JUDGED = 3  # states of the cluster that the autoscaler has to judge before its answer counts
SHOWN = 3  # names of trials in a message
_EPSILON = 1e-9
_READ_ONLY = re.compile(r"node_[0-9a-f]{56}")  # the node types of a cluster that has no autoscaler (v1)


@dataclass(frozen=True)
class Demand:
    """What one trial takes."""

    trial: str  # the name of its run folder
    resources: Resources

    @property
    def bundle(self) -> dict[str, float]:
        return bundle(self.resources)

    @property
    def shape(self) -> tuple[object, ...]:
        return (self.resources.ranks, *sorted(self.bundle.items()))


class Autoscaler(NamedTuple):
    """What a cluster tells of its autoscaler."""

    exists: bool | None  # None: not told
    infeasible: tuple[dict[str, float], ...] | None = None  # bundles that no node type can give; None: not told
    seen: int = 0  # the number of the newest state of the cluster that the autoscaler has judged


def bundle(resources: Resources) -> dict[str, float]:
    """Return what one rank takes of one node, by Ray's names."""
    wanted = {"CPU": resources.cpus or 0.0, "GPU": resources.gpus, "memory": resources.memory * 2**30}
    return {name: amount for name, amount in wanted.items() if amount}


def slots(node: Mapping[str, float], wanted: Mapping[str, float]) -> float:
    """Return how many of these bundles one node holds when nothing else runs there."""
    return min(((node.get(name, 0.0) + _EPSILON) // amount for name, amount in wanted.items()), default=float("inf"))


def nodes() -> list[Mapping[str, float]]:
    """Return the total resources of each node that is alive."""
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def join_seconds() -> float:
    """Return how long nodes may take to join a cluster before a trial that fits none of them ends the sweep."""
    text = os.environ.get("FEWBITS_JOIN_SECONDS", "")
    try:
        return max(0.0, float(text)) if text else JOIN
    except ValueError:
        raise ValueError(f"FEWBITS_JOIN_SECONDS={text}: a number of seconds is expected") from None


def require_capacity(demands: Sequence[Demand], say: Callable[[str], None], alone: bool = False) -> None:
    """Return when the cluster that this process is connected to can give what each trial asks for, now or by growing;
    ValueError, naming the trials, if it cannot. alone: Ray runs on this machine alone, where no node joins."""
    patience, began, told = 0.0 if alone else join_seconds(), time.monotonic(), False
    with contextlib.ExitStack() as ends:
        probes: dict[tuple[object, ...], _Probe] = {}
        while True:
            there, autoscaler = nodes(), Autoscaler(False) if alone else ask_autoscaler()
            lacking = [demand for demand in demands if not _fits(demand, there, autoscaler)]
            if autoscaler.infeasible is not None:
                for demand in lacking:
                    if demand.shape not in probes:
                        probes[demand.shape] = ends.enter_context(_Probe(demand, autoscaler))
                lacking = [demand for demand in lacking if not probes[demand.shape].granted(autoscaler)]
            if not lacking:
                return
            if there and time.monotonic() - began >= patience:
                break
            if not told and not alone:
                say(f"{_described(lacking, there)}; waiting up to {patience:.0f} s for such nodes")
                told = True
            time.sleep(POLL)
    why = _described(lacking, there)
    if autoscaler.infeasible is None and autoscaler.exists is not False:
        say(f"{why}; the cluster does not report which nodes it can start, so these trials may wait for ever")
        return
    grown = ", and its autoscaler has no node type that fits" if autoscaler.exists else ""
    raise ValueError(f"{why}{grown}: change resources, or --address a cluster whose nodes have them")


def _fits(demand: Demand, there: Sequence[Mapping[str, float]], autoscaler: Autoscaler) -> bool:
    """Return whether the nodes have room for all ranks when nothing else runs. With an autoscaler, a node that holds
    one rank is enough: it can start more of that type."""
    counts = [slots(node, demand.bundle) for node in there]
    return max(counts, default=0) >= 1 if autoscaler.exists else sum(counts) >= demand.resources.ranks


class _Probe:
    """Demand for one trial's bundles, for the autoscaler to judge; it ends with the block, or with the driver."""

    def __init__(self, demand: Demand, autoscaler: Autoscaler) -> None:
        # An autoscaler is asked for one rank: its limits may be used up for now.
        self._bundles = [demand.bundle] * (1 if autoscaler.exists else demand.resources.ranks)
        self._after = autoscaler.seen + JUDGED

    def __enter__(self) -> _Probe:
        from ray.util.placement_group import placement_group

        self._group: Any = placement_group(self._bundles, strategy="PACK")
        return self

    def __exit__(self, *_: object) -> None:
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(self._group)

    def granted(self, autoscaler: Autoscaler) -> bool:
        """Return whether the autoscaler has judged states in which this demand stood, and can meet it."""
        if autoscaler.seen < self._after or autoscaler.infeasible is None:
            return False
        return self._bundles[0] not in autoscaler.infeasible


def ask_autoscaler() -> Autoscaler:
    """Return what the cluster tells. Ray (2.60) has no public call for it: what is not where it was is not told."""
    try:
        import ray
        from ray._raylet import GcsClient  # type: ignore[attr-defined]
        from ray.core.generated import autoscaler_pb2
        from ray.experimental.internal_kv import _internal_kv_get

        reply = autoscaler_pb2.GetClusterStatusReply()  # type: ignore[attr-defined]
        if not ray.util.client.ray.is_connected():  # through ray://, from where the cluster's own ports are not reached
            gcs = GcsClient(address=ray.get_runtime_context().gcs_address)
            reply.ParseFromString(gcs.get_cluster_status(timeout_s=10))
        state = reply.autoscaling_state
        if state.last_seen_cluster_resource_state_version:
            gangs = [request for gang in state.infeasible_gang_resource_requests for request in gang.requests]
            infeasible = [dict(one.resources_bundle) for one in (*state.infeasible_resource_requests, *gangs)]
            named = any(node.ray_node_type_name for node in reply.cluster_resource_state.node_states)
            return Autoscaler(named, tuple(infeasible), state.last_seen_cluster_resource_state_version)
        report = json.loads(_internal_kv_get("__autoscaling_status") or b"{}").get("autoscaler_report") or {}
        types = [*(report.get("active_nodes") or {}), *(report.get("idle_nodes") or {})]
        return Autoscaler(not all(_READ_ONLY.fullmatch(name) for name in types) if types else None)
    except Exception:  # whatever another Ray, or a client's connection, has in place of these
        return Autoscaler(None)


def _described(lacking: Sequence[Demand], there: Sequence[Mapping[str, float]]) -> str:
    names = list(dict.fromkeys(demand.trial for demand in lacking))
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    asked = dict.fromkeys(f"{one.resources.ranks} × ({_amounts(one.bundle)})" for one in lacking)
    largest = max(there, key=lambda node: [node.get(name, 0.0) for name in ("GPU", "CPU", "memory")], default={})
    verb = "trial {} asks" if len(names) == 1 else "trials {} ask"
    said = verb.format(", ".join(names[:SHOWN]) + more)
    return f"{said} for {', '.join(asked)}; the largest of {len(there)} nodes has {_amounts(largest)}"


def _amounts(of: Mapping[str, float]) -> str:
    units = {"CPU": "{:g} CPUs", "GPU": "{:g} GPUs"}
    amounts = [unit.format(of.get(name, 0.0)) for name, unit in units.items()]
    return ", ".join([*amounts, f"{of.get('memory', 0.0) / 2**30:.4g} GiB"] if of.get("memory") else amounts)
