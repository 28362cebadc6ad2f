"""Test MoR's tables with simulated results: the paper's numbers, ours, changes in percent, and reasons for gaps."""

import json
import shutil
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from fewbits.analysis.engine.results.data import NoData
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.paper import paper
from fewbits.analysis.figures.effects import effects_of, effects_picture
from fewbits.analysis.figures.theme import draw_figure
from fewbits.analysis.report.items import FigureResult, OutOfReach, TableResult, Value
from fewbits.analysis.report.registry import declared, study_registry
from fewbits.analysis.tables.cells import BEST, BLANK
from fewbits.experiments.storage import results as evaluations
from fewbits.sweeps.planning.plan import Plan
from tests.analysis import shown_items
from tests.analysis.mor.worlds import World, results
from tests.analysis.shown_items import cell, mean

EFFECT = {"block": 0.002, "two-way": -0.003, "bad-arm": 0.05, "bf16-again": 0.0001}


@pytest.fixture(scope="module")
def found(cpu: Plan) -> Results:
    return results(cpu, World(effect=EFFECT, fallback=lambda arm, c, block, part, slot, end: 0.2 * (part == "down")))


table = partial(shown_items.table, "mor")


@pytest.mark.parametrize("name", ["Table 2", "Table 3", "Table 4"])
def test_each_number_of_the_paper_stands_in_its_cell(name: str, found: Results) -> None:
    made, said = table(name, found), paper("mor").table(name)
    for row in said.rows:
        (there,) = (r for r in made.rows if r.title == row.title)
        assert tuple(c.paper for c in there.cells) == row.values


def test_changes_compare_and_levels_do_not(found: Results) -> None:
    """Check that changes from BF16 are compared with the paper's, but losses are not."""
    made = table("Table 2", found)
    level, change = (
        cell(made, f"Validation loss{what}", "Configuration 1: Block") for what in ("", ", change from BF16")
    )
    assert level.paper == 1.8046
    assert mean(level) == pytest.approx(1.1 * 2.1 * 1.002, rel=1e-4)
    assert level.difference is None, "losses per byte and per word cannot be compared"
    assert change.paper == pytest.approx(0.1276, abs=1e-4)
    assert mean(change) == pytest.approx(0.2, rel=1e-6)
    assert isinstance(change.ours, Value)
    assert change.ours.interval is not None
    assert change.ours.interval.low < 0.2 < change.ours.interval.high
    assert change.difference == pytest.approx(0.2 - 0.1276, abs=1e-4)
    assert len(change.trials) == 6, "three pairs of trials"
    assert mean(cell(table("Table 4", found), "Training loss, change from BF16", "Two-way")) == pytest.approx(
        -0.3 * 2.1 / 2.125, rel=0.1
    )


