"""Numbers of GaussWS's trials that claims compare: bit widths, and how two optimizers change what sampling costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fewbits.analysis.engine.data import Differences, Measured, NoData
from fewbits.analysis.engine.frames import Results
from fewbits.analysis.engine.hooks import measure, metric
from fewbits.analysis.engine.places import not_planned
from fewbits.analysis.studies.gaussws.widths import finals

LOSS = "validation_loss"
SHARE = (0.0, 1.0)


@metric("gaussws", "width_spread")
def width_spread(results: Results) -> Mapping[str, float]:
    """Return how far widths spread within a trial at its end, in bits, over all squares of all layers.

    All widths begin alike and decay alike, so that decay alone, which moves them by almost two bits, leaves this at 0.
    """
    return {trial: one.spread for trial, one in finals(results).items()}


@metric("gaussws", "mean_width")
def mean_width(results: Results) -> Mapping[str, float]:
    return {trial: one.mean for trial, one in finals(results).items()}


def _up_to(tier: int) -> Callable[[Results], Mapping[str, float]]:
    """Return how a trial's share of parameters of so many bits or fewer is read."""
    return lambda results: {trial: one.tiers[tier] for trial, one in finals(results).items()}


for _name, _tier in {"to_five_bits": 5, "to_nine_bits": 9, "to_twelve_bits": 12}.items():
    metric("gaussws", _name, SHARE)(_up_to(_tier))


@metric("gaussws", "cast_cost")
def cast_cost(results: Results) -> Mapping[str, float]:
    """Return how far the validation loss rises when weights are cast to the formats of their widths, by trial."""
    cast, uncast = (results.numbers(f"{LOSS}_{what}") for what in ("cast", "unquantized"))
    return {trial: cast[trial] / uncast[trial] - 1 for trial in cast if trial in uncast}


@measure("gaussws", "G12")
def optimizers(results: Results) -> Mapping[str, Measured]:
    """Return, seed by seed, the interaction of sampling and optimizer: what GaussWS costs under Adam-mini over what it
    costs under AdamW. All four arms start from the same weights and see the same data."""
    arms = (("gpt2-mini", "adam-mini-gaussws"), ("gpt2-mini", "adam-mini"), ("gpt2", "gaussws"), ("gpt2", "bf16"))
    return {"interaction": _by_seed(results, arms, lambda mg, mb, g, b: (mg / mb) / (g / b) - 1)}


@measure("gaussws", "G20")
def adam_mini(results: Results) -> Mapping[str, Measured]:
    """Return, seed by seed, what Adam-mini costs beside AdamW under GaussWS over what it costs under BF16."""
    arms = (
        ("llama2-mini", "adam-mini-gaussws"),
        ("llama2", "gaussws"),
        ("llama2-mini", "adam-mini"),
        ("llama2", "bf16"),
    )
    return {"adam-mini": _by_seed(results, arms, lambda mg, g, mb, b: (mg / g) / (mb / b) - 1)}


@measure("gaussws", "G15")
def families(results: Results) -> Mapping[str, Measured]:
    """Return how much wider GPT-2's widths end than Llama 2's, both without a penalty, seed by seed."""
    arms = (("widths", "lambda-0"), ("llama2", "gaussws"))
    return {
        "families": _by_seed(results, arms, lambda gpt2, llama2: gpt2 - llama2, mean_width(results), relative=False)
    }


def _by_seed(
    results: Results,
    arms: Sequence[tuple[str, str]],
    combine: Callable[..., float],
    numbers: Mapping[str, float] | None = None,
    *,
    relative: bool = True,
) -> Measured:
    """Return a number of several arms of a seed; arms: sweep and name; numbers: validation losses if none."""
    numbers = results.numbers(LOSS) if numbers is None else numbers
    ids = [
        {m.cell.seed: m.id for m in results.members if (m.cell.sweep, m.cell.arm) == (sweep, arm)}
        for sweep, arm in arms
    ]
    if not all(ids):
        return not_planned(results)
    trials = tuple(dict.fromkeys(trial for one in ids for trial in one.values()))
    seeds = [seed for seed in ids[0] if all(one.get(seed) in numbers for one in ids)]
    if not seeds:
        return NoData("no seed has ended in every arm", trials)
    values = tuple(combine(*(numbers[one[seed]] for one in ids)) for seed in seeds)
    return Differences(values, relative, trials)
