"""Check before the first trial starts that a cluster can ever provide the resources that the trials request.

A bundle is the resources that one rank of a trial needs on one node. If no present node is large enough for a bundle, a
suitable node may still join the cluster, or the cluster's autoscaler may start one. Only the autoscaler knows which
nodes it can start. To ask it, this module creates a placement group with the bundle: the group waits, so the autoscaler
treats it as a demand. There are three cases:
- Ray's second autoscaler (v2, used by KubeRay and `ray up`) reports the demands that none of its node types can meet.
  If the bundle is one of these, the sweep ends with an error.
- Ray's first autoscaler (v1) does not report this. A warning is printed, and the sweep starts.
- Without an autoscaler, the sweep ends with an error if no suitable node joins within `join_seconds()`: 60 s
  or FEWBITS_JOIN_SECONDS.

Limit: if other work occupies as many nodes as the autoscaler may start, and none of these could hold the bundle, v2
reports that no node type can hold it, even if one can.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fewbits.sweeps.planning.sweep import Resources

JOIN = 60.0  # seconds that nodes of a new cluster may take to join; FEWBITS_JOIN_SECONDS overrides it
POLL = 0.5  # seconds between two checks of the cluster
JUDGED = 3  # the autoscaler's report on a demand counts after it has evaluated this many cluster states with the demand
UNLISTED = 15.0  # seconds after which a demand is treated as part of the cluster's state even if it is not listed there
SHOWN = 3  # the largest number of trials that a message names
_EPSILON = 1e-9
_READ_ONLY = re.compile(r"node_[0-9a-f]{56}")  # how Ray's v1 report names node types if there is no autoscaler


@dataclass(frozen=True)
class Demand:
    """The resources that one trial requests."""

    trial: str  # the name of its run folder
    resources: Resources

    @property
    def bundle(self) -> dict[str, float]:
        return bundle(self.resources)

    @property
    def shape(self) -> tuple[object, ...]:
        return (self.resources.ranks, *sorted(self.bundle.items()))


class Autoscaler(NamedTuple):
    """A cluster's report about its autoscaler, from `ask_autoscaler`.

    `seen` and `present` are numbers of cluster states. A state is Ray's list of a cluster's nodes and of the resources
    that are demanded at one time. Each time a program requests the state from Ray, its number increases.
    """

    exists: bool | None  # None: not reported
    infeasible: tuple[dict[str, float], ...] | None = None  # bundles that no node type can hold; None: not reported
    seen: int = 0  # the number of the newest state that the autoscaler has evaluated
    present: int = 0  # the number of the present state
    waiting: tuple[dict[str, float], ...] = ()  # bundles of placement groups that wait in the present state


def bundle(resources: Resources) -> dict[str, float]:
    """Return the CPU, GPU and memory (in bytes) that one rank needs, by Ray's names; amounts of 0 are left out."""
    wanted = {"CPU": resources.cpus or 0.0, "GPU": resources.gpus, "memory": resources.memory * 2**30}
    return {name: amount for name, amount in wanted.items() if amount}


