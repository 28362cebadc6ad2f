"""Test NVFP4's verdicts with simulated results whose true effects are known.

In different tests, the effects are as the paper states, opposite or absent, or noise hides them, or controls fail.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from fewbits.analysis.engine.claims.findings import Outcome, Status, Verdict
from fewbits.analysis.engine.claims.schema import load_claims
from fewbits.analysis.engine.results.frames import Results
from fewbits.sweeps.planning.plan import Plan
from tests.analysis import worlds
from tests.analysis.nvfp4.worlds import BAD, PAPER, World, results

REPRODUCED, IN_PART, CONTRADICTED = Outcome.REPRODUCED, Outcome.IN_PART, Outcome.CONTRADICTED
NOT_SEEN, INCONCLUSIVE, OUT_OF_REACH = Outcome.NOT_SEEN, Outcome.INCONCLUSIVE, Outcome.OUT_OF_REACH
EXACT = tuple(c.id for c in load_claims("nvfp4").claims if any(part.test == "exact" for part in c.parts))
PROBED = tuple(c.id for c in load_claims("nvfp4").claims if c.id.startswith("P"))
STRESS = ("F2", "F3")  # claims about the sweeps overfit and rates, in which PAPER has no effects
TRAINED = tuple(c.id for c in load_claims("nvfp4").claims if c.id not in (*EXACT, *PROBED, *STRESS))
UNREACHED = ("N2", "N5", "N11", "N15")
NULLS = ("N10", "N14", "N16")
CONTROLS = BAD | {"layers/nvfp4-base": 0.04, "no-rht": 0.04}  # the effects that controls need to pass
STOCHASTIC = ("sr-gradients", "sr-backward", "sr-activations", "sr-weights")
FOUR_BITS = (
    *("kept", "with-2d", "no-sr", "recipe/nvfp4", "recipe/mxfp4", "hybrid/nvfp4", "hybrid/mxfp4"),
    *("rht-2", "rht-4", "rht-128", "signs-none", "signs-each", "rht-wgrad", "rht-fprop", "rht-dgrad"),
    *("weights-different", "weights-same", "weights-squares", "activations-different", "activations-same"),
)
LONG = (
    *("nvfp4-trunk", "nvfp4-long", "long-no-sr", "long-no-rht", "long-no-2d"),
    *("switch-both", "switch-forward", "switch-backward", "switch-late"),
)
# Training in four bits increases the loss, but all recipes in four bits increase it equally.
NULL = World(
    effect=CONTROLS | dict.fromkeys(FOUR_BITS, 0.02) | dict.fromkeys(LONG, 0.005) | dict.fromkeys(STOCHASTIC, 0.01),
    gradients=lambda block, part: 0.12,
)


def judged(plan: Plan, world: World, *names: str, covered: bool = False) -> dict[str, Verdict]:
    """Return the verdicts of the named claims for simulated results with the effects of `world`.

    Without names, return those of all claims in TRAINED. covered: treat the runs as being as large as the paper's.
    """
    return verdicts(results(plan, world), names or TRAINED, covered=covered)


def verdicts(found: Results, names: Iterable[str], *, covered: bool = False) -> dict[str, Verdict]:
    return worlds.verdicts("nvfp4", found, names, covered=covered)


def outcomes(found: Mapping[str, Verdict]) -> dict[str, Outcome]:
    return {name: one.outcome for name, one in found.items()}


def changed(effect: Mapping[str, float]) -> World:
    return replace(PAPER, effect={**PAPER.effect, **effect})


def test_where_all_is_as_the_paper_says_every_claim_about_trials_is_reproduced(cpu: Plan) -> None:
    found = judged(cpu, PAPER)
    expected = dict.fromkeys(TRAINED, REPRODUCED) | dict.fromkeys(UNREACHED, OUT_OF_REACH)
    expected["N18"] = IN_PART  # one part is out of reach
    assert {name: (one.outcome, one.reason) for name, one in found.items() if one.outcome is not expected[name]} == {}
    assert [one.status for one in found["N18"].findings if one.name not in found["N18"].supported] == [
        Status.OUT_OF_REACH
    ]


def test_where_nothing_happens_nulls_hold_and_effects_are_not_seen_at_this_scale(cpu: Plan) -> None:
    found = judged(cpu, NULL)
    assert outcomes(found) == (
        dict.fromkeys(NULLS, REPRODUCED)
        | dict.fromkeys(("N3", "N4", "N6", "N9", "N13", "N17", "N18", "N20"), NOT_SEEN)
        | {"N1": IN_PART}  # the gap is within its bound, but it does not widen
        | {"N7": CONTRADICTED}  # a claim about tensors, which any run can contradict
        | {"N8": NOT_SEEN, "N21": INCONCLUSIVE, "F1": IN_PART}
        | dict.fromkeys(("N22", "N23"), INCONCLUSIVE)  # without a gap to BF16, a switch cannot reduce it
        | dict.fromkeys(UNREACHED, OUT_OF_REACH)
    )
    assert found["N1"].supported == ("before the decay",)


def test_in_runs_as_large_as_the_papers_an_absence_contradicts_what_says_so(cpu: Plan) -> None:
    absent = ("N3", "N4", "N6", "N8", "N9", "N13", "N17", "N18", "N20")
    expected = dict.fromkeys(absent, CONTRADICTED) | dict.fromkeys(("N3", "N4", "N8", "N13"), NOT_SEEN)
    assert outcomes(judged(cpu, NULL, *absent, covered=True)) == expected


OPPOSITE = replace(
    changed(
        {"nvfp4-trunk": 0.02, "base-whole": -0.01, "first-4": 0.005}
        | dict.fromkeys(("long-no-sr", "long-no-rht", "long-no-2d"), 0.011)
        | {"with-2d": 0.025, "no-sr": 0.03, "recipe/nvfp4": 0.04, "hybrid/nvfp4": 0.02, "no-rht": 0.06}
        | {"sr-activations": 0.01, "sr-weights": 0.01, "sr-backward": 0.03}
        | {"rht-wgrad": 0.025, "rht-fprop": 0.015, "rht-dgrad": 0.015}
        | {"weights-same": 0.025, "weights-squares": 0.025, "activations-same": 0.006}
        | {"mxfp4-1.00": 0.03, "mxfp4-1.25": 0.005, "mxfp4-1.50": 0.02}
        | {"switch-both": 0.007, "switch-late": 0.014, "switch-forward": 0.02, "switch-backward": 0.004}
    ),
    gradients=lambda block, part: 0.3 if block < 3 else 0.12,
)


def test_the_opposite_is_contradicted_where_runs_reach_so_far_and_not_seen_elsewhere(cpu: Plan) -> None:
    expected = dict.fromkeys(TRAINED, NOT_SEEN) | dict.fromkeys(UNREACHED, OUT_OF_REACH)
    expected |= {"N7": CONTRADICTED, "F1": CONTRADICTED}  # claims about tensors and our own findings: by any run
    expected |= {"N22": IN_PART}  # its control is also one of its parts, which is supported
    assert outcomes(judged(cpu, OPPOSITE)) == expected
    covered = dict.fromkeys(TRAINED, CONTRADICTED) | dict.fromkeys(UNREACHED, OUT_OF_REACH)
    assert outcomes(judged(cpu, OPPOSITE, covered=True)) == covered


def test_too_much_noise_is_inconclusive_and_says_what_it_would_have_detected(cpu: Plan) -> None:
    loud = {"bad-arm": 5.0, "layers/nvfp4-base": 5.0, "no-rht": 5.0, "mxfp4-1.00": 5.0}
    loud |= dict.fromkeys((*FOUR_BITS, *LONG), 0.06) | {"kept": 1.0, "rht-wgrad": 1.0}
    names = (*NULLS, "N3", "N4", "N6", "N9", "N17", "N18", "N20")
    found = judged(cpu, World(effect=loud, noise=0.01, noises={"base-whole": 0.05}), *names)
    for name, one in found.items():
        assert one.outcome is INCONCLUSIVE, name
        assert all(control.passed for control in one.controls), name
        assert one.underpowered, name
    for finding in (finding for name in NULLS for finding in found[name].findings):
        assert finding.mde is not None
        assert finding.shown(finding.mde)[1:] in finding.reason


def test_nothing_is_decided_where_controls_find_nothing(cpu: Plan) -> None:
    costs = ("kept", "nvfp4-long", "weights-different", "activations-different", "recipe/mxfp4", "hybrid/mxfp4")
    silent = dict.fromkeys((*BAD, *costs, "mxfp4-1.50"), 0.0) | {"no-rht": 0.01}
    for name, one in judged(cpu, replace(changed(silent), gradients=lambda block, part: 0.001)).items():
        if one.claim.control:
            assert one.outcome is INCONCLUSIVE, name
            assert tuple(control.id for control in one.controls if not control.passed) == one.claim.control, name


def test_what_a_switch_gains_by_the_format_of_its_evaluation_is_no_gain(cpu: Plan) -> None:
    """Check that a switch to BF16 counts as a gain only if it also lowers the loss evaluated in BF16."""
    found = judged(cpu, replace(PAPER, unquantized={"nvfp4-long": 0.001, "long-no-sr": 0.001}), "N4", "N22", "N23")
    assert outcomes(found) == {"N4": IN_PART, "N22": INCONCLUSIVE, "N23": INCONCLUSIVE}
    assert "switch: no stochastic above NVFP4, validation loss" in found["N4"].reason
    assert "long-no-sr above nvfp4-long, validation loss" in found["N4"].supported
    assert "long-no-sr above nvfp4-long, validation loss, unquantized" not in found["N4"].supported
    assert "control switch-gains failed" in found["N22"].reason


def test_probes_decide_the_findings_about_checkpoints(cpu: Plan) -> None:
    found = judged(cpu, PAPER, *PROBED)
    assert outcomes(found) == dict.fromkeys(PROBED, REPRODUCED)
    assert all(finding.n == 3 for verdict in found.values() for finding in verdict.findings)


STRESSED = {"overfit/bad-arm": 0.05, "overfit/nvfp4": 0.01, "overfit/no-sr": 0.03}
STRESSED |= {"rates/bad-arm": 0.05, "rates/nvfp4": 0.02}


def test_stress_is_found_where_it_is(cpu: Plan) -> None:
    """Check that the two claims about training under stress are reproduced if the simulated effects are as claimed.

    F2 is about a text that is learned by heart (sweep `overfit`), F3 about raised learning rates (sweep `rates`).
    """
    assert outcomes(judged(cpu, World(effect=STRESSED), *STRESS)) == dict.fromkeys(STRESS, REPRODUCED)


def test_what_the_format_costs_under_stress_is_no_effect_of_training(cpu: Plan) -> None:
    """Check that the claims about training under stress are not reproduced if only the evaluation raises losses."""
    alike = World(effect=STRESSED | {"overfit/no-sr": 0.01}, unquantized={"rates/nvfp4": 0.0})
    assert REPRODUCED not in outcomes(judged(cpu, alike, *STRESS)).values()


def test_stress_without_a_control_is_inconclusive(cpu: Plan) -> None:
    """Check that the claims about training under stress are inconclusive if the controls (`bad-arm`) have no effect."""
    silent = World(effect=STRESSED | {"overfit/bad-arm": 0.0, "rates/bad-arm": 0.0})
    assert outcomes(judged(cpu, silent, *STRESS)) == dict.fromkeys(STRESS, INCONCLUSIVE)
