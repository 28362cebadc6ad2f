"""Predict the speed of kernels on an H100 from their machine code, by a roofline model.

The predicted time of a kernel is the longest of three: its bytes at the speed of a copy; all its instructions at the
issue rate; and the instructions that only a part of the multiprocessor executes, at the rate of that part. Nothing here
is measured.

If a kernel reads data twice, the second read counts fully, with one exception: if the tiles of a strip
(csrc/strip.cuh) that all concurrent CTAs read twice fit in the L2 together, the second read has the speed of the L2,
and its time is added to that of all other traffic. That the L2 then holds these tiles is an assumption.

    python -m tests.kernels.backends.gpu.predict             # writes docs/measured/cuda-kernels-predicted.md
    python -m tests.kernels.backends.gpu.predict "1x32, mx"  # prints the rows of one class, and writes nothing
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from fewbits.kernels.backends.gpu import cubins
from fewbits.kernels.backends.gpu.tiles import STATIC_SHARED, TWO_STRIPS, tiles_kept
from fewbits.kernels.backends.gpu.variants import DTYPE_NAMES, Variant
from tests.kernels.backends.gpu.machine_code import SIXTEEN, SIXTY_FOUR, resident_ctas
from tests.kernels.backends.gpu.test_cuda_kernels_fit import CLASSES, usage
from tests.kernels.backends.gpu.test_machine_code import BY_ELEMENT, ELEMENTS, LOOPED, compiled, variants_of

TARGET = Path(__file__).parents[4] / "docs/measured/cuda-kernels-predicted.md"
COPY = 3.0e12  # bytes that a copy reads and writes in a second on an H100 SXM
MULTIPROCESSORS, CLOCK = 132, 1.755e9
# The speed of reads from the L2 in bytes a second, and the bytes that can be read at this speed. They were measured by
# others on an H100 PCIe, which has 114 multiprocessors and, like an H100 SXM, an L2 of 50 MB:
# github.com/te42kyfo/gpu-benches (gpu-l2-cache/h100_pcie.txt) has 6.8e12 for up to 33,152 KiB, and less for more. We
# assume the same of an H100 SXM, and that results which are written meanwhile displace nothing in the L2.
L2, L2_HOLDS = 6.8e12, 33_152 << 10
SHARED = (227 << 10) - STATIC_SHARED  # bytes of dynamic shared memory that a CTA can have
STRIPS, HIGH_STRIPS = "channel down, many rows", "channel down, 8192 rows"
HEIGHTS = (4096, 8192, 10240, 12288, 14336, 16384, 24576, 32768, 65536)
SHOWN = (  # the names of the classes on the page, in its order
    "128x128, amax",
    STRIPS,
    HIGH_STRIPS,
    "nvfp4",
    "nvfp4, stochastic",
    "nvfp4, stochastic, rht16",
    "tensor, amax",
    "1x32, mx",
    "128x128, statistics of blocks",
    "128x128, gam, with statistics",
    "1x16, statistics of blocks",
    "encode, e4m3, 128x128, gam",
    "nvfp4, stochastic, rht16, both axes",
    "channel",
)
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
HEAD = """# CUDA kernels: predicted speed

**Predicted, not measured**: the speed on an H100 SXM relative to a copy of the same BF16 matrix, by a roofline model of
the machine code for sm_90 by NVRTC {nvrtc}: a kernel takes as long as its slowest resource.
`python -m tests.kernels.backends.gpu.predict` writes this page.

Assumed are 132 multiprocessors, copies at 3.0 TB/s and 1.755 GHz. A multiprocessor issues 128 instructions each clock,
64 of integers and comparisons, 16 conversions. Latency, launches, divergence, atomic operations and idle
multiprocessors are not modelled. Instructions are those of the longest path without rare cases. The last column is
the speed of all kernels of a call together.

| class | kernel | registers/thread | CTAs/multiprocessor | instructions/element | limited by | speed relative to copy |
|---|---|---|---|---|---|---|
"""
HEAD_OF_HEIGHTS = """
Whole columns of more than 2048 rows are quantized in strips (`csrc/strip.cuh`). A CTA keeps at most 6144 rows in shared
memory and 2048 in registers, and reads the others twice; `with the L2` assumes that the L2 cache serves second reads of
at most 33,152 KiB at 6.8 TB/s.

