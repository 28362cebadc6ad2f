"""Test every figure of the study NVFP4 with simulated results: all results, some of them, and none."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fewbits.analysis.engine.results.data import Differences, NoData, NotPlanned
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.figures.effects import effects_of
from fewbits.analysis.figures.series import switches
from fewbits.analysis.figures.theme import LOOK, WIDTH, draw_figure
from fewbits.analysis.report.items import FigureResult
from fewbits.analysis.report.registry import declared, study_registry
from fewbits.analysis.studies.nvfp4 import figures
from fewbits.analysis.tables.cells import compare
from fewbits.sweeps.planning.plan import Plan
from tests.analysis.nvfp4.worlds import World, results
from tests.analysis.shown_items import reaches_over
from tests.analysis.worlds import planned
from tests.experiments.data.data_inputs import shared_cache

FIGURES = study_registry("nvfp4").figures
FROM_KERNELS = ("Figure 1", "Figure 5")
Draw = Callable[[str], Figure]
(EFFECTS_FIGURE,) = declared("nvfp4").effects
EFFECTS = {
    "recipe/fp8": 0.001,
    "recipe/nvfp4": 0.006,
    "recipe/kept": 0.01,
    "recipe/with-2d": 0.009,
    "recipe/no-sr": 0.008,
    "recipe/bad-arm": 0.3,
    "switch/nvfp4-trunk": 0.004,
    "switch/nvfp4-long": 0.009,
    "switch/long-no-rht": 0.014,
}
WORLD = World(
    EFFECTS,
    noise=2e-4,
    gradients=lambda block, part: 0.09 + 0.01 * block,
    measured=("nvfp4", "nvfp4-base"),
)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Plan]:
    """Return a function that plans NVFP4 at scale smoke, with further overrides, in a new empty store."""

    def of(*words: str) -> Plan:
        folder, cache = tmp_path_factory.mktemp("runs"), shared_cache(tmp_path_factory)
        return planned("nvfp4", folder, cache, "scale=smoke", *words)

    return of


@pytest.fixture(scope="module")
def made(smoke: Callable[..., Plan]) -> Results:
    """Return simulated results of every sweep with two seeds."""
    return results(smoke("seeds=[0,1]"), WORLD)


@pytest.fixture(scope="module")
def one_seed(smoke: Callable[..., Plan]) -> Plan:
    return smoke()


@pytest.fixture(scope="module")
def pictures(made: Results) -> Callable[[str], FigureResult]:
    """Return a cached function: name of a figure → its FigureResult, made from the results `made`."""
    return cache(lambda name: pictured(name, made))


@pytest.fixture(scope="module")
def light(pictures: Callable[[str], FigureResult]) -> Draw:
    """Return a cached function: name of a figure → the figure, drawn in the light theme."""
    return cache(lambda name: draw_figure(pictures(name)))


def pictured(name: str, found: Results) -> FigureResult:
    picture = FIGURES[name].make(found)
    assert isinstance(picture, FigureResult), (name, picture)
    return picture


def line(axes: Axes, colour: int) -> np.ndarray:
    """Return the points (x, y) of the only curve with this colour. colour: an index in the light theme's series."""
    (found,) = [one for one in lines(axes, LOOK.light.series[colour]) if len(one)]
    return found


def lines(axes: Axes, colour: str | None = None) -> list[np.ndarray]:
    return [np.asarray(one.get_xydata(), float) for one in axes.lines if colour in (None, one.get_color())]


@pytest.mark.parametrize("name", FIGURES)
def test_it_is_drawn_whole_with_the_trials_behind_it(
    name: str, made: Results, pictures: Callable[[str], FigureResult], light: Draw
) -> None:
    picture, figure = pictures(name), light(name)
    assert figure.get_figwidth() == WIDTH
    assert not reaches_over(figure)
    assert bool(picture.trials) == (name not in FROM_KERNELS)
    assert set(picture.trials) <= set(made.plan.trials)


def test_what_has_no_results_says_so(one_seed: Plan) -> None:
    nothing = frozenset((str(m.cell.arm), m.cell.seed) for m in one_seed.members)
    empty = results(one_seed, World(missing=nothing))
    for name, entry in FIGURES.items():
        assert isinstance(entry.make(empty), FigureResult if name in FROM_KERNELS else NoData), name


def test_a_sweep_that_the_scale_leaves_out_is_not_run(smoke: Callable[..., Plan]) -> None:
    alone = Results(smoke("sweep=rounding"))
    for name in ("Figure 9", "Figure 6", "Figure B"):
        assert FIGURES[name].make(alone) == NotPlanned("not run at this scale (smoke)")
    assert isinstance(FIGURES["Figure 10"].make(alone), NoData)


