"""Claims as data: what a paper says, what we test, and how a result is judged.

`papers/claims/STUDY.yaml` has a study's claims and controls. A claim has one or several parts; a part names a test,
arms, metrics and a margin, and expands to one comparison for each arm, metric and value of an axis (`comparisons`).
Python hooks (engine/claims/hooks.py) supply numbers that no result file has; they never make a verdict.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise, product
from pathlib import Path

import yaml

from fewbits.analysis.engine.claims import formulas
from fewbits.analysis.engine.claims.formulas import Place
from fewbits.analysis.engine.results.arms import ArmTable
from fewbits.analysis.engine.results.paper import distinct, named
from fewbits.common.from_dict import from_dict, one_of

FOLDER = Path(__file__).parents[2] / "papers" / "claims"
REACHES = ("any", "mechanism", "outcome")
ABSENCES = ("contradicts", "not-seen")
DIRECTIONS = ("higher", "lower")
NULLS = ("no_worse", "equivalent")
OWN = ("within", "above", "below")  # tests of an arm's own numbers, without a baseline
OBSERVED = ("all_above", "all_below")  # checks of every trial's number, without inference; only controls use them
EVENTS = ("more", "fewer")  # tests of how often an event such as divergence occurs
TESTS = (*DIRECTIONS, *NULLS, *OWN, *OBSERVED, *EVENTS, "exact")
BASELINE = "bf16"
LOSS = "validation_loss"


@dataclass(frozen=True)
class Margin:
    """The smallest effect that counts, fixed before the first run."""

    value: float
    relative: bool  # the value is a fraction of the baseline's level
    reason: str

    def __post_init__(self) -> None:
        if not (0 < self.value < math.inf and self.reason):
            raise ValueError(f"margin {self.value}: a margin is a positive number with a reason")


@dataclass(frozen=True)
class Printed:
    """The paper's own result of a comparison: cells of a table, one of the paper's numbers, or a value.

    In row, column, baseline and number, the comparison's values replace `{arm}`, `{baseline}`, `{metric}` and `{value}`
    (of the axis in `each`).
    """

    table: str = ""
    row: str = "{metric}"
    column: str = "{arm}"
    baseline: str = ""  # the baseline's column; without one, the paper's value itself is compared
    number: str = ""  # the id of one of the paper's numbers, instead of a table
    value: float | None = None  # a number from the paper's plots or sentences, instead of a table or a number's id
    negative: bool = False  # the number says how far the arm is below its baseline

    def __post_init__(self) -> None:
        if sum((bool(self.table), bool(self.number), self.value is not None)) != 1:
            raise ValueError("printed: give exactly one of table, number and value")


@dataclass(frozen=True)
class Part:
    """A statement that one test decides, for each of its arms, metrics and values of an axis."""

    test: str = ""
    name: str = ""  # the start of its comparisons' names; arms and metrics follow if there are several
    arms: tuple[str, ...] = ()
    chain: tuple[str, ...] = ()  # instead of arms: arms of which each is compared with the next
    # If empty, bf16. A test of an arm's own numbers has a baseline only if its metric is a function of two trials.
    baseline: str = ""
    metrics: tuple[str, ...] = (LOSS,)
    data: str = ""  # instead of arms: the key of the data in the result of the claim's measure hook
    formula: str = ""  # instead of arms: a number of several arms (engine/claims/formulas.py)
    of: dict[str, str] = field(default_factory=dict)  # the names in the formula, each with its arm
    sweep: str = ""  # the sweep to compare in; needed if several sweeps have different trials for one arm
    where: dict[str, str] = field(default_factory=dict)  # selected values of the sweep's axes
    baseline_where: dict[str, str] | None = None  # the baseline's axis values, if they are not the arm's
    each: dict[str, tuple[str, ...]] = field(default_factory=dict)  # one axis, with a comparison for each value
    probed: bool = False  # in plans with probes of these arms, the probes are compared (engine/claims/probed.py)
    relative: bool = True  # differences are fractions of the baseline's level
    margin: Margin | None = None
    low: float | None = None  # the bounds of `within`
    high: float | None = None
    than: float | None = None  # the bound of above, below, all_above and all_below
    reason: str = ""  # where the bounds come from
    absence: str = ""  # if empty, the claim's
    printed: Printed | None = None
    # False if runs in which nothing happens support the part, too: then it counts only together with other parts.
    alone: bool = True
    out_of_reach: str = ""  # the reason why no scale of ours can test the part

    def __post_init__(self) -> None:
        where = f"part {self.name or ' '.join(self.arms or self.chain) or self.data}"
        if self.out_of_reach:
            if self.test or not self.name:
                raise ValueError(f"{where}: a part that is out of reach needs a name and has no test")
            return
        one_of(f"{where}: test", self.test, TESTS)
        if self.absence:
            one_of(f"{where}: absence", self.absence, ABSENCES)
        if self.test == "exact":
            return
        if sum((bool(self.arms), bool(self.chain), bool(self.data), bool(self.formula))) != 1:
            raise ValueError(f"{where}: give exactly one of arms, chain, data and formula")
        if self.formula:
            if not self.name or len(self.metrics) != 1:
                raise ValueError(f"{where}: a part with a formula needs a name and exactly one metric")
            formulas.check(self.formula, self.places)
        if self.chain and (len(self.chain) < 2 or self.test not in DIRECTIONS):
            raise ValueError(f"{where}: a chain needs two or more arms and the test {' or '.join(DIRECTIONS)}")
        if self.test == "within" and (self.low is None or self.high is None or not self.low < self.high):
            raise ValueError(f"{where}: low is {self.low} and high {self.high}; low must be less than high")
        if self.test in ("above", "below", *OBSERVED) and self.than is None:
            raise ValueError(f"{where}: test {self.test} needs the number `than`")
        if len(self.each) > 1:
            raise ValueError(f"{where}: `each` takes one axis, not {len(self.each)} ({', '.join(self.each)})")

    @property
    def bounds(self) -> str:
        """Return the bounds of the part's test as text; empty if it has none."""
        if self.low is not None and self.high is not None:
            return f"{self.low:g} to {self.high:g}"
        return "" if self.than is None else f"{self.than:g}"

    @property
    def places(self) -> dict[str, Place]:
        """Return the arm and the metric that each name of the formula stands for."""
        return {name: Place.parse(text, self.metrics[0]) for name, text in self.of.items()}