| rows | share of rows read twice | speed relative to a copy, with the L2 | the same, if the L2 holds nothing |
|---|---|---|---|
"""


def read_again(variant: Variant, rows: int) -> tuple[float, bool]:
    """Return the share of a matrix of `rows` rows that a kernel reads twice, and whether the L2 holds this share."""
    if variant.kernel != "quantize_strip":
        return 0, False
    x = torch.empty(rows, 1, dtype=DTYPES[variant.dtypes[0]], device="meta")
    tiles = -(-rows // variant.shape.rows)
    twice = tiles - 1 - tiles_kept(x, variant.shape, SHARED)
    return twice * variant.shape.rows / rows, MULTIPROCESSORS * twice * variant.shape.bytes(x.itemsize) <= L2_HOLDS


def seconds(variant: Variant, path: Counter[str], rows: int, cached: bool = True) -> tuple[float, str]:
    """Return the predicted seconds for one element, and the name of the resource that limits the speed.

    path: the instructions of a thread. rows: of the matrix. cached: whether second reads that fit in the L2 are served
    by it.
    """
    width = DTYPES[variant.dtypes[0]].itemsize
    quantizes = variant.kernel in ("quantize", "quantize_strip")
    writes = sum(s.encodes / 8 if s.encodes else width for s in variant.specs) if quantizes else 0
    share, fits = read_again(variant, rows)
    again = share * width / (L2 if fits and cached else COPY)
    rate = MULTIPROCESSORS * CLOCK * ELEMENTS

    def at(operations: tuple[str, ...], each_clock: int) -> float:
        return sum(n for op, n in path.items() if op.split(".")[0] in operations) / each_clock / rate

    times = {
        "memory": (width + writes) / COPY + again,
        "instruction issue": path.total() / 128 / rate,
        "integer and comparison": at(SIXTY_FOUR, 64),
        "conversion": at(SIXTEEN, 16),
    }
    limit = max(times, key=lambda name: times[name])
    return times[limit], limit


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("python -m tests.kernels.backends.gpu.predict", description="Predict speeds.")
    parser.add_argument("classes", nargs="*", metavar="CLASS", help="print the rows of these classes; write no page")
    names = parser.parse_args(arguments).classes
    if unknown := [name for name in names if name not in CLASSES]:
        parser.error(f"unknown classes {'; '.join(unknown)}: valid classes are {'; '.join(CLASSES)}")
    rows = []
    for name in names or SHOWN:
        try:
            rows.append("".join(rows_of(name)))
        except ValueError as error:
            parser.error(str(error))
        print(rows[-1], end="", flush=True)
    if not names:
        TARGET.write_text(HEAD.format(nvrtc="{}.{}".format(*cubins.version())) + "".join(rows) + heights())


def rows_of(name: str) -> list[str]:
    """Return the page's rows for a class: one for each kernel; the last has the class's speed relative to a copy."""
    variants, height = variants_of(name), CLASSES[name][2][0]
    if name in (*BY_ELEMENT, *LOOPED) or any(variant.file != "quantize.cu" for variant in variants):
        raise ValueError(f"class {name!r}: its kernels have no common path of whole vectors, which the model needs")
    paths = [compiled(variant)[1].common_path() for variant in variants]
    results = [seconds(variant, path, height) for variant, path in zip(variants, paths, strict=True)]
    share = of_copy(variants[0], sum(time for time, _ in results))
    rows = []
    for i, (variant, path, (_, limit)) in enumerate(zip(variants, paths, results, strict=True)):
        use = usage(variant, "sm_90")
        ctas = resident_ctas(use.registers, variant.shape.threads, use.shared_bytes + dynamic(variant, height))
        last = f"{share:.0%}" if i == len(results) - 1 else ""
        count = path.total() / ELEMENTS
        rows.append(f"| {name} | {variant.kernel} | {use.registers} | {ctas} | {count:.1f} | {limit} | {last} |\n")
    return rows


def of_copy(variant: Variant, time: float) -> float:
    return 2 * DTYPES[variant.dtypes[0]].itemsize / COPY / time


def dynamic(variant: Variant, rows: int) -> int:
    """Return the bytes of dynamic shared memory of a CTA, for a matrix with this number of rows."""
    if variant.kernel != "quantize_strip":
        return 0
    x = torch.empty(rows, 1, dtype=DTYPES[variant.dtypes[0]], device="meta")
    return tiles_kept(x, variant.shape, SHARED) * variant.shape.bytes(x.itemsize)


@cache
def heights() -> str:
    """Return the page's section on whole columns, with a table row for each of HEIGHTS."""
    lines = []
    for rows in HEIGHTS:
        (variant,) = variants_of(STRIPS if rows <= TWO_STRIPS else HIGH_STRIPS)
        path = compiled(variant)[1].common_path()
        shares = [of_copy(variant, seconds(variant, path, rows, cached)[0]) for cached in (True, False)]
        lines.append(f"| {rows} | {read_again(variant, rows)[0]:.0%} | {shares[0]:.0%} | {shares[1]:.0%} |\n")
    return HEAD_OF_HEIGHTS + "".join(lines)


if __name__ == "__main__":
    main(sys.argv[1:])
