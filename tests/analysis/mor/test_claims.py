"""Verdicts on trials whose truth is known: right where it can be told, and inconclusive where it cannot."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fewbits.analysis.engine.frames import Results
from fewbits.analysis.registry import judge, judge_all, shelf
from fewbits.analysis.verdicts import Outcome, Verdict
from fewbits.sweeps.planning.plan import Plan
from tests.analysis.mor.worlds import FLOOR, World, results

REPRODUCED, CONTRADICTED = Outcome.REPRODUCED, Outcome.CONTRADICTED
INCONCLUSIVE, OUT_OF_REACH = Outcome.INCONCLUSIVE, Outcome.OUT_OF_REACH
FIRST, LAST = 1, 4
BAD = {"bad-arm": 0.05}
NULL = World(effect=BAD)
NOT_AT_CPU = {"M4", "M10", "M12", "F3", "F4"}


def paper_error(arm: str, configuration: str, block: int, part: str, slot: str, end: bool) -> float:
    """As the paper has it: FC2's input, FC1's gradient in block 1, the last block's gradients."""
    if slot == "wgrad.x" or (slot == "fprop.x" and part == "down" and not end):
        return FLOOR
    if slot == "fprop.x" and part == "down":
        return {1: 0.09, 2: 0.05}.get(block, 0.03)
    if slot == "dgrad.dy":
        if (block, part) == (FIRST, "up"):
            return 0.06 if end else 0.03
        return FLOOR + (0.01 if part in ("qkv", "up") else 0.0) + (0.02 if block == LAST else 0.0)
    return FLOOR


def paper_fallback(arm: str, configuration: str, block: int, part: str, slot: str, end: bool) -> float:
    share = {"tensor": 0.12, "block": 0.06, "channel": 0.03}.get(arm, 0.0)
    return 0.9 if arm == "tensor" and (part, slot) == ("down", "fprop.x") else share


PAPER = World(
    effect=BAD | {"two-way": -0.003, "three-way": -0.013, "e8m0": -0.005},
    elsewhere={"three-way": 0.02},
    error=paper_error,
    fallback=paper_fallback,
    below=0.95,
)


def verdict(claim: str, found: Results) -> Verdict:
    """With its control, not yet corrected for the others."""
    (entry,) = (entry for entry in shelf("mor").claims if entry.id == claim)
    return judge(entry, found)


def test_where_all_is_as_the_paper_says_every_claim_is_reproduced(cpu: Plan) -> None:
    found = judge_all("mor", results(cpu, PAPER))
    assert [name for name in found if name.startswith("M")] == [f"M{i + 1}" for i in range(20)]
    for name, one in found.items():
        assert one.outcome is (OUT_OF_REACH if name in NOT_AT_CPU else REPRODUCED), (name, str(one), one.parts)
        assert one.trials or name in {"M1", "M2", *NOT_AT_CPU}, name


def test_nothing_but_noise_is_told_from_effects_that_are_claimed(cpu: Plan) -> None:
    found = judge_all("mor", results(cpu, NULL))
    equal, effects = ("M3", "M5", "M6", "M7", "M17", "M19", "F1", "F2"), ("M8", "M18")
    assert {name: found[name].outcome for name in equal} == dict.fromkeys(equal, REPRODUCED)
    assert {name: found[name].outcome for name in effects} == dict.fromkeys(effects, CONTRADICTED)
    order = dict(found["M9"].parts)
    assert order["tensor above block"].outcome is INCONCLUSIVE, "equal shares are in no order, nor in another one"


def test_an_underpowered_null_is_inconclusive_and_says_how_many_seeds_would_do(cpu: Plan) -> None:
    loud = World(effect={"bad-arm": 1.0}, noise=0.004)
    found = results(cpu, loud)
    for claim in ("M3", "M6", "M7", "M17", "M19", "F2"):
        one = verdict(claim, found)
        assert one.outcome is INCONCLUSIVE, claim
        assert "underpowered" in one.reason, claim
    assert verdict("M8", found).outcome is INCONCLUSIVE
    assert verdict("M18", found).outcome is INCONCLUSIVE


def test_claims_on_losses_need_their_control(cpu: Plan) -> None:
    found = results(cpu, World())  # E2M1 per tensor costs nothing: these runs would not see an effect
    for claim in ("M3", "M5", "M6", "M7", "M8", "M9", "M17", "M18", "M19"):
        one = verdict(claim, found)
        assert one.outcome is INCONCLUSIVE, claim
        assert one.control is not None, claim
        assert not one.control.passed
    assert verdict("M3", found).reason.startswith("its control failed (E2M1 with one scale")


