"""Test MoR's verdicts with simulated results whose true effects are known: as the paper says, and the opposite."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import pytest

from fewbits.analysis.engine.claims.findings import Outcome, Status
from fewbits.analysis.engine.claims.judging import scale_words
from fewbits.sweeps.planning.plan import Member, Plan
from tests.analysis import worlds
from tests.analysis.mor.worlds import FLOOR, World, results

FIRST, LAST = 1, 4
CONTROLS = {"bad-arm": 0.05, "e5m2": 0.02, "e2m1": 0.03, "bf16-again": 1e-5}
NOISE = 1e-5
TASKS = ("mmlu", "winogrande", "openbookqa", "commonsense_qa", "piqa")


@dataclass
class Scored(World):
    """A world whose trials also have downstream scores."""

    scores: Mapping[str, float] = field(default_factory=dict)  # arm → change of all scores

    def further(self, of: Plan, member: Member, unquantized: float) -> dict[str, float]:
        score = 0.5 + self.scores.get(str(member.cell.arm), 0.0)
        found: dict[str, object] = {}
        for task in TASKS:
            form = "acc_norm" if task in ("openbookqa", "piqa") else "acc"
            found[task] = {f"{form},none": score, f"{form}_stderr,none": 0.001}
        return {"tasks": found}  # type: ignore[dict-item]


def paper_error(arm: str, configuration: str, block: int, part: str, slot: str, end: bool) -> float:
    """Return a made-up quantization error of a tensor, with the pattern that the paper reports."""
    less = 0.0005 if arm == "block-64" else 0.0
    if configuration == "2" and slot == "dgrad.dy" and part == "up":
        return 0.06 if block <= 2 else FLOOR
    if configuration == "2" and (part, slot) in (("up", "fprop.w"), ("down", "fprop.w"), ("down", "fprop.x")):
        return 0.11 if block == FIRST else 0.03
    if slot == "wgrad.x":
        return FLOOR
    if slot == "fprop.x" and part == "down":
        return {1: 0.09, 2: 0.05}.get(block, 0.03) - less if end else 0.026 - less
    if slot == "dgrad.dy":
        if (block, part) == (FIRST, "up"):
            return 0.06 if end else 0.03
        depth = 0.001 * block
        return FLOOR + (0.01 + depth if part in ("qkv", "up") else 0.001) + (0.04 if block == LAST else 0.0)
    return FLOOR


def paper_fallback(arm: str, configuration: str, block: int, part: str, slot: str, end: bool) -> float:
    share = {"tensor": 0.12, "block": 0.03, "channel": 0.0162}.get(arm, 0.0) + (0.02 if configuration == "2" else 0.0)
    return 0.9 if arm == "tensor" and (part, slot) == ("down", "fprop.x") else share


def other_error(arm: str, configuration: str, block: int, part: str, slot: str, end: bool) -> float:
    """Return errors with the opposite pattern: high where the paper's are low, and falling over training and depth."""
    slot = {"wgrad.dy": "dgrad.dy", "wgrad.x": "fprop.x"}.get(slot, slot)
    if slot == "dgrad.dy" and (block, part, end) == (FIRST, "up", False):
        return 0.06
    if slot == "dgrad.dy":
        return (
            0.05 - 0.002 * block
            if part == "out"
            else FLOOR + (0.002 if (block, part) == (2, "up") else 0.0) + 0.0001 * (LAST - block)
        )
    if slot == "fprop.x" and part == "down":
        return (0.05 if block >= 3 else 0.024 if end else 0.05) + (0.001 if arm == "block-64" else 0.0)
    return 0.06 if (block, part, slot) == (3, "qkv", "fprop.x") else FLOOR + (0.001 if arm == "block-64" else 0.0)


def other_fallback(arm: str, configuration: str, block: int, part: str, slot: str, end: bool) -> float:
    share = {"tensor": 0.03, "block": 0.06, "channel": 0.12}.get(arm, 0.05)
    return 0.0 if arm == "tensor" and (part, slot) == ("down", "fprop.x") else share


