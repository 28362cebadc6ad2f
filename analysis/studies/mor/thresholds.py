"""Draw Figure B: the share of fallbacks and the change of the validation loss, by threshold of the acceptance test."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.figure import Figure

from fewbits.analysis.engine.claims.schema import LOSS
from fewbits.analysis.engine.results.arms import BASELINE
from fewbits.analysis.engine.results.data import Data, Differences, NoData
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.pairing import Where, paired, sample
from fewbits.analysis.engine.results.places import not_planned
from fewbits.analysis.engine.statistics.estimates import ALPHA, summary
from fewbits.analysis.figures.curves import Line, Panel, Rule, curve_figure
from fewbits.analysis.figures.series import band_of, means_of
from fewbits.analysis.figures.theme import STYLES, Style
from fewbits.analysis.report.items import FigureResult, Picture
from fewbits.analysis.report.registry import figure
from fewbits.analysis.studies.mor.tensors import THRESHOLD, fallback_shares, tensors
from fewbits.kernels.quantizer import Mixture

AXIS = "recipe.threshold"
BLOCKS = ("128x128", "tensor", "channel")  # an entry's index is the index of its colour
SCALINGS = {"gam": "GAM", "amax": "FP32 amax", "e8m0": "E8M0"}  # labels; the position gives dashes and marker
Values = Mapping[float, Sequence[float]]  # by threshold, a number for each seed


@dataclass(frozen=True)
class ThresholdLine:
    """A line of the figure: one arm at several acceptance thresholds, with fixed values of its other axes."""

    sweep: str
    arm: str
    rest: tuple[tuple[str, str], ...]  # the other axes, each with its value
    model: str
    block: str
    scaling: str
    spelled: Mapping[float, str]  # by threshold, the value of the axis as text

    @property
    def label(self) -> str:
        return f"{self.block.replace('x', '×')}, {SCALINGS.get(self.scaling, self.scaling)}"

    @property
    def style(self) -> Style:
        colour = BLOCKS.index(self.block) if self.block in BLOCKS else len(BLOCKS)
        like = list(SCALINGS).index(self.scaling) if self.scaling in SCALINGS else len(SCALINGS)
        return replace(STYLES[like], colour=colour)

    def values(self, measure: Callable[[Where], Data]) -> Values:
        """Return, by threshold, the numbers of all seeds from `measure`; thresholds without data are left out.

        measure: given the values of all axes of this line's arm, returns a number for each seed.
        """
        found = {x: measure({**dict(self.rest), AXIS: text}) for x, text in self.spelled.items()}
        return {x: data.values for x, data in found.items() if isinstance(data, Differences) and data.values}

    def line(self, values: Values) -> Line:
        """Return the line through the means over seeds, with 90 % intervals if there are several seeds.

        values: by threshold, a number for each seed.
        """
        x = [value for value in self.spelled if value in values]
        found = [summary(values[value], 1 - 2 * ALPHA) for value in x]
        return Line(np.array(x), means_of(found), self.style, self.label, band_of(found), points=True)


@figure("mor", "Figure B", "Thresholds: share of fallbacks and change of loss")
def thresholds(results: Results) -> Picture:
    """Draw, for each model, how the share of decisions for BF16 and the validation loss depend on the threshold.

    The threshold is the relative error below which a mixture accepts its first quantizer.
    """
    arms = _threshold_lines(results)
    if not arms:
        return not_planned(results)
    parts = {name: results.of_sweep(name) for name in {arm.sweep for arm in arms}}
    fallback = {name: fallback_shares(tensors(part)) for name, part in parts.items()}

    def share_of(arm: ThresholdLine) -> Values:
        return arm.values(lambda where: sample(parts[arm.sweep], fallback[arm.sweep], arm.arm, where))

    def change_of(arm: ThresholdLine) -> Values:
        part = parts[arm.sweep]
        return arm.values(lambda where: paired(part, LOSS, arm.arm, BASELINE, where)) if part.has(BASELINE) else {}

    shares, changes = [share_of(arm) for arm in arms], [change_of(arm) for arm in arms]
    if not any((*shares, *changes)):
        return NoData("no trial with a threshold is finished")
    models = list(dict.fromkeys(arm.model for arm in arms))

    def row(found: Sequence[Values], make: Callable[[int, str, tuple[Line, ...]], Panel]) -> list[Panel]:
        of_model = {
            model: tuple(arm.line(v) for arm, v in zip(arms, found, strict=True) if arm.model == model and v)
            for model in models
        }
        return [make(i, model, lines) for i, (model, lines) in enumerate(of_model.items())]

    def above(i: int, model: str, lines: tuple[Line, ...]) -> Panel:
        label = "" if i else "decisions for BF16, %"
        return Panel(model, lines, (PAPERS,), y_label=label, x_axis="percent", y_axis="percent", y_limits=(0, None))

    def below(i: int, model: str, lines: tuple[Line, ...]) -> Panel:
        label = "" if i else "validation loss,\nchange from BF16, %"
        zero = (Rule(0, "text"), PAPERS)
        return Panel("", lines, zero, x_label="threshold, %", y_label=label, x_axis="percent", y_axis="change")

    def draw() -> Figure:
        return curve_figure([row(shares, above), row(changes, below)], height=4.4, sharex=True, sharey="row")

    trials = tuple(dict.fromkeys(m.id for m in results.members if AXIS in dict(m.cell.axes)))
    return FigureResult(
        draw, trials, ("Means over seeds with 90 % intervals. Colours stand for blocks, dashes for scalings.",)
    )


PAPERS = Rule(THRESHOLD, label="the paper's, 4.5 %", upright=True)


def _threshold_lines(results: Results) -> list[ThresholdLine]:
    """Return a line for each arm whose threshold a sweep varies, and each combination of its other axes."""
    found: dict[tuple[str, str, tuple[tuple[str, str], ...]], dict[str, str]] = {}
    for member in results.members:
        axes = dict(member.cell.axes)
        if AXIS in axes:
            threshold = axes.pop(AXIS)
            found.setdefault((member.cell.sweep, str(member.cell.arm), tuple(axes.items())), {})[threshold] = member.id
    arms = []
    for (sweep, arm, rest), trials in found.items():
        trial = results.plan.trials[next(iter(trials.values()))].trial
        quantizer = Mixture.parse(trial.recipe.fprop.x).entries[0].quantizer
        spelled = dict(sorted((float(text), text) for text in trials))
        arms.append(
            ThresholdLine(sweep, arm, rest, trial.model.name, str(quantizer.block), str(quantizer.scaling), spelled)
        )
    return arms
