"""Compare probes of the trunk instead of trained arms, in those parts of claims that have `probed: true`.

Probes measure all recipes on the same weights and batches. So a statement about tensors can be tested at one
checkpoint, without training a model with each recipe. The probe of the arm ARM is the arm `probe-ARM` in the sweep
`probes`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from fewbits.analysis.engine.claims.schema import Claim, ControlClaim, Part
from fewbits.analysis.engine.results.frames import Results

SWEEP, PREFIX = "probes", "probe-"
END = {"checkpoint": "end"}  # the axis value of the trunk's last checkpoint

C = TypeVar("C", bound=Claim | ControlClaim)


def at_probes(claim: C, results: Results) -> C:
    """Return a copy of the claim in which parts with `probed` compare probes of their arms, not the trained arms.

    The probes are those at the trunk's last checkpoint. A part stays unchanged if the plan lacks the probe of one of
    its arms or of its baseline, or if the probed checkpoint belongs to an imported model, whose architecture differs
    from the one that the claims are about.
    """
    return replace(claim, parts=tuple(_moved(part, results) if part.probed else part for part in claim.parts))


def _moved(part: Part, results: Results) -> Part:
    where = {**part.where, **END}
    arms, chain = (tuple(map(_probe, names)) for names in (part.arms, part.chain))
    baseline = _probe(part.baseline) if part.baseline else ""
    if SWEEP not in {sweep.name for sweep in results.plan.sweeps}:
        return part
    scope = results.of_sweep(SWEEP)
    needed = (*arms, *chain, *([baseline] if baseline else []))
    if not (all(scope.has(name, where) for name in needed) and _has_trunk(scope)):
        return part
    return replace(part, arms=arms, chain=chain, baseline=baseline, sweep=SWEEP, where=where)


def _probe(arm: str) -> str:
    return f"{PREFIX}{arm}"


def _has_trunk(scope: Results) -> bool:
    parents = {scope.plan.trials[member.id].parent for member in scope.members}
    return any(parent in scope.plan.trials for parent in parents if parent is not None)
