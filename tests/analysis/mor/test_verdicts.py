"""Test MoR's verdicts with simulated results whose true effects are known.

In different tests, the effects are as the paper states, opposite or absent, or noise hides them, or controls fail.
"""

from collections.abc import Callable, Mapping

import pytest

from fewbits.analysis.engine.claims.findings import Outcome, Status, Verdict
from fewbits.analysis.engine.claims.judging import judge_study, resolve
from fewbits.analysis.engine.claims.pairs import data_of
from fewbits.analysis.engine.claims.preview import spreads_of
from fewbits.analysis.engine.claims.schema import comparisons, load_claims
from fewbits.analysis.engine.results.data import Differences
from fewbits.sweeps.planning.plan import Plan
from tests.analysis import worlds
from tests.analysis.mor.worlds import FLOOR, World, results

REPRODUCED, IN_PART, CONTRADICTED = Outcome.REPRODUCED, Outcome.IN_PART, Outcome.CONTRADICTED
NOT_SEEN, INCONCLUSIVE = Outcome.NOT_SEEN, Outcome.INCONCLUSIVE
FIRST, LAST = 1, 4
CONTROLS = {"bad-arm": 0.05, "e5m2": 0.009, "e2m1": 0.03}
LOSSES = ("M3", "M6", "M7", "M17", "M19")
EFFECTS = ("M8", "M18")


def paper_error(arm: str, configuration: str, block: int, part: str, slot: str, end: bool) -> float:
    """Return a made-up quantization error of a tensor, with the pattern that the paper reports.

    Errors are high in FC2's input, in FC1's gradient in block 1, and in gradients of the last block. Under
    configuration 2, errors of FC1's and FC2's weights are also high in block 1, and no error of FC tensors in the
    forward pass is high in later blocks. end: at the end of training, not earlier.
    """
    less = 0.0005 if arm == "block-64" else 0.0
    if configuration == "2" and (part, slot) in (("up", "fprop.w"), ("down", "fprop.w"), ("down", "fprop.x")):
        return 0.11 if block == FIRST else 0.03
    if slot == "wgrad.x":
        return FLOOR
    if slot == "fprop.x" and part == "down":
        return {1: 0.09, 2: 0.05}.get(block, 0.03) - less if end else 0.026 - less
    if slot == "dgrad.dy":
        if (block, part) == (FIRST, "up"):
            return 0.06 if end else 0.03
        return FLOOR + (0.01 if part in ("qkv", "up") else 0.001) + (0.04 if block == LAST else 0.0)
    return FLOOR


def paper_fallback(arm: str, configuration: str, block: int, part: str, slot: str, end: bool) -> float:
    share = {"tensor": 0.12, "block": 0.06, "channel": 0.03}.get(arm, 0.0) + (0.02 if configuration == "2" else 0.0)
    return 0.9 if arm == "tensor" and (part, slot) == ("down", "fprop.x") else share


TRUE = World(
    effect=CONTROLS
    | {"two-way": -0.003, "three-way": -0.013, "e8m0": -0.005}
    | {"always-tensor": 0.004, "always-block": 0.002, "always-channel": 0.002},
    norm={"bad-arm": 0.5},
    error=paper_error,
    fallback=paper_fallback,
    below=0.94,
)


def some_fallback(arm: str, *place: object) -> float:
    return 0.03 if arm == "threshold-5" else 0.05


NULL = World(effect=CONTROLS, norm={"bad-arm": 0.5}, fallback=some_fallback)


@pytest.fixture(scope="session")
def six(plans: Callable[..., Plan]) -> Plan:
    return plans("scale=cpu", "seeds=[0,1,2,3,4,5]")


def judged(plan: Plan, world: World, *names: str) -> Mapping[str, Verdict]:
    """Return the verdicts of the named claims for simulated results with the effects of `world`.

    Without names, return the verdicts of all claims of the study.
    """
    found = results(plan, world)
    return worlds.verdicts("mor", found, names) if names else judge_study("mor", found)


def outcomes(found: Mapping[str, Verdict], names: tuple[str, ...]) -> dict[str, Outcome]:
    return {name: found[name].outcome for name in names}


