"""What MoR says of outcomes: losses, parameter norms and how many tensors fall back, arm beside arm.

Question answering is out of reach of models this small: a verdict's notes say which part of its claim speaks of it.
Training losses are means over the last tenth of the steps, in which all arms of a seed see the same batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import pairwise, product
from statistics import fmean

from fewbits.analysis.arms import (
    BAD,
    BASELINE,
    Where,
    compared,
    curves_apart,
    decided,
    having,
    ids,
    seed_by_seed,
)
from fewbits.analysis.engine.data import Data, NoData
from fewbits.analysis.engine.frames import Metric, Results
from fewbits.analysis.engine.paper import paper
from fewbits.analysis.engine.ranks import rank_correlation
from fewbits.analysis.mor.arms import CONFIGURATIONS, ONE, PARTITIONS, TWO
from fewbits.analysis.noise import VALIDATION
from fewbits.analysis.registry import claim, control
from fewbits.analysis.results import NotRun
from fewbits.analysis.studies.mor.tensors import fallback_shares, first, largest_accepted, looked_at
from fewbits.analysis.verdicts import (
    Outcome,
    Verdict,
    equivalent,
    every,
    higher,
    lower,
    no_worse,
    not_run,
    noted,
    ordering,
    share_within,
)

margin = paper("mor").margin
MMLU = "the paper's words on MMLU are out of reach of models this small: losses alone are judged"
HALF = (1 / 3, 2 / 3)  # of M9's "about half"
MOST = 0.5  # of an arm's tensors in BF16: beyond, it is BF16 rather than MoR


def quantizing(verdict: Verdict, results: Results, arms: Iterable[str]) -> Verdict:
    """That an arm is as good as BF16 says something only where it is another one: where it quantizes."""
    shares = fallback_shares(looked_at(results))
    idle = {}
    for arm, (name, where) in product(arms, CONFIGURATIONS.items()):
        found = [shares[i] for i in ids(results, arm, where).values() if i in shares]
        if found and fmean(found) > MOST:
            idle[f"{arm}, {name}"] = fmean(found)
    if not idle or verdict.outcome is not Outcome.REPRODUCED:
        return verdict
    left = ", ".join(f"{share:.0%} of {name}" for name, share in idle.items())
    reason = f"most was not quantized ({left} stayed in BF16); without regard to that: {verdict.reason}"
    return replace(verdict, outcome=Outcome.INCONCLUSIVE, reason=reason)


def losses(results: Results) -> dict[str, Metric]:
    return {"training loss": results.late("loss"), "validation loss": VALIDATION}


def in_configurations(results: Results, arm: str, parts: Callable[[Where], Mapping[str, Verdict]]) -> Verdict:
    """Of those that this scale runs; the others are named."""
    there = {name: where for name, where in CONFIGURATIONS.items() if having(results, arm, BASELINE, where=where)}
    if not there:
        return not_run(results.scale_name)
    found = every({f"{what}, {name}": v for name, where in there.items() for what, v in parts(where).items()})
    missing = [name for name in CONFIGURATIONS if name not in there]
    return noted(found, f"{', '.join(missing)}: not run at this scale, not judged") if missing else found


# -------------------------------------------------------------------------------- the control


@control("mor", "bad-arm", "E2M1 with one scale for each whole tensor is found to be worse than BF16")
def bad_arm(results: Results) -> Verdict:
    return decided(compared(results, VALIDATION, BAD, where=ONE), higher)


# -------------------------------------------------------------------------------- tensor-level arms


@claim("mor", "M3")
def m3(results: Results) -> Verdict:
    def parts(where: Where) -> Mapping[str, Verdict]:
        return {
            f"{arm}, {name}": decided(
                compared(results, metric, arm, where=where), lambda found: equivalent(found, margin("M3"))
            )
            for arm in PARTITIONS
            for name, metric in losses(results).items()
        }

    return quantizing(in_configurations(results, "block", parts), results, PARTITIONS)


@claim("mor", "M5")
def m5(results: Results) -> Verdict:
    """By each seed's greatest distance over the whole curve, which has no sign."""
    between = curves_apart(results, "parameter_norm")

    def parts(where: Where) -> Mapping[str, Verdict]:
        found = {}
        for arm in PARTITIONS:
            one = having(results, arm, BASELINE, where=where)
            data = NotRun(results.scale_name) if one is None else one.distances(between, arm, BASELINE, where)
            found[arm] = decided(data, lambda data: equivalent(data, margin("M5")))
        return found

    return quantizing(in_configurations(results, "block", parts), results, PARTITIONS)


@claim("mor", "M6")
def m6(results: Results) -> Verdict:
    found = compared(results, VALIDATION, "block-64", "block", where=ONE)
    return noted(quantizing(decided(found, lambda data: no_worse(data, margin("M6"))), results, ["block-64"]), MMLU)


@claim("mor", "M7")
def m7(results: Results) -> Verdict:
    found = compared(results, VALIDATION, "threshold-5", "block", where=ONE)
    return noted(
        quantizing(decided(found, lambda data: equivalent(data, margin("M7"))), results, ["threshold-5"]), MMLU
    )


