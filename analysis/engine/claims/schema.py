"""The dataclasses of claims and controls, which are read from `studies/STUDY/claims.yaml` or a file of the user's own.

A claim has at most nine keys, and one or several parts. A part names a test, arms, metrics and a margin, and expands
to one comparison for each arm and metric (`comparisons`). Python hooks (engine/claims/hooks.py) compute numbers that
no result file contains, and checks by arithmetic; only the tests and rules of this package make verdicts.

A part names a comparison, not a place of one scale: `sweep` may be a list of sweeps, of which the first one counts
that has all the part's arms at the scale. An arm is written `a|b` if sweeps have different names for it; a baseline
that is written so, too, has its first name where the arm has. In the sweep
`probes`, the arm X is found as `probe-X`, at the trunk's end; if other sweeps follow in the list, probes count only if
their checkpoints are those of a trunk of the study.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, field, replace
from enum import StrEnum
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from fewbits.analysis.engine.results.paper import STUDIES, distinct, named
from fewbits.analysis.engine.results.places import ArmTable
from fewbits.common.from_dict import from_dict, one_of
from fewbits.experiments.composition import spelled

DIRECTIONS = ("higher", "lower")
BOUNDED = ("no_worse", "equal")  # tests that an effect is smaller than the margin
EVENTS = ("more", "fewer")  # tests of how often an event such as divergence occurs
WITHIN = "within"  # compares an arm's own numbers, or a function of two trials, with bounds
TESTS = (*DIRECTIONS, *BOUNDED, WITHIN, *EVENTS, "exact")
BASELINE = "bf16"
LOSS = "validation_loss"
DIVERGED = "diverged"  # the metric of the tests `more` and `fewer` without `data`
SEEDS = Path(__file__).with_name("seeds.yaml")
RELATIONS = {"higher": "above", "lower": "below", "no_worse": "no worse than", "equal": "like"} | {
    "more": "diverges more often than",
    "fewer": "diverges less often than",
}
TITLES = {
    LOSS: "validation loss",
    f"{LOSS}_unquantized": "validation loss, unquantized",
    "loss@late": "training loss",
    "loss_max@late": "largest training loss",
    "ood_loss": "loss on other text",
}


class Kind(StrEnum):
    """The groups in which claims are counted and corrected for multiple tests."""

    EMPIRICAL = "the paper's empirical claims"
    ARITHMETIC = "arithmetic and definitions"
    OURS = "our own findings"


@dataclass(frozen=True)
class Source:
    """The place of a claim in the paper, and the paper's sentence."""

    place: str
    sentence: str
    size: str = "default"  # a key of `sizes` in paper.yaml: the model in which the paper saw it


@dataclass(frozen=True)
class Margin:
    """The smallest effect that counts as an effect, fixed before the runs that test the claim.

    `third: true` stands for a third of what the whole recipe costs in the same runs (`recipe_cost` in paper.yaml).
    """

    value: float | None = None
    relative: bool = True  # True: the value is a fraction of the baseline's number; False: it is in the metric's unit
    reason: str = ""  # why the margin has this size
    third: bool = False

    def __post_init__(self) -> None:
        if self.third == (self.value is not None) or not (self.third or (0 < (self.value or 0) < math.inf)):
            raise ValueError(f"margin {self.value}: set either a positive, finite `value` or `third: true`")
        if not (self.third or self.reason):
            raise ValueError(f"margin {self.value}: a margin needs a `reason`")