ARMS = ("block", "tensor", "channel", "block-64", "threshold-5", "amax", "e8m0", "two-way", "three-way")
ALWAYS = ("always-tensor", "always-block", "always-channel")
TRUE = Scored(
    effect=CONTROLS
    | dict.fromkeys(ALWAYS, 0.01)
    | {"two-way": -0.003, "three-way": -0.013, "e8m0": -0.0045}
    | {"block": 2e-5, "tensor": 3e-5, "channel": -2e-5},
    norm={"bad-arm": 0.5, "block": 0.001, "tensor": -0.001, "channel": 0.002},
    error=paper_error,
    fallback=lambda arm, *place: 0.02 if arm == "threshold-5" else paper_fallback(arm, *place),
    below=0.94,
    noise=NOISE,
    scores={"block-64": 0.002, "threshold-5": -0.02, "amax": -0.03, "three-way": -0.03},
)
FALSE = Scored(
    effect=CONTROLS | dict.fromkeys(ARMS, 0.02) | dict.fromkeys(ALWAYS, 0.01) | {"threshold-5": 0.045},
    norm=dict.fromkeys(ARMS, 0.5) | {"bad-arm": 0.5},
    error=other_error,
    fallback=lambda arm, *place: 0.02 if arm == "threshold-5" else other_fallback(arm, *place),
    below=0.5,
    flush=0.0,
    noise=NOISE,
    scores=dict.fromkeys(ARMS, -0.1) | {"threshold-5": 0.05, "amax": 0.05, "three-way": 0.05, "block-64": -0.25},
)


@pytest.fixture(scope="session")
def six(plans: Callable[..., Plan]) -> Plan:
    return plans("scale=cpu", "seeds=[0,1,2,3,4,5]")


BETTER_DATA = dict.fromkeys(("M10", "M12", "M25"), Outcome.NOT_TESTABLE)
SMALL = BETTER_DATA | dict.fromkeys(("M4", "M28"), Outcome.NOT_TESTABLE)


def test_where_all_is_as_the_paper_says_every_claim_is_reproduced(six: Plan) -> None:
    found = results(six, TRUE)
    assert worlds.differing("mor", found, Outcome.REPRODUCED, **SMALL) == {}
    assert "MMLU of FP32 amax: needs 1 B parameters" in worlds.verdicts("mor", found, ("M8",))["M8"].reason
    assert "quantized for 48 steps of 2,048 " in scale_words(found, six.trials, None)  # not the trunk's 400


def test_where_nothing_is_as_the_paper_says_no_claim_is(six: Plan) -> None:
    assert worlds.differing("mor", results(six, FALSE), Outcome.NOT_REPRODUCED, **SMALL) == {}


def test_a_failed_control_and_a_test_that_wrong_arms_pass_tell_nothing(six: Plan) -> None:
    found = worlds.verdicts(
        "mor", results(six, replace(TRUE, effect={"e2m1": 0.03, "always-block": 0.001})), ("M19", "M8")
    )
    assert {one.outcome for one in found.values()} == {Outcome.CANNOT_TELL}
    assert {part.status for part in found["M19"].findings} == {Status.VACUOUS}
    assert "control gains failed" in found["M8"].reason


@pytest.mark.deep
@pytest.mark.parametrize(("world", "outcome"), [(TRUE, Outcome.REPRODUCED), (FALSE, Outcome.NOT_REPRODUCED)])
def test_one_run_of_the_papers_size_decides(plans: Callable[..., Plan], world: World, outcome: Outcome) -> None:
    """Check every claim at scale paper, where each arm has one run: true and false worlds have opposite labels.

    M10, M12 need the paper's data; M28 needs scores of several checkpoints.
    """
    paper = plans("scale=paper", "data.path=null", "evaluation.tasks=[]", "evaluation.tasks_every=0")
    found = results(paper, world)
    assert worlds.differing("mor", found, outcome, **BETTER_DATA, M28=Outcome.CANNOT_TELL) == {}
    assert worlds.verdicts("mor", found, ("M3",))["M3"].findings[0].extra_tokens
