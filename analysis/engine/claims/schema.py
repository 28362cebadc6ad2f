"""The dataclasses of claims and controls, which are read from `studies/STUDY/claims.yaml`.

A claim has one or several parts. A part names a test, arms, metrics and a margin, and expands to one comparison for
each combination of an arm, a metric and an axis value (`comparisons`). Python hooks (engine/claims/hooks.py) compute
numbers that no result file contains; only the tests and rules of this package make verdicts.
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
from fewbits.analysis.engine.claims.formulas import Term
from fewbits.analysis.engine.results.arms import ArmTable
from fewbits.analysis.engine.results.paper import STUDIES, distinct, named
from fewbits.common.from_dict import from_dict, one_of

REACHES = ("any", "mechanism", "outcome")
ABSENCES = ("contradicts", "not-seen")
DIRECTIONS = ("higher", "lower")
BOUNDED = ("no_worse", "equivalent")  # tests that an effect is smaller than the margin
OWN = ("within", "above", "below")  # tests that compare an arm's numbers with bounds instead of a baseline
OBSERVED = ("all_above", "all_below")  # checks that every trial's number is beyond a bound; only controls may use them
EVENTS = ("more", "fewer")  # tests of how often an event such as divergence occurs
TESTS = (*DIRECTIONS, *BOUNDED, *OWN, *OBSERVED, *EVENTS, "exact")
BASELINE = "bf16"
LOSS = "validation_loss"


@dataclass(frozen=True)
class Margin:
    """The smallest effect that counts as an effect, fixed before the runs that test the claim."""

    value: float
    relative: bool  # True: the value is a fraction of the baseline's number; False: it is in the metric's unit
    reason: str  # why the margin has this size

    def __post_init__(self) -> None:
        if not (0 < self.value < math.inf and self.reason):
            raise ValueError(f"margin {self.value}: a margin needs a positive and finite `value`, and a `reason`")


@dataclass(frozen=True)
class Printed:
    """The paper's own effect for a comparison: where it is in the study's paper.yaml, or the effect itself in `value`.

    row, column, baseline and number may contain `{arm}`, `{baseline}`, `{metric}` and `{value}`, which are replaced by
    the Comparison's fields with these names. `{value}` is a value of an axis, not the field `value` of this class.
    """

    table: str = ""  # the id of a table in studies/STUDY/paper.yaml
    row: str = "{metric}"  # the id of the table's row
    column: str = "{arm}"  # the id of the table's column for the arm
    baseline: str = ""  # the id of the baseline's column; if empty, the cell of `column` is the effect
    number: str = ""  # instead of a table: the key of a number in `numbers` of studies/STUDY/paper.yaml
    value: float | None = None  # instead of a table or number: the effect, from the paper's plots or sentences
    negative: bool = False  # `number` or `value` says by how much the arm is below its baseline, so the effect is < 0

    def __post_init__(self) -> None:
        if sum((bool(self.table), bool(self.number), self.value is not None)) != 1:
            raise ValueError("printed: set exactly one of the keys table, number and value")


@dataclass(frozen=True)
class Part:
    """A part of a claim or control: one statistical test, applied to each of its arms, metrics and axis values."""

    test: str = ""  # one of TESTS
    name: str = ""  # the start of the comparisons' names; arms and metrics follow if there are several
    arms: tuple[str, ...] = ()  # the arms that are compared with the baseline
    chain: tuple[str, ...] = ()  # instead of arms: an ordered list in which each arm is compared with the next one
    # If empty: bf16. Tests in OWN and OBSERVED need a baseline only if the metric is a function of two trials.
    baseline: str = ""
    metrics: tuple[str, ...] = (LOSS,)
    data: str = ""  # instead of arms: a key of the mapping that the claim's measure hook returns (hooks.py)
    formula: str = ""  # instead of arms: a formula over several arms, for example `a / b` (engine/claims/formulas.py)
    of: dict[str, str] = field(default_factory=dict)  # names in the formula → "SWEEP/ARM" or "SWEEP/ARM METRIC"
    sweep: str = ""  # the sweep to compare in; needed if several sweeps have different trials for one arm
    where: dict[str, str] = field(default_factory=dict)  # axis → value: use only trials with these axis values
    baseline_where: dict[str, str] | None = None  # axis → value for the baseline; None: the same as the arm's values
    each: dict[str, tuple[str, ...]] = field(default_factory=dict)  # one axis → values, with one comparison per value
    probed: bool = False  # if the plan has probes of these arms, compare the probes instead (engine/claims/probed.py)
    relative: bool = True  # differences are divided by the baseline's number
    margin: Margin | None = None  # if None, the claim's margin
    low: float | None = None  # the lower bound of the test `within`
    high: float | None = None  # the upper bound of the test `within`
    than: float | None = None  # the bound of the tests above, below, all_above and all_below
    reason: str = ""  # where the bounds come from
    absence: str = ""  # one of ABSENCES; if empty, the claim's `absence`
    printed: Printed | None = None  # the paper's own effect
    # False: runs in which the mechanism has no effect support this part, too. The part then counts as support of the
    # claim only together with other parts.
    alone: bool = True
    out_of_reach: str = ""  # why none of our scales can test the part; empty if some scale can

    def __post_init__(self) -> None:
        where = f"part {self.name or ' '.join(self.arms or self.chain) or self.data}"
        if self.out_of_reach:
            if self.test or not self.name:
                raise ValueError(f"{where}: a part with the key out_of_reach needs a name and cannot have a test")
            return
        one_of(f"{where}: test", self.test, TESTS)
        if self.absence:
            one_of(f"{where}: absence", self.absence, ABSENCES)
        if self.test == "exact":
            return
        if sum((bool(self.arms), bool(self.chain), bool(self.data), bool(self.formula))) != 1:
            raise ValueError(f"{where}: set exactly one of the keys arms, chain, data and formula")
        if self.formula:
            if not self.name or len(self.metrics) != 1:
                raise ValueError(f"{where}: a part with a formula needs a name and exactly one metric")
            formulas.check(self.formula, self.terms)
        if self.chain and (len(self.chain) < 2 or self.test not in DIRECTIONS):
            raise ValueError(
                f"{where}: `chain` takes two or more arms in their order, and `test` must then be "
                f"{' or '.join(DIRECTIONS)}"
            )
        if self.test == "within" and (self.low is None or self.high is None or not self.low < self.high):
            raise ValueError(f"{where}: low is {self.low} and high {self.high}; low must be less than high")
        if self.test in ("above", "below", *OBSERVED) and self.than is None:
            raise ValueError(f"{where}: the test {self.test} needs a bound: give the number in the field `than`")
        if len(self.each) > 1:
            raise ValueError(f"{where}: `each` takes one axis, not {len(self.each)} ({', '.join(self.each)})")

    @property
    def bounds(self) -> str:
        """The bounds of the part's test as text, `LOW to HIGH` or the single bound; empty for tests without bounds."""
        if self.low is not None and self.high is not None:
            return f"{self.low:g} to {self.high:g}"
        return "" if self.than is None else f"{self.than:g}"

    @property
    def terms(self) -> dict[str, Term]:
        """The sweep, arm and metric of each name in the formula."""
        return {name: Term.parse(text, self.metrics[0]) for name, text in self.of.items()}