def bundles_that_fit(node: Mapping[str, float], wanted: Mapping[str, float]) -> float:
    """Return how many copies of a bundle fit on a node while nothing else runs there; infinity for an empty bundle.

    node: the node's total resources. wanted: the resources of one bundle. Both are amounts by Ray's names.
    """
    return min(((node.get(name, 0.0) + _EPSILON) // amount for name, amount in wanted.items()), default=float("inf"))


def nodes() -> list[Mapping[str, float]]:
    """Return the total resources of each living node of the connected cluster, by Ray's names."""
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def join_seconds() -> float:
    """Return how many seconds a sweep waits for nodes to join the cluster if a trial fits on none of its nodes."""
    text = os.environ.get("FEWBITS_JOIN_SECONDS", "")
    try:
        return max(0.0, float(text)) if text else JOIN
    except ValueError:
        raise ValueError(f"FEWBITS_JOIN_SECONDS={text}: expected a number of seconds, such as 60") from None


def require_capacity(demands: Sequence[Demand], log: Callable[[str], None], alone: bool = False) -> None:
    """Wait until the cluster has, or its autoscaler can start, nodes that are large enough for each trial.

    If some trials have no such nodes after `join_seconds`, raise ValueError, which names these trials. However, if the
    cluster may have an autoscaler that does not report which nodes it can start, only log a warning and return.
    log: called with each line of text to show. alone: Ray runs on this machine only, so no node can join, and the
    function does not wait.
    """
    patience, began, logged = 0.0 if alone else join_seconds(), time.monotonic(), False
    with contextlib.ExitStack() as ends:
        requests: dict[tuple[object, ...], _CapacityRequest] = {}
        while True:
            alive, autoscaler = nodes(), Autoscaler(False) if alone else ask_autoscaler()
            lacking = [demand for demand in demands if not _fits(demand, alive, autoscaler)]
            if autoscaler.infeasible is not None:
                for demand in lacking:
                    if demand.shape not in requests:
                        requests[demand.shape] = ends.enter_context(_CapacityRequest(demand, autoscaler))
                lacking = [demand for demand in lacking if not requests[demand.shape].granted(autoscaler)]
            if not lacking:
                return
            if alive and time.monotonic() - began >= patience:
                break
            if not logged and not alone:
                log(f"{_describe(lacking, alive)}; waiting up to {patience:.0f} s for such nodes")
                logged = True
            time.sleep(POLL)
    reason = _describe(lacking, alive)
    if autoscaler.infeasible is None and autoscaler.exists is not False:
        log(f"{reason}; the cluster does not report which nodes it can start, so these trials may wait for ever")
        return
    no_type = ", and the cluster's autoscaler has no node type that fits" if autoscaler.exists else ""
    raise ValueError(f"{reason}{no_type}: lower `resources`, or use --address with a cluster that has larger nodes")


def _fits(demand: Demand, alive: Sequence[Mapping[str, float]], autoscaler: Autoscaler) -> bool:
    """Tell whether the nodes `alive` (their resources) can hold all ranks of a trial while nothing else runs.

    With an autoscaler, one node that can hold one rank is enough, since the autoscaler can start more such nodes.
    """
    counts = [bundles_that_fit(node, demand.bundle) for node in alive]
    return max(counts, default=0) >= 1 if autoscaler.exists else sum(counts) >= demand.resources.ranks


class _CapacityRequest:
    """A placement group that asks the autoscaler for a trial's resources, until the `with` block or the driver ends."""

    def __init__(self, demand: Demand, autoscaler: Autoscaler) -> None:
        # Ask an autoscaler for one rank only, since other work may use up its limits at present.
        self._bundles = [demand.bundle] * (1 if autoscaler.exists else demand.resources.ranks)
        # _after: the number of the state that the autoscaler has to have evaluated before its report counts; 0: unknown
        # yet, since the cluster's state does not list the demand.
        self._began, self._after = time.monotonic(), 0

    def __enter__(self) -> _CapacityRequest:
        from ray.util.placement_group import placement_group

        self._group: Any = placement_group(self._bundles, strategy="PACK")
        return self

    def __exit__(self, *_: object) -> None:
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(self._group)

    def granted(self, autoscaler: Autoscaler) -> bool:
        """Tell from the report `autoscaler` whether the autoscaler can start a node that holds a requested bundle.

        The report refers to cluster states by numbers (class Autoscaler). The result is False until the autoscaler has
        evaluated a state that is new enough: its number must be at least JUDGED plus the number of the first state that
        lists the bundle. If no state has listed the bundle UNLISTED seconds after the request, the state that is
        present at that time is used in place of the first one.
        """
        late = time.monotonic() - self._began >= UNLISTED  # another version of Ray may not list the demand at all
        if not self._after and (late or self._bundles[0] in autoscaler.waiting):
            self._after = autoscaler.present + JUDGED
        if not self._after or autoscaler.seen < self._after or autoscaler.infeasible is None:
            return False
        return self._bundles[0] not in autoscaler.infeasible


def ask_autoscaler() -> Autoscaler:
    """Return the connected cluster's report about its autoscaler.

    Ray (2.60) has no public function for it, so this reads Ray's internal state. If that fails, for example with
    another version of Ray, the result is `Autoscaler(None)`: nothing is reported.
    """
    try:
        import ray
        from ray._raylet import GcsClient  # type: ignore[attr-defined]
        from ray.core.generated import autoscaler_pb2
        from ray.experimental.internal_kv import _internal_kv_get

        reply = autoscaler_pb2.GetClusterStatusReply()  # type: ignore[attr-defined]
        if not ray.util.client.ray.is_connected():  # a client connection (ray://) cannot reach this internal port
            gcs = GcsClient(address=ray.get_runtime_context().gcs_address)
            reply.ParseFromString(gcs.get_cluster_status(timeout_s=10))
        state = reply.autoscaling_state
        if state.last_seen_cluster_resource_state_version:
            cluster = reply.cluster_resource_state
            infeasible = _bundles(state.infeasible_gang_resource_requests, state.infeasible_resource_requests)
            waiting = _bundles(cluster.pending_gang_resource_requests)
            named = any(node.ray_node_type_name for node in cluster.node_states)
            seen, present = state.last_seen_cluster_resource_state_version, cluster.cluster_resource_state_version
            return Autoscaler(named, infeasible, seen, present, waiting)
        report = json.loads(_internal_kv_get("__autoscaling_status") or b"{}").get("autoscaler_report") or {}
        types = [*(report.get("active_nodes") or {}), *(report.get("idle_nodes") or {})]
        return Autoscaler(not all(_READ_ONLY.fullmatch(name) for name in types) if types else None)
    except Exception:  # with another version of Ray or a ray:// connection, any error may be raised here
        return Autoscaler(None)


def _bundles(groups: Iterable[Any], singles: Iterable[Any] = ()) -> tuple[dict[str, float], ...]:
    """Return the bundles in Ray's messages about requested resources: for each bundle, the amounts by Ray's names.

    groups: messages that request several bundles each. singles: messages that request one bundle each.
    """
    requests = [*singles, *(request for group in groups for request in group.requests)]
    return tuple(dict(request.resources_bundle) for request in requests)


def _describe(lacking: Sequence[Demand], alive: Sequence[Mapping[str, float]]) -> str:
    names = list(dict.fromkeys(demand.trial for demand in lacking))
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    asked = dict.fromkeys(f"{demand.resources.ranks} × ({_amounts(demand.bundle)})" for demand in lacking)
    largest = max(alive, key=lambda node: [node.get(name, 0.0) for name in ("GPU", "CPU", "memory")], default={})
    verb = "trial {} asks" if len(names) == 1 else "trials {} ask"
    subject = verb.format(", ".join(names[:SHOWN]) + more)
    return f"{subject} for {', '.join(asked)}; the largest of {len(alive)} nodes has {_amounts(largest)}"


def _amounts(resources: Mapping[str, float]) -> str:
    units = {"CPU": "{:g} CPUs", "GPU": "{:g} GPUs"}
    amounts = [unit.format(resources.get(name, 0.0)) for name, unit in units.items()]
    return ", ".join(
        [*amounts, f"{resources.get('memory', 0.0) / 2**30:.4g} GiB"] if resources.get("memory") else amounts
    )
