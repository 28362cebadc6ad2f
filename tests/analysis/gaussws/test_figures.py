"""Test GaussWS's tables and figures with simulated results: with all results, and without any."""

from pathlib import Path

import pandas as pd
import pytest

from fewbits.analysis.engine.results.archive import REDUCTIONS, Detail
from fewbits.analysis.engine.results.data import NoData, NotPlanned
from fewbits.analysis.engine.results.frames import METRICS, Files, Results
from fewbits.analysis.figures.theme import draw_figure, svg
from fewbits.analysis.report.items import FigureResult, Setting, TableResult, Value
from fewbits.analysis.report.registry import study_registry
from fewbits.sweeps.planning.plan import Plan
from tests.analysis.gaussws.worlds import World, benches, results

OF_KERNELS = {"Figure 2", "Figure D.1", "Figure C"}
FIGURES = {name: entry.make for name, entry in study_registry("gaussws").figures.items()}
TABLES = {name: entry.make for name, entry in study_registry("gaussws").tables.items()}


@pytest.fixture(scope="module")
def made(cpu: Plan) -> Results:
    found = results(cpu, World(effect={"gpt2/gaussws": 0.01, "bf16@x30": 0.4}, bits={"gpt2": 7.0}))
    benches(cpu)
    return found


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_drawn(made: Results, name: str) -> None:
    picture = FIGURES[name](made)
    assert isinstance(picture, FigureResult), picture
    assert bool(picture.trials) is (name not in {*OF_KERNELS, "Figure 6"})
    assert "<svg" in svg(draw_figure(picture))


def test_moving_averages_are_the_papers_and_an_archive_keeps_their_maxima(tmp_path: Path) -> None:
    """Check that a spike of the maximum loss, which α = 1/128 reduces to 1, survives the thinning of curves."""
    steps = pd.DataFrame({"step": range(1000), "tokens": range(1000), "loss": 1.0, "loss_max": 1.0})
    steps.loc[500, "loss_max"] = 129.0
    steps.to_parquet(tmp_path / METRICS)
    found = Files().read(tmp_path / METRICS)
    assert found["loss_average"].eq(1.0).all()
    assert found["loss_max_average"].max() == pytest.approx(2.0)
    kept = REDUCTIONS[METRICS](found.assign(id="a"), Detail(200, 50))
    assert len(kept) == 200
    assert kept["loss_max_average"].max() == pytest.approx(2.0)
    assert kept["loss_max"].max() < 129 / 4


@pytest.mark.parametrize("name", [name for name in TABLES if name != "Widths"])
def test_every_table_is_made(made: Results, name: str) -> None:
    found = TABLES[name](made)
    assert isinstance(found, TableResult), found
    assert not found.frame().empty


def test_what_widths_depend_on_is_told_where_it_is_run(made: Results, varied_widths: Plan) -> None:
    """Check that the table Widths has a row for each arm of the sweep `widths`, and is not planned at scale cpu."""
    assert isinstance(TABLES["Widths"](made), NotPlanned)
    found = TABLES["Widths"](results(varied_widths, World(effect={"widths/no-decay": 0.01}, bits={"widths": 4.5})))
    assert isinstance(found, TableResult)
    titles = {str(m.cell.arm) for m in varied_widths.members} - {"trunk", "bf16"}
    assert len(found.rows) == len(titles) == 7
    mean, *tiers, change = cells(found, "without decay")
    assert isinstance(mean, Value)
    assert mean.mean == pytest.approx(4.5, abs=1e-6)
    assert [tier.mean for tier in tiers if isinstance(tier, Value)] == pytest.approx([100.0] * 3)
    assert isinstance(change, Value)
    assert change.mean == pytest.approx(1.0, abs=0.01)


def test_without_results_there_is_a_word_in_place_of_each(made: Results) -> None:
    """Check that figures give NoData or NotPlanned with a reason if no trial has run."""
    empty = results(made.plan, World(missing=frozenset((str(m.cell.arm), m.cell.seed) for m in made.members)))
    for name in FIGURES.keys() - OF_KERNELS - {"Figure 6"}:
        assert isinstance(FIGURES[name](empty), NoData | NotPlanned), name


def cells(found: object, title: str) -> list[object]:
    assert isinstance(found, TableResult)
    (row,) = (row for row in found.rows if row.title.strip() == title)
    return [cell.ours for cell in row.cells]


def test_table_1_has_ours_and_the_papers(cpu: Plan) -> None:
    benches(cpu, ours=1.25, models=("llama2-134m", "gpt2-nano"))
    found = TABLES["Table 1"](Results(cpu))
    assert isinstance(found, TableResult)
    overheads = cells(found, "Overhead of gpt2-nano (ours)")
    assert isinstance(overheads[1], Value)
    assert overheads[1].mean == pytest.approx(20.0)
    of_paper = next(row for row in found.rows if row.title == "Overhead of 134M").cells[1]
    assert (of_paper.paper, of_paper.difference) == (1.40, None), "the devices differ, so no difference is shown"
    assert isinstance(next(row for row in found.rows if row.title == "Llama2-1B").cells[0].ours, NotPlanned)
    (mean,) = (row.cells[1].ours for row in found.rows if row.title == "Overhead, mean")
    assert isinstance(mean, Value)
    assert mean.mean == pytest.approx(20.0), "1 minus the geometric mean of two equal ratios"


def test_the_table_of_induced_instability_counts_seeds(cpu: Plan) -> None:
    found = results(cpu, World(effect={"bf16@x30": 0.4}, diverged=frozenset({"qkv@x10"})))
    shares = {row: cells(TABLES["Table A"](found), row)[0] for row in ("BF16, x10", "BF16, x30", "qkv, x10")}
    assert [one.mean for one in shares.values() if isinstance(one, Value)] == [0.0, 100.0, 100.0]
    stability = cells(TABLES["Table B.1"](found), "BF16")[1]
    assert isinstance(stability, Setting)
    assert stability.text == "0 of 3, 0 of 3, 3 of 3"