@dataclass(frozen=True)
class Stated:
    """The paper's number of model parameters and of training tokens for an outcome that it reports."""

    parameters: float
    tokens: float


@dataclass(frozen=True)
class Claim:
    """A statement of the paper, or a finding of our own, with the parts whose tests give its verdict."""

    id: str
    statement: str  # in our words
    parts: tuple[Part, ...]
    place: str = ""  # the place in the paper, such as a section
    sentence: str = ""  # the paper's sentence, shortened; empty for a finding of our own
    tests: str = ""  # what we test, and how that differs from the paper's sentence
    reach: str = "any"  # one of REACHES (docs/glossary.md)
    stated: Stated | None = None  # set if runs that are smaller or shorter than the paper's cannot contradict the claim
    absence: str = "not-seen"  # if an effect is shown to be absent, this "contradicts" the claim or is "not-seen"
    control: tuple[str, ...] = ()  # ids of controls, all of which have to pass
    margin: Margin | None = None  # the margin of parts that have no margin of their own
    caveat: str = ""  # a note that is shown with the verdict
    unfit: Mapping[str, str] = field(default_factory=dict)  # scale → why its trials cannot test the claim
    ours: bool = False  # True for a finding of our own

    def __post_init__(self) -> None:
        one_of(f"{self.id}: reach", self.reach, REACHES)
        one_of(f"{self.id}: absence", self.absence, ABSENCES)
        if not self.parts:
            raise ValueError(f"{self.id}: a claim needs at least one part")
        if not self.ours and not (self.place and self.sentence):
            raise ValueError(f"{self.id}: a claim needs `place` and `sentence` of the paper, or `ours: true`")
        if self.reach == "outcome" and self.stated is None and not self.ours:
            raise ValueError(
                f"{self.id}: a claim with reach outcome needs `stated`, the paper's numbers of parameters and tokens"
            )
        for part in self.parts:
            if part.test in OBSERVED:
                raise ValueError(
                    f"{self.id}: the test {part.test} has no p value, so only controls may use it; choose another test"
                )
            if part.test in OWN and not (part.reason or self.ours):
                raise ValueError(f"{self.id}: the test {part.test} needs a `reason` for its bounds")
            if part.test in BOUNDED and self.margin_of(part) is None:
                raise ValueError(f"{self.id}: the test {part.test} needs a margin, in the part or in the claim")
            if part.test in BOUNDED and self.reach == "outcome" and not self.control:
                raise ValueError(
                    f"{self.id}: the test {part.test} needs a control, which shows that these runs detect a change"
                )

    def margin_of(self, part: Part) -> Margin | None:
        """Return the part's own margin or, if it has none, the claim's; None for tests that use no margin."""
        return (part.margin or self.margin) if part.test in (*DIRECTIONS, *BOUNDED) else None

    @property
    def out_of_reach(self) -> bool:
        """True if none of our scales can test any part of the claim."""
        return all(part.out_of_reach for part in self.parts)