@dataclass(frozen=True)
class Stated:
    """The size of the model and the number of tokens with which the paper observed an outcome."""

    parameters: float
    tokens: float


@dataclass(frozen=True)
class Claim:
    """A statement of the paper, or a finding of our own, with the tests that decide it."""

    id: str
    statement: str  # in our words
    parts: tuple[Part, ...]
    place: str = ""  # the place in the paper, such as a section
    sentence: str = ""  # the paper's sentence, shortened; empty for a finding of our own
    tests: str = ""  # what we test, and how that differs from the sentence
    reach: str = "any"
    stated: Stated | None = None  # set if absence in smaller or shorter runs than the paper's would say nothing
    absence: str = "not-seen"  # what an effect shown to be absent means; "contradicts" or "not-seen"
    control: tuple[str, ...] = ()  # ids of controls, all of which have to pass
    margin: Margin | None = None  # the margin of parts without one of their own
    caveat: str = ""
    unfit: Mapping[str, str] = field(default_factory=dict)  # scales whose trials cannot decide it, with the reason
    ours: bool = False  # a finding of our own

    def __post_init__(self) -> None:
        one_of(f"{self.id}: reach", self.reach, REACHES)
        one_of(f"{self.id}: absence", self.absence, ABSENCES)
        if not self.parts:
            raise ValueError(f"{self.id}: a claim needs at least one part")
        if not self.ours and not (self.place and self.sentence):
            raise ValueError(f"{self.id}: a claim of the paper needs `place` and `sentence`")
        if self.reach == "outcome" and self.stated is None and not self.ours:
            raise ValueError(f"{self.id}: a claim with reach outcome needs `stated`, with parameters and tokens")
        for part in self.parts:
            if part.test in OBSERVED:
                raise ValueError(f"{self.id}: {part.test} checks single trials, and only controls may use it")
            if part.test in OWN and not (part.reason or self.ours):
                raise ValueError(f"{self.id}: {part.test} needs a `reason` for its bounds")
            if part.test in NULLS and self.margin_of(part) is None:
                raise ValueError(f"{self.id}: {part.test} needs a margin, in the part or in the claim")
            if part.test in NULLS and self.reach == "outcome" and not self.control:
                raise ValueError(f"{self.id}: {part.test} needs a control, which shows that these runs detect a change")

    def margin_of(self, part: Part) -> Margin | None:
        return part.margin or self.margin

    @property
    def out_of_reach(self) -> bool:
        return all(part.out_of_reach for part in self.parts)


