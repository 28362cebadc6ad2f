"""Claims as data: what a paper says, what we test of it, and how a result is judged.

`papers/claims/STUDY.yaml` holds a study's claims and controls. A claim has one or several parts; a part names a test,
arms, metrics and a margin, and expands to one comparison for each arm, metric and value of an axis (`comparisons`).
Python hooks (engine/hooks.py) deliver numbers that no result file has; they never make a verdict.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise, product
from pathlib import Path

import yaml

from fewbits.analysis.engine.arms import ArmTable
from fewbits.common.from_dict import from_dict, one_of

FOLDER = Path(__file__).parents[1] / "papers" / "claims"
REACHES = ("any", "mechanism", "outcome")
ABSENCES = ("contradicts", "not-seen")
DIRECTIONS = ("higher", "lower")
NULLS = ("no_worse", "equivalent")
OWN = ("within", "above", "below")  # tests of an arm's own numbers, without a baseline
OBSERVED = ("all_above", "all_below")  # of every trial itself, without inference: for controls alone
EVENTS = ("more", "fewer")  # of an event such as divergence
TESTS = (*DIRECTIONS, *NULLS, *OWN, *OBSERVED, *EVENTS, "exact")
BASELINE = "bf16"
LOSS = "validation_loss"


@dataclass(frozen=True)
class Margin:
    """The smallest effect that counts, fixed before the first run."""

    value: float
    relative: bool  # to the baseline's level
    reason: str

    def __post_init__(self) -> None:
        if not (0 < self.value < math.inf and self.reason):
            raise ValueError(f"margin {self.value}: a positive number with its reason is expected")


@dataclass(frozen=True)
class Printed:
    """What the paper prints of a comparison: cells of a table, or one of the paper's numbers.

    In row, column, baseline and number, `{arm}`, `{baseline}`, `{metric}` and `{value}` (of the axis `each`) stand for
    those of the comparison.
    """

    table: str = ""
    row: str = "{metric}"
    column: str = "{arm}"
    baseline: str = ""  # the column that the change is from; without one the value itself counts
    number: str = ""  # id of a number, in place of a table
    value: float | None = None  # a number that the paper's plots or sentences give, in place of both
    negative: bool = False  # the number is how far the arm lies below its baseline

    def __post_init__(self) -> None:
        if sum((bool(self.table), bool(self.number), self.value is not None)) != 1:
            raise ValueError("printed: one of table, number and value is expected")


@dataclass(frozen=True)
class Part:
    """A statement that one test decides, for each of its arms, metrics and values of an axis."""

    test: str = ""
    name: str = ""  # begins the names of its comparisons; arms and metrics are added where there are several
    arms: tuple[str, ...] = ()
    chain: tuple[str, ...] = ()  # in place of arms: each is compared with the next
    baseline: str = ""  # bf16 where empty; a test of an arm's own numbers takes one if its metric is of two trials
    metrics: tuple[str, ...] = (LOSS,)
    data: str = ""  # in place of arms: the name of what the claim's measure hook delivers
    sweep: str = ""  # where arms of one name are different trials in several sweeps
    where: dict[str, str] = field(default_factory=dict)  # values of the sweep's axes
    baseline_where: dict[str, str] | None = None  # where the baseline is looked up, if not in the arm's place
    each: dict[str, tuple[str, ...]] = field(default_factory=dict)  # one axis, with the values to go through
    relative: bool = True
    margin: Margin | None = None
    low: float | None = None
    high: float | None = None
    than: float | None = None  # of above and below
    absence: str = ""  # the claim's, where empty
    printed: Printed | None = None
    alone: bool = True  # false: it holds of runs in which nothing happens, so it counts only beside the other parts
    out_of_reach: str = ""

    def __post_init__(self) -> None:
        where = f"part {self.name or ' '.join(self.arms or self.chain) or self.data}"
        if self.out_of_reach:
            if self.test or not self.name:
                raise ValueError(f"{where}: what is out of reach has a name and no test")
            return
        one_of(f"{where}: test", self.test, TESTS)
        if self.absence:
            one_of(f"{where}: absence", self.absence, ABSENCES)
        if self.test == "exact":
            return
        if sum((bool(self.arms), bool(self.chain), bool(self.data))) != 1:
            raise ValueError(f"{where}: one of arms, chain and data is expected")
        if self.chain and (len(self.chain) < 2 or self.test not in DIRECTIONS):
            raise ValueError(f"{where}: a chain has two arms or more, and the test higher or lower")
        if self.test == "within" and (self.low is None or self.high is None or not self.low < self.high):
            raise ValueError(f"{where}: low < high are expected, not {self.low} and {self.high}")
        if self.test in ("above", "below", *OBSERVED) and self.than is None:
            raise ValueError(f"{where}: than, a number, is expected")
        if len(self.each) > 1:
            raise ValueError(f"{where}: each takes one axis, not {', '.join(self.each)}")


@dataclass(frozen=True)
class Stated:
    """Where the paper saw an outcome."""

    parameters: float
    tokens: float


@dataclass(frozen=True)
class Claim:
    id: str
    statement: str  # in our words
    parts: tuple[Part, ...]
    place: str = ""  # where the paper says it
    sentence: str = ""  # the paper's own, short; a finding of ours has none
    tests: str = ""  # what we test, and how that differs from the sentence
    reach: str = "any"
    stated: Stated | None = None  # where the paper saw it, if its absence in smaller or shorter runs says nothing
    absence: str = "not-seen"
    control: tuple[str, ...] = ()  # all have to pass
    margin: Margin | None = None  # of parts without one of their own
    caveat: str = ""
    ours: bool = False  # a finding of our own

    def __post_init__(self) -> None:
        one_of(f"{self.id}: reach", self.reach, REACHES)
        one_of(f"{self.id}: absence", self.absence, ABSENCES)
        if not self.parts:
            raise ValueError(f"{self.id}: one part or more is expected")
        if not self.ours and not (self.place and self.sentence):
            raise ValueError(f"{self.id}: a paper's claim has its place and the paper's sentence")
        if self.reach == "outcome" and self.stated is None and not self.ours:
            raise ValueError(f"{self.id}: an outcome has its stated parameters and tokens")
        for part in self.parts:
            if part.test in OBSERVED:
                raise ValueError(f"{self.id}: {part.test} is not inferred from several seeds; it is for controls alone")
            if part.test in NULLS and self.margin_of(part) is None:
                raise ValueError(f"{self.id}: {part.test} needs a margin, of the part or of the claim")
            if part.test in NULLS and self.reach == "outcome" and not self.control:
                raise ValueError(
                    f"{self.id}: {part.test} shows that nothing changes; a control has to show that a change is seen"
                )

    def margin_of(self, part: Part) -> Margin | None:
        return part.margin or self.margin

    @property
    def out_of_reach(self) -> bool:
        return all(part.out_of_reach for part in self.parts)


@dataclass(frozen=True)
class ControlClaim:
    """A known effect that a claim's runs have to show before they may decide it."""

    id: str
    title: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class StudyClaims:
    study: str
    claims: tuple[Claim, ...]
    controls: tuple[ControlClaim, ...] = ()

    def __post_init__(self) -> None:
        names = [one.id for one in self.controls]
        _distinct([*(one.id for one in self.claims), *names])
        for claim in self.claims:
            for control in claim.control:
                one_of(f"{claim.id}: control", control, names)
        for name in set(names) - {control for claim in self.claims for control in claim.control}:
            raise ValueError(f"control {name}: no claim has it")

    def claim(self, name: str) -> Claim:
        one_of("claim", name, [one.id for one in self.claims])
        return next(one for one in self.claims if one.id == name)

    def control(self, name: str) -> ControlClaim:
        one_of("control", name, [one.id for one in self.controls])
        return next(one for one in self.controls if one.id == name)