@dataclass(frozen=True)
class ControlClaim:
    """A known effect that a claim's runs have to show; otherwise the claim's verdict is `inconclusive`."""

    id: str
    title: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class StudyClaims:
    """The claims and controls of a study."""

    study: str
    claims: tuple[Claim, ...]
    controls: tuple[ControlClaim, ...] = ()
    unfit: Mapping[str, str] = field(default_factory=dict)  # scale → why its trials test no claim

    def __post_init__(self) -> None:
        names = [one.id for one in self.controls]
        distinct(self.study, [*(one.id for one in self.claims), *names])
        for claim in self.claims:
            for control in claim.control:
                one_of(f"{claim.id}: control", control, names)
            self._check_bounded(claim)
        for name in set(names) - {control for claim in self.claims for control in claim.control}:
            raise ValueError(
                f"control {name}: no claim lists it under the key control; add it to a claim, or remove it"
            )

    def _check_bounded(self, claim: Claim) -> None:
        """Raise ValueError if the claim lacks a control for a part with the test `no_worse` or `equivalent`.

        Such a part needs a control that passes only with an effect of at least the part's margin (`_exceeds`). Without
        it, runs that cannot detect any change would support the claim, too. Only claims about losses (reach `outcome`)
        are checked.
        """
        shown = [part for name in claim.control for part in self.control(name).parts]
        for part in claim.parts:
            margin = claim.margin_of(part)
            if claim.reach != "outcome" or part.test not in BOUNDED or margin is None:
                continue
            if not any(_exceeds(control, part, margin) for control in shown):
                size = f"{margin.value:.3g}{' of the baseline' * margin.relative}"
                raise ValueError(
                    f"{claim.id}: the test {part.test} allows a change of {size}, so a control of the claim must show "
                    f"that the runs detect a change of {size}. Add to a control a part with the test "
                    f"{' or '.join(DIRECTIONS)}, the same metric (for a loss: any loss), the same `relative` in part "
                    f"and margin, and a margin of at least {size}. Or add a part with `test: above`, `than` at least "
                    f"{margin.value:.3g}, and the same metrics (for a relative margin, a formula instead)"
                )

    def claim(self, name: str) -> Claim:
        return named("claim", name, self.claims)

    def unfit_at(self, scale: str, claim: Claim) -> str:
        """Return why the trials of this scale cannot test the claim; "" if they can, or if it needs no trials."""
        needs_trials = any(part.test != "exact" and not part.out_of_reach for part in claim.parts)
        return claim.unfit.get(scale, "") or (self.unfit.get(scale, "") if needs_trials else "")

    def control(self, name: str) -> ControlClaim:
        return named("control", name, self.controls)


