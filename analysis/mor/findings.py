"""Findings of our own: that watching changes nothing, how far noise goes, and what the paper left open."""

from __future__ import annotations

from fewbits.analysis.arms import AGAIN, BASELINE, compared, decided, having, ids, seed_by_seed
from fewbits.analysis.engine.frames import Results
from fewbits.analysis.engine.paper import Claim, Margin
from fewbits.analysis.mor.arms import CONFIGURATIONS, ONE
from fewbits.analysis.noise import VALIDATION
from fewbits.analysis.registry import claim
from fewbits.analysis.verdicts import Outcome, Verdict, equivalent, exact, higher, lower, not_run

LEAST = 0.0015  # the smallest margin of the paper's claims about losses
THRESHOLDS = ("0.02", "0.08")  # the ends of the range
_AXIS = "recipe.threshold"


def _finding(name: str, kind: str, statement: str, arms: tuple[str, ...], baseline: str, why: str = "") -> Claim:
    return Claim(
        name,
        statement,
        "",
        kind,
        VALIDATION,
        arms,
        baseline,
        margin=Margin(LEAST, True, why) if why else None,
    )


@claim(
    "mor",
    "F1",
    _finding(
        "F1",
        "arithmetic",
        "Watching errors under a threshold that nothing passes is BF16 to the bit.",
        ("watched",),
        BASELINE,
    ),
)
def f1(results: Results) -> Verdict:
    rows = {row["id"]: row for row in results.trials.to_dict("records") if row["state"] == "done"}
    pairs = [
        (i, ids(results, BASELINE, where).get(seed, ""))
        for where in CONFIGURATIONS.values()
        for seed, i in ids(results, "watched", where).items()
    ]
    if not pairs:
        return not_run(results.scale_name)
    done = [(i, j) for i, j in pairs if i in rows and j in rows]
    if not done:
        return Verdict(Outcome.INCONCLUSIVE, "no data: no pair is complete", trials=tuple(i for i, _ in pairs))
    metrics = results.metrics()
    apart = [(i, m) for i, j in done for m in metrics if not _same(rows[i][m], rows[j][m])]
    what = f"{len(metrics)} numbers of {len(done)} pairs of trials: {len(apart) or 'none'} differs"
    return exact(not apart, what, trials=dict.fromkeys(i for pair in done for i in pair))


def _same(a: float, b: float) -> bool:
    return a == b or (a != a and b != b)  # neither has the number


@claim(
    "mor",
    "F2",
    _finding(
        "F2",
        "equal",
        "The same mathematics, its sums rounded in another order, comes to the same loss: noise is below every margin.",
        (AGAIN,),
        BASELINE,
        "the smallest margin of the paper's claims",
    ),
)
def f2(results: Results) -> Verdict:
    return decided(compared(results, VALIDATION, AGAIN, where=ONE), lambda found: equivalent(found, LEAST))


@claim(
    "mor",
    "F3",
    _finding(
        "F3",
        "lower",
        "E8M0 stays below GAM where nothing is rounded to BF16 after descaling, so this rounding is not the reason.",
        ("fp32-e8m0",),
        "fp32-gam",
        "as in M8",
    ),
)
def f3(results: Results) -> Verdict:
    found = compared(results, VALIDATION, "fp32-e8m0", "fp32-gam", where=ONE)
    return decided(found, lambda data: lower(data, LEAST, absence_contradicts=True))


@claim(
    "mor",
    "F4",
    _finding(
        "F4",
        "higher",
        "A threshold of 8 % costs loss that one of 2 % does not.",
        ("threshold",),
        "threshold",
        "as in M7",
    ),
)
def f4(results: Results) -> Verdict:
    strict, loose = ({**ONE, _AXIS: value} for value in THRESHOLDS)
    if having(results, "threshold", where=strict) is None:
        return not_run(results.scale_name)
    rows = results.trials.to_dict("records")
    losses = {row["id"]: row[VALIDATION] for row in rows if row["state"] == "done"}
    found = seed_by_seed(results, losses, ("threshold", loose), ("threshold", strict), relative=True)
    return higher(found, LEAST, absence_contradicts=True)
