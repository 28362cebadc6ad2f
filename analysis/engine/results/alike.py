"""Check that two trials were computed in the same environment; only then are they compared.

The environment is the kind of machine, the kernel backend, the version of torch, and the environment variables that
change how sums are rounded. Other rounding errors can look like a small effect of an arm.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from fewbits.analysis.engine.results.rows import Row, treatment
from fewbits.common.wording import plural
from fewbits.experiments.environment import COMPARED_KEYS, UNKNOWN, alike, describe_kinds, kinds_of
from fewbits.sweeps.planning.store import OVER

NAMES = {  # the plural names of the properties of an environment (COMPARED_KEYS), for messages
    "kind": "kinds of machine",
    "backend": "backends",
    "torch": "versions of torch",
    "limits": "instruction limits",
}


def why_not_compared(row: Row, other: Row, usual: str | None) -> str | None:
    """Return one line of text that says why two finished trials with the same seed are not compared.

    Return None if they can be compared, or if one of them is not finished. usual: the kind of machine that computed
    most trials, which the text recommends for running trials again.
    """
    ours, theirs = row["computed"], other["computed"]
    finished = row["state"] in OVER and other["state"] in OVER
    if not finished or row["id"] == other["id"] or alike(ours, theirs):
        return None
    names = [treatment(trial["arm"], trial["axes"]) for trial in (row, other)]
    ran = f"{names[0]} ran on {describe_kinds(ours, [theirs])}, {names[1]} on {describe_kinds(theirs, [ours])}"
    return f"seed {row['seed']}: {ran}, so the two are not compared; {_remedy(usual)}"


def usual_kind(rows: Iterable[Row]) -> str | None:
    """Return the kind of machine that computed most of the trials; None if no kind is known."""
    by_trial = {row["id"]: row["computed"] for row in rows}
    counts = Counter(kind for computed in by_trial.values() for kind in kinds_of(computed))
    return min(counts, key=lambda kind: (-counts[kind], kind)) if counts else None


def unlike_within_seeds(rows: Sequence[Row]) -> list[str]:
    """Return lines of text about differences in the environment between finished trials with the same seed.

    There is a line for each property of the environment (COMPARED_KEYS) that differs within a seed, with the number of
    trials for each of its values, and for each trial whose steps were computed in several environments.
    """
    finished = {row["id"]: row for row in rows if row["state"] in OVER}
    remedy = _remedy(usual_kind(finished.values()))
    lines = []
    for at, key in enumerate(COMPARED_KEYS):
        seeds: dict[int, Counter[str]] = defaultdict(Counter)
        for row in finished.values():
            # A run without a record of its environment has the kind UNKNOWN, and no value of the other properties.
            unknown = [UNKNOWN] if key == "kind" else []
            seeds[row["seed"]].update({str(part[at]) for part in row["computed"]} or unknown)
        differing = {seed: counts for seed, counts in sorted(seeds.items()) if len(counts) > 1}
        if differing:
            total = sum(differing.values(), Counter[str]())
            each = ", ".join(f"{value} ({plural(total[value], 'trial')})" for value in sorted(total))
            within = f"{'seed' if len(differing) == 1 else 'seeds'} {', '.join(map(str, differing))}"
            differ = "trials that differ in this are not compared"
            lines.append(f"{len(total)} {NAMES[key]} within {within}: {each}; {differ}; {remedy}")
    for row in finished.values():
        if len(row["computed"]) > 1:
            computed = f"{str(row['folder']).rpartition('/')[2]} was computed on {describe_kinds(row['computed'])}"
            lines.append(f"{computed}, so nothing is compared with it; {remedy}")
    return lines


def _remedy(usual: str | None) -> str:
    """Return a text that tells how to run the deviating trials again. usual: the kind of machine that it names."""
    machines = usual or "machines of one kind"
    return f"to run the deviating trials again: move their run folders away, then `fewbits sweep …` on {machines}"
