"""Compute metrics that GaussWS's claims compare: statistics of each trial's bit widths at the end of its training."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fewbits.analysis.engine.claims.hooks import metric
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.studies.gaussws.widths import finals

SHARE = (0.0, 1.0)


@metric("gaussws", "width_spread")
def width_spread(results: Results) -> Mapping[str, float]:
    """Return, by the id of each finished trial, the standard deviation of the final bit widths of the whole model.

    Each 32×32 square of a weight has one width; the standard deviation is over all squares of all layers, in bits. All
    widths have the same initial value and the same decay. Therefore a value above 0 shows that gradients move them;
    decay alone moves all widths equally, by almost two bits.
    """
    return {trial: one.spread for trial, one in finals(results).items()}


@metric("gaussws", "mean_width")
def mean_width(results: Results) -> Mapping[str, float]:
    return {trial: one.mean for trial, one in finals(results).items()}


def _up_to(tier: int) -> Callable[[Results], Mapping[str, float]]:
    """Return the function that computes a metric of each finished trial, by the trial's id.

    The metric is the share of the parameters that are in squares with a final bit width of at most `tier`.
    """
    return lambda results: {trial: one.tiers[tier] for trial, one in finals(results).items()}


for _name, _tier in {"to_five_bits": 5, "to_nine_bits": 9, "to_twelve_bits": 12}.items():
    metric("gaussws", _name, SHARE)(_up_to(_tier))
