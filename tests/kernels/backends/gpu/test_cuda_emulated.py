"""Check that the CUDA backend equals the reference: on a GPU, and without one on a SIMT emulator of its kernel sources.

On the emulator, the host code is unchanged. Speed and NVIDIA's compiler and instructions are not tested. The emulator
runs threads one after another, in an order that differs between launches, so a race is detected only if this order
changes the result.
On a GPU, most of the time is spent on compiling kernels; FEWBITS_TESTS=deep needs about twice as many.
"""

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fewbits.kernels.backends import build, reference
from fewbits.kernels.backends.gpu import cuda, tiles
from fewbits.kernels.backends.gpu.device import Device
from fewbits.kernels.backends.gpu.warm import Recorder
from fewbits.kernels.mixing import mix_matrix
from fewbits.kernels.quantizer import HADAMARD_SIZES, Mixture, Quantizer
from tests.effort import DEEP, examples
from tests.kernels.backends.gpu.device_checks import CONVERTED, DRAWN, Checks, any_bytes, every_pattern, undecided
from tests.kernels.backends.gpu.emulated import SHARED, EmulatedLauncher, emulated_device
from tests.kernels.backends.test_parity import FAMILIES, MS_EDEN, STORED, VARIANTS, matrices, parts, quantizers
from tests.kernels.inputs import DTYPES, EMPTY, KINDS, ODD, assert_same, generator, make
from tests.kernels.test_mix import LIMITS, MIXTURES

needs_compiler = pytest.mark.skipif(build.compiler() is None, reason="there is no C++ compiler for the emulator")


