"""Verdicts on trials whose truth is known: right where it can be told, and inconclusive where it cannot."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fewbits.analysis.arms import pooled
from fewbits.analysis.engine.frames import Damaged, Results
from fewbits.analysis.gaussws.arms import MINI_OURS, OURS
from fewbits.analysis.gaussws.claims import at_its_rate
from fewbits.analysis.gaussws.tables import table_e1
from fewbits.analysis.noise import VALIDATION
from fewbits.analysis.registry import judge, judge_all, shelf
from fewbits.analysis.verdicts import Outcome, Verdict
from fewbits.sweeps.planning.plan import Plan, plan
from fewbits.sweeps.planning.sweep import load_sweeps
from tests.analysis.gaussws.conftest import SMALL
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
    benches(cpu, kind="cuda", models=("llama2-134m",), ours=1.3)
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
    assert low.arms | low.unlike == {"gaussws-low", "diffq-low"}, "and BF16 is the only one of its kind there"


def test_rivalling_the_best_bf16_is_rivalling_that_of_either_rate(cpu: Plan) -> None:
    found = results(cpu, replace(PAPER, effect={**PAPER.effect, "gpt2/bf16-low": -0.02}))
    assert verdict("G9", found).outcome is CONTRADICTED


@pytest.mark.parametrize("arm", ["gaussws", "diffq"])
def test_fewer_leave_their_way_of_both_samplers_or_it_is_not_shown(cpu: Plan, arm: str) -> None:
    found = results(cpu, replace(PAPER, missing=frozenset({f"stability/{arm}"})))
    assert verdict("S1", found).outcome is INCONCLUSIVE


def test_that_bf16_bears_every_rate_is_said_of_bf16_that_ran(cpu: Plan) -> None:
    for missing in ("stability/bf16", "stability/bf16@x3"):
        one = verdict("S1", results(cpu, replace(PAPER, missing=frozenset({missing}))))
        assert one.outcome is INCONCLUSIVE
        assert "no trial of BF16 has ended at x3" in one.reason


def test_widths_of_an_arm_that_diverged_are_not_those_of_its_end(cpu: Plan) -> None:
    found = results(cpu, replace(PAPER, diverged=frozenset({"gpt2/gaussws"})))
    wider = dict(verdict("G15", found).parts)["GPT-2's mean width above Llama 2's"]
    assert wider.outcome is INCONCLUSIVE
    assert wider.reason.startswith("no data")


@pytest.mark.parametrize(
    ("ours", "diffq", "outcome"),
    [(1.25, 1.5, CONTRADICTED), (1.03, 1.05, CONTRADICTED), (1.005, 1.2, REPRODUCED), (0.99, 1.2, CONTRADICTED)],
)
def test_throughput_is_held_against_the_papers_numbers(cpu: Plan, ours: float, diffq: float, outcome: Outcome) -> None:
    found = results(cpu, World())
    benches(cpu, kind="cuda", models=("llama2-134m",), ours=ours, diffq=diffq)
    one = verdict("G16", found)
    _forget(cpu)
    assert one.outcome is outcome, str(one)
    assert one.scale.startswith("a processor"), "no trial is behind it, so none's parameters are its scale"


def test_throughput_of_models_that_the_paper_has_not_decides_nothing(cpu: Plan) -> None:
    benches(cpu, kind="cuda", models=("gpt2-nano",))
    one = verdict("G16", results(cpu, World()))
    _forget(cpu)
    assert one.outcome is OUT_OF_REACH


@pytest.mark.parametrize(
    "text", ["{", "{}", "[]", "null", '{"machine": {"device": "d", "load": 0}, "turns": 5, "models": [], "timed": []}']
)
def test_a_damaged_bench_is_named(cpu: Plan, text: str) -> None:
    found = results(cpu, World())
    benches(cpu, kind="cuda", models=("llama2-134m",))
    for path in _benches(cpu):
        path.write_text(text)
    try:
        for claim in ("G16", "G18"):
            with pytest.raises(Damaged, match=r"-cuda\.json is damaged"):
                verdict(claim, found)
    finally:
        _forget(cpu)


def test_a_slow_kind_of_call_may_have_fewer_turns_than_another(cpu: Plan) -> None:
    found = results(cpu, World())
    benches(cpu, kind="cuda")
    try:
        (path,) = (path for path in _benches(cpu) if path.name == "generators-cuda.json")
        content = json.loads(path.read_text())
        for one in content["timed"]:
            if one["what"] == "generator":
                one["seconds"] = one["seconds"][1:]
        path.write_text(json.dumps(content))
        assert verdict("G18", found).outcome is REPRODUCED
    finally:
        _forget(cpu)


def _benches(plan: Plan) -> list[Path]:
    return list((next(iter(plan.trials.values())).folder.path.parent / "bench").glob("*-cuda.json"))


def _forget(plan: Plan) -> None:
    for path in _benches(plan):
        path.unlink()


@pytest.mark.parametrize(
    ("metric", "place", "other"),
    [("loss", "llama2/bf16", "llama2/diffq"), ("loss_max", "llama2/diffq", "llama2/gaussws")],
)
def test_average_and_maximum_are_judged_apart(cpu: Plan, metric: str, place: str, other: str) -> None:
    """One neighbour of one of them out of order contradicts."""
    found = results(cpu, replace(PAPER, apart={(place, metric): -0.01, (other, metric): 0.0}))
    (wrong,) = (name for name, one in verdict("G13", found).parts if one.outcome is CONTRADICTED)
    assert wrong.startswith("average" if metric == "loss" else "maximum")


@pytest.mark.parametrize("place", ["gpt2/gaussws", "gpt2/gaussws-low"])
def test_either_rate_can_contradict_that_gaussws_is_below_diffq(cpu: Plan, place: str) -> None:
    found = results(cpu, replace(PAPER, effect={**PAPER.effect, place: 0.008}))
    assert verdict("G8", found).outcome is CONTRADICTED


@pytest.mark.parametrize("place", ["gpt2-mini/adam-mini-gaussws", "gpt2-mini/adam-mini-diffq"])
def test_either_sampler_can_contradict_what_adam_mini_does(cpu: Plan, place: str) -> None:
    found = results(cpu, replace(PAPER, effect={**PAPER.effect, place: 0.02}))
    assert verdict("G12", found).outcome is CONTRADICTED


@pytest.mark.parametrize("wrong", [{"bits": {"gpt2": 4.9, "llama2": 5.0}}, {"to_nine": 0.9}])
def test_either_half_contradicts_g15(cpu: Plan, wrong: Any) -> None:
    assert verdict("G15", results(cpu, replace(PAPER, **wrong))).outcome is CONTRADICTED


def test_what_is_smaller_than_its_margin_is_not_reproduced(cpu: Plan) -> None:
    small = {"gpt2/diffq": 0.001, "gpt2/diffq-low": 0.001, "llama2/bf16": 0.0006, "llama2/diffq": 0.0003}
    found = results(cpu, replace(PAPER, effect={**PAPER.effect, **small, "gpt2/gaussws": 0.0}, noise=1e-6))
    assert {name: verdict(name, found).outcome for name in ("G8", "G13")} == {"G8": INCONCLUSIVE, "G13": INCONCLUSIVE}


def test_adam_mini_is_compared_at_its_own_learning_rate(tmp_path: Path, cpu: Plan) -> None:
    assert at_its_rate(results(cpu, World()), MINI_OURS, OURS, "gaussws-low") == OURS
    where = (f"runtime.runs={tmp_path}", f"runtime.cache={next(iter(cpu.trials.values())).runtime.cache}")
    paper = plan(*load_sweeps(("study=gaussws", "scale=paper", *SMALL, *where)))
    assert at_its_rate(Results.of(paper), MINI_OURS, OURS, "gaussws-low") == "gaussws-low"
    shown = {row.title: [str(cell.ours) for cell in row.cells] for row in table_e1(Results.of(paper)).rows}
    assert shown["GPUs"] == ["8", "8", "8"]
    assert shown["Micro-batches to an update"] == ["5", "1", "1"]


def test_places_without_a_result_are_named_with_their_sweep(cpu: Plan) -> None:
    """Two sweeps have an arm of that name."""
    found = results(cpu, replace(PAPER, missing=frozenset({"llama2-mini/adam-mini"})))
    assert [flag.partition(": ")[0] for flag in found.flags] == [
        f"llama2-mini, adam-mini, seed {seed}" for seed in (0, 1, 2)
    ]