@dataclass(frozen=True)
class Printed:
    """The paper's own effect for a comparison: where it is in the study's paper.yaml, or the effect itself in `value`.

    row, column, baseline and number may contain `{arm}`, `{baseline}` and `{metric}`, which are replaced by the names
    of the comparison.
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
class Needs:
    """What runs must have before they can test a claim or part; otherwise it is `not testable here`."""

    parameters: float = 0.0  # at least so many in each compared model
    tokens: float = 0.0  # at least so many in each compared run, including its trunk's
    scores: str = ""  # stored results of this downstream task (`fewbits evaluate`)
    data: str = ""  # this kind of data (`data.kind` of a trial)
    trained: bool = False  # weights of our own training, not published ones
    other: str = ""  # what the kind of data stands for or, without it, something that no scale of ours has, in words

    def and_also(self, more: Needs) -> Needs:
        return Needs(*map(max, astuple(self), astuple(more)))


@dataclass(frozen=True)
class Part:
    """A part of a claim or control: one statistical test, applied to each of its arms and metrics."""

    test: str = ""  # one of TESTS; may be missing if `needs.other` is set
    name: str = ""  # the start of the comparisons' names; arms and metrics follow if there are several
    arms: tuple[str, ...] = ()  # the arms that are compared with the baseline
    baseline: str = ""  # if empty: bf16; `within` needs a baseline only if the metric is a function of two trials
    metrics: tuple[str, ...] = (LOSS,)
    sweep: tuple[str, ...] = ()  # if empty: the first sweep that has all arms
    where: dict[str, Any] = field(default_factory=dict)  # axis → value: use only trials with these axis values
    baseline_where: dict[str, Any] | None = None  # axis → value for the baseline; None: the same as the arm's values
    data: str = ""  # instead of arms: a key of the mapping that the claim's measure hook returns (hooks.py)
    margin: Margin | None = None  # if None, the claim's margin
    bounds: tuple[float | None, float | None] | None = None  # of the test `within`; null stands for no bound
    relative: bool = True  # differences are divided by the baseline's number
    needs: Needs = field(default_factory=Needs)
    printed: Printed | None = None  # the paper's own effect
    wrong: tuple[str, ...] = ()  # arms that must not pass the same test; if one does, nothing could fail it
    reason: str = ""  # where the bounds come from

    def __post_init__(self) -> None:
        where = f"part {self.name or ' '.join(self.arms) or self.data}"
        if self.needs.other and not self.needs.data:
            if self.test or not self.name:
                raise ValueError(f"{where}: a part that needs something else has a name, and no test")
            return
        one_of(f"{where}: test", self.test, TESTS)
        if self.test == "exact":
            return
        if bool(self.arms) == bool(self.data):
            raise ValueError(f"{where}: set exactly one of the keys arms and data")
        if (self.test == WITHIN) != (self.bounds is not None):
            raise ValueError(f"{where}: the test {WITHIN} needs `bounds: [LOW, HIGH]`, and no other test has them")
        if self.bounds is not None:
            given = [bound for bound in self.bounds if bound is not None]
            if not given or given != sorted(set(given)):
                raise ValueError(f"{where}: bounds {list(self.bounds)}: set one of them, or LOW < HIGH")
        for name in ("where", "baseline_where"):  # values of axes are compared as text
            if axes := getattr(self, name):
                texts = {axis: value if isinstance(value, str) else spelled(value) for axis, value in axes.items()}
                object.__setattr__(self, name, texts)

    @property
    def shown_bounds(self) -> str:
        """The bounds as text, `LOW to HIGH`, `above LOW` or `below HIGH`; empty for tests without bounds."""
        low, high = self.bounds or (None, None)
        if low is not None and high is not None:
            return f"{low:g} to {high:g}"
        return f"above {low:g}" if low is not None else f"below {high:g}" if high is not None else ""


@dataclass(frozen=True)
class Claim:
    """A statement of the paper, or a finding of our own, with the parts whose tests give its verdict."""

    id: str
    statement: str  # in our words
    parts: tuple[Part, ...]
    source: Source | None = None  # None for a finding of our own
    tests: str = ""  # what we test, and how that differs from the paper's sentence
    control: tuple[str, ...] = ()  # ids of controls, all of which have to pass
    margin: Margin | None = None  # the margin of parts that have no margin of their own
    needs: Needs = field(default_factory=Needs)
    judged_at: str = ""  # the scale whose label counts, fixed before the runs; if empty, the file's

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError(f"{self.id}: a claim needs at least one part")
        for part in self.parts:
            if part.test == WITHIN and not part.reason and not self.ours:
                raise ValueError(f"{self.id}: the test {part.test} needs a `reason` for its bounds")
            if part.test in BOUNDED and self.margin_of(part) is None:
                raise ValueError(f"{self.id}: the test {part.test} needs a margin, in the part or in the claim")
            margin = self.margin_of(part)
            if part.arms and margin and not margin.third and margin.relative != part.relative:
                relative = str(part.relative).lower()
                raise ValueError(f"{self.id}: set `relative: {relative}` in the margin, as in the part")

    @property
    def ours(self) -> bool:
        return self.source is None

    @property
    def kind(self) -> Kind:
        if all(part.test == "exact" for part in self.parts):
            return Kind.ARITHMETIC
        return Kind.OURS if self.ours else Kind.EMPIRICAL

    def margin_of(self, part: Part) -> Margin | None:
        """Return the part's own margin or, if it has none, the claim's; None for tests that use no margin."""
        return (part.margin or self.margin) if part.test in (*DIRECTIONS, *BOUNDED) else None


@dataclass(frozen=True)
class ControlClaim:
    """A known effect that a claim's runs have to show; otherwise nothing can be told about the claim."""

    id: str
    title: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class StudyClaims:
    study: str
    claims: tuple[Claim, ...]
    controls: tuple[ControlClaim, ...] = ()
    judged_at: str = ""  # the scale whose labels count, for claims that do not name another

    def __post_init__(self) -> None:
        if not self.claims:
            raise ValueError("claims: at least one is expected")
        filled = tuple(replace(claim, judged_at=claim.judged_at or self.judged_at) for claim in self.claims)
        object.__setattr__(self, "claims", filled)
        names = [one.id for one in self.controls]
        distinct(self.study, [*(one.id for one in self.claims), *names])
        used = {control: claim.id for claim in self.claims for control in claim.control}
        for control, claim in used.items():
            one_of(f"{claim}: control", control, names)
        if unused := set(names) - set(used):
            raise ValueError(f"control {', '.join(sorted(unused))}: no claim lists it under the key control; remove it")

    def claim(self, name: str) -> Claim:
        return named("claim", name, self.claims)

    def control(self, name: str) -> ControlClaim:
        return named("control", name, self.controls)


