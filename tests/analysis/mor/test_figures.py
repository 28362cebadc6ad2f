"""Test every figure of the study MoR with simulated results: all results, some of them, and none."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.figure import Figure

from fewbits.analysis.engine.results.data import Differences, NoData, NotPlanned
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.places import sweep_places
from fewbits.analysis.figures.effects import effects_of
from fewbits.analysis.figures.series import change
from fewbits.analysis.figures.series import curves as recorded
from fewbits.analysis.figures.theme import WIDTH, draw_figure
from fewbits.analysis.report.items import FigureResult, MakeFigure
from fewbits.analysis.report.registry import Entry, declared, study_registry
from fewbits.analysis.studies.mor.tensors import ONE
from fewbits.analysis.tables.cells import compare
from fewbits.sweeps.planning.plan import Plan
from tests.analysis.mor.worlds import World, results
from tests.analysis.shown_items import reaches_over

FIGURES = study_registry("mor").figures
SCHEMATICS = ("Figure 1", "Figure 2", "Figure 3", "Figure 4")
BY_MODELS = ("Figure R", "Figure S")  # only at scales questions and gpu; test_tables.py draws them
WORLD = World(fallback=lambda arm, configuration, block, part, slot, end: 0.3 * (part == "down"))


@pytest.fixture(scope="module")
def every(plans: Callable[..., Plan]) -> Plan:
    """Return the plan at scale cpu, with both configurations and two seeds."""
    return plans("scale=cpu", "seeds=[0,1]")


@pytest.fixture(scope="module")
def made(every: Plan) -> Results:
    return results(every, WORLD)


@pytest.fixture(scope="module")
def smoke(plans: Callable[..., Plan]) -> Plan:
    """Return the plan at scale smoke, with one seed and one configuration."""
    return plans("scale=smoke")


def drawn(entry: Entry[MakeFigure], found: Results) -> Figure:
    picture = entry.make(found)
    assert isinstance(picture, FigureResult), (entry.id, picture)
    return draw_figure(picture)


@pytest.mark.parametrize("name", [name for name in FIGURES if name not in (*BY_MODELS, "Figure B", "Figure D")])
def test_it_is_drawn_whole_with_the_trials_behind_it(name: str, made: Results) -> None:
    check_drawn(name, made)


@pytest.mark.parametrize(
    ("name", "words"),
    [("Figure B", ("scale=questions", "sweep=left-open", "seeds=[0,1]")), ("Figure D", ("scale=sizes",))],
)
def test_thresholds_and_sizes_are_drawn_at_their_scales(
    name: str, words: tuple[str, ...], plans: Callable[..., Plan]
) -> None:
    check_drawn(name, results(plans(*words), WORLD))


def check_drawn(name: str, found: Results) -> None:
    picture = FIGURES[name].make(found)
    assert isinstance(picture, FigureResult)
    figure = draw_figure(picture)
    assert figure.get_figwidth() == WIDTH
    assert not reaches_over(figure)
    assert bool(picture.trials) == (name not in SCHEMATICS[1:])
    assert set(picture.trials) <= set(found.plan.trials)


def test_what_has_no_results_says_so(smoke: Plan) -> None:
    empty = results(smoke, World(missing=frozenset((str(m.cell.arm), m.cell.seed) for m in smoke.members)))
    for name, entry in FIGURES.items():
        picture = entry.make(empty)
        if name in SCHEMATICS:
            assert isinstance(picture, FigureResult)
        elif name in ("Figure 6", "Figure 15", "Figure 16", "Figure B", *BY_MODELS):
            assert picture == NotPlanned("not run at this scale (smoke)")
        else:
            assert isinstance(picture, NoData)
            assert picture.reason


def test_one_seed_a_diverged_arm_and_a_missing_one_are_drawn_and_said(smoke: Plan) -> None:
    missing = frozenset({("tensor", 0), ("three-way", 0)})
    found = results(smoke, replace(WORLD, missing=missing, diverged=frozenset({"channel", "two-way", "block-64"})))
    figure_17, figure_18 = FIGURES["Figure 17"].make(found), FIGURES["Figure 18"].make(found)
    assert isinstance(figure_17, NoData)
    assert "Tensor" in figure_17.reason
    assert isinstance(figure_18, NoData), "a diverged trial's last window is not the end of training"
    assert "Channel" in figure_18.reason
    for name in ("Figure 1", "Figure 5", "Figure 7", "Figure 10", "Figure 12", "Figure A"):
        assert not reaches_over(drawn(FIGURES[name], found))
    figure_5 = FIGURES["Figure 5"].make(found)
    assert isinstance(figure_5, FigureResult)
    assert any("channel, seed 0: diverged at step" in note for note in figure_5.notes)
    assert any("No data" in note and "Tensor" in note for note in figure_5.notes)
    assert legend_of("Figure A", found)[:2] == ["ours, one seed", "the paper's"]
    assert not any("A/A" in words for words in legend_of("Figure A", found)), "one seed has no interval to shade"


def legend_of(name: str, found: Results) -> list[str]:
    return [text.get_text() for text in drawn(FIGURES[name], found).legends[0].get_texts()]


def test_a_change_is_from_the_same_seed_at_the_same_step(made: Results) -> None:
    part = sweep_places(made, "partitions", ONE)
    assert isinstance(part, Results)
    frame = recorded(part, "loss")
    found = change(frame, "block", "bf16")
    assert found is not None
    frame = frame[frame["arm"].isin(("block", "bf16"))]
    table = frame.pivot(index="tokens", columns=["arm", "seed"], values="value")
    by_hand = [(table["block", s] - table["bf16", s]) / table["bf16", s] for s in (0, 1)]
    assert np.allclose(found.mean, np.mean(by_hand, axis=0))
    assert found.tokens[0] == table.index[0]


def test_effects_are_those_that_verdicts_are_read_off(made: Results) -> None:
    of = declared("mor").effects[0]
    assert of is not None
    found = {effect.label: effect for effect in effects_of(made, "mor", of)}
    for arm, label, sweep in (("tensor", "Tensor", "partitions"), ("e8m0", "E8M0", "ablations")):
        pairs = compare(made, "validation_loss", arm, where=ONE, sweep=sweep)
        assert isinstance(pairs, Differences)
        assert found[label].data == pairs
        assert found[label].mean == pytest.approx(np.mean(pairs.values))
    assert found["Tensor"].paper == pytest.approx(0.0003, abs=1e-4)
    assert found["config. 2: Tensor"].paper == pytest.approx(0.0016, abs=1e-4)
    assert found["64×64"].paper == pytest.approx(0.0034, abs=1e-4)
