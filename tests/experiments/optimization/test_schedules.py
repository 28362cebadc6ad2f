"""Test learning-rate schedules: their formulas at both ends and between phases, and errors for invalid settings."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fewbits.experiments.optimization.schedules import KINDS, SHAPES, ScheduleConfig, factor


def curve(config: ScheduleConfig, steps: int) -> list[float]:
    """Return the factor of every update of a trial."""
    return [factor(config, step, steps) for step in range(steps)]


def nanogpt(it: int, warmup: int, steps: int, floor: float) -> float:
    """Return the factor that `get_lr` of nanoGPT's train.py computes, with lr_decay_iters = steps."""
    if it < warmup:
        return (it + 1) / (warmup + 1)
    ratio = (it - warmup) / (steps - warmup)
    return floor + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (1 - floor)


def torchtitan(step: int, warmup: int, steps: int) -> float:
    """Return the factor of `linear_warmup_linear_decay` in the version of torchtitan that GaussWS used."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    decay = float(max(1, steps - warmup))
    return 1 - (decay - (decay - (step - warmup))) / decay


def test_cosine_is_nanogpts() -> None:
    config = ScheduleConfig(kind="cosine", warmup_steps=20, final_ratio=0.1)
    for step, value in enumerate(curve(config, 300)):
        assert value == pytest.approx(nanogpt(step, 20, 300, 0.1), rel=1e-15)


def test_linear_is_torchtitans() -> None:
    config = ScheduleConfig(kind="linear", warmup_steps=7)
    for step, value in enumerate(curve(config, 50)):
        assert value == pytest.approx(torchtitan(step, 7, 50), rel=1e-15)


def test_warm_up_rises_evenly_from_above_zero_to_the_peak_reached_once_it_is_over() -> None:
    for kind in KINDS:
        values = curve(ScheduleConfig(kind=kind, warmup_steps=4), 40)
        assert values[:5] == [1 / 5, 2 / 5, 3 / 5, 4 / 5, 1.0]


@pytest.mark.parametrize("decay_fraction", [0.2, 0.15])
def test_wsd_holds_the_peak_and_decays_in_the_last_part(decay_fraction: float) -> None:
    """Check NVFP4's settings: decay in the last 20 % (12B) or 15 % (8B, 1.2B) of updates, to 1/100 of the peak."""
    config = ScheduleConfig(kind="wsd", warmup_steps=10, final_ratio=0.01, decay_fraction=decay_fraction)
    steps, decaying = 200, round(200 * decay_fraction)
    values = curve(config, steps)
    assert set(values[10 : steps - decaying + 1]) == {1.0}
    assert values[steps - decaying + 1] == pytest.approx(1 - 0.99 / decaying)
    assert values[-1] == pytest.approx(0.01 + 0.99 / decaying)


@pytest.mark.parametrize(("shape", "half"), [("linear", 0.5), ("cosine", 0.5), ("sqrt", 1 - math.sqrt(0.5))])
def test_the_shape_of_wsds_decay_is_a_setting(shape: str, half: float) -> None:
    config = ScheduleConfig(kind="wsd", decay_fraction=0.5, decay_shape=shape)
    assert factor(config, 75, 100) == pytest.approx(half)


@given(
    st.sampled_from(KINDS),
    st.sampled_from(sorted(SHAPES)),
    st.integers(0, 30),
    st.floats(0, 1),
    st.floats(0, 0.5),
    st.integers(80, 300),
)
def test_every_factor_is_positive_at_most_one_and_falls_once_decay_has_started(
    kind: str, shape: str, warmup: int, floor: float, decay_fraction: float, steps: int
) -> None:
    config = ScheduleConfig(kind, warmup, 0.0, floor, decay_fraction, shape)
    values = curve(config, steps)
    assert all(0 < value <= 1 for value in values)
    assert max(values) == 1
    assert sorted(values[:warmup]) == values[:warmup]
    assert sorted(values[warmup:], reverse=True) == values[warmup:]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "exponential"}, "unknown schedule 'exponential'.*constant, linear, cosine, wsd"),
        ({"decay_shape": "cubic"}, "unknown decay_shape 'cubic'.*linear, cosine, sqrt"),
        ({"warmup_steps": -1}, "warmup_steps=-1"),
        ({"warmup_steps": 5, "warmup_fraction": 0.1}, "set one of the two to 0"),
        ({"final_ratio": 1.5}, "final_ratio=1.5.*numbers from 0 to 1"),
        ({"decay_fraction": float("nan")}, "decay_fraction=nan"),
    ],
)
def test_a_wrong_setting_is_named_with_what_is_valid(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScheduleConfig(**settings)  # type: ignore[arg-type]
