"""Compute the data of claims G16 and G18: how much sampling slows training, and how long noise generators take.

Arms are timed in turns: one turn times each arm once. The data of a claim are numbers computed from ratios of these
times, one number for each quiet turn. A turn is quiet if other processes used little of the machine (benches.py). A
claim about all models or shapes has to hold for each of them, so the number of a turn is the one of the model or shape
that is least favourable to the claim. If fewer than half of the turns were quiet, there are no data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from fewbits.analysis.engine.claims.hooks import measure
from fewbits.analysis.engine.results.data import Differences, Measured, NoData, NotPlanned
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.paper import paper
from fewbits.analysis.studies.gaussws import benches
from fewbits.analysis.studies.gaussws.benches import PLAIN, QUIET, Timed, lost_throughput
from fewbits.experiments.bench.generators import BITWISE, BOX_MULLER, TORCH

MODELS = {"134m": "llama2-134m", "1b": "llama2-1b", "3b": "llama2-3b", "70b": "llama2-70b-4l"}  # by size in Table 1
THREEFOLD = 3.0
Pair = tuple[Timed | None, Timed | None]  # an arm and its baseline, for one model or shape; None: not measured
Turns = Callable[[Timed, Timed], Sequence[float]]  # returns a value for each turn of an arm and its baseline


@measure("gaussws", "G16")
def training(results: Results) -> Mapping[str, Measured]:
    """Return the data of claim G16's parts: how much GaussWS and DiffQ slow the training of Table 1's models on a GPU.

    A turn is one timing of each arm. There is a number for each turn in which other processes used little of the
    machine: of the values of the timed models in this turn, the one that is least favourable to the claim. The slowdown
    of a method is the share of BF16's throughput that training with the method loses. Table 1 is that of the paper; its
    slowdowns follow from the throughputs that it prints.

    order-gaussws: (time of GaussWS) / (time of BF16) − 1.
    order-diffq: (time of DiffQ) / (time of GaussWS) − 1.
    gaussws-at-most: GaussWS's slowdown in our timings, minus its greatest slowdown over all models in Table 1.
    diffq-at-least: DiffQ's least slowdown over all models in Table 1, minus its slowdown in our timings.

    If none of the models was timed on a GPU, each value is NotPlanned.
    """
    names = ("order-gaussws", "order-diffq", "gaussws-at-most", "diffq-at-least")
    found = benches.training(results)
    if found is None or found.kind != "cuda" or not any(name in found.timed for name in MODELS.values()):
        return dict.fromkeys(
            names, NotPlanned("not measured; on a GPU, run `fewbits bench train --store` with Table 1's models")
        )
    models = [found.timed[name] for name in MODELS.values() if name in found.timed]

    def pairs(ours: str, baseline: str) -> list[Pair]:
        return [(of.get(("adamw", ours)), of.get(("adamw", baseline))) for of in models]

    most, least = max(_printed("adamw-gaussws")), min(_printed("adamw-diffq"))
    return {
        "order-gaussws": _chosen(min, pairs("gaussws", PLAIN), lambda ours, plain: ours.longer_than(plain)),
        "order-diffq": _chosen(min, pairs("diffq", "gaussws"), lambda diffq, ours: diffq.longer_than(ours)),
        "gaussws-at-most": _chosen(
            max, pairs("gaussws", PLAIN), lambda ours, plain: [one - most for one in lost_throughput(ours, plain)]
        ),
        "diffq-at-least": _chosen(
            max, pairs("diffq", PLAIN), lambda diffq, plain: [least - one for one in lost_throughput(diffq, plain)]
        ),
    }


@measure("gaussws", "G18")
def generators(results: Results) -> Mapping[str, Measured]:
    """Return the data of claim G18's parts: how much longer other generators take than the bitwise generator.

    The bitwise generator is GaussWS's: it computes rounded normal noise with bit operations. The two parts are:

    box-muller: (Box-Muller's time) / (bitwise time) − 1.
    torch: (torch's time) / (3 · bitwise time) − 1, because by the claim torch takes at least three times as long.

    A turn is one timing of each arm. Each part has a number for each turn in which other processes used little of the
    machine: the smallest of the numbers of all shapes of the matrix. On a GPU, the computation of the sampled weight
    (eq. 3 of the GaussWS paper) is timed, as in the paper's Figure 6. On a CPU, only the generation of noise is timed,
    because no CPU kernel computes eq. 3 with Box-Muller.
    """
    found = benches.generators(results)
    if found is None:
        missing = NotPlanned("not measured; run `fewbits bench kernels --generators --store`")
        return {"box-muller": missing, "torch": missing}
    what = "forward" if found.kind == "cuda" else "generator"

    def beside(arm: str, times: float) -> Measured:
        pairs = [(of.get((what, arm)), of.get((what, BITWISE))) for of in found.timed.values()]
        return _chosen(min, pairs, lambda other, ours: [(1 + one) / times - 1 for one in other.longer_than(ours)])

    return {"box-muller": beside(BOX_MULLER, 1.0), "torch": beside(TORCH, THREEFOLD)}


def _chosen(choose: Callable[[Iterable[float]], float], pairs: Iterable[Pair], turns: Turns) -> Measured:
    """Return a value for each quiet turn: the minimum or maximum (`choose`) over all pairs of an arm and its baseline.

    A turn is one timing of each arm; it is quiet if other processes used little of the machine. turns: computes the
    values of one pair, one for each turn. Pairs were timed separately, so the i-th quiet turn of a pair is combined
    with the i-th quiet turns of all others. Return NoData if an arm was not measured, or if fewer than half of the
    turns of a pair were quiet.
    """
    kept: list[list[float]] = []
    for ours, other in pairs:
        if ours is None or other is None:
            return NoData("an arm of the comparison was not measured")
        values = turns(ours, other)
        quiet = [value for value, still in zip(values, ours.quiet_turns, strict=True) if still]
        if 2 * len(quiet) < len(values):
            return NoData(
                f"disturbed: in {len(values) - len(quiet)} of {len(values)} turns other processes used more than "
                f"{QUIET:.0%} of the processors, or their use was not measured; measure again on an idle machine"
            )
        kept.append(quiet)
    shortest = min(map(len, kept), default=0)
    if not shortest:
        return NoData("nothing was measured: there is no turn with timings")
    chosen = tuple(choose(values[turn] for values in kept) for turn in range(shortest))
    return Differences(chosen, True, unit="turn")


def _printed(column: str) -> list[float]:
    """Return the share of BF16's throughput that each model in MODELS loses according to the paper's Table 1.

    column: the id of the table's column, which stands for an optimizer and a method, such as adamw-gaussws. The shares
    are fractions. Models for which the paper has no number are left out.
    """
    printed = [paper("gaussws").table("Table 1").value(f"overhead-{size}", column) for size in MODELS]
    return [value / 100 for value in printed if value is not None]
