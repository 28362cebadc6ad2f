"""Check without a GPU that cuda equals the reference: real host code, with kernel sources on a SIMT emulator.

This cannot test speed, nor NVIDIA's compiler and instructions. It detects a race only if the order of threads, which
differs in every launch, changes the result.
"""

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fewbits.kernels.backends import build
from fewbits.kernels.quantizer import HADAMARD_SIZES, Mixture, Quantizer
from tests.effort import DEEP, examples
from tests.kernels.backends.gpu.device_checks import DRAWN, Checks, any_bytes, undecided
from tests.kernels.backends.gpu.emulated import emulated_device
from tests.kernels.backends.test_parity import FAMILIES, MS_EDEN, STORED, VARIANTS, matrices, parts, quantizers
from tests.kernels.inputs import DTYPES, EMPTY, KINDS, ODD, generator, make
from tests.kernels.test_mix import MIXTURES

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="there is no C++ compiler for the emulator")


@pytest.fixture(scope="module")
def checks() -> Checks:
    device, _ = emulated_device()
    return Checks(device, lambda t: t)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_the_references_bits(checks: Checks, family: str, dtype: torch.dtype) -> None:
    """Check a half of the shapes and axes, and a third in a short run; a family meets all with at least one dtype."""
    start = FAMILIES.index(family) * 7 + DTYPES.index(dtype) * 3
    names, share = list(KINDS), 2 if DEEP else 3
    cases = list(enumerate(product(ODD, (-1, 0)), start=start))
    for i, (shape, axis) in cases[(FAMILIES.index(family) + DTYPES.index(dtype)) % share :: share]:
        q = Quantizer.parse(family + VARIANTS[i % len(VARIANTS)])
        checks.quantizer(make(names[i % len(names)], shape, dtype, seed=i), q, axis, seed=i)


@pytest.mark.parametrize("text", MS_EDEN)
def test_ms_eden_gives_the_references_bits(checks: Checks, text: str) -> None:
    names, start = list(KINDS), MS_EDEN.index(text) * 5
    for i, (shape, axis) in enumerate(product((*ODD, (34, 48)), (-1, 0)), start=start):
        checks.quantizer(make(names[i % len(names)], shape, DTYPES[i % 3], seed=i), Quantizer.parse(text), axis, seed=i)


@pytest.mark.parametrize("name", KINDS)
def test_every_input_gives_the_references_bits(checks: Checks, name: str) -> None:
    """Check matrices whose rows are whole vectors, as in most models; in a short run every second pair of cases."""
    texts = ("e4m3:1x16:amax", "e4m3:32x32:gam", "e2m1:1x32:e8m0", "e2m1:1x32:mx", "e2m1:1x16:nvfp4", "e5m2", "bf16")
    for i, (text, rounding, dtype) in enumerate(
        product(texts, ("", ":stochastic"), DTYPES), start=2 * list(KINDS).index(name)
    ):
        if DEEP or i // 2 % 2:
            checks.quantizer(make(name, (34, 48), dtype), Quantizer.parse(text + rounding), -(i % 2))


@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("text", DRAWN)
def test_the_last_bits_of_a_draw_decide_where_its_first_do_not(checks: Checks, text: str, axis: int) -> None:
    q = Quantizer.parse(f"{text}:stochastic")
    checks.quantizer(undecided(q, axis, seed=3), q, axis, seed=3)


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_gives_nothing(checks: Checks, family: str) -> None:
    for shape, axis in product(EMPTY, (-1, 0)):
        checks.quantizer(torch.zeros(shape, dtype=torch.bfloat16), Quantizer.parse(family), axis)


@examples(50)
@given(x=matrices(), q=quantizers(), axis=st.sampled_from([-1, 0]), seed=st.integers(0, 2**63 - 1))
def test_any_quantizer_of_any_matrix(checks: Checks, x: Tensor, q: Quantizer, axis: int, seed: int) -> None:
    checks.quantizer(x, q, axis, seed)