EFFECTS = {
    "beyond the margins": (
        {"tensor": 0.01, "block-64": 0.0021, "threshold-5": -0.003, "e8m0": 0.003, "amax": 0.02}
        | {"two-way": 0.003, "three-way": 0.003, "bf16-again": 0.004},
        dict.fromkeys(("M3", "M6", "M7", "M8", "M17", "M18", "M19", "F2"), CONTRADICTED),
    ),
    "within them": (
        {"tensor": 0.003, "block-64": -0.01, "threshold-5": 0.0003, "e8m0": -0.0055, "two-way": 0.001},
        dict.fromkeys(("M3", "M6", "M7", "M8", "M17", "M19"), REPRODUCED),
    ),
    "on the other side, and too small": (
        {"channel": -0.01, "e8m0": -0.0005},
        {"M3": CONTRADICTED, "M8": CONTRADICTED, "M19": REPRODUCED},
    ),
}


@pytest.mark.parametrize("name", EFFECTS)
def test_effects_on_losses_are_told_by_their_size_and_sign(cpu: Plan, name: str) -> None:
    effect, expected = EFFECTS[name]
    found = results(cpu, World(effect=BAD | effect))
    assert {claim: verdict(claim, found).outcome for claim in expected} == expected


def test_an_arm_that_leaves_all_in_bf16_is_no_proof_that_it_is_as_good(cpu: Plan) -> None:
    found = results(cpu, World(effect=BAD, fallback=lambda *place: 0.6))
    for claim in ("M3", "M5", "M6", "M7", "M17", "M19"):
        one = verdict(claim, found)
        assert one.outcome is INCONCLUSIVE, claim
        assert "most was not quantized (60% of " in one.reason


def test_ablations_are_judged_beside_block_not_beside_bf16(cpu: Plan) -> None:
    beside = results(cpu, World(effect=BAD | {"block": 0.006, "block-64": 0.0065, "threshold-5": 0.0065}))
    assert {name: verdict(name, beside).outcome for name in ("M6", "M7")} == dict.fromkeys(("M6", "M7"), REPRODUCED)
    apart = results(cpu, World(effect=BAD | {"block": -0.006}))
    assert {name: verdict(name, apart).outcome for name in ("M6", "M7")} == dict.fromkeys(("M6", "M7"), CONTRADICTED)


def test_e8m0_below_gam_and_above_bf16_is_not_what_was_said(cpu: Plan) -> None:
    found = verdict("M8", results(cpu, World(effect=BAD | {"block": 0.006, "e8m0": 0.001})))
    assert {name: part.outcome for name, part in found.parts} == {
        "E8M0 below BF16": CONTRADICTED,
        "E8M0 below GAM, the paper's default": REPRODUCED,
    }
    assert found.outcome is CONTRADICTED


def test_lower_losses_that_carry_over_to_other_text_do_no_harm(cpu: Plan) -> None:
    """M18 says both: losses fall, and scores with them. Loss on other text that falls too speaks against it."""
    found = verdict("M18", results(cpu, World(effect=BAD | {"three-way": -0.013})))
    parts = dict(found.parts)
    assert parts["validation loss"].outcome is REPRODUCED
    assert parts["out-of-domain loss higher, in place of scores"].outcome is CONTRADICTED
    assert found.outcome is CONTRADICTED


@pytest.mark.parametrize(("distance", "expected"), [(0.002, REPRODUCED), (-0.002, REPRODUCED), (-0.03, CONTRADICTED)])
def test_a_norm_that_leaves_its_course_and_comes_back_has_left_it(
    cpu: Plan, distance: float, expected: Outcome
) -> None:
    found = verdict("M5", results(cpu, World(effect=BAD, norm={"channel": distance})))
    assert found.outcome is expected
    assert dict(found.parts)["channel, configuration 1"].effect == pytest.approx(abs(distance))


def test_arms_that_diverge_are_worse(cpu: Plan) -> None:
    found = verdict("M17", results(cpu, World(effect=BAD, diverged=frozenset({"two-way"}))))
    assert found.outcome is CONTRADICTED
    assert "ours diverged in 3" in found.reason


