"""Compare mixtures (MoR algorithm 2) with a slow, separate implementation: a loop over decision blocks.

The loop takes the values of each entry from `fake_quantize` and decides by the paper's equations, in float64.
"""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fewbits import Mixture, fake_quantize, mix
from fewbits.kernels.backends import cpu
from fewbits.kernels.backends.protocol import ERROR
from fewbits.kernels.quantizer import Entry, ErrorBelow, ErrorBelowOther
from tests.effort import DEEP, examples
from tests.kernels.inputs import DTYPES, EMPTY, KINDS, assert_same, generator, make

TENSOR_LEVEL = "e4m3:128x128:gam @ error<0.045 | bf16"
TWO_WAY = "e4m3:128x128:gam @ error<e5m2:128x128:gam | bf16 ; per=block"
THREE_WAY = "e4m3:128x128:gam @ error<e5m2:128x128:gam | e5m2:128x128:gam @ spread<normal | bf16 ; per=block"
OUTLOOK = "e2m1:1x16:nvfp4 @ error<0.1 | e4m3:128x128:gam @ error<0.045 | bf16 ; per=128x128"
MIXTURES = (
    TENSOR_LEVEL,
    TWO_WAY,
    THREE_WAY,
    OUTLOOK,
    "e4m3:channel:amax @ error<0.025 | bf16 ; per=channel",
    "e4m3:32x32:gam @ error<0.03 | e5m2:1x16:e8m0 @ error<0.05 | fp16 ; per=7x40",
    "e2m1:1x32:mx @ spread<8 | e3m2:1x32:mx @ spread<100 | e5m2:1x32:mx @ spread<normal | bf16 ; per=1x32",
    "e4m3:tensor:gam @ error<0.03 | bf16 ; per=16x16",
    "e2m1:1x16:nvfp4:stochastic @ error<0.15 | e4m3:1x16:e8m0 @ error<0.022 | e5m2:stochastic ; per=4x16",
    "e2m1:1x16:nvfp4:rht16 @ error<e2m1:1x8:mx:rht16 | e4m3:32x32:gam:rht16 @ spread<normal | bf16:rht16 ; per=16x16",
    "e4m3 @ error<0.03 | e5m2:8x8:amax @ error<0.05 | fp32 ; per=block",
    "int4:1x16:nvfp4 @ mse<e2m1:1x16:nvfp4 | e2m1:1x16:nvfp4 ; per=block",
    "e2m1:1x16:nvfp4:rht16 @ mae<e3m2:1x8:mx:rht16 | e2m1:tensor:amax:rht16 @ max<int4:4x4:amax:rht16 | bf16:rht16 ; "
    "per=8x16",
)


