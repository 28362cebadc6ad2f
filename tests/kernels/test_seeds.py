"""Check that derived seeds are the same on every machine, and that seeds from neighbouring parts are unrelated."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from fewbits import fake_quantize, gaussian_noise, uniform_noise, unpack_noise
from fewbits.kernels import seeds
from fewbits.kernels.seeds import derive_seed

SIGMAS = 5.0
COUNT = 1 << 16


def test_the_mixer_is_splitmix64() -> None:
    """Check that the function which mixes the parts of a seed gives the outputs of Vigna's splitmix64.c.

    In splitmix64.c, the state starts at the seed, here 1234567, and grows by `golden` from output to output.
    """
    golden = 0x9E3779B97F4A7C15
    outputs = [seeds._mix(1234567 + i * golden & (1 << 64) - 1) for i in range(3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_seeds_do_not_change_between_versions() -> None:
    """Check fixed values, because a trial that is repeated or resumed from a checkpoint must draw the same numbers."""
    assert derive_seed() == 0
    assert derive_seed(0) == 3364290834513671632
    assert derive_seed(1, 2, 3, 4, 5, 6) == 1260513375399412624
    assert derive_seed(-1, (1 << 63) - 1) == 8215278656592112332


def test_order_and_number_of_parts_count() -> None:
    made = [derive_seed(*parts) for n in range(5) for parts in product(range(6), repeat=n)]
    assert len(set(made)) == len(made)
    assert all(0 <= seed < 1 << 63 for seed in made)


def test_neighbouring_parts_share_no_bits() -> None:
    """Check that if one part changes by 1, each of the 63 bits of the seed changes in half of the cases."""
    for place in range(3):
        differ = torch.zeros(63)
        for step in range(2000):
            parts = [7, step, 3]
            parts[place] += 1
            x = derive_seed(7, step, 3) ^ derive_seed(*parts)
            differ += torch.tensor([x >> bit & 1 for bit in range(63)])
        assert ((differ - 1000).abs() < SIGMAS * 500**0.5).all()


# Numbers drawn from the seeds


def draws(seed: int) -> dict[str, dict[str, Tensor]]:
    """Return vectors with mean 0 that depend on the seed's random bits, as {use of the bits: {name: vector}}.

    For the use `rounding`, the vector `of e2m1` has +1 for each value that is rounded up, and −1 for each that is
    rounded down. For `gaussian` and `uniform` noise, `value` is the noise, and `size` its magnitude minus the mean.
    """
    half = torch.full((COUNT,), 0.25)
    gaussian, uniform = unpack_noise(gaussian_noise(COUNT, seed)).float(), uniform_noise(COUNT, seed).float()
    return {
        "rounding": {"of e2m1": fake_quantize(half, "e2m1:stochastic", seed=seed) * 4 - 1},
        "gaussian": {"value": gaussian, "size": gaussian.abs() - gaussian.abs().mean()},
        "uniform": {"value": uniform, "size": uniform.abs() - uniform.abs().mean()},
    }


def assert_unrelated(one: dict[str, Tensor], other: dict[str, Tensor], what: str) -> None:
    """Check that the vectors of `one` and `other` are uncorrelated, element by element and at several lags."""
    for (a, x), (b, y), lag in product(one.items(), other.items(), (0, 1, 2, 4, 8, 16, 32)):
        x, y = x[lag:].double(), y[: COUNT - lag].double()
        z = (x * y).sum() / (x.square().sum() * y.square().sum() / len(x)).sqrt()
        assert abs(float(z)) < SIGMAS, f"{what}: {a}, {b}, {lag=}"


def test_rounding_and_noise_of_one_seed_do_not_know_of_each_other() -> None:
    """Check that rounding and noise with the same seed are uncorrelated, because they use different random streams.

    Gaussian and uniform noise share a stream, because a weight has only one of the two.
    """
    for seed in (0, 21, (1 << 63) - 1):
        made = draws(seed)
        for noise in ("gaussian", "uniform"):
            assert_unrelated(made["rounding"], made[noise], noise)
            assert_unrelated(made[noise], made["rounding"], noise)


@pytest.mark.parametrize(
    ("first", "second"), [(5, 6), (5, 5 + (1 << 32)), (derive_seed(1, 7), derive_seed(1, 8)), (0, (1 << 63) - 1)]
)
def test_uses_of_neighbouring_seeds_do_not_know_of_each_other(first: int, second: int) -> None:
    one, other = draws(first), draws(second)
    for a, b in product(one, other):
        assert_unrelated(one[a], other[b], f"{a}, {b}")