@dataclass(frozen=True)
class Comparison:
    """One test of one arm: what a part expands to."""

    name: str  # the key, with the ids of arms
    part: Part
    title: str = ""  # the name with the labels of arms, for readers
    arm: str = ""
    baseline: str = ""
    metric: str = ""
    where: Mapping[str, str] = field(default_factory=dict)
    margin: Margin | None = None
    absence: str = ""
    value: str = ""  # of the axis `each`

    @property
    def test(self) -> str:
        return self.part.test


@cache
def load_claims(study: str) -> StudyClaims:
    """Return the claims and controls of a study."""
    one_of("study", study, studies_with_claims())
    try:
        return from_dict(StudyClaims, yaml.safe_load((FOLDER / f"{study}.yaml").read_text("utf-8")))
    except ValueError as error:
        raise ValueError(f"claims/{study}.yaml: {error}") from None


def studies_with_claims() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


def comparisons(claim: Claim | ControlClaim, arms: ArmTable | None = None) -> tuple[Comparison, ...]:
    """Return every comparison of a claim, with names that differ; exact parts are named by their hook instead.

    arms: the study's, whose labels stand in the titles; without it these are the names.
    """
    found = [one for part in claim.parts for one in _expand(claim, part, arms or ArmTable(""))]
    _distinct(one.name for one in found)
    _distinct(one.title for one in found)
    return tuple(found)


def _expand(claim: Claim | ControlClaim, part: Part, table: ArmTable) -> Iterator[Comparison]:
    margin = claim.margin_of(part) if isinstance(claim, Claim) else part.margin
    absence = part.absence or (claim.absence if isinstance(claim, Claim) else "")
    name = part.name or part.data
    whole = Comparison(name, part, name, margin=margin, absence=absence)
    if part.out_of_reach or part.test == "exact" or part.data:
        yield whole
        return
    baseline = part.baseline if part.test in (*OWN, *OBSERVED) else part.baseline or BASELINE
    pairs = list(pairwise(part.chain)) or [(arm, baseline) for arm in part.arms]
    ((axis, values),) = part.each.items() or [("", ("",))]
    for value, (arm, baseline), metric in product(values, pairs, part.metrics):
        names, titles = ([part.name], [part.name]) if part.name else ([], [])
        if len(pairs) > 1 or not part.name:
            names.append(_relation(part, arm, baseline))
            shown = _relation(part, table.label(arm), table.label(baseline) if baseline else "")
            titles.append(f"{table.prefix(part.sweep)}{shown}")
        rest = []
        if len(part.metrics) > 1 or (not part.name and metric != LOSS):
            rest.append(TITLES.get(metric, metric.replace("_", " ")))
        if value:
            rest.append(f"{axis} {value}")
        yield replace(
            whole,
            name=", ".join((*names, *rest)),
            title=", ".join((*titles, *rest)),
            arm=arm,
            baseline=baseline,
            metric=metric,
            where={**part.where, axis: value} if axis else part.where,
            value=value,
        )


def _relation(part: Part, arm: str, baseline: str) -> str:
    return f"{arm} {RELATIONS.get(part.test, 'beside')} {baseline}" if baseline else arm


RELATIONS = {"higher": "above", "lower": "below", "no_worse": "no worse than", "equivalent": "like"}
TITLES = {
    LOSS: "validation loss",
    f"{LOSS}_unquantized": "validation loss, unquantized",
    "loss@late": "training loss",
    "loss_max@late": "largest training loss",
    "ood_loss": "loss on other text",
}


def _distinct(names: Iterable[str]) -> None:
    names = list(names)
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name} is there twice")