def test_where_all_is_as_the_paper_says_every_claim_that_runs_is_reproduced(six: Plan) -> None:
    found = judged(six, TRUE)
    in_part = {"M6", "M7", "M8", "M17", "M18"}  # claims with parts that need larger models
    expected = {name: IN_PART if name in in_part else REPRODUCED for name in found}
    expected |= {"M4": Outcome.OUT_OF_REACH}
    # The six values are equal, so p = 2^-6 by their signs, which is not significant after correction over all claims.
    expected |= {"M22": INCONCLUSIVE}
    assert {name: (one.outcome, one.reason) for name, one in found.items() if one.outcome is not expected[name]} == {}


def test_a_claim_reproduced_in_part_names_its_parts(six: Plan) -> None:
    one = judged(six, TRUE)["M8"]
    assert one.supported == ("e8m0 below bf16, validation loss", "e8m0 below bf16, training loss")
    assert [part.status for part in one.findings if part.name not in one.supported] == [Status.OUT_OF_REACH]


def test_where_nothing_happens_nulls_hold_and_effects_are_not_seen_at_this_scale(six: Plan) -> None:
    found = judged(six, NULL, *LOSSES, *EFFECTS, "M9", "M13", "M14")
    assert outcomes(found, LOSSES) == {name: REPRODUCED if name in ("M3", "M19") else IN_PART for name in LOSSES}
    assert outcomes(found, EFFECTS) == dict.fromkeys(EFFECTS, NOT_SEEN)
    assert not any(found[name].covered for name in (*LOSSES, *EFFECTS))
    assert outcomes(found, ("M9", "M13", "M14")) == dict.fromkeys(("M9", "M13", "M14"), NOT_SEEN), (
        "the paper's runs are longer"
    )


def test_a_mechanism_is_contradicted_at_the_scale_of_its_statement(six: Plan) -> None:
    """Check that M9 is contradicted only by runs of the paper's size, but M23 by any run.

    M9 is about fallback shares of one large model; M23 says that smaller blocks represent any tensor better.
    """

    def other_way(arm: str, *place: object) -> float:
        return {"tensor": 0.03, "block": 0.06, "channel": 0.12}.get(arm, 0.0)

    def coarser_is_better(arm: str, *place: object) -> float:
        return FLOOR + (0.001 if arm == "block-64" else 0.0)

    made = results(six, World(effect=CONTROLS, fallback=other_way, error=coarser_is_better))
    for covered, outcome in ((False, NOT_SEEN), (True, CONTRADICTED)):
        found = worlds.verdicts("mor", made, ("M9",), covered=covered)
        assert found["M9"].outcome is outcome
    assert worlds.verdicts("mor", made, ("M9", "M23"))["M23"].outcome is CONTRADICTED


def test_a_null_that_does_not_hold_is_not_contradicted_where_the_paper_did_not_look(six: Plan) -> None:
    worse = dict.fromkeys(("tensor", "block", "channel", "block-64"), 0.02) | {"threshold-5": 0.03, "two-way": 0.01}
    names = ("M3", "M6", "M7", "M17")
    found = judged(six, World(effect=CONTROLS | worse, fallback=some_fallback), *names)
    assert outcomes(found, names) == dict.fromkeys(names, NOT_SEEN)


def test_the_opposite_is_contradicted_in_runs_as_large_as_the_papers_and_not_seen_in_others(six: Plan) -> None:
    worse = {"block": 0.02, "tensor": 0.02, "channel": 0.02, "block-64": 0.02, "threshold-5": 0.05, "amax": 0.02}
    world = World(
        effect=CONTROLS | worse | dict.fromkeys(("e8m0", "two-way", "three-way"), 0.02), fallback=some_fallback
    )
    names = (*LOSSES, *EFFECTS, "M13", "M14")
    for covered, outcome in ((False, NOT_SEEN), (True, CONTRADICTED)):
        found = worlds.verdicts("mor", results(six, world), names, covered=covered)
        assert outcomes(found, names) == dict.fromkeys(names, outcome)


def test_an_underpowered_null_is_inconclusive_and_says_how_many_seeds_would_do(six: Plan) -> None:
    found = judged(six, World(effect={"bad-arm": 5.0, "e5m2": 1.0, "e2m1": 2.0}, noise=0.01), *LOSSES, *EFFECTS)
    for name in LOSSES:
        assert found[name].outcome is INCONCLUSIVE, name
        assert found[name].underpowered, name
    assert outcomes(found, EFFECTS) == dict.fromkeys(EFFECTS, INCONCLUSIVE)