@examples(50)
@given(x=matrices(), q=quantizers(), axis=st.sampled_from([-1, 0]), part=parts, share=st.floats(0, 1))
def test_any_partition_with_any_parts_left_out(
    checks: Checks, x: Tensor, q: Quantizer, axis: int, part: tuple[int, int] | None, share: float
) -> None:
    part = part or q.block.resolve(x.shape, axis)
    grid = [-(-n // size) for n, size in zip(x.shape, part, strict=True)]
    skip: dict[str, Any] = {"skip": torch.rand(grid, generator=generator(x.numel())) < share} if share else {}
    checks.quantizer(x, q, axis, partition=part, **skip)


@examples(30)
@given(x=matrices(), row=quantizers(), column=quantizers(), seed=st.integers(0, 2**63 - 1))
def test_both_axes_in_one_reading_are_two_calls(
    checks: Checks, x: Tensor, row: Quantizer, column: Quantizer, seed: int
) -> None:
    checks.both(x, row, column, seed)


# Tiles hold 128x128 elements, rows of up to 16384, or columns of up to 2048; only powers of two fill them.
CLASSES = (
    ("e4m3:64x32:amax", (200, 136)),
    ("e4m3:32x1:gam:stochastic", (136, 136)),
    ("e4m3:128x2:amax", (130, 136)),
    ("e4m3:1x1:gam", (40, 130)),
    ("e4m3:2x4:mx", (40, 130)),
    ("e4m3:300x2:amax:stochastic", (330, 40)),
    ("e4m3:tensor:gam", (300, 136)),
    ("e4m3:300x300:gam:group=row", (330, 310)),
    ("e2m1:1x16:nvfp4:stochastic", (2, 17000)),
    ("e4m3:channel:amax", (2, 17000)),
    ("e4m3:channel:amax:rht64", (3, 2500)),
    ("e4m3:channel:gam:stochastic", (2, 16384)),
    ("e4m3:channel:gam:rht128", (2040, 24)),
    ("e4m3:channel:amax", (2060, 20)),
    ("e2m1:channel:gam:stochastic:rht16", (2064, 9)),
    ("e5m2:128x1:amax", (300, 140)),
    ("e4m3:256x1:mx:stochastic", (2600, 3)),
    ("e4m3:channel:gam:group=row", (2100, 33)),
    ("e2m1:16x16:nvfp4:rht16", (136, 264)),
    ("e2m1:1x16:eden:rht128", (136, 264)),
    ("e2m1:1x16:fouroversix:stochastic", (136, 264)),
    ("e2m1:16x16:fouroversix", (136, 264)),
    ("e2m1:64x32:fouroversix", (200, 136)),
    ("e4m3:tensor:amax:rht128", (260, 136)),
    ("e5m2:257x1:mx:stochastic:rht8", (300, 40)),
)


@pytest.mark.parametrize(("text", "shape"), CLASSES)
@pytest.mark.parametrize("axis", [-1, 0])
def test_blocks_of_every_class(checks: Checks, text: str, shape: tuple[int, int], axis: int) -> None:
    q = Quantizer.parse(text)
    x = make("lognormal", shape, torch.bfloat16)
    checks.quantizer(x, q, axis, partition=q.block.resolve(shape, axis))
    checks.values(make("one bad", shape, torch.float32), q, axis)


@pytest.mark.parametrize("text", STORED)
def test_any_bytes_are_read_as_the_reference_reads_them(checks: Checks, text: str) -> None:
    q = Quantizer.parse(text)
    for i, (shape, axis) in enumerate(product((*ODD, (34, 48), (130, 136)), (-1, 0)), start=STORED.index(text)):
        checks.decoding(any_bytes(q, axis, shape, seed=i), q, axis, shape[1], DTYPES[i % 3])


@pytest.mark.parametrize("name", ["e1m1", "e2m1", "e2m2", "e3m2", "e2m4", "e4m3", "e4m7", "bf16"])
def test_codes_of_every_width_lie_in_words_and_in_bytes(checks: Checks, name: str) -> None:
    """Check rows of whole words of 16 bytes down to odd numbers of bytes."""
    for i, cols in enumerate((128, 64, 32, 16, 8, 24, 40, 129, 131, 7)):
        for text in (name, f"{name}:1x8:e8m0:stochastic", f"{name}:5x3:amax"):
            checks.quantizer(make("lognormal", (11, cols), DTYPES[i % 3], seed=i), Quantizer.parse(text), -1)


@pytest.mark.parametrize("size", HADAMARD_SIZES)
def test_rotations_and_their_inverses(checks: Checks, size: int) -> None:
    for i, (shape, axis) in enumerate(product((*ODD, (136, 264)), (-1, 0))):
        x = make("lognormal", shape, DTYPES[i % 3], seed=i)
        checks.rotation(x, Quantizer("fp32", hadamard=size, signs=i), axis)


@pytest.mark.parametrize("part", [(1, 1), (1, 16), (16, 16), (3, 5), (8, 64), (128, 128), (1000, 8), (64, 1000)])
def test_extents(checks: Checks, part: tuple[int, int]) -> None:
    for i, name in enumerate(KINDS):
        checks.extent(make(name, ((40, 72), (130, 33), (260, 300))[i % 3], DTYPES[i % 3], seed=i), part)


@pytest.mark.parametrize("text", MIXTURES)
@pytest.mark.parametrize("axis", [-1, 0])
def test_mixtures_decide_as_the_reference_does_without_the_host(checks: Checks, text: str, axis: int) -> None:
    for i, name in enumerate(KINDS):
        shape = ((40, 70), (66, 150), (33, 16))[i % 3]
        checks.mixture(make(name, shape, DTYPES[(i + axis) % 3], seed=i), Mixture.parse(text), axis)


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 31, 32, 33, 8191, 8192, 20001])
def test_noise(checks: Checks, count: int) -> None:
    for seed in (0, 5, 2**63 - 1):
        checks.noise(count, seed)


@pytest.mark.parametrize("noise", ["gaussian", "uniform"])
@pytest.mark.parametrize("block", [1, 2, 4, 8, 16, 32, 64, 128])
def test_sampled_weights_and_the_gradient_of_their_bits(checks: Checks, block: int, noise: str) -> None:
    for i, shape in enumerate(((64, 128), (33, 130), (1, 17), (130, 264))):
        w, grad = make("lognormal", shape, DTYPES[i % 3], seed=i), make("normal", shape, DTYPES[(i + 1) % 3], seed=i)
        bits = torch.rand(*(-(-n // block) for n in shape), generator=generator(i)) * 8 + 1
        checks.sampled_weight(w, grad, bits, noise, block, DTYPES[(i + 2) % 3])