def _exceeds(control: Part, bounded: Part, margin: Margin) -> bool:
    """Tell whether a part of a control is supported only by an effect of at least `margin`.

    control: the control's part. bounded: a part of the claim, with a test in BOUNDED (`no_worse`, `equivalent`).
    margin: the margin of `bounded`. The result is also False if the effects of the two parts are different kinds of
    numbers, for example a relative change of a loss and an absolute one.
    """
    same = any(
        one == other or ("loss" in one and "loss" in other) for one in control.metrics for other in bounded.metrics
    )
    own = control.margin
    if control.test in DIRECTIONS and own is not None:
        alike = same and own.relative == margin.relative and control.relative == bounded.relative
        return alike and own.value >= margin.value
    # The test above compares a number itself. It is a relative change only if a formula makes it one.
    change = bool(control.formula) if margin.relative else {*control.metrics} == {*bounded.metrics}
    return control.test == "above" and change and control.than is not None and control.than >= margin.value


@dataclass(frozen=True)
class Comparison:
    """One test of a part for one arm, metric and axis value; `comparisons` returns all tests of a claim.

    arm, baseline and metric are empty for exact checks and for parts with `data`, `formula` or `out_of_reach`.
    """

    name: str  # unique in the claim; contains the arms' names in the sweep files
    part: Part
    title: str = ""  # the same text for readers, with the arms' labels from arms.yaml
    arm: str = ""
    baseline: str = ""
    metric: str = ""
    where: Mapping[str, str] = field(default_factory=dict)  # axis → value
    margin: Margin | None = None  # the part's margin, or else the claim's
    absence: str = ""  # the part's `absence`, or else the claim's
    value: str = ""  # this comparison's value of the axis in `part.each`

    @property
    def test(self) -> str:
        return self.part.test


@cache
def load_claims(study: str) -> StudyClaims:
    """Return the claims and controls of a study; raise ValueError if the file is not valid."""
    one_of("study", study, studies_with_claims())
    try:
        return from_dict(StudyClaims, yaml.safe_load((STUDIES / study / "claims.yaml").read_text("utf-8")))
    except ValueError as error:
        raise ValueError(f"{study}/claims.yaml: {error}") from None


def claims_from(file: Path, study: str) -> StudyClaims:
    """Return the claims and controls that the user has written in a YAML file.

    A claim of the file without the key `ours` is a finding of the user's own (`ours` is True), not a statement of a
    paper. study: the study of the sweep that the claims are about. Raise ValueError if the file is not valid.
    """
    try:
        content = yaml.safe_load(file.read_text("utf-8"))
        if not isinstance(content, Mapping):
            raise ValueError("the file must be a mapping with the key claims")
        listed = content.get("claims")
        if not isinstance(listed, list) or not all(isinstance(claim, Mapping) for claim in listed):
            raise ValueError(f"claims: must be a list of mappings, not {listed!r}")
        return from_dict(StudyClaims, {"study": study, **content, "claims": [{"ours": True, **one} for one in listed]})
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or " ".join(str(error).split())
        raise ValueError(f"{file}: {reason}") from None


def claim_ids(study: str) -> tuple[str, ...]:
    """Return the ids of a study's claims, in the order of its file; () if the study has no file of claims."""
    return tuple(claim.id for claim in load_claims(study).claims) if study in studies_with_claims() else ()


def studies_with_claims() -> tuple[str, ...]:
    """Return the names of the studies that have a claims.yaml, sorted."""
    return tuple(sorted(path.parent.name for path in STUDIES.glob("*/claims.yaml")))


def comparisons(claim: Claim | ControlClaim, arms: ArmTable | None = None) -> tuple[Comparison, ...]:
    """Return the comparisons of all parts of a claim or control; their names and titles are unique in the claim.

    A part with `test: exact` gives a single comparison, although its Python check may return several findings.
    arms: the study's table of arms, whose labels appear in the titles; if None, the titles have the arms' names.
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
