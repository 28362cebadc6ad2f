"""Test NVFP4's tables with simulated results: the paper's numbers, ours, and reasons for missing numbers."""

from functools import partial
from pathlib import Path

import pytest

from fewbits.analysis.engine.results.data import NotPlanned
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.figures.theme import draw_figure
from fewbits.analysis.report.items import FigureResult, TableResult, Value
from fewbits.analysis.report.registry import study_registry
from fewbits.experiments.storage import results as evaluations
from fewbits.sweeps.planning.plan import Plan, plan
from fewbits.sweeps.planning.studies import load_sweeps
from tests.analysis import shown_items
from tests.analysis.nvfp4.worlds import PAPER, World, results
from tests.analysis.shown_items import cell, mean, text


@pytest.fixture(scope="module")
def found(cpu: Plan) -> Results:
    return results(cpu, PAPER)


table = partial(shown_items.table, "nvfp4")


def test_the_papers_own_model_has_the_papers_numbers_and_scores(tmp_path: Path) -> None:
    """Check Table 2, Table 3 and Figure 3 at scale paper, where the 12B model is trained and has stored scores."""
    whole = plan(
        *load_sweeps(("study=nvfp4", "scale=paper", "sweep=large", f"runtime.runs={tmp_path}")), with_data=False
    )
    results(whole, World({"large/nvfp4": 0.01}))
    for trial in whole.trials.values():
        steps = trial.trial.training.steps
        for name, metric, step, value in (
            ("gsm8k_cot", "exact_match,flexible-extract", steps, 0.5),
            ("hendrycks_math", "exact_match,none", steps, 0.25),
            ("hendrycks_math500", "exact_match,none", steps // 2, 0.125),
        ):
            key = evaluations.Key(name, {}, step, "fingerprint")
            one = evaluations.Evaluation(key, {"tasks": {name: {metric: value}}}, {}, 1)
            evaluations.write(trial.folder.path, one)
    of = Results(whole)
    made = table("Table 2", of)
    assert made.columns[:2] == ("12B: FP8", "12B: NVFP4")
    assert (mean(cell(made, "Math", "12B: FP8")), cell(made, "Math", "12B: FP8").paper) == (37.5, 86.2)
    assert mean(cell(made, "MATH", "12B: NVFP4")) == 25.0
    assert text(cell(table("Table 3", of), "Blocks", "Trained at this scale")) == "62"
    entry = study_registry("nvfp4").figures["Figure 3"]
    picture = entry.make(of)
    assert isinstance(picture, FigureResult)
    titles = [axes.get_title(loc="left") for axes in draw_figure(picture).axes]
    assert titles == ["MMLU-Pro 5-shot, paper, %", "MMLU, paper, %", "MATH-500, %", "MBPP+, paper, %"]


def test_every_arm_is_told_from_bf16_and_from_the_whole_recipe(found: Results) -> None:
    made = table("Recipe", found)
    row = "without the Hadamard transform"
    assert mean(cell(made, row, "Validation loss, from BF16")) == pytest.approx(1.3, rel=1e-3)
    assert mean(cell(made, row, "Validation loss, from NVFP4")) == pytest.approx(100 * (1.013 / 1.01 - 1), rel=1e-3)
    of_another_sweep = mean(cell(made, "stochastic: weights", "Validation loss, from NVFP4"))
    assert of_another_sweep == pytest.approx(100 * (1.06 / 1.01 - 1), rel=1e-3)
    titles = [r.title for r in made.rows]
    assert len(set(titles)) == len(titles) == 45, "each arm has one row, and trunks have none"
    blocks = table("Blocks", found)
    assert mean(cell(blocks, "first 4 blocks in BF16", "Validation loss, from BF16")) == pytest.approx(3.0, rel=1e-3)
    nothing = table("From scratch", found)
    assert mean(cell(nothing, "MXFP4", "Validation loss, from NVFP4")) == pytest.approx(
        100 * (1.02 / 1.012 - 1), rel=1e-2
    )
    assert not isinstance(cell(nothing, "MXFP4", "Training loss, from BF16").ours, Value), (
        "MXFP4 is trained for another length than BF16"
    )
    assert isinstance(cell(nothing, "NVFP4, the whole recipe", "Training loss, from BF16").ours, Value)
    outlook = table("Outlook", found)
    assert {"MXFP4", "MXFP4, no random signs, nearest rounding"} <= {row.title for row in outlook.rows}


def test_sweeps_that_are_not_run_have_no_table(found: Results) -> None:
    alone = found.of_sweep("rounding")
    for name in ("Blocks", "Hybrids", "From scratch"):
        entry = study_registry("nvfp4").tables[name]
        assert entry.make(alone) == NotPlanned("not run at this scale (cpu)")
    assert isinstance(cell(table("Table 3", alone), "Blocks", "Trained at this scale").ours, NotPlanned)


def test_an_empty_store_gives_tables_without_numbers(cpu: Plan) -> None:
    nothing = frozenset((str(member.cell.arm), member.cell.seed) for member in cpu.members)
    found = results(cpu, World(missing=nothing))
    for entry in study_registry("nvfp4").tables.values():
        made = entry.make(found)
        assert isinstance(made, TableResult)
        made.frame()
        assert not any(isinstance(c.ours, Value) for row in made.rows for c in row.cells)