@dataclass(frozen=True)
class Comparison:
    """One test of a part for one arm and metric; `comparisons` returns all tests of a claim."""

    name: str  # unique in the claim; contains the arms' names in the sweep files
    part: Part
    title: str = ""  # the same text for readers, with the arms' labels from arms.yaml
    arm: str = ""
    baseline: str = ""
    metric: str = ""
    margin: Margin | None = None  # the part's margin, or else the claim's

    @property
    def test(self) -> str:
        return self.part.test


# -------------------------------------------------------------------------------- files


@cache
def load_claims(study: str) -> StudyClaims:
    """Return the claims and controls of a study; raise ValueError if the file is not valid."""
    one_of("study", study, studies_with_claims())
    return claims_from(STUDIES / study / "claims.yaml")


def claims_from(file: Path, study: str = "") -> StudyClaims:
    """Return the claims and controls in a YAML file; raise ValueError if the file is not valid."""
    try:
        content: Any = yaml.safe_load(file.read_text("utf-8"))
        if study and isinstance(content, Mapping):
            content = {"study": study, **content}
        return from_dict(StudyClaims, content)
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or " ".join(str(error).split())
        raise ValueError(f"{file}: {reason}") from None


def studies_with_claims() -> tuple[str, ...]:
    return tuple(sorted(path.parent.name for path in STUDIES.glob("*/claims.yaml")))


def pilots_of(study: str, scale: str, seeds: Iterable[int]) -> dict[int, str]:
    """Return {seed: description of the pilot} for those of `seeds` whose results shaped the design of this scale."""
    designs = [one for one in _designs() if one["study"] == study and scale in one["scales"]]
    known = {seed: pilot["by"] for one in designs for pilot in one["shaped"] for seed in pilot["seeds"]}
    return {seed: known[seed] for seed in seeds if seed in known}


@cache
def _designs() -> list[dict[str, Any]]:
    return yaml.safe_load(SEEDS.read_text("utf-8"))


# -------------------------------------------------------------------------------- comparisons


def comparisons(claim: Claim | ControlClaim, arms: ArmTable | None = None) -> tuple[Comparison, ...]:
    """Return the comparisons of all parts of a claim or control; their names and titles are unique in the claim."""
    expanded = [comparison for part in claim.parts for comparison in expand(claim, part, arms or ArmTable(""))]
    distinct(claim.id, [comparison.name for comparison in expanded])
    distinct(claim.id, [comparison.title for comparison in expanded])
    return tuple(expanded)


def expand(claim: Claim | ControlClaim, part: Part, table: ArmTable) -> Iterator[Comparison]:
    margin = claim.margin_of(part) if isinstance(claim, Claim) else part.margin
    if not part.arms:
        name = part.name or part.data or part.needs.other
        yield Comparison(name, part, name, margin=margin)
        return
    baseline = part.baseline if part.test == WITHIN else part.baseline or BASELINE
    for arm, metric in product(part.arms, part.metrics):
        names, titles = ([part.name], [part.name]) if part.name else ([], [])
        if len(part.arms) > 1 or not part.name:
            first, base = arm.partition("|")[0], baseline.partition("|")[0]
            relation = f" {RELATIONS.get(part.test, 'beside')} " if base else ""
            names.append(f"{first}{relation}{base}")
            prefix = table.prefix(part.sweep[0] if part.sweep else "")
            titles.append(f"{prefix}{table.label(first)}{relation}{table.label(base) if base else ''}")
        rest = []
        if len(part.metrics) > 1 or (not part.name and metric not in (LOSS, DIVERGED)):
            rest.append(TITLES.get(metric, metric.replace("_", " ")))
        if part.where and not part.name:
            rest += [f"{axis} {value}" for axis, value in part.where.items()]
        name, title = ", ".join((*names, *rest)), ", ".join((*titles, *rest))
        yield Comparison(name, part, title, arm, baseline, metric, margin)
