"""Check that cpu equals the reference bit for bit: values with the signs of zeros, counts, maxima, codes and scales.

The systematic tests cover every family of quantizers. In other tests hypothesis draws combinations of inputs and
quantizers, and shrinks failures. Several threads share a call even for the smallest matrices.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fewbits.kernels.backends import build, reference
from fewbits.kernels.backends import cpu as cpu_module
from fewbits.kernels.backends.cpu import BACKEND as cpu
from fewbits.kernels.backends.protocol import Backend
from fewbits.kernels.quantizer import HADAMARD_SIZES, Block, Quantizer
from fewbits.kernels.reference.noise import uniform
from fewbits.kernels.scalings import ROUNDINGS, SELECTS, Select
from tests.effort import DEEP, examples
from tests.forked_python import run_python
from tests.kernels.backends.gpu.device_checks import DRAWN, Checks, any_bytes, decided_late, undecided
from tests.kernels.inputs import COMPILED, DTYPES, EMPTY, KINDS, ODD, assert_same, generator, make, options

pytestmark = pytest.mark.skipif(not build.available(), reason="there is no C++ compiler, hence no cpu backend")

ON_CPU = Checks(cpu, lambda t: t)
FAMILIES = (
    "fp32",
    "bf16",
    "fp16",
    "e4m3",
    "e2m1",
    "e4m3:overflow=nan",
    "e5m2:overflow=inf",
    "e4m3:tensor:amax",
    "e4m3:channel:amax",
    "e5m2:128x128:amax",
    "e4m3:1x128:amax",
    "bf16:1x16:amax",
    "e4m3:tensor:gam",
    "e4m3:channel:gam",
    "e4m3:128x128:gam",
    "e5m2:64x64:gam",
    "e4m3:1x16:gam:group=row",
    "e3m2:3x5:gam",
    "e8m3:5x16:gam:group=row",
    "e4m3:1x32:e8m0",
    "e2m1:32x32:e8m0",
    "e2m3:1x7:e8m0",
    "e4m3:1x32:mx",
    "e2m1:1x32:mx",
    "e3m2:channel:mx:overflow=saturate",
    "e5m2:1x16:mx:overflow=inf",
    "e2m1:1x16:nvfp4",
    "e2m1:16x16:nvfp4",
    "e2m1:32x1:nvfp4",
    "e4m3:channel:nvfp4",
    "e2m1:1x16:ue5m3",
    "e2m1:16x16:ue5m3",
    "e4m3:3x5:ue5m3",
    "e2m1:1x16:fouroversix",
    "e2m1:16x16:fouroversix",
    "e2m1:3x5:fouroversix",
    "e2m1:channel:fouroversix",
    "e2m1:2x48:fouroversix",
    "e2m1:1x16:nvfp4:group=row",
    "e2m1:16x16:nvfp4:group=32",
    "e4m3:1x8:ue5m3:group=128",
    "e2m1:3x5:nvfp4:group=row:factor=16/17:target=256",
    "e2m1:1x32:mx:factor=3/4",
    "e2m1:1x16:fouroversix:select=mae:target=448:group=row",
    "e2m1:16x16:fouroversix:select=max:group=64",
    "e2m1:3x5:fouroversix:select=max",
    "e2m1:channel:fouroversix:select=mse",
    "int8",
    "int8:channel:amax",
    "int8:1x32:mx",
    "int4:1x16:nvfp4",
)
MS_EDEN = tuple(f"e2m1:1x16:eden:{turned}" for turned in ("rht16", "rht32:signs=none", "rht64:signs=5", "rht128"))
VARIANTS = (
    "",
    ":stochastic",
    ":rht16",
    ":stochastic:rht16",
    ":rht2:signs=none",
    ":rht64:signs=5",
    ":stochastic:rht128",
)


@pytest.fixture(autouse=True, scope="module")
def _threads_even_for_few_elements() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_module, "SMALL", 0)
        yield


def run(backend: Backend, x: Tensor, q: Quantizer, axis: int, seed: int, **how: Any) -> tuple[Tensor, ...]:
    values: tuple[Tensor, ...] = backend.quantize(x, q, axis, seed, **how)
    return values


def check(
    x: Tensor,
    q: Quantizer,
    axis: int,
    seed: int = 7,
    threads: tuple[int, ...] = (1, 2, 3),
    **parts: Any,
) -> None:
    """Compare quantize, encode and decode of cpu with the reference; parts: the arguments partition and skip."""
    for n in threads:
        torch.set_num_threads(n)
        ON_CPU.quantizer(x, q, axis, seed, **parts)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_the_references_bits(family: str, dtype: torch.dtype) -> None:
    """Check each shape and axis, with an input, variant and number of threads that change from case to case.

    A few families together cover all inputs, variants and numbers of threads. Without FEWBITS_TESTS=deep, a quarter
    of the shapes and axes is checked for each dtype.
    """
    start = FAMILIES.index(family) * 7 + DTYPES.index(dtype) * 3
    names, share = list(KINDS), 1 if DEEP else 4
    cases = list(enumerate(product((-1, 0), ODD), start=start))  # both axes are in each part
    for i, (axis, shape) in cases[(FAMILIES.index(family) + DTYPES.index(dtype)) % share :: share]:
        q = Quantizer.parse(family + VARIANTS[i % len(VARIANTS)])
        check(make(names[i % len(names)], shape, dtype, seed=i), q, axis, seed=i, threads=(i % 3 + 1,))


@pytest.mark.parametrize("text", MS_EDEN)
def test_ms_eden_gives_the_references_bits(text: str) -> None:
    """Check every shape and axis, with an input, dtype and number of threads that change from case to case."""
    names = list(KINDS)
    shapes = (*ODD, *ODD) if DEEP else ODD
    for i, (shape, axis) in enumerate(product(shapes, (-1, 0)), start=MS_EDEN.index(text) * 5):
        x = make(names[i % len(names)], shape, DTYPES[i % 3], seed=i)
        check(x, Quantizer.parse(text), axis, seed=i, threads=(i % 3 + 1,))


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_gives_nothing(family: str) -> None:
    """Check matrices without elements."""
    for i, (shape, axis, dtype) in enumerate(product(EMPTY, (-1, 0), DTYPES)):
        threads = (1, 2, 3) if DEEP else ((i // 3 + i) % 3 + 1,)
        check(torch.zeros(shape, dtype=dtype), Quantizer.parse(family), axis, threads=threads)


scaled = st.sampled_from(["e4m3", "e5m2", "e2m1", "e3m2", "e2m3", "e3m4", "bf16", "fp16", "e4m3ieee", "e8m3", "e4m9"])
odd_formats = st.sampled_from(["fp32", "e1m3", "e6m5", "e3m1", "e5m2finite", "e4m3fn", "e2m6", "e7m2", "e1m1", "e8m15"])
blocks = st.sampled_from(
    ["tensor", "channel", "128x128", "64x64", "32x32", "16x16", "1x128", "1x32", "1x16", "16x1", "1x1", "1x7", "3x5"]
) | st.builds("{}x{}".format, st.integers(1, 40), st.integers(1, 200))
signs: st.SearchStrategy[Any] = st.none() | st.just("none") | st.integers(0, 2**63 - 1)
sizes = st.integers(1, 40) | st.integers(1, 300)
parts = st.none() | st.just((16, 16)) | st.tuples(st.integers(1, 70), st.integers(1, 140))


@st.composite
def quantizers(draw: st.DrawFn) -> Quantizer:
    name = draw(scaled | odd_formats)
    scaling = draw(st.sampled_from(COMPILED)) if name != "fp32" else "none"
    name = "e2m1" if scaling == "fouroversix" else name
    if scaling == "eden":  # fixes all other fields, and rotates whole blocks
        whole = draw(st.sampled_from([n for n in HADAMARD_SIZES if n >= 16]))
        return Quantizer("e2m1", "1x16", "eden", hadamard=whole, signs=draw(signs))
    plain, block = Quantizer(name), Block.parse(draw(blocks) if scaling != "none" else "tensor")
    return Quantizer(
        format=name,
        block=block,
        scaling=scaling,
        rounding=draw(st.sampled_from(ROUNDINGS)),
        hadamard=(size := draw(st.none() | st.sampled_from(HADAMARD_SIZES))),
        signs=draw(signs) if size else None,
        overflow=draw(st.sampled_from(plain.format.overflows)),
        **draw(options(scaling, block, plain.format.max)),
    )


@st.composite
def matrices(draw: st.DrawFn) -> Tensor:
    shape = draw(sizes), draw(sizes)
    return make(draw(st.sampled_from(list(KINDS))), shape, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 2**32)))


@examples(1200)
@given(matrices(), quantizers(), st.sampled_from([-1, 0]), st.integers(0, 2**63 - 1), st.sampled_from([1, 2, 3]))
def test_any_quantizer_of_any_matrix(x: Tensor, q: Quantizer, axis: int, seed: int, threads: int) -> None:
    check(x, q, axis, seed, threads=(threads,))


@examples(800)
@given(matrices(), quantizers(), st.sampled_from([-1, 0]), parts, st.floats(0, 1), st.sampled_from([1, 3]))
def test_any_partition_with_any_parts_left_out(
    x: Tensor, q: Quantizer, axis: int, part: tuple[int, int] | None, share: float, threads: int
) -> None:
    part = part or q.block.resolve(x.shape, axis)
    grid = [-(-n // size) for n, size in zip(x.shape, part, strict=True)]
    skip: dict[str, Any] = {"skip": torch.rand(grid, generator=generator(x.numel())) < share} if share else {}
    check(x, q, axis, threads=(threads,), partition=part, **skip)


@examples(300)
@given(matrices(), quantizers(), quantizers(), st.integers(0, 2**63 - 1), st.sampled_from([1, 2, 3]))
def test_both_axes_in_one_reading_are_two_calls(
    x: Tensor, row: Quantizer, column: Quantizer, seed: int, threads: int
) -> None:
    """Compare quantization along both axes in one call with two calls of the reference."""
    torch.set_num_threads(threads)
    ON_CPU.both(x, row, column, seed)


@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("text", DRAWN)
def test_the_last_bits_of_a_draw_decide_where_its_first_do_not(text: str, axis: int) -> None:
    q = Quantizer.parse(f"{text}:stochastic")
    x = undecided(q, axis, seed=3)
    assert decided_late(x, q, axis, seed=3)
    check(x, q, axis, seed=3)


@pytest.mark.parametrize("name", ["bf16", "e8m15"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_what_scaling_takes_beyond_float32_overflows(name: str, rounding: str) -> None:
    """Check nvfp4 with formats so wide that 448 times their largest value exceeds float32.

    The tensor's encode factor is then limited to FLT_MAX. For the largest magnitude 1.05, E4M3 rounds the block scale
    down to 1, so elements above 1 exceed float32 when they are scaled, and overflow.
    """
    for overflow, dtype in product(("saturate", "inf", "nan"), DTYPES):
        x = make("ties", (64, 64), dtype).clamp(-1, 1) * 1.05
        check(x, Quantizer.parse(f"{name}:tensor:nvfp4:{rounding}:overflow={overflow}"), -1)


@pytest.mark.parametrize(
    ("name", "low", "step", "seed", "index", "draw"),
    [
        ("e4m3", 0.0, 2.0**-9, 1674, 916, 0xD6B1E9),
        ("e4m3", 0.0, 2.0**-9, 24367, 194, 0x9BD9F6),
        ("e8m1", 1.0, 2.0**-1, 422221, 910, 0x537EE0000000),
        ("e8m1", 1.0, 2.0**-1, 470821, 187, 0x03332C000000),
    ],
)
def test_a_draw_goes_below_the_distance_and_stays_at_it(
    name: str, low: float, step: float, seed: int, index: int, draw: int
) -> None:
    """Check a value whose distance above the grid value `low`, in steps, equals its draw: it is rounded down to `low`.

    One ulp higher, it is rounded up. The seeds and indices were found by search, because draws that make such a value
    exact in float32 are rare (one in 2^24, and one in 2^26).
    """
    distance = draw * 2.0**-48
    assert float(uniform(index + 1, seed, "cpu")[index]) == distance
    x, q = torch.zeros(1, index + 1), Quantizer.parse(f"{name}:stochastic")
    x[0, index] = low + step * distance
    assert float(x[0, index].double() - low) == step * distance
    for nudged, want in ((x, low), (x.nextafter(x + 1), low + step)):
        for backend in (reference, cpu):
            assert float(run(backend, nudged, q, -1, seed)[0][0, index]) == want


STORED = (
    *FAMILIES[1:],
    *MS_EDEN,
    "e3m4:tensor:amax",
    "e1m1:1x5:e8m0",
    "e2m2:1x16:nvfp4",
    "e4m3ieee:7x8:gam",
    "e4m7:8x8:mx",
)


@pytest.mark.parametrize("text", STORED)
def test_any_bytes_are_read_as_the_reference_reads_them(text: str) -> None:
    """Check that random codes and scales are decoded as by the reference, also those that `encode` never stores.

    For example, a scale can be negative, or so large that values exceed the range of the dtype.
    """
    q = Quantizer.parse(text)
    for i, (shape, axis) in enumerate(product((*ODD, (40, 1040)), (-1, 0)), start=STORED.index(text)):
        torch.set_num_threads(i % 3 + 1)
        ON_CPU.decoding(any_bytes(q, axis, shape, seed=i), q, axis, shape[1], DTYPES[i % 3])


# Tiles end at 256 rows and 16384 columns; larger blocks are looked up.
@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("e4m3:300x2:amax:stochastic", (700, 130)),
        ("e4m3:tensor:gam", (515, 130)),
        ("e4m3:300x300:gam:group=row", (700, 610)),
        ("e2m1:1x16:nvfp4:stochastic", (3, 33000)),
        ("e4m3:channel:amax", (3, 33000)),
        ("e4m3:1x20000:gam", (2, 33001)),
        ("e4m3:1x300:amax:stochastic", (3, 4000)),  # random bits are buffered for 1024 columns
        ("e2m1:16x16:nvfp4:rht16", (300, 520)),
        ("e2m1:1x16:eden:rht128", (300, 1100)),
        ("e4m3:tensor:amax:rht128", (390, 300)),
        ("e5m2:257x1:mx:stochastic:rht8", (520, 70)),
    ],
)
@pytest.mark.parametrize("axis", [-1, 0])
def test_blocks_and_matrices_larger_than_a_tile(text: str, shape: tuple[int, int], axis: int) -> None:
    q = Quantizer.parse(text)
    partition = q.block.resolve(shape, axis)
    check(make("lognormal", shape, torch.bfloat16), q, axis, threads=(1, 3) if DEEP else (3,), partition=partition)
    check(make("one bad", shape[::-1], torch.float32), q, axis, threads=(2,))


@pytest.mark.parametrize("cols", [4096, 4099])
@pytest.mark.parametrize("text", ["e4m3:1x128:amax", "e2m1:1x16:mx:stochastic"])
def test_a_matrix_larger_than_the_caches_is_as_its_bands_are(text: str, cols: int) -> None:
    """Check a result above 16 MiB, whose stores bypass the caches, against bands of 100 rows, whose stores do not.

    A band may start inside a tile of the whole matrix.
    """
    q, x = Quantizer.parse(text), make("lognormal", (1100, cols), torch.float32)
    torch.set_num_threads(2)
    whole, counts, _ = run(cpu, x, q, -1, 3, want_stats=True, partition=(100, cols))
    if q.needs_seed:  # an element's draw depends on its index in the whole matrix
        assert_same(whole, run(reference, x, q, -1, 3)[0])
        return
    for i, band in enumerate(x.split(100)):
        values, total, _ = run(cpu, band.contiguous(), q, -1, 3, want_stats=True)
        assert_same(whole[100 * i : 100 * i + 100], values, f"rows from {100 * i}")
        assert torch.equal(counts[i], total[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_caller_that_flushes_subnormals_changes_no_bit(family: str) -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    torch.set_flush_denormal(False)
    for name, variant, dtype in product(("subnormal", "tiny", "wide"), ("", ":stochastic"), DTYPES):
        x, q = make(name, (40, 70), dtype), Quantizer.parse(family + variant)
        for threads in (1, 2):
            torch.set_num_threads(threads)
            want = everything(x, q)
            torch.set_flush_denormal(True)
            try:
                got = everything(x, q)
            finally:
                torch.set_flush_denormal(False)
            for a, b in zip(got, want, strict=True):
                assert_same(a, b, f"{q} of {name} {dtype}, {threads} threads")


def everything(x: Tensor, q: Quantizer) -> tuple[Tensor, ...]:
    return *run(cpu, x, q, -1, 3, want_stats=True), *(cpu.encode(x, q, -1, 3) if q.format.bits <= 16 else ())


def test_a_forked_child_works_without_the_parents_threads(tmp_path: Path) -> None:
    code = (
        "import os, signal, torch\n"
        "from fewbits import fake_quantize\n"
        "from fewbits.kernels.products import matmul_fp32\n"
        "torch.set_num_threads(2)\n"
        "x = torch.arange(1 << 18, dtype=torch.float32).view(512, 512)\n"
        "a = (x % 97).bfloat16()\n"
        "def run():\n"
        "    return [y.numpy().tobytes() for y in (fake_quantize(x, 'e4m3:128x128:gam'), matmul_fp32(a, a))]\n"
        "results = run()\n"
        "child = os.fork()\n"
        "signal.alarm(60)\n"  # ends the parent and the child if they hang
        "if child == 0:\n"
        "    os._exit(0 if run() == results else 1)\n"  # torch's own threads would hang
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    done = run_python(["-c", code], folder=tmp_path, environment=os.environ)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("by", SELECTS)
def test_errors_of_two_quantizers_are_compared_alike(by: Select) -> None:
    for i, name in enumerate(KINDS):
        torch.set_num_threads(i % 3 + 1)
        x = make(name, ((40, 72), (33, 130), (260, 300))[i % 3], DTYPES[i % 3], seed=i)
        mine, other = (reference.quantize(x, Quantizer.parse(f"{f}:1x16:nvfp4"), -1, 0)[0] for f in ("int4", "e2m1"))
        for part in ((1, 16), (7, 40), (300, 300)):
            assert_same(cpu.compare(x, mine, other, part, by), reference.compare(x, mine, other, part, by), name)