@pytest.fixture(params=["cpu", "reference"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("FEWBITS_BACKEND", request.param)
    return str(request.param)


def each_block(x: Tensor, rows: int, cols: int) -> list[list[Tensor]]:
    return [list(band.split(cols, 1)) for band in x.split(rows)]


def relative_errors(source: Tensor, values: Tensor) -> Tensor:
    """Return the relative errors of the non-zero elements, limited to 1 and rounded to 2^-23; a NaN counts as 1."""
    kept = source != 0
    each = (source[kept].float() - values[kept].float()).abs() / source[kept].float().abs()
    return (each.double().nan_to_num(nan=1.0, posinf=1.0).clamp(max=1.0) * 2**23).round() / 2**23


def absolute_error(source: Tensor, values: Tensor, by: str) -> float:
    """Return the largest error, or the sum of errors or of their squares, in integer units of the amax."""
    each = ((source.float() - values.float()).abs() / source.float().abs().max()).double()
    units = (each.nan_to_num(nan=1.0).clamp(max=1.0) * 2 ** (16 if by == "mse" else 23)).round()
    return float(units.max() if by == "max" else (units**2 if by == "mse" else units).sum())


def passes(entry: Entry, source: Tensor, values: Tensor, other: Tensor | None) -> bool:
    if not values.isfinite().all():  # an element outside this block, which shares a scale with it, is not finite
        return False
    errors = relative_errors(source, values)
    exact = float(errors.sum()) == 0
    if isinstance(entry.test, ErrorBelow):
        return float(errors.sum()) < entry.test.threshold * len(errors) or exact
    if isinstance(entry.test, ErrorBelowOther):
        assert other is not None
        if entry.test.by != "error":
            return absolute_error(source, values, entry.test.by) < absolute_error(source, other, entry.test.by)
        return float(errors.sum()) < float(relative_errors(source, other).sum()) or exact
    assert entry.test is not None
    nonzero = source[source != 0].double().abs()
    return not len(nonzero) or float(nonzero.max() / nonzero.min()) < entry.test.limit_for(entry.quantizer)


def slowly(x: Tensor, mixture: Mixture, axis: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return a mixture's values, and each decision block's choice (the index of its entry), computed by a slow loop."""
    rotation = mixture.entries[0].quantizer
    turned = f"fp32:rht{rotation.hadamard}:signs={rotation.signs}" if rotation.hadamard else "fp32"
    source = fake_quantize(x, turned, axis=axis)
    rows, cols = mixture.decision_block.resolve(x.shape, axis)

    def cut(t: Tensor) -> list[list[Tensor]]:
        return each_block(t, rows, cols)

    def quantized(q: Any) -> list[list[Tensor]]:
        return cut(fake_quantize(x, q, axis=axis, seed=seed))

    values = [quantized(entry.quantizer) for entry in mixture.entries]
    others = [quantized(e.test.other) if isinstance(e.test, ErrorBelowOther) else None for e in mixture.entries]
    out, choice = torch.empty_like(x), []
    for i, row in enumerate(cut(source)):
        for j, block in enumerate(row):
            k = len(mixture.entries) - 1
            if block.isfinite().all():
                tried = enumerate(zip(mixture.entries[:-1], values, others, strict=False))
                k = next((n for n, (e, v, o) in tried if passes(e, block, v[i][j], o[i][j] if o else None)), k)
            choice.append(k)
            cut(out)[i][j].copy_(values[k][i][j])
    return out, torch.tensor(choice, dtype=torch.int8).view(-(-x.shape[0] // rows), -(-x.shape[1] // cols))


def check(x: Tensor, text: str, axis: int = -1, seed: int = 5) -> Tensor:
    mixture = Mixture.parse(text)
    values, choice, stats = mix(x, mixture, axis=axis, seed=seed, stats=True)
    want, chosen = slowly(x, mixture, axis, seed)
    assert_same(choice, chosen.flatten()[0] if mixture.per == "tensor" else chosen, f"choices of {text}, {axis=}")
    assert_same(values, want, f"values of {text}, {axis=}")
    first = fake_quantize(x, mixture.entries[0].quantizer, axis=axis, seed=seed, stats=True)[1]
    assert_same(
        stats.counts.view(-1, first.counts.numel()).sum(0), first.counts, "statistics are those of the first entry"
    )
    return choice


@pytest.mark.parametrize("text", MIXTURES)
@pytest.mark.parametrize("axis", [-1, 0])
def test_mixtures_decide_as_the_loop_does(text: str, axis: int) -> None:
    """Compare each mixture on each input with `slowly` (without FEWBITS_TESTS=deep, on a quarter along each axis)."""
    for i, name in enumerate(KINDS):
        shape = ((40, 70), (66, 150), (33, 16))[i % 3]
        if DEEP or (i + 2 * axis + MIXTURES.index(text)) % 4 == 0:
            check(make(name, shape, DTYPES[(i + axis) % 3], seed=i), text, axis)


@pytest.mark.parametrize("text", MIXTURES)
def test_reference_and_cpu_decide_alike(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare the two backends for each mixture on each input in all dtypes (without FEWBITS_TESTS=deep, in one)."""
    for i, (name, dtype) in enumerate(product(KINDS, DTYPES)):
        if not DEEP and (i // len(DTYPES) + i + MIXTURES.index(text)) % len(DTYPES):
            continue
        x = make(name, (260, 150), dtype, seed=i)
        results = []
        for backend, threads in (("reference", 1), ("cpu", 1 + i % 3)):
            monkeypatch.setenv("FEWBITS_BACKEND", backend)
            torch.set_num_threads(threads)
            results.append(mix(x, text, axis=-(i % 2), seed=i, stats=True))
        (a, b, c), (d, e, f) = results
        for got, want in ((d, a), (e, b), (f.counts, c.counts), (f.amax, c.amax)):
            assert_same(got, want, f"{text}, {name} {dtype}")


@pytest.mark.parametrize("undecided", [None, 0, 35_000, 69_999])
def test_threads_agree_whether_a_block_is_undecided(undecided: int | None) -> None:
    """Check that several threads report correctly whether any decision block still has no accepted entry.

    None or one of the 70,000 blocks fails the test of the first entry; `undecided` is its index.
    """
    counts = torch.zeros(70_000, 7, dtype=torch.int64)
    if undecided is not None:
        counts[undecided, ERROR] = 1
    torch.set_num_threads(4)
    for _ in range(20):
        choice, decided = torch.empty(70_000, dtype=torch.int8), torch.empty(70_000, dtype=torch.bool)
        assert cpu.BACKEND.decide(0, 1, counts, choice, decided) == (undecided is not None)
        assert (~decided).nonzero().flatten().tolist() == ([] if undecided is None else [undecided])


@examples(60)
@given(
    st.sampled_from(list(KINDS)),
    st.sampled_from(DTYPES),
    st.tuples(st.integers(1, 40), st.integers(1, 70)),
    st.sampled_from(["tensor", "channel", "block"]) | st.builds("{}x{}".format, st.integers(1, 20), st.integers(1, 40)),
    st.sampled_from([-1, 0]),
)
def test_any_block_may_decide(name: str, dtype: torch.dtype, shape: tuple[int, int], per: str, axis: int) -> None:
    for text in (
        "e4m3:3x16:gam @ error<0.03 | e5m2:5x8:e8m0 @ spread<1e6 | bf16",
        "e2m1:1x16:nvfp4 @ error<0.1 | e4m3",
    ):
        check(make(name, shape, dtype, seed=sum(shape)), f"{text} ; per={per}", axis)


# Statements of the paper


def test_a_tensor_falls_back_as_a_whole_at_the_threshold() -> None:
    light, heavy = torch.randn(256, 256, generator=generator(0)), make("lognormal", (256, 256))
    for x, expected in ((light, 0), (heavy, 1)):
        values, choice, stats = mix(x.bfloat16(), TENSOR_LEVEL, stats=True)
        assert choice.shape == ()
        assert int(choice) == expected
        assert (float(stats.error) < 0.045) == (expected == 0)
        assert_same(values, x.bfloat16() if expected else fake_quantize(x.bfloat16(), "e4m3:128x128:gam"))


def three_blocks() -> Tensor:
    """Return three 128x128 blocks: in E4M3's range; outside it but in E5M2's normal range; outside both."""
    g = generator(1)
    below_one = torch.exp2(torch.rand(128, 3, 128, generator=g) * torch.tensor([[-1.0], [-24.0], [-60.0]]))
    return (torch.randn(128, 3, 128, generator=g).sign() * below_one).view(128, 384)


def test_two_and_three_ways_by_the_spread_of_a_block() -> None:
    assert check(three_blocks(), THREE_WAY).tolist() == [[0, 1, 2]]
    assert check(three_blocks(), TWO_WAY).tolist() == [[0, 1, 1]]
    assert check(three_blocks().t(), THREE_WAY, axis=0).tolist() == [[0], [1], [2]]


def test_a_longer_list_takes_the_fewest_bits_that_pass() -> None:
    """Check the mixture that MoR's outlook proposes: FP4 for blocks where it suffices, else FP8, else BF16."""
    x = three_blocks()
    x[:, :128] = torch.tensor([0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -6.0]).repeat(128, 16)  # E2M1 has all of these values
    x[:, 128:256] = torch.randn(128, 128, generator=generator(2))
    assert check(x, OUTLOOK).tolist() == [[0, 1, 2]]


LIMITS = [
    # One of four values is flushed to zero: the mean error is a quarter.
    ((1.0, 1.0, 1.0, 0.1), "e2m1 @ error<0.25 | bf16", 1),
    ((1.0, 1.0, 1.0, 0.1), "e2m1 @ error<0.25000001 | bf16", 0),
    ((8.0, 1.0), "e4m3 @ spread<8 | bf16", 1),
    ((7.96875, 1.0), "e4m3 @ spread<8 | bf16", 0),
    # The exact quotient is about 3 - 2^-23, which float32 rounds to 3: the quotient is a float32, not a double.
    ((3 + 2.0**-22, 1 + 2.0**-23), "e4m3 @ spread<3 | bf16", 1),
    ((939524096.0, 1.0), "e5m2:tensor:amax @ spread<normal | bf16", 1),
    ((939524032.0, 1.0), "e5m2:tensor:amax @ spread<normal | bf16", 0),
    ((1.1, 1.0), "e4m3 @ error<e4m3 | bf16", 1),
    ((1.125, 1.0), "e4m3 @ error<e4m3 | bf16", 0),  # E4M3 represents both values exactly, so the first entry is chosen
]


@pytest.mark.parametrize(("values", "text", "expected"), LIMITS)
def test_limits_are_strict(backend: str, values: tuple[float, ...], text: str, expected: int) -> None:
    """Check that an entry of a mixture is rejected if its error or spread equals the limit."""
    _, choice = mix(torch.tensor([values]), text)
    assert int(choice) == expected


def test_an_entry_and_its_yardstick_draw_alike(backend: str) -> None:
    """Check that `q @ error<q` never accepts a stochastic q: its error and the limit use the same random bits.

    So in `q @ error<other`, the errors of q and other differ because of their grids, not because of random bits.
    """
    q = "e2m1:1x8:mx:stochastic"
    _, choice = mix(make("normal", (64, 64)), f"{q} @ error<{q} | bf16 ; per=block", seed=3)
    assert choice.all()


@pytest.mark.parametrize("text", [TENSOR_LEVEL, TWO_WAY, THREE_WAY, "e4m3 @ error<1e-30 | e4m3 @ error<e5m2 | bf16"])
def test_what_the_first_entry_holds_exactly_it_takes(backend: str, text: str) -> None:
    """Check that the first entry of a mixture is chosen for blocks that it represents exactly."""
    for x in (torch.zeros(128, 128), -torch.zeros(128, 128), torch.full((128, 128), 1.75)):
        values, choice = mix(x, text)
        assert not choice.any()
        assert_same(values, x)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "text", [*MIXTURES[1:4], "e4m3:1x8:amax @ error<0.9 | e5m2:1x8:amax @ spread<1e9 | bf16 ; per=8x8"]
)
def test_a_block_that_is_not_finite_takes_the_last(backend: str, text: str, bad: float) -> None:
    x = torch.full((256, 256), 1.75)
    x[200, 30] = bad
    values, choice = mix(x, text)
    rows, cols = Mixture.parse(text).decision_block.resolve((256, 256))
    last = len(Mixture.parse(text).entries) - 1
    assert int(choice[200 // rows, 30 // cols]) == last
    assert int(choice.count_nonzero()) == 1
    assert_same(values, x)  # the last is bf16, which has infinities and NaN


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "e4m3:32x32:amax @ error<0.045 | bf16 ; per=16x16"),
        (1.75, "e5m2:32x32:amax @ spread<normal | bf16 ; per=16x16"),
        (1.75, "e4m3:1x32:amax @ error<0.1 | bf16 ; per=16x16"),
    ],
)
def test_a_finite_decision_block_stays_finite_beside_one_that_is_not(backend: str, value: float, text: str) -> None:
    """Check that a NaN does not change other decision blocks, although they share its scale in the first entry.

    With that scale, the first entry would return NaN for them, so they get the second entry.
    """
    x = torch.full((32, 32), value)
    x[0, 0] = math.nan
    assert_same(mix(x, text)[0], x)


@pytest.mark.parametrize("text", MIXTURES)
def test_nothing_mixes_to_nothing(backend: str, text: str) -> None:
    """Check matrices without elements: the result has their shape, and its statistics are 0."""
    for shape in EMPTY:
        values, choice, stats = mix(torch.zeros(shape), text, seed=1, stats=True)
        assert values.shape == shape
        assert not choice.any()
        assert float(stats.error.sum()) == 0


def test_memory_layout_and_dimensions_do_not_matter() -> None:
    x, text = make("lognormal", (6, 40), torch.bfloat16), "e4m3:1x8:amax @ error<0.02 | bf16 ; per=1x8"
    flat, choice = mix(x, text)
    for other in (x.view(2, 3, 40), x.t().contiguous().t()):
        values, same_choice = mix(other, text)
        assert_same(values.reshape(6, 40), flat)
        assert_same(same_choice, choice)
