"""Verdicts on trials whose truth is known: right where it can be told, and inconclusive where it cannot."""

from dataclasses import replace

import pytest

from fewbits.analysis.arms import pooled
from fewbits.analysis.frames import Results
from fewbits.analysis.noise import VALIDATION
from fewbits.analysis.registry import judge, judge_all, shelf
from fewbits.analysis.verdicts import Outcome, Verdict
from fewbits.sweeps.plan import Plan
from tests.analysis.gaussws.made import World, benches, results

REPRODUCED, CONTRADICTED = Outcome.REPRODUCED, Outcome.CONTRADICTED
INCONCLUSIVE, OUT_OF_REACH = Outcome.INCONCLUSIVE, Outcome.OUT_OF_REACH
NEVER = {"G7", "G10", "G11", "G14", "G16"}  # on a CPU
LEFT = {f"stability/bf16@{rate}": 0.5 for rate in ("x10", "x30")}
PAPER = World(
    effect={
        "gpt2/diffq": 0.004,
        "gpt2/diffq-low": 0.004,
        "gpt2/gaussws": 0.0005,
        "gpt2-mini/adam-mini-diffq": 0.003,
        "gpt2-mini/adam-mini-gaussws": 0.0005,
        "llama2/bf16": 0.004,
        "llama2/diffq": 0.002,
        "stability/gaussws@x30": 0.5,
        "stability/diffq@x30": 0.5,
        **LEFT,
    },
    bits={"gpt2": 6.5, "llama2": 5.0},
)


def verdict(claim: str, found: Results) -> Verdict:
    (entry,) = (entry for entry in shelf("gaussws").claims if entry.id == claim)
    return judge(entry, found)


def test_every_item_of_the_paper_is_registered() -> None:
    assert shelf("gaussws").missing == []


def test_where_all_is_as_the_paper_says_every_claim_is_reproduced(cpu: Plan) -> None:
    found = results(cpu, PAPER)
    benches(cpu)
    judged = judge_all("gaussws", found)
    assert [name for name in judged if name.startswith("G")] == [f"G{i + 1}" for i in range(18)]
    for name, one in judged.items():
        expected = OUT_OF_REACH if name in NEVER else REPRODUCED
        assert one.outcome is expected or name == "S1", (name, str(one), one.parts)
    assert judged["S1"].parts[0][1].outcome is REPRODUCED


def test_what_is_out_of_reach_has_the_induced_protocol_beside_it_labelled_as_ours(cpu: Plan) -> None:
    found = results(cpu, PAPER)
    for claim in ("G7", "G10", "G11"):
        one = verdict(claim, found)
        assert one.outcome is OUT_OF_REACH
        assert any("Induced instability, ours" in note for note in one.notes), claim
    assert "BF16 0 of 3 at x3, 3 of 3 at x10, 3 of 3 at x30" in verdict("G7", found).notes[0]


def test_the_opposite_is_contradicted(cpu: Plan) -> None:
    effect = {
        "gpt2/gaussws": 0.02,
        "gpt2/gaussws-low": 0.02,
        "llama2/gaussws": 0.01,
        "gpt2-mini/adam-mini-gaussws": 0.1,
        "stability/gaussws@x3": 0.5,
    }
    found = results(cpu, replace(PAPER, effect=effect, bits={"gpt2": 4.0, "llama2": 5.0}, to_nine=0.9))
    for claim in ("G8", "G9", "G12", "G13", "G15"):
        assert verdict(claim, found).outcome is CONTRADICTED, (claim, str(verdict(claim, found)))


def test_widths_that_never_moved_leave_claims_inconclusive(cpu: Plan) -> None:
    found = results(cpu, replace(PAPER, bits={"gpt2": 6.0, "llama2": 6.0}, spread=0.01))
    for claim in ("G8", "G9", "G12", "G13", "G15"):
        one = verdict(claim, found)
        assert one.outcome is INCONCLUSIVE
        assert one.control is not None
        assert not one.control.passed


def test_where_bf16_bears_every_rate_nothing_was_induced(cpu: Plan) -> None:
    found = results(cpu, World())
    one = verdict("S1", found)
    assert one.outcome is INCONCLUSIVE
    assert "nothing was induced" in one.reason


def test_divergence_is_leaving_ones_way(cpu: Plan) -> None:
    found = results(cpu, World(diverged=frozenset({"stability/bf16@x10"})))
    assert all(part.outcome is REPRODUCED for _, part in verdict("S1", found).parts)


def test_what_is_not_there_is_said(cpu: Plan) -> None:
    found = results(cpu, replace(PAPER, missing=frozenset({"gpt2/diffq", "llama2/gaussws"})))
    assert verdict("G8", found).outcome is INCONCLUSIVE
    assert verdict("G13", found).outcome is INCONCLUSIVE
    assert verdict("G15", found).outcome is INCONCLUSIVE


@pytest.mark.parametrize(
    ("box_muller", "torch", "outcome"), [(4.0, 12.0, REPRODUCED), (0.9, 12.0, CONTRADICTED), (4.0, 2.0, CONTRADICTED)]
)
def test_generators_are_judged_turn_by_turn(cpu: Plan, box_muller: float, torch: float, outcome: Outcome) -> None:
    found = results(cpu, World())
    benches(cpu, box_muller=box_muller, torch=torch)
    one = verdict("G18", found)
    assert one.outcome is outcome, str(one)


def test_throughput_is_decided_on_a_gpu_alone(cpu: Plan) -> None:
    found = results(cpu, World())
    benches(cpu)
    assert verdict("G16", found).outcome is OUT_OF_REACH
    assert any("gaussws 4.8%" in note for note in verdict("G16", found).notes)
    benches(cpu, kind="cuda", models=("llama2-134m", "llama2-1b"))
    assert verdict("G16", found).outcome is REPRODUCED
    benches(cpu, kind="cuda", ours=1.3)
    assert verdict("G16", found).outcome is CONTRADICTED
    for path in (next(iter(cpu.trials.values())).folder.path.parent / "bench").glob("*-cuda.json"):
        path.unlink()


def test_the_spread_of_a_pair_is_that_of_arms_at_one_rate(cpu: Plan) -> None:
    """What a seed makes of another rate is an effect, not chance."""
    part = results(cpu, PAPER).of_sweep("gpt2")
    usual, low = (pooled(part, VALIDATION, baseline) for baseline in ("bf16", "bf16-low"))
    assert usual is not None
    assert usual.arms | usual.unlike == {"bf16", "bf16-again", "gaussws", "diffq"}
    assert low is not None
    assert low.arms | low.unlike == {"bf16-low", "gaussws-low", "diffq-low"}
