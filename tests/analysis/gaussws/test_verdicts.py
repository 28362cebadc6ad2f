"""Test GaussWS's verdicts with simulated results whose true effects are known.

In different tests, the effects are as the paper states, opposite or absent, or noise hides them, or controls fail.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import pytest

from fewbits.analysis.engine.claims.findings import Outcome, Status, Verdict
from fewbits.analysis.engine.claims.schema import load_claims
from fewbits.analysis.engine.results.frames import Results
from fewbits.sweeps.planning.plan import Plan
from tests.analysis import worlds
from tests.analysis.gaussws.worlds import PAPER, World, benches, forget_benches, results

REPRODUCED, IN_PART, CONTRADICTED = Outcome.REPRODUCED, Outcome.IN_PART, Outcome.CONTRADICTED
NOT_SEEN, INCONCLUSIVE, OUT_OF_REACH = Outcome.NOT_SEEN, Outcome.INCONCLUSIVE, Outcome.OUT_OF_REACH
CLAIMS = load_claims("gaussws").claims
EXACT = tuple(c.id for c in CLAIMS if any(part.test == "exact" for part in c.parts))
UNREACHED = ("G7", "G10", "G11", "G14")
TIMED = ("G16", "G18")
TRAINED = tuple(c.id for c in CLAIMS if c.id not in (*EXACT, *TIMED) and not c.id.startswith("P"))
TABLE_1 = ("llama2-134m", "llama2-1b")
MINI = "llama2-mini"
SWEEPS = ("gpt2", "gpt2-mini", "llama2", MINI)
CONTROL = "parts"  # the sweep with the two arms that controls compare
SEEN = {"parts/all": 0.01}  # the effect that this control needs to pass


def judged(plan: Plan, world: World, *names: str, covered: bool = False) -> dict[str, Verdict]:
    """Return the verdicts of the named claims for simulated results with the effects of `world`.

    Without names, return those of all claims in TRAINED. covered: treat the runs as being as large as the paper's.
    """
    return verdicts(results(plan, world), names or TRAINED, covered=covered)


def verdicts(found: Results, names: Iterable[str], *, covered: bool = False) -> dict[str, Verdict]:
    return worlds.verdicts("gaussws", found, names, covered=covered)


def joined(one: Plan, other: Plan) -> Plan:
    """Return a plan with the sweeps of both plans."""
    return Plan((*one.sweeps, *other.sweeps), (*one.members, *other.members), {**one.trials, **other.trials})


def outcomes(found: Mapping[str, Verdict]) -> dict[str, Outcome]:
    return {name: one.outcome for name, one in found.items()}


def changed(effect: Mapping[str, float]) -> World:
    return replace(PAPER, effect={**PAPER.effect, **effect})


@pytest.fixture(scope="module")
def compared(cpu: Plan) -> Plan:
    """Return the plan with only those arms that claims compare, which saves time."""
    members = tuple(
        member
        for member in cpu.members
        if member.cell.sweep in SWEEPS or (member.cell.sweep == CONTROL and member.cell.arm in ("all", "bf16-low"))
    )
    return Plan(tuple(sweep for sweep in cpu.sweeps if sweep.name in (*SWEEPS, CONTROL)), members, cpu.trials)


@pytest.fixture
def timed(compared: Plan) -> Iterator[Plan]:
    """Yield the plan, and afterwards remove the files of timings that the test has written to the store."""
    yield compared
    forget_benches(compared)


# -------------------------------------------------------------------------------- trials


def test_where_all_is_as_the_paper_says_every_claim_about_trials_is_reproduced(compared: Plan) -> None:
    found = judged(compared, PAPER)
    expected = dict.fromkeys(TRAINED, REPRODUCED) | dict.fromkeys(UNREACHED, OUT_OF_REACH)
    expected |= {"G8": IN_PART, "G12": IN_PART}  # some parts need 30 B tokens, so they are out of reach
    expected |= {"G15": INCONCLUSIVE}  # the scale does not plan the comparison of model families
    assert {name: (one.outcome, one.reason) for name, one in found.items() if one.outcome is not expected[name]} == {}
    assert found["G12"].supported == ("no interaction", "DiffQ improves")
    assert len(found["G8"].supported) == 2


def test_families_are_compared_where_gpt_2_has_no_penalty_either(compared: Plan, varied_widths: Plan) -> None:
    """Check that the claim that GPT-2 needs more bits than Llama 2 (G15) is judged by the sweep `widths`.

    There GPT-2 is trained without a penalty on bit widths, as Llama 2 is. The claim is reproduced, or not seen if
    GPT-2's mean width is smaller.
    """
    both = joined(compared, varied_widths)
    assert judged(both, replace(PAPER, to_nine=0.998), "G15")["G15"].outcome is REPRODUCED
    narrower = judged(both, replace(PAPER, to_nine=0.998, bits={"widths": 4.5, "llama2": 5.0}), "G15")["G15"]
    assert narrower.outcome is NOT_SEEN, "the claim is about far longer runs, so ours do not contradict it"
    assert [one.status for one in narrower.findings][:1] == [Status.OPPOSED]


def test_widths_of_a_trial_that_diverged_are_not_those_of_its_end(compared: Plan, varied_widths: Plan) -> None:
    gone = replace(PAPER, diverged=frozenset({"lambda-0"}))
    families, *_ = judged(joined(compared, varied_widths), gone, "G15")["G15"].findings
    assert (families.status, families.effect) == (Status.UNDECIDED, None)
    assert "lambda-0" in families.reason
    assert "diverged" in families.reason


def test_shares_that_say_nothing_alone_do_not_decide(compared: Plan) -> None:
    """Check that the claim that GPT-2 needs more bits than Llama 2 (G15) is inconclusive if the two were not compared.

    Its other parts, about widths up to 9 bits, are supported. But they have `alone: false`, so they prove nothing
    without the comparison.
    """
    one = judged(compared, replace(PAPER, to_nine=0.998), "G15")["G15"]
    assert {part.status for part in one.findings} == {Status.SUPPORTED, Status.NOT_RUN}
    assert one.outcome is INCONCLUSIVE
    assert "up to 9 bits in GPT-2" in one.reason
    assert "not run at this scale" in one.reason


def test_where_nothing_happens_nulls_hold_and_effects_are_not_seen_at_this_scale(compared: Plan) -> None:
    found = judged(compared, World(effect=SEEN, cast=1e-5))
    assert outcomes(found) == (
        {"G9": REPRODUCED, "G12": IN_PART, "G19": REPRODUCED, "G13": NOT_SEEN, "G20": NOT_SEEN}
        | {"G8": NOT_SEEN, "G15": INCONCLUSIVE}
        | dict.fromkeys(UNREACHED, OUT_OF_REACH)
    )
    assert [one.status for one in found["G8"].findings] == [Status.ABSENT, Status.ABSENT, Status.OUT_OF_REACH]


OPPOSITE = replace(
    changed(
        {"gpt2/gaussws": 0.02, "gaussws-low": 0.02, "gpt2-mini/adam-mini-gaussws": 0.05}
        | {"gpt2-mini/adam-mini-diffq": 0.02}
        | {"llama2/bf16": 0.0, "llama2/diffq": 0.002, "llama2/gaussws": 0.01}
        | {"llama2-mini/adam-mini": 0.0, "llama2-mini/adam-mini-gaussws": 0.03}
    ),
    to_nine=0.9,
    cast=0.02,
)


@pytest.mark.parametrize(("covered", "outcome"), [(False, NOT_SEEN), (True, CONTRADICTED)])
def test_the_opposite_is_contradicted_where_runs_reach_so_far_and_not_seen_elsewhere(
    compared: Plan, covered: bool, outcome: Outcome
) -> None:
    expected = dict.fromkeys(TRAINED, outcome) | dict.fromkeys(UNREACHED, OUT_OF_REACH)
    assert outcomes(judged(compared, OPPOSITE, covered=covered)) == expected


def test_the_largest_loss_of_a_micro_batch_is_judged_apart(compared: Plan) -> None:
    one = judged(compared, replace(PAPER, maximum={"llama2/bf16": 0.0}), "G13")["G13"]
    assert one.outcome is IN_PART
    assert [part.status for part in one.findings] == [
        Status.SUPPORTED,
        Status.OPPOSED,
        Status.SUPPORTED,
        Status.SUPPORTED,
    ]


def test_too_much_noise_is_inconclusive_and_says_what_it_would_have_detected(compared: Plan) -> None:
    names = ("G9", "G12", "G13", "G20")
    found = judged(compared, World(effect={"parts/all": 5.0}, noise=0.05), *names)
    for name, one in found.items():
        assert one.outcome is INCONCLUSIVE, name
        assert all(control.passed for control in one.controls), name
        assert one.underpowered, name
    for name in ("G9", "G12"):
        first, *_ = found[name].findings
        assert first.mde is not None
        assert first.shown(first.mde)[1:] in first.reason


def test_nothing_is_decided_where_controls_find_nothing(compared: Plan) -> None:
    silent = replace(changed({"parts/all": 0.0}), spread={"gpt2": 0.0, "llama2": 0.0}, narrow=0.002)
    for name, one in judged(compared, silent).items():
        if one.claim.control:
            assert one.outcome is INCONCLUSIVE, name
            assert tuple(control.id for control in one.controls if not control.passed) == one.claim.control, name
            assert name == "G15" or all(f"control {control} failed" in one.reason for control in one.claim.control)


def test_casts_say_nothing_where_three_bits_would_do(compared: Plan) -> None:
    """Check that the claim that casts to the learned formats keep the loss (G19) is inconclusive if its control fails.

    The control fails because even a cast to three bits hardly raises the loss.
    """
    kept = judged(compared, replace(PAPER, narrow=0.002), "G9", "G19")
    assert outcomes(kept) == {"G9": REPRODUCED, "G19": INCONCLUSIVE}
    failed = [control.id for control in kept["G19"].controls if not control.passed]
    assert failed == ["narrow-costs", "narrow-costs-llama2"]


# -------------------------------------------------------------------------------- timings and arithmetic


@pytest.mark.parametrize(
    ("box_muller", "torch", "outcome"), [(4.0, 12.0, REPRODUCED), (0.9, 12.0, CONTRADICTED), (4.0, 2.0, CONTRADICTED)]
)
def test_generators_are_judged_turn_by_turn(timed: Plan, box_muller: float, torch: float, outcome: Outcome) -> None:
    benches(timed, box_muller=box_muller, torch=torch)
    assert verdicts(Results(timed), TIMED)["G18"].outcome is outcome


@pytest.mark.parametrize(
    ("ours", "diffq", "outcome"),
    [
        (1.03, 1.2, REPRODUCED),
        (1 / (1 - 0.053), 1 / (1 - 0.1115), REPRODUCED),
        (1.25, 1.5, CONTRADICTED),
        (1.03, 1.05, CONTRADICTED),
        (0.99, 1.2, CONTRADICTED),
    ],
)
def test_throughput_is_judged_beside_the_papers_numbers(
    timed: Plan, ours: float, diffq: float, outcome: Outcome
) -> None:
    benches(timed, kind="cuda", models=TABLE_1, ours=ours, diffq=diffq)
    assert verdicts(Results(timed), TIMED)["G16"].outcome is outcome


def test_throughput_is_judged_on_a_gpu_and_of_the_papers_models_alone(timed: Plan) -> None:
    benches(timed, models=TABLE_1)
    assert verdicts(Results(timed), TIMED)["G16"].outcome is Outcome.NOT_RUN
    benches(timed, kind="cuda", models=("gpt2-nano",))
    assert verdicts(Results(timed), TIMED)["G16"].outcome is Outcome.NOT_RUN


def test_a_busy_machine_decides_nothing(timed: Plan) -> None:
    benches(timed, kind="cuda", models=TABLE_1, box_muller=0.5, ours=2.0, others=0.5)
    for name, one in verdicts(Results(timed), TIMED).items():
        assert one.outcome is INCONCLUSIVE, name
        assert "disturbed" in one.reason, name