def test_the_order_of_fallbacks_is_told_and_a_third_of_block_is_not_half_of_it(cpu: Plan) -> None:
    def shares(tensor: float, block: float, channel: float) -> Verdict:
        of = {"tensor": tensor, "block": block, "channel": channel}
        world = World(effect=BAD, fallback=lambda arm, *rest: of.get(arm, 0.0))
        return verdict("M9", results(cpu, world))

    assert shares(0.12, 0.06, 0.03).outcome is REPRODUCED
    assert shares(0.06, 0.12, 0.03).outcome is CONTRADICTED
    seldom = shares(0.12, 0.06, 0.005)
    assert {name: part.outcome for name, part in seldom.parts} == {
        "tensor above block": REPRODUCED,
        "block above channel": REPRODUCED,
        "channel about half of block": CONTRADICTED,
    }
    assert seldom.outcome is CONTRADICTED
    assert any("tensor 12.00%, block 6.00%, channel 0.50%" in note for note in seldom.notes)
    gone = World(effect=BAD, diverged=frozenset({"tensor"}), fallback=lambda arm, *rest: 0.06)
    above = dict(verdict("M9", results(cpu, gone)).parts)["tensor above block"]
    assert above.outcome is INCONCLUSIVE, "an arm that diverges has no share, and not a greater one"
    never = World(effect=BAD, wobble=0.0)
    assert verdict("M9", results(cpu, never)).outcome is INCONCLUSIVE, "of nothing there is no half"


Error = Callable[[str, str, int, str, str, bool], float]


def but(part: str, slot: str, error: float, *blocks: int, end: bool | None = None) -> Error:
    """The paper's world, but for one tensor in some blocks, in all windows or one."""

    def of(arm: str, configuration: str, block: int, at: str, to: str, late: bool) -> float:
        if (at, to) == (part, slot) and block in blocks and end in (None, late):
            return error
        return paper_error(arm, configuration, block, at, to, late)

    return of


TENSORS: dict[str, tuple[list[Error], dict[str, Outcome]]] = {
    "elsewhere, or the other way round": (
        [
            but("up", "fprop.w", 0.06, 4),  # another forward tensor exceeds
            but("qkv", "dgrad.dy", 0.12, 3),  # another block's gradients are higher
            but("down", "fprop.x", 0.05, 1, end=False),  # begins above the threshold
            but("down", "wgrad.x", 0.2, 1, 2),  # columns are the higher ones
        ],
        {"M11": CONTRADICTED, "M13": CONTRADICTED, "M14": CONTRADICTED, "M15": CONTRADICTED},
    ),
    "in a later block, in other layers": (
        [
            but("down", "fprop.x", 0.06, 4),
            but("down", "dgrad.dy", 0.09, 1, 2, 3, 4),
            but("down", "wgrad.x", 0.069, 1, 2),  # apart by less than a bin
        ],
        {"M11": CONTRADICTED, "M13": CONTRADICTED, "M14": REPRODUCED, "M15": CONTRADICTED},
    ),
    "never in block 1": (
        [but("down", "fprop.x", 0.03, 1, end=True), but("up", "dgrad.dy", 0.02, 1)],
        {"M11": CONTRADICTED, "M13": CONTRADICTED, "M14": CONTRADICTED},
    ),
}


@pytest.mark.parametrize("name", TENSORS)
def test_claims_on_tensors_follow_their_errors(cpu: Plan, name: str) -> None:
    changes, expected = TENSORS[name]

    def error(*place: Any) -> float:
        return next((e for change in changes if (e := change(*place)) != paper_error(*place)), paper_error(*place))

    found = results(cpu, replace(PAPER, error=error, below=None))
    assert {claim: verdict(claim, found).outcome for claim in expected} == expected


@pytest.mark.parametrize(("least", "expected"), [(0.9, REPRODUCED), (0.2, CONTRADICTED), (0.5, INCONCLUSIVE)])
def test_fc2s_activation_falls_back_in_all_blocks_or_not(cpu: Plan, least: float, expected: Outcome) -> None:
    world = World(fallback=lambda arm, configuration, block, *rest: least if block == 3 else 0.9, wobble=0.01)
    assert verdict("M16", results(cpu, world)).outcome is expected


@pytest.mark.parametrize(("below", "expected"), [(0.95, REPRODUCED), (0.85, CONTRADICTED), (1.0, CONTRADICTED)])
def test_the_threshold_takes_as_many_tensors_as_it_was_chosen_for(cpu: Plan, below: float, expected: Outcome) -> None:
    assert verdict("M20", results(cpu, World(below=below))).outcome is expected