@claim("mor", "M8")
def m8(results: Results) -> Verdict:
    """Of an effect: one shown to be smaller than the margin contradicts it. Below GAM alone it may be above BF16."""
    if having(results, "e8m0", BASELINE, where=ONE) is None:
        return not_run(results.scale_name)
    parts = {
        f"E8M0 below {name}": decided(
            compared(results, VALIDATION, "e8m0", other, where=ONE),
            lambda data: lower(data, margin("M8"), absence_contradicts=True),
        )
        for name, other in (("BF16", BASELINE), ("GAM, the paper's default", "block"))
    }
    return noted(every(parts), MMLU, "FP32 amax is in Table 3")


# -------------------------------------------------------------------------------- tensors that fall back


@claim("mor", "M9")
def m9(results: Results) -> Verdict:
    """The order over whole runs, and the half. Right after a branch the arms share one trajectory: see the notes."""
    one = having(results, *PARTITIONS, where=ONE)
    if one is None:
        return not_run(results.scale_name)
    rows = looked_at(one)
    shares = fallback_shares(rows)

    def above(arm: str, other: str) -> Data:  # that a trial diverged says nothing of its shares
        found = one.paired(shares, arm, other, ONE, relative=False)
        return found if isinstance(found, NoData) else replace(found, diverged=0, baseline_diverged=0)

    def halves(channel: str, block: str) -> float | None:
        return shares[channel] / shares[block] if {channel, block} <= set(shares) and shares[block] else None

    order = ordering({f"{a} above {b}": above(a, b) for a, b in pairwise(PARTITIONS)}, margin("M9"))
    half = share_within(one.distances(halves, "channel", "block", ONE, relative=False), *HALF)
    parts = {**dict(order.parts), "channel about half of block": half}
    return noted(
        replace(every(parts), mde=order.mde),  # the ratio has another unit
        "about half is taken as a third to two thirds",
        "of the arms' own tensors, over their whole runs: " + _means(one, shares),
        "in the first window, where arms that branch still share their trunk's weights: "
        + _means(one, fallback_shares(first(rows))),
    )


def _means(results: Results, shares: Mapping[str, float]) -> str:
    found = {arm: [shares[i] for i in ids(results, arm, where=ONE).values() if i in shares] for arm in PARTITIONS}
    return ", ".join(f"{arm} {sum(v) / len(v):.2%}" if v else f"{arm} no data" for arm, v in found.items())


@claim("mor", "M10")
def m10(results: Results) -> Verdict:
    """Seeds pair initial weights alone: the data are other data."""
    if having(results, "block", where=TWO) is None:
        return noted(not_run(results.scale_name), "configuration 2 is not run")
    shares = fallback_shares(looked_at(results))
    found = seed_by_seed(results, shares, ("block", TWO), ("block", ONE))
    return higher(found, margin("M10"))


# -------------------------------------------------------------------------------- sub-tensor arms


@claim("mor", "M17")
def m17(results: Results) -> Verdict:
    verdict = decided(compared(results, VALIDATION, "two-way", where=ONE), lambda found: no_worse(found, margin("M17")))
    return quantizing(verdict, results, ["two-way"])


@claim("mor", "M18")
def m18(results: Results) -> Verdict:
    """Of an effect on the losses: one shown to be smaller than the margin contradicts it. Out-of-domain loss stands in
    for the scores, so that only its improving would speak against their harm."""
    if having(results, "three-way", BASELINE, where=ONE) is None:
        return not_run(results.scale_name)
    parts = {
        name: decided(
            compared(results, metric, "three-way", where=ONE),
            lambda data: lower(data, margin("M18"), absence_contradicts=True),
        )
        for name, metric in losses(results).items()
    }
    harm = decided(compared(results, "ood_loss", "three-way", where=ONE), lambda data: higher(data, margin("M18")))
    return noted(
        every(parts | {"out-of-domain loss higher, in place of scores": harm}),
        "the paper's words on downstream scores are out of reach of models this small: out-of-domain loss stands in",
    )


@claim("mor", "M19")
def m19(results: Results) -> Verdict:
    """That it suffices: each arm whose error is bounded is no worse than BF16. The rank correlation is a note."""
    arms = [arm for arm in paper("mor").claim("M19").arms if having(results, arm, BASELINE, where=ONE)]
    if not arms:
        return not_run(results.scale_name)
    parts = {
        arm: decided(compared(results, VALIDATION, arm, where=ONE), lambda d: no_worse(d, margin("M19")))
        for arm in arms
    }
    verdict = quantizing(every(parts), results, arms)
    return noted(verdict, correlation(results, arms), "that it need not be necessary is not tested")


def correlation(results: Results, arms: Iterable[str]) -> str:
    """Of the largest error that a trial accepted with its change of loss, over arms and seeds."""
    accepted = largest_accepted(looked_at(results))
    loss = {row["id"]: row[VALIDATION] for row in results.trials.to_dict("records") if row["state"] == "done"}
    base = ids(results, BASELINE, where=ONE)
    points = [
        (accepted[i], loss[i] / loss[base[seed]] - 1)
        for arm in arms
        for seed, i in ids(results, arm, where=ONE).items()
        if i in accepted and i in loss and loss.get(base.get(seed, "")) is not None
    ]
    what = "rank correlation of the largest error that a trial accepted with its change of loss"
    if len(points) < 3:
        return f"{what}: fewer than three points"
    found = rank_correlation([x for x, _ in points], [y for _, y in points])
    value = "none, as one of them does not vary" if found.value is None else f"{found.value:+.2f}"
    return f"{what}: {value} over {found.n} trials (those of a seed share a baseline, so no p is given)"