@pytest.fixture(
    scope="module", params=[pytest.param("emulated", marks=needs_compiler), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def checks(request: pytest.FixtureRequest) -> Checks:
    if request.param == "emulated":
        return Checks(emulated_device()[0], lambda t: t)
    if complaint := cuda.complaint():
        pytest.skip(f"no CUDA kernels here: {complaint}")
    return Checks(cuda.BACKEND, lambda t: t.cuda())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_the_references_bits(checks: Checks, family: str, dtype: torch.dtype) -> None:
    """Check half of the pairs of axis and shape (the next dtype gets the other half).

    Without FEWBITS_TESTS=deep, check a tenth.
    """
    start = FAMILIES.index(family) * 7 + DTYPES.index(dtype) * 3
    names, share = list(KINDS), 2 if DEEP else 10
    cases = list(enumerate(product((-1, 0), ODD), start=start))  # every share contains both axes
    for i, (axis, shape) in cases[(FAMILIES.index(family) + DTYPES.index(dtype)) % share :: share]:
        q = Quantizer.parse(family + VARIANTS[i % len(VARIANTS)])
        checks.quantizer(make(names[i % len(names)], shape, dtype, seed=i), q, axis, seed=i)


@pytest.mark.parametrize("text", MS_EDEN)
def test_ms_eden_gives_the_references_bits(checks: Checks, text: str) -> None:
    """Check each rotation with every shape along both axes; without FEWBITS_TESTS=deep, along one axis only."""
    names, start = list(KINDS), MS_EDEN.index(text) * 5
    for i, (shape, axis) in enumerate(product((*ODD, (34, 48)), (-1, 0)), start=start):
        if not DEEP and i % 2:
            continue
        checks.quantizer(make(names[i % len(names)], shape, DTYPES[i % 3], seed=i), Quantizer.parse(text), axis, seed=i)


@pytest.mark.parametrize("name", KINDS)
def test_every_input_gives_the_references_bits(checks: Checks, name: str) -> None:
    """Check matrices whose rows are whole vectors of 8 elements, as in most models.

    Without FEWBITS_TESTS=deep, check every fifth case.
    """
    texts = ("e4m3:1x16:amax", "e4m3:32x32:gam", "e2m1:1x32:e8m0", "e2m1:1x32:mx", "e2m1:1x16:nvfp4", "e5m2", "bf16")
    for i, (text, rounding, dtype) in enumerate(
        product(texts, ("", ":stochastic"), DTYPES), start=2 * list(KINDS).index(name)
    ):
        if DEEP or i % 5 == 0:  # the inputs start at different i, so together they take every quantizer and dtype
            checks.quantizer(make(name, (34, 48), dtype), Quantizer.parse(text + rounding), -(i % 2))


@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("text", DRAWN)
def test_the_last_bits_of_a_draw_decide_where_its_first_do_not(checks: Checks, text: str, axis: int) -> None:
    q = Quantizer.parse(f"{text}:stochastic")
    checks.quantizer(undecided(q, axis, seed=3), q, axis, seed=3)


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_gives_nothing(checks: Checks, family: str) -> None:
    """Check matrices without elements."""
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


@pytest.mark.parametrize("text", ["e4m3:128x128:amax", "e2m1:1x16:nvfp4"])
def test_calls_that_differ_only_in_their_parts(checks: Checks, text: str) -> None:
    """Quantize one matrix with several partitions, with and without skipped parts; each needs its own plan."""
    x, q = make("lognormal", (136, 144), torch.bfloat16), Quantizer.parse(text)
    for part in (None, (1, 16), (16, 16), (128, 128), (7, 5), (136, 144), (1, 16)):
        checks.quantizer(x, q, -1, partition=part)
        if part:
            grid = [-(-n // size) for n, size in zip(x.shape, part, strict=True)]
            checks.quantizer(x, q, -1, partition=part, skip=torch.rand(grid, generator=generator(1)) < 0.5)


@examples(30)
@given(x=matrices(), row=quantizers(), column=quantizers(), seed=st.integers(0, 2**63 - 1))
def test_both_axes_in_one_reading_are_two_calls(
    checks: Checks, x: Tensor, row: Quantizer, column: Quantizer, seed: int
) -> None:
    """Compare quantization along both axes in one call with two calls of the reference."""
    checks.both(x, row, column, seed)


# Quantizers and shapes that cover all classes of tiles: a tile has 128x128 elements, whole rows of up to 16384, or
# whole columns of up to 2048. Only blocks whose sizes are powers of two fill a tile.
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
    ("e2m1:1x16:nvfp4:group=row", (136, 264)),
    ("e2m1:1x16:nvfp4:group=64:stochastic", (140, 300)),
    ("e2m1:16x16:ue5m3:group=32", (136, 264)),
    ("e2m1:4x8:nvfp4:group=16:factor=16/17", (40, 130)),
    ("e2m1:300x300:nvfp4:group=row", (330, 310)),
    ("e2m1:1x256:nvfp4:group=256", (20, 700)),
    ("e2m1:1x32:mx:factor=3/4", (136, 264)),
    ("e2m1:1x16:fouroversix:select=mae:group=row", (136, 264)),
    ("e2m1:16x16:fouroversix:select=max:group=64", (136, 264)),
    ("e2m1:64x32:fouroversix:select=max:stochastic", (200, 136)),
    ("e2m1:1x16:fouroversix:target=448:select=mse:stochastic", (136, 264)),
    ("e4m3:tensor:amax:rht128", (260, 136)),
    ("e5m2:257x1:mx:stochastic:rht8", (300, 40)),
)


@pytest.mark.parametrize(("text", "shape"), CLASSES)
@pytest.mark.parametrize("axis", [-1, 0])
def test_blocks_of_every_class(checks: Checks, text: str, shape: tuple[int, int], axis: int) -> None:
    """Check values along both axes; without FEWBITS_TESTS=deep, statistics and codes along one of them."""
    q = Quantizer.parse(text)
    x = make("lognormal", shape, torch.bfloat16)
    if DEEP or (CLASSES.index((text, shape)) + axis) % 2:
        checks.quantizer(x, q, axis, partition=q.block.resolve(shape, axis))
    else:
        checks.values(x, q, axis)
    checks.values(make("one bad", shape, torch.float32), q, axis)


MARGIN = 1 << 14  # elements before and behind a matrix: more than a row, and a multiple of 16 bytes


def amid(x: Tensor, fill: float, checks: Checks) -> tuple[Tensor, Tensor]:
    """Return a copy of x that lies between two margins filled with `fill`, and the memory of copy and margins."""
    memory = checks.place(torch.full((x.numel() + 2 * MARGIN,), fill, dtype=x.dtype))
    inside = memory[MARGIN:-MARGIN].view(x.shape)
    return inside.copy_(x), memory


# Shapes (rows, cols). A thread processes 8 rows of vectors of 8 elements. The number of rows is a multiple of 8, or one
# less or more. The number of columns is a multiple of 8 or not.
EDGES = tuple(product((7, 9, 128, 135), (16, 24, 33, 136)))


@pytest.mark.parametrize("shape", EDGES)
def test_nothing_beyond_a_matrix_is_read_or_written(checks: Checks, shape: tuple[int, int]) -> None:
    """Check inputs between infinities, which would change results if read, and results between sevens, which stay."""
    i = EDGES.index(shape)
    x, _ = amid(make("lognormal", shape, DTYPES[i % 3], seed=i), float("inf"), checks)
    for text in ("e4m3:128x128:amax", "e2m1:1x16:nvfp4:stochastic", "e4m3:channel:gam", "e4m3:3x5:amax", "e4m3"):
        q = Quantizer.parse(text)
        outs = [amid(torch.zeros_like(x), 7.0, checks) for _ in range(3)]
        want = [reference.quantize(x.cpu(), q, axis, 3)[0] for axis in (-1, 0)]
        checks.backend.quantize(x, q, -1, 3, out=outs[0][0])
        checks.backend.quantize_both(x, q, q, 3, 3, out=(outs[1][0], outs[2][0]))
        for (out, memory), values in zip(outs, (want[0], *want), strict=True):
            assert_same(out.cpu(), values, f"{q} of {shape}")
            assert (memory[:MARGIN] == 7).all()
            assert (memory[-MARGIN:] == 7).all()
    codes = reference.encode(x.cpu(), q, -1, 0)
    out, memory = amid(torch.zeros_like(x), 7.0, checks)
    checks.backend.decode(*map(checks.place, codes), q, -1, shape[1], x.dtype, out=out)
    assert_same(out.cpu(), reference.decode(*codes, q, -1, shape[1], x.dtype), f"codes of {shape}")
    assert int((memory == 7).sum()) == 2 * MARGIN + int((out == 7).sum())


# Heights around these limits: a tile holds whole columns of up to 2048 rows. Higher columns are divided into tiles of
# 1024 rows (float32: 2048), or of twice as many if there are more than 4096 rows. A row of a tile has 32 bytes. A CTA
# keeps one tile in registers, and as many tiles as fit in 64 KiB in shared memory; it reads the others twice.
HEIGHTS = (2048, 2049, 3072, 3073, 4096, 4097, 6145)
IN_STRIPS = (
    "e4m3:channel:amax",
    "e2m1:channel:e8m0:stochastic",
    "e5m2:channel:mx:overflow=inf",
    "e4m3:channel:amax:stochastic:rht64",
    "bf16:channel:amax",
)


def spoiled(x: Tensor) -> Tensor:
    """Put NaN into the last row and infinity into the first row of some columns, and only zeros into other columns."""
    x[:, 1::5] = 0
    x[:, 2::10] *= -0.0
    x[-1, 3::7] = float("nan")
    x[0, 4::9] = float("inf")
    return x


@pytest.fixture
def strips(monkeypatch: pytest.MonkeyPatch) -> tuple[Checks, EmulatedLauncher]:
    """Return checks and launcher of a backend that uses strips even for narrow matrices, with 64 KiB shared memory."""
    monkeypatch.setattr(tiles, "FEWEST_STRIPS", 1)
    device, launcher = emulated_device()
    launcher.room = 64 << 10
    return Checks(device, lambda t: t), launcher


@needs_compiler
@pytest.mark.parametrize("text", IN_STRIPS)
@pytest.mark.parametrize("height", HEIGHTS)
def test_whole_columns_of_any_height(strips: tuple[Checks, EmulatedLauncher], height: int, text: str) -> None:
    checks, launcher = strips
    i = HEIGHTS.index(height) + IN_STRIPS.index(text)
    dtype, width = DTYPES[i % 3], (20, 17, 9, 40, 1)[i % 5]
    x, q = spoiled(make("lognormal", (height, width), dtype, seed=i)), Quantizer.parse(text)
    checks.quantizer(x, q, 0, seed=i)
    strip = launcher.launches[0].kernel == "quantize_strip"
    assert strip == (height > 2048)
    tile = (2048 if dtype == torch.float32 else 1024) * (2 if height > 4096 else 1)
    assert launcher.shared[0] == (min(-(-height // tile) - 1, 2048 // tile) * (32 * tile) if strip else 0)


@needs_compiler
@pytest.mark.parametrize("height", [8192, 8193, 9217])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_whole_columns_that_just_fit_in_the_shared_memory_of_a_gpu(
    strips: tuple[Checks, EmulatedLauncher], height: int, dtype: torch.dtype
) -> None:
    checks, launcher = strips
    launcher.room = SHARED
    checks.values(spoiled(make("lognormal", (height, 17), dtype)), Quantizer.parse("e4m3:channel:amax"), 0)
    assert launcher.shared == [3 * 2048 * 32 if dtype != torch.float32 else 4096 * 32]


@needs_compiler
@pytest.mark.parametrize("part", [(1, 16), (16, 1), (1000, 8), (3000, 1), (7, 5), (8, 8)])
def test_strips_with_statistics_and_parts_left_out(
    strips: tuple[Checks, EmulatedLauncher], part: tuple[int, int]
) -> None:
    checks, _ = strips
    x = spoiled(make("lognormal", (3080, 20), torch.bfloat16))
    grid = [-(-n // size) for n, size in zip(x.shape, part, strict=True)]
    left_out = torch.rand(grid, generator=generator(1)) < 0.3
    checks.quantizer(x, Quantizer.parse("e4m3:channel:amax"), 0, partition=part, skip=left_out)


def test_only_wide_matrices_whose_columns_share_nothing_are_quantized_in_strips() -> None:
    recorder = Recorder()
    device = Device(recorder)
    tall, amax = torch.empty(2049, 1009, dtype=torch.bfloat16), Quantizer.parse("e4m3:channel:amax")
    cases = [(tall, amax, True), (tall[:, :1008].contiguous(), amax, False), (tall[1:], amax, False)]
    cases += [(tall, Quantizer.parse(f"e4m3:channel:{name}"), False) for name in ("gam", "nvfp4")]
    cases += [(tall, Quantizer.parse(text), True) for text in ("e4m3:channel:mx", "e4m3:channel:amax:stochastic:rht16")]
    for x, q, strip in cases:
        recorder.variants.clear()
        device.quantize(x, q, 0, 0)
        assert ([v.kernel for v in recorder.variants] == ["quantize_strip"]) == strip, f"{q} of {tuple(x.shape)}"
    recorder.variants.clear()
    device.quantize_both(tall, amax, amax, 0, 0)
    assert "quantize_strip" not in [v.kernel for v in recorder.variants]


# A quantizer, its axis, and the number of atomic operations of its first launch for one tile of 128x128, which eight
# warps process, 16 rows each.
ATOMICS = (
    ("e4m3:128x128:amax", -1, 8),
    ("e4m3:32x64:amax", -1, 8 * 2),
    ("e4m3:1x16:gam:group=row", -1, 128),
    ("e4m3:16x16:gam:group=row", -1, 8),
    ("e4m3:1x16:gam:group=row", 0, 8 * 128),
    ("e4m3:16x16:gam:group=row", 0, 8 * 8),
    ("e2m1:1x16:nvfp4:group=32", -1, 128 * 4),
    ("e2m1:1x16:nvfp4:group=64", 0, 8 * 128),
)


@needs_compiler
@pytest.mark.parametrize(("text", "axis", "count"), ATOMICS)
def test_a_warp_does_one_atomic_operation_for_a_destination(text: str, axis: int, count: int) -> None:
    device, launcher = emulated_device()
    device.quantize(make("lognormal", (128, 128), torch.bfloat16), Quantizer.parse(text), axis, 0)
    assert launcher.atomics[0] == count


@pytest.mark.parametrize("text", STORED)
def test_any_bytes_are_read_as_the_reference_reads_them(checks: Checks, text: str) -> None:
    q = Quantizer.parse(text)
    for i, (shape, axis) in enumerate(product((*ODD, (34, 48), (130, 136)), (-1, 0)), start=STORED.index(text)):
        checks.decoding(any_bytes(q, axis, shape, seed=i), q, axis, shape[1], DTYPES[i % 3])


@pytest.mark.parametrize("name", ["e1m1", "e2m1", "e2m2", "e2m3", "e3m2", "e2m4", "e4m3", "e5m2", "e4m7", "bf16"])
def test_codes_of_every_width_lie_in_words_and_in_bytes(checks: Checks, name: str) -> None:
    """Check rows of codes whose length is a multiple of 16 bytes, and shorter rows down to odd numbers of bytes.

    Without FEWBITS_TESTS=deep, check every second pair of a number of columns and a quantizer.
    """
    texts = (name, f"{name}:1x8:e8m0:stochastic", f"{name}:1x16:nvfp4", f"{name}:5x3:amax")
    columns = (128, 64, 32, 16, 8, 24, 40, 129, 131, 7)
    for (i, cols), (j, text) in product(enumerate(columns), enumerate(texts)):
        if DEEP or (i + j + len(name)) % 2:
            checks.quantizer(make("lognormal", (11, cols), DTYPES[i % 3], seed=i), Quantizer.parse(text), -1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("text", CONVERTED)
def test_every_pattern_is_converted_as_the_reference_does(checks: Checks, text: str, dtype: torch.dtype) -> None:
    checks.quantizer(every_pattern(dtype), Quantizer.parse(text), -1)


@pytest.mark.parametrize("size", HADAMARD_SIZES)
def test_rotations_and_their_inverses(checks: Checks, size: int) -> None:
    for i, (shape, axis) in enumerate(product((*ODD, (136, 264)), (-1, 0))):
        x = make("lognormal", shape, DTYPES[i % 3], seed=i)
        checks.rotation(x, Quantizer("fp32", hadamard=size, signs=i), axis)


def test_a_rotation_beyond_the_dtype_is_a_nan_block_whatever_bits_the_device_gives_nan(checks: Checks) -> None:
    """Check that inf − inf in a rotation makes the block NaN, although the NaNs of GPUs and CPUs have other bits."""
    for dtype, axis in product(DTYPES, (-1, 0)):
        checks.quantizer(make("huge", (64, 64), dtype), Quantizer.parse("e4m3:1x16:amax:rht16"), axis)


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


@pytest.mark.parametrize("blocks", [0, 1, 255, 256, 257, 1000])
@pytest.mark.parametrize("index", [0, 1])
def test_decisions_leave_what_is_beside_them(checks: Checks, blocks: int, index: int) -> None:
    checks.decision(blocks, index)


@pytest.mark.parametrize(("values", "text", "expected"), LIMITS)
def test_limits_are_strict(checks: Checks, values: tuple[float, ...], text: str, expected: int) -> None:
    """Check that an entry of a mixture is rejected if its error or spread equals the limit."""
    _, choice, _, _ = mix_matrix(checks.backend, checks.place(torch.tensor([values])), Mixture.parse(text), -1, 0)
    assert int(choice) == expected


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