def test_scores_of_the_papers_tasks_are_shown_where_runs_were_evaluated(cpu: Plan) -> None:
    """Check Table 2 and Figure 7 if the arm Block has scores of OpenBookQA and MMLU at two checkpoints."""
    made = results(cpu, World(effect=EFFECT))
    trials = {str(row["id"]): row for row in made.rows if row["arm"] == "block" and row["state"] == "done"}
    folders = [cpu.trials[trial].folder.path for trial in trials]
    for path in folders:
        last = json.loads((path / "result.json").read_text())["step"]
        for step, value in ((last // 2, 0.75), (last, 0.5)):
            for name, metric in (("openbookqa", "acc_norm,none"), ("mmlu", "acc,none")):
                key = evaluations.Key(name, {}, step, "fingerprint")
                evaluations.write(path, evaluations.Evaluation(key, {"tasks": {name: {metric: value}}}, {}, 1))
    try:
        shown = table("Table 2", Results(cpu))
        entry = study_registry("mor").figures["Figure 7"]
        picture = entry.make(Results(cpu))
        assert isinstance(picture, FigureResult)
        figure = draw_figure(picture)
    finally:
        for path in folders:
            shutil.rmtree(path / evaluations.FOLDER)
    ours, best = (cell(shown, f"OpenBookQA{end}", "Configuration 1: Block") for end in ("", BEST))
    assert (mean(ours), ours.paper) == (50.0, 39.8)
    assert (mean(best), best.paper) == (75.0, 42.2)
    assert cell(shown, f"OpenBookQA{BEST}", "Configuration 1: BF16") is BLANK
    assert isinstance(cell(shown, "PIQA", "Configuration 1: BF16").ours, OutOfReach)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["MMLU, %"] * 2
    (line,) = (one for one in figure.axes[0].lines if one.get_clip_on())
    assert np.asarray(line.get_ydata(), float).tolist() == [0.75, 0.5]
    assert sum(not one.get_clip_on() for one in figure.axes[0].lines) == 4, "the paper's last scores of four arms"
    assert not picture.notes


def test_fallbacks_are_told_by_kind_of_tensor(cpu: Plan) -> None:
    def share(arm: str, configuration: str, block: int, part: str, slot: str, end: bool) -> float:
        return 0.6 if arm == "channel" and (part, slot) == ("down", "fprop.x") else 0.0

    made = table("Fallbacks", results(cpu, World(fallback=share, wobble=0.0)))
    row = "Channel, configuration 1"
    assert mean(cell(made, row, "All")) == pytest.approx(60 / 24), "60 % in one of 4 parts × 6 slots"
    assert cell(made, row, "All").paper == pytest.approx(1.62)
    assert mean(cell(made, row, "FC2")) == pytest.approx(60 / 6)
    assert mean(cell(made, row, "FC2's activations")) == pytest.approx(60 / 2)
    assert mean(cell(made, row, "Weights")) == 0
    assert mean(cell(made, "Tensor, configuration 1", "All")) == 0


def test_data_and_batches_crossed_have_rows_of_their_own(plans: Callable[..., Plan]) -> None:
    made = table("Crossed", results(plans("scale=cpu-full", "sweep=quality", "seeds=[0,1]", "seeds_of={}"), World()))
    assert len(made.rows) == 4 * 3
    assert {row.title.partition(":")[0] for row in made.rows} == {
        "worse data",
        "better data",
        "large batch",
        "worse data, large batch",
    }


def test_recipes_and_settings_on_several_models_are_compared_with_each_models_own_bf16(
    plans: Callable[..., Plan],
) -> None:
    """Check a row for each arm and model, and the figures of both sweeps."""
    for sweep, name, figure, arms in (
        ("recipes-by-models", "Recipes by models", "Figure R", 5),
        ("axes-by-models", "Axes by models", "Figure S", 15),
    ):
        own = results(plans("scale=questions", f"sweep={sweep}", "seeds=[0,1]"), World(effect={"tensor": 0.004}))
        made = table(name, own)
        assert len(made.rows) == 3 * arms
        changes = [mean(row.cells[1]) for row in made.rows if row.title.endswith(": Tensor")]
        assert changes == pytest.approx([0.4] * 3, rel=0.01)
        (of,) = (one for one in declared("mor").effects if one.id == figure)
        effects = effects_of(own, "mor", of)
        assert len(effects) == 3 * arms
        assert {one.label.partition(":")[0] for one in effects} == {"GPT-2", "Llama 2", "Nemotron"}
        assert not any(one.paper for one in effects), "the paper's numbers are of another model"
        assert isinstance(effects_picture(own, "mor", of), FigureResult)


def test_an_empty_store_gives_tables_without_numbers(cpu: Plan) -> None:
    nothing = frozenset((member.cell.arm, member.cell.seed) for member in cpu.members)
    found = results(cpu, World(missing=nothing))
    for entry in study_registry("mor").tables.values():
        made = entry.make(found)
        if isinstance(made, TableResult):
            made.frame()
            assert not any(isinstance(c.ours, Value) for row in made.rows for c in row.cells)
    assert isinstance(cell(table("Table 3", found), "Training loss", "E8M0").ours, NoData)