def test_watching_that_changes_a_bit_is_found(cpu: Plan) -> None:
    found = verdict("F1", results(cpu, World(effect={"watched": 1e-15})))
    assert found.outcome is CONTRADICTED
    assert verdict("F1", results(cpu, NULL)).outcome is REPRODUCED


# -------------------------------------------------------------------------------- what other scales run


@pytest.fixture
def both(plans: Callable[..., Plan]) -> Plan:
    second = "['data=python','training.batch=12','training.micro_batch=4']"
    return plans("scale=cpu", "sweep=partitions", "seeds=[0,1,2]", f"+axes.configuration.2={second}")


def test_configurations_are_compared_and_each_counts(both: Plan) -> None:
    more = {"1": 0.02, "2": 0.05}

    def error(arm: str, configuration: str, block: int, part: str, slot: str, end: bool) -> float:
        elevated = (part, slot) in {("up", "fprop.w"), ("down", "fprop.x"), ("down", "fprop.w")}
        return 0.06 if configuration == "2" and block == 1 and elevated else FLOOR

    world = World(effect=BAD, error=error, fallback=lambda arm, configuration, *rest: more[configuration])
    with_bad = results(both, world)
    assert verdict("M10", with_bad).outcome is REPRODUCED
    assert verdict("M12", with_bad).outcome is REPRODUCED
    assert len(verdict("M3", with_bad).parts) == 12, "three partitions, two losses, two configurations"
    assert verdict("M3", with_bad).notes == ()
    turned = replace(world, fallback=lambda arm, configuration, *rest: 0.07 - more[configuration])
    assert verdict("M10", results(both, turned)).outcome is CONTRADICTED
    late = replace(world, error=lambda arm, c, block, *rest: 0.06 if block == 4 else FLOOR)
    assert verdict("M12", results(both, late)).outcome is CONTRADICTED


def test_a_configuration_that_is_not_run_is_named(cpu: Plan) -> None:
    found = results(cpu, NULL)
    assert verdict("M3", found).notes == ("configuration 2: not run at this scale, not judged",)
    assert verdict("M10", found).reason == "not run at this scale (cpu)"


def test_what_the_paper_left_open_is_judged_where_it_is_run(plans: Callable[..., Plan]) -> None:
    own = plans("scale=cpu-full", "sweep=left-open", "seeds=[0,1,2]")
    stays = results(own, World(effect={"fp32-e8m0": -0.005, "threshold@0.08": 0.01}))
    assert (verdict("F3", stays).outcome, verdict("F4", stays).outcome) == (REPRODUCED, REPRODUCED)
    goes = results(own, World())
    assert (verdict("F3", goes).outcome, verdict("F4", goes).outcome) == (CONTRADICTED, CONTRADICTED)
    assert verdict("M3", goes).outcome is OUT_OF_REACH, "the partitions are another sweep's"
    both = results(own, World(effect={"fp32-e8m0": -0.005, "fp32-gam": -0.005}))
    assert verdict("F3", both).outcome is CONTRADICTED, "beside GAM, not beside FP32"
    gone = verdict("F4", results(own, World(diverged=frozenset({"threshold@0.08"}))))
    assert gone.outcome is REPRODUCED
    assert "ours diverged in 3 and the baseline in 0" in gone.reason


# -------------------------------------------------------------------------------- what is missing


def test_one_seed_decides_nothing(plans: Callable[..., Plan]) -> None:
    found = judge_all("mor", results(plans("scale=cpu", "seeds=[1]"), PAPER))
    exact = {"M1", "M2", "F1"}
    for name, one in found.items():
        assert one.outcome in ({REPRODUCED} if name in exact else {INCONCLUSIVE, OUT_OF_REACH}), name


def test_an_empty_store_decides_nothing_and_breaks_nothing(cpu: Plan) -> None:
    nothing = frozenset((member.cell.arm, member.cell.seed) for member in cpu.members)
    for name, one in judge_all("mor", results(cpu, World(missing=nothing))).items():
        assert one.outcome in ({REPRODUCED} if name in {"M1", "M2"} else {INCONCLUSIVE, OUT_OF_REACH}), name


def test_a_seed_that_is_missing_is_named_and_the_others_count(cpu: Plan) -> None:
    found = verdict("M17", results(cpu, replace(PAPER, missing=frozenset({("two-way", 2)}))))
    assert found.n == 2
    assert any("two-way, configuration 1, seed 2" in note for note in found.notes)