@dataclass(frozen=True)
class ControlClaim:
    """A known effect that the runs have to show before they may decide a claim."""

    id: str
    title: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class StudyClaims:
    """The claims and controls of a study."""

    study: str
    claims: tuple[Claim, ...]
    controls: tuple[ControlClaim, ...] = ()

    def __post_init__(self) -> None:
        names = [one.id for one in self.controls]
        distinct(self.study, [*(one.id for one in self.claims), *names])
        for claim in self.claims:
            for control in claim.control:
                one_of(f"{claim.id}: control", control, names)
        for name in set(names) - {control for claim in self.claims for control in claim.control}:
            raise ValueError(f"control {name}: no claim has it")

    def claim(self, name: str) -> Claim:
        return named("claim", name, self.claims)

    def control(self, name: str) -> ControlClaim:
        return named("control", name, self.controls)


@dataclass(frozen=True)
class Comparison:
    """One test of one arm, metric and value of an axis; a part expands to comparisons."""

    name: str  # the key, with the ids of arms
    part: Part
    title: str = ""  # the name with the labels of arms, for readers
    arm: str = ""
    baseline: str = ""
    metric: str = ""
    where: Mapping[str, str] = field(default_factory=dict)
    margin: Margin | None = None
    absence: str = ""
    value: str = ""  # the value of the part's axis `each`

    @property
    def test(self) -> str:
        return self.part.test


@cache
def load_claims(study: str) -> StudyClaims:
    """Return the claims and controls of a study; raise ValueError if the file is not valid."""
    one_of("study", study, studies_with_claims())
    try:
        return from_dict(StudyClaims, yaml.safe_load((FOLDER / f"{study}.yaml").read_text("utf-8")))
    except ValueError as error:
        raise ValueError(f"claims/{study}.yaml: {error}") from None


def claims_from(file: Path, study: str) -> StudyClaims:
    """Return the claims and controls of a file of the user's own, for a sweep of this study."""
    try:
        content = yaml.safe_load(file.read_text("utf-8"))
        if not isinstance(content, Mapping):
            raise ValueError("a mapping with the key claims is expected")
        listed = content.get("claims")
        if not isinstance(listed, list) or not all(isinstance(claim, Mapping) for claim in listed):
            raise ValueError(f"claims: a list of mappings is expected, not {listed!r}")
        return from_dict(StudyClaims, {"study": study, **content, "claims": [{"ours": True, **one} for one in listed]})
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or " ".join(str(error).split())
        raise ValueError(f"{file}: {reason}") from None


def claim_ids(study: str) -> tuple[str, ...]:
    """Return the ids of a study's claims; none if it has no file of claims."""
    return tuple(claim.id for claim in load_claims(study).claims) if study in studies_with_claims() else ()


def studies_with_claims() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


def comparisons(claim: Claim | ControlClaim, arms: ArmTable | None = None) -> tuple[Comparison, ...]:
    """Return the comparisons of a claim, which all have different names.

    A part that arithmetic decides (`test: exact`) gives a single comparison; the Python function that checks it names
    its findings later. arms: the study's arms, whose labels stand in the titles; without them, a title is the name.
    """
    expanded = [comparison for part in claim.parts for comparison in _expand(claim, part, arms or ArmTable(""))]
    distinct(claim.id, [comparison.name for comparison in expanded])
    distinct(claim.id, [comparison.title for comparison in expanded])
    return tuple(expanded)


def _expand(claim: Claim | ControlClaim, part: Part, table: ArmTable) -> Iterator[Comparison]:
    margin = claim.margin_of(part) if isinstance(claim, Claim) else part.margin
    absence = part.absence or (claim.absence if isinstance(claim, Claim) else "")
    name = part.name or part.data
    whole = Comparison(name, part, name, margin=margin, absence=absence)
    if part.out_of_reach or part.test == "exact" or part.data or part.formula:
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