def test_no_null_and_no_absence_is_decided_where_the_control_finds_nothing(six: Plan) -> None:
    """Check that claims are inconclusive if their controls, E5M2 or E2M1 for all operands, have no effect.

    Claims with a margin of 0.5 % have only E2M1 as control; E5M2 costs less than their margin.
    """
    for name, one in judged(six, World(), *LOSSES, *EFFECTS).items():
        assert one.outcome is INCONCLUSIVE, name
        first = "coarse" if name in ("M3", "M6", "M19") else "graded"
        assert [control.id for control in one.controls if not control.passed][:1] == [first], name


@pytest.mark.deep
def test_a_margin_of_half_a_percent_does_not_need_an_effect_far_below_it(six: Plan) -> None:
    """Check that M3 is decided although E5M2 does not cost measurably more than BF16, but that M17 is not.

    M3's margin is 0.5 % of the loss, M17's 0.15 %.
    """
    found = judged(six, World(effect=CONTROLS | {"e5m2": 0.0}, fallback=some_fallback), "M3", "M17")
    assert outcomes(found, ("M3", "M17")) == {"M3": REPRODUCED, "M17": INCONCLUSIVE}


@pytest.mark.deep
def test_no_null_is_decided_where_no_arm_is_worse_by_its_margin(six: Plan) -> None:
    """Check that M3 (losses are within 0.5 % of BF16's) is inconclusive if no arm costs 0.5 %.

    Its control needs an arm that costs more than the margin; in these simulated results even E2M1 costs only 0.4 %.
    """
    one = judged(six, World(effect=CONTROLS | {"e2m1": 0.004}), "M3")["M3"]
    assert one.outcome is INCONCLUSIVE
    assert [control.id for control in one.controls if not control.passed] == ["coarse"]


@pytest.mark.deep
def test_arms_that_stay_in_bf16_do_not_show_that_quantizing_costs_nothing(six: Plan) -> None:
    one = judged(six, World(effect=CONTROLS, fallback=lambda *place: 0.9), "M3")["M3"]
    assert one.outcome is INCONCLUSIVE
    assert [control.id for control in one.controls if not control.passed] == ["quantizes"]


@pytest.mark.deep
def test_errors_say_nothing_where_no_tensor_falls_back(six: Plan) -> None:
    """Check that claims about errors are inconclusive if no tensor falls back: the mechanism was not active."""
    names = ("M9", "M11", "M13", "M14", "M15", "M16", "M20", "M22", "M23")
    assert outcomes(judged(six, World(effect=CONTROLS), *names), names) == dict.fromkeys(names, INCONCLUSIVE)


@pytest.mark.deep
def test_a_threshold_that_changes_no_decision_shows_no_null(six: Plan) -> None:
    """Check that M7 (a threshold of 5 % costs nothing) is inconclusive if it causes as many fallbacks as 4.5 %."""
    one = judged(six, World(effect=CONTROLS, fallback=lambda *place: 0.05), "M7")["M7"]
    assert one.outcome is INCONCLUSIVE
    assert [control.id for control in one.controls if not control.passed] == ["quantizes-more"]


@pytest.mark.deep
def test_what_a_scale_leaves_out_is_not_run_and_the_rest_is_judged(plans: Callable[..., Plan]) -> None:
    """Check that parts and claims are not run if the scale cpu-full lacks their arms, and that the others are judged.

    The scale lacks BF16 under configuration 2, the baseline of some parts of M3, and tensor partition, which a control
    of M3 needs. So M3 is not run.
    """
    found = judged(plans("scale=cpu-full"), TRUE, "M3", "M9", "M10", "M17")
    status = {part.name: part.status for part in found["M3"].findings}
    assert {one for name, one in status.items() if "configuration 2" in name} == {Status.NOT_RUN}
    assert Status.SUPPORTED in status.values()
    expected = {"M3": Outcome.NOT_RUN, "M9": REPRODUCED, "M10": REPRODUCED, "M17": IN_PART}
    assert {name: one.outcome for name, one in found.items()} == expected


def test_spreads_for_planning_do_not_contain_the_factor_that_planning_applies(cpu: Plan) -> None:
    """Check that rows for spreads.yaml have the pooled spread itself: planned_effect multiplies it by CAUTION."""
    made = results(cpu, NULL)
    printed = next(row for row in spreads_of("mor", made) if row.metric == "validation_loss")
    block = next(one for one in comparisons(load_claims("mor").claim("M3")) if one.name.startswith("block"))
    data = data_of(made, block, lambda scope, name: resolve("mor", scope, name))
    assert isinstance(data, Differences)
    assert data.spread is not None
    assert printed.sd == pytest.approx(data.spread.sd, rel=0.1)
