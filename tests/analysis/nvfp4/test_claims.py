"""Verdicts on trials whose truth is known: right where it can be told, and inconclusive where it cannot."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from fewbits.analysis.engine.frames import Results
from fewbits.analysis.engine.paper import paper
from fewbits.analysis.nvfp4.own_tables import PAIRS
from fewbits.analysis.registry import judge, judge_all, shelf
from fewbits.analysis.verdicts import Outcome, Verdict
from fewbits.sweeps.planning.plan import Plan
from tests.analysis.nvfp4.worlds import BAD, PAPER, World, results
from tests.analysis.worlds import planned
from tests.experiments.data.data_inputs import shared_cache

REPRODUCED, CONTRADICTED = Outcome.REPRODUCED, Outcome.CONTRADICTED
INCONCLUSIVE, OUT_OF_REACH = Outcome.INCONCLUSIVE, Outcome.OUT_OF_REACH
NULL = World(effect=BAD)
ARITHMETIC = {"N12", "N19", "N24", "N25", "N26", "S1", "S2"}
UNREACHED = {"N2", "N5", "N11", "N15"}


def verdict(claim: str, found: Results) -> Verdict:
    """With its control, not yet corrected for the others."""
    (entry,) = (entry for entry in shelf("nvfp4").claims if entry.id == claim)
    return judge(entry, found)


def outcomes(found: Results, *claims: str) -> dict[str, Outcome]:
    return {claim: verdict(claim, found).outcome for claim in claims}


def changed(effect: Mapping[str, float]) -> World:
    return replace(PAPER, effect={**PAPER.effect, **effect})


def test_where_all_is_as_the_paper_says_every_claim_is_reproduced(cpu: Plan) -> None:
    found = judge_all("nvfp4", results(cpu, PAPER))
    assert [name for name in found if name.startswith("N")] == [f"N{i + 1}" for i in range(26)]
    for name, one in found.items():
        assert one.outcome is (OUT_OF_REACH if name in UNREACHED else REPRODUCED), (name, str(one), one.parts)
        assert one.trials or name in ARITHMETIC | UNREACHED, name
    assert found["N10"].scale != found["N6"].scale, "a verdict is at the size of what was compared"


def test_nothing_but_noise_is_told_from_effects_that_are_claimed(cpu: Plan) -> None:
    found = judge_all("nvfp4", results(cpu, replace(NULL, gradients=lambda block, part: 0.12)))
    nulls, effects = ("N1", "N10", "N14", "N16", "S3", "S4"), ("N7", "N9", "N17", "N18", "N20", "N23")
    assert {name: found[name].outcome for name in nulls} == dict.fromkeys(nulls, REPRODUCED)
    assert {name: found[name].outcome for name in effects} == dict.fromkeys(effects, CONTRADICTED)
    for name in ("N3", "N4", "N8", "N13"):
        assert found[name].outcome is INCONCLUSIVE, f"{name}: the paper says itself that small models may not show it"
    assert found["N6"].outcome is INCONCLUSIVE, "where all blocks together cost nothing, none costs more than another"
    assert found["N6"].control is not None
    assert not found["N6"].control.passed
    assert found["N22"].outcome is INCONCLUSIVE, "without a gap there is nothing to restore"


def test_an_underpowered_null_is_inconclusive_and_says_how_many_seeds_would_do(cpu: Plan) -> None:
    loud = dict.fromkeys(BAD, 1.0) | {"mxfp4-1.50": -0.5}
    found = results(cpu, World(effect=loud, noise=0.004))
    for claim in ("N10", "N14", "N16", "S3", "S4"):
        one = verdict(claim, found)
        assert one.outcome is INCONCLUSIVE, claim
        assert "underpowered" in one.reason, claim


def test_claims_on_losses_need_a_control_of_their_own_model(cpu: Plan) -> None:
    seen = {"bad-arm": "recipe/bad-arm", "bad-arm-20-blocks": "layers/bad-arm", "more-tokens": "mxfp4-1.00"}
    bad = {claim.id: claim.control for claim in paper("nvfp4").claims if claim.control}
    for control, arm in seen.items():
        blind = results(cpu, changed({arm: 0.0, "mxfp4-1.50": 0.0} if control == "more-tokens" else {arm: 0.0}))
        for claim, its in bad.items():
            one = verdict(claim, blind)
            assert one.control is not None
            fails = its == control or (its == "bad-arm-families" and control == "bad-arm")
            assert one.control.passed != fails, (claim, its, control)
            if fails:
                assert one.outcome is INCONCLUSIVE
    hybrid = results(cpu, changed({"hybrid/bad-arm": 0.0}))
    assert outcomes(hybrid, "N1", "N20", "N10") == {"N1": INCONCLUSIVE, "N20": INCONCLUSIVE, "N10": REPRODUCED}


EFFECTS: Mapping[str, tuple[Mapping[str, float], Mapping[str, Outcome]]] = {
    "the other way round": (
        {"recipe/nvfp4": 0.02, "first-4": 0.005, "sr-gradients": 0.07, "rht-wgrad": 0.03, "weights-different": 0.001}
        | {"activations-same": 0.006, "recipe/mxfp4": 0.01, "switch-forward": 0.02, "nvfp4-long": 0.016},
        dict.fromkeys(("N1", "N4", "N6", "N8", "N9", "N13", "N14", "N16", "N17", "N18", "N20", "N23"), CONTRADICTED),
    ),
    "in one family alone": ({"hybrid/nvfp4": 0.0165}, {"N1": CONTRADICTED, "N20": CONTRADICTED, "N4": REPRODUCED}),
    "of another sweep's arm of that name": (
        {"layers/nvfp4-base": -0.05, "hybrid/fp8": 0.005},
        {"N1": REPRODUCED, "N3": REPRODUCED, "N6": INCONCLUSIVE},
    ),
    "not before the decay": ({"nvfp4-trunk": 0.012}, {"N1": CONTRADICTED}),
    "beyond a margin of nulls": (
        {"sr-backward": 0.02, "rht-4": 0.013, "signs-none": 0.007, "bf16-again": 0.001, "mxfp4-deterministic": 0.02}
        | {"bf16-fp32-wgrad": -0.002},
        dict.fromkeys(("N10", "N14", "N16", "S3", "S4", "S6"), CONTRADICTED),
    ),
    "of one part of the recipe, too small": ({"long-no-2d": 0.0121}, {"N4": INCONCLUSIVE, "N8": REPRODUCED}),
    "in Fprop and Dgrad, none": ({"rht-fprop": 0.02, "rht-dgrad": 0.02}, {"N13": INCONCLUSIVE}),
    "of tokens, never enough": ({"mxfp4-1.50": 0.013}, {"N21": CONTRADICTED}),
    "of tokens, with few enough": ({"mxfp4-1.25": 0.011}, {"N21": CONTRADICTED}),
    "of a switch, not all of it": ({"switch-both": 0.009, "switch-late": 0.013}, {"N22": CONTRADICTED}),
    "of a switch, less than half": ({"switch-forward": 0.008}, {"N23": CONTRADICTED}),
    "of a switch, half of BF16's and most of both's": (
        {"switch-forward": 0.007, "switch-both": 0.004},
        {"N22": REPRODUCED, "N23": REPRODUCED},
    ),
    "of a switch of the backward pass": ({"switch-backward": 0.005}, {"N23": CONTRADICTED}),
    "of a switch of both passes, not enough": ({"switch-both": 0.009}, {"N22": CONTRADICTED}),
    "of a switch at the end, none": ({"switch-late": 0.013}, {"N22": CONTRADICTED}),
    "of a switch that loses what there was": ({"nvfp4-long": 0.0005, "switch-late": 0.0004}, {"N22": CONTRADICTED}),
    "a little smaller than each margin": (
        {"base-whole": 0.012, "with-2d": 0.0123, "recipe/mxfp4": 0.011, "mxfp4-deterministic": 0.012, "first-4": 0.013}
        | {"sr-weights": 0.018, "rht-fprop": 0.0203, "weights-same": 0.0197, "activations-same": 0.0038}
        | {"nvfp4-long": 0.001, "switch-forward": 0.0004, "switch-backward": 0.001, "four-over-six": 0.0097},
        dict.fromkeys(("N3", "N8", "N13"), INCONCLUSIVE)
        | dict.fromkeys(("N6", "N9", "N17", "N18", "N20", "N23", "S5"), CONTRADICTED)
        | {"S4": REPRODUCED},
    ),
    "a little beyond them, and beside the right baseline": (
        {"base-whole": 0.02, "sr-gradients": 0.025},
        {"N3": REPRODUCED, "N9": CONTRADICTED, "N10": CONTRADICTED},
    ),
    "of FP8 and of a size, which are not of BF16 and of signs": (
        {"recipe/fp8": -0.007, "rht-4": 0.013},
        {"N1": CONTRADICTED, "N14": CONTRADICTED, "N16": REPRODUCED},
    ),
}


@pytest.mark.parametrize("name", EFFECTS)
def test_effects_on_losses_are_told_by_their_size_and_sign(cpu: Plan, name: str) -> None:
    effect, expected = EFFECTS[name]
    assert outcomes(results(cpu, changed(effect)), *expected) == expected


GRADIENTS: Mapping[str, tuple[Callable[[int, str], float], Outcome]] = {
    "the same everywhere": (lambda block, part: 0.12, CONTRADICTED),
    "greatest in the first blocks": (lambda block, part: 0.3 if block < 3 else 0.12, CONTRADICTED),
    "of one kind of layer": (lambda block, part: 0.24 if part == "up" and block > 16 else 0.12, REPRODUCED),
    "a little": (lambda block, part: 0.125 if block > 16 else 0.12, CONTRADICTED),
    "of the first of the last four": (lambda block, part: 0.165 if block == 17 else 0.12, REPRODUCED),
    "of the one before them": (lambda block, part: 0.3 if block == 16 else 0.12, CONTRADICTED),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_of_last_layers_are_told_from_the_others(cpu: Plan, name: str) -> None:
    gradients, expected = GRADIENTS[name]
    found = verdict("N7", results(cpu, replace(PAPER, gradients=gradients)))
    assert found.outcome is expected, found


def test_arms_that_diverge_are_worse(cpu: Plan) -> None:
    gone = frozenset({"base-whole", "sr-weights", "sr-activations", "hybrid/nvfp4", "switch-both"})
    found = results(cpu, replace(PAPER, diverged=gone))
    assert outcomes(found, "N3", "N9") == {"N3": REPRODUCED, "N9": REPRODUCED}
    assert "ours diverged in 3" in verdict("N3", found).reason
    for name, part in (("N1", "after the decay, beside FP8, hybrid"), ("N22", "switched early, no worse than BF16")):
        one = verdict(name, found)
        assert dict(one.parts)[part].outcome is CONTRADICTED
        assert one.outcome is INCONCLUSIVE, "three of three seeds are too few for one part among three"


def test_what_is_said_of_the_decay_alone_is_judged_in_the_decay(cpu: Plan) -> None:
    found = verdict("N18", results(cpu, PAPER))
    assert found.outcome is REPRODUCED
    assert any("that it does not before is not" in note for note in found.notes)


@pytest.mark.parametrize("name", ["N4", "N6", "N8", "N9", "N10", "N13", "N14", "N16", "N17", "N18"])
def test_claims_on_branches_say_that_the_beginning_is_not_among_them(cpu: Plan, name: str) -> None:
    assert any("arms branch where the decay begins" in note for note in verdict(name, results(cpu, PAPER)).notes)


def test_a_null_says_what_there_was_to_see_of_what_it_varies(cpu: Plan) -> None:
    found = results(cpu, changed({"no-rht": PAPER.effect["recipe/nvfp4"] + 0.02, "kept": 0.0}))
    for name, said in (("N14", "training ends +"), ("N16", "training ends +"), ("N10", "training ends -")):
        assert any(said in note for note in verdict(name, found).notes), (name, verdict(name, found).notes)


def test_at_the_papers_scale_its_largest_model_is_judged_and_nothing_is_said_of_branches(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    words = ("scale=paper", "seeds=[0, 1, 2]", "data.path=null", "observer.gradients_every=0")
    paper_plan = planned("nvfp4", tmp_path, shared_cache(tmp_path_factory), *words)
    large = {"fp8": 0.001, "nvfp4": 0.012, "full": 0.01, "no-sr": 0.02, "no-rht": 0.02, "no-2d": 0.02}
    large |= {"switch-both": 0.002, "switch-forward": 0.005, "switch-backward": 0.012, "switch-late": 0.004}
    large |= {"rht-4": 0.01, "rht-128": 0.01, "signs-none": 0.01, "signs-each": 0.01, "fewer-kept": 0.01}
    world = changed({f"large/{arm}": effect for arm, effect in large.items()})
    found = results(paper_plan, world)
    twelve = "after the decay, beside FP8, 12B"
    assert dict(verdict("N1", found).parts)[twelve].outcome is REPRODUCED
    assert dict(verdict("N4", found).parts)["no-sr above the whole recipe, 12B"].effect == pytest.approx(0.01, rel=0.02)
    assert dict(verdict("N22", found).parts)["switched early, no worse than FP8"].outcome is REPRODUCED
    assert dict(verdict("N23", found).parts)["forward, more than half of what both passes gain"].outcome is REPRODUCED
    for name in ("N3", "N6", "N17", "N18"):
        assert not any("branch" in note for note in verdict(name, found).notes), name


def test_sweeps_that_are_not_run_are_out_of_reach_and_others_are_judged(cpu: Plan) -> None:
    alone = results(cpu, PAPER).of_sweep("recipe")
    expected = dict.fromkeys(
        ("N3", "N4", "N6", "N7", "N9", "N10", "N13", "N14", "N17", "N18", "N21", "N22", "N23"), OUT_OF_REACH
    )
    assert outcomes(alone, *expected) == expected
    assert verdict("N6", alone).reason == "not run at this scale (cpu)"
    assert outcomes(alone, "N1", "N8", "N20") == dict.fromkeys(("N1", "N8", "N20"), REPRODUCED)


def test_one_seed_decides_nothing(cpu: Plan) -> None:
    arms = {str(member.cell.arm) for member in cpu.members}
    one_seed = replace(PAPER, missing=frozenset((arm, seed) for arm in arms for seed in (1, 2)))
    for name, one in judge_all("nvfp4", results(cpu, one_seed)).items():
        assert one.outcome in ({REPRODUCED} if name in ARITHMETIC else {INCONCLUSIVE, OUT_OF_REACH}), name


def test_an_empty_store_decides_nothing_and_breaks_nothing(cpu: Plan) -> None:
    nothing = frozenset((str(member.cell.arm), member.cell.seed) for member in cpu.members)
    for name, one in judge_all("nvfp4", results(cpu, World(missing=nothing))).items():
        assert one.outcome in ({REPRODUCED} if name in ARITHMETIC else {INCONCLUSIVE, OUT_OF_REACH}), name


def test_a_seed_that_is_missing_is_named_and_the_others_count(cpu: Plan) -> None:
    found = verdict("N10", results(cpu, replace(PAPER, missing=frozenset({("sr-backward", 2)}))))
    assert found.n == 2
    assert any("sr-backward, seed 2" in note for note in found.notes)


def test_every_claim_about_losses_has_its_arms_in_the_plan_and_its_power_in_a_table(cpu: Plan) -> None:
    arms = {str(member.cell.arm) for member in cpu.members}
    told = {name for name, *_ in PAIRS}
    for claim in paper("nvfp4").claims:
        if claim.margin is not None:
            assert {*claim.arms, *([claim.baseline] if claim.baseline else [])} <= arms, claim.id
            assert claim.id in told or claim.id in {"N7", "N21"}, claim.id