def test_one_seed_a_diverged_arm_and_a_missing_one_are_drawn_and_said(one_seed: Plan) -> None:
    missing = frozenset({("with-2d", 0), ("mxfp4-1.36", 0), ("layers/nvfp4-base", 0)})
    diverged = frozenset({"recipe/kept", "layers/first-4", "scratch/base-whole"})
    found = results(one_seed, replace(WORLD, missing=missing, diverged=diverged))
    for name in ("Figure 6", "Figure A"):
        assert not reaches_over(draw_figure(pictured(name, found)))
    figure_8 = pictured("Figure 8", found)
    assert any("kept, seed 0: diverged at step 4" in note for note in figure_8.notes)
    assert figure_8.notes[0].startswith("One seed")
    assert any("No data" in note and "+ 2-D weights" in note for note in figure_8.notes)
    longer = figures.longer(found)
    assert isinstance(longer, figures.Longer)
    assert len(longer.times) == 3, "one of MXFP4's four lengths of training is missing"
    effects = {one.label: one.text for one in effects_of(found, "nvfp4", EFFECTS_FIGURE)}
    assert effects["last blocks in BF16"] == "1 diverged"


def test_changes_are_from_the_baseline_of_the_same_seed(light: Draw) -> None:
    above, below = light("Figure 8").axes[1::2]
    for colour, arm in enumerate(("kept", "with-2d", "no-sr", "nvfp4")):
        for axes in (above, below):
            last = line(axes, colour)[-1, 1]
            assert last == pytest.approx(EFFECTS[f"recipe/{arm}"], abs=1e-3), "with-rht is no-sr, with-sr is nvfp4"
    figure_4 = light("Figure 4").axes
    assert line(figure_4[1], 0)[-1, 1] == pytest.approx((1.009 - 1.001) / 1.001, abs=1e-3)
    titles = [axes.get_title(loc="left") for axes in figure_4[1::2]]
    assert titles == ["Change from FP8, %", "Change from FP8, %", "Change from whole recipe, %"]
    assert line(figure_4[5], 2)[-1, 1] == pytest.approx((1.014 - 1.009) / 1.009, abs=1e-3), "the arm long-no-rht"


def test_switches_are_marked_where_recipes_switch(made: Results, light: Draw) -> None:
    part = made.of_sweep("switch")
    early, late = (next(m.id for m in part.members if m.cell.arm == arm) for arm in ("switch-both", "switch-late"))
    marks = switches(part, ("nvfp4-long", "switch-both", "switch-late"))
    rows = part.curves("loss").drop_duplicates(["id", "step"]).set_index(["id", "step"])["tokens"]
    assert marks == (rows[early, 0], rows[late, 6]), (
        "0.1 of 8 steps ends within the first step, and 0.8 of 8 steps within the seventh"
    )
    assert switches(part, ("nvfp4-long",)) == ()
    axes = light("Figure 7").axes[1]
    uprights = [line[0, 0] for line in lines(axes, LOOK.light.line) if len(set(line[:, 0])) == 1]
    assert uprights == list(marks)


def test_tokens_to_the_same_loss_are_read_between_runs(made: Results, light: Draw) -> None:
    assert figures.crossing((1, 1.25, 1.5), (0.02, 0.01, -0.01)) == pytest.approx(1.375)
    assert figures.crossing((1, 1.5), (0.02, 0.01)) is None
    assert figures.crossing((1, 1.5), (0.02, 0.0)) == 1.5
    found = figures.longer(made)
    assert isinstance(found, figures.Longer)
    assert found.times == pytest.approx((1, 1.25, 1.35, 1.5), abs=0.01)
    assert len(found.losses) == 2
    axes = light("Figure 6").axes[-1]
    assert np.allclose(line(axes, 1)[:, 1], found.changes.mean())


def test_effects_are_those_that_verdicts_are_read_off(made: Results) -> None:
    found = {effect.label: effect for effect in effects_of(made, "nvfp4", EFFECTS_FIGURE)}
    for arm, label in (("nvfp4", "NVFP4"), ("kept", "last blocks in BF16")):
        pairs = compare(made, "validation_loss", arm, sweep="recipe")
        assert isinstance(pairs, Differences)
        assert found[label].data == pairs
        assert found[label].mean == pytest.approx(EFFECTS[f"recipe/{arm}"], abs=1e-3)
    assert found["hybrid: MXFP4"].paper == 0.025
    assert not any("1.25×" in label for label in found), "arms that train for longer than their baseline are left out"
