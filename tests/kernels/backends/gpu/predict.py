"""Predict the speed of kernels on an H100 from their machine code, by a roofline model.

A kernel takes as long as the slowest of: the bytes that it moves at the speed of a copy, its instructions at the issue
rate, and those that only a part of the multiprocessor executes, at that part's rate. Nothing here is measured.

    python -m tests.kernels.backends.gpu.predict    # writes docs/measured/cuda-kernels-predicted.md
"""

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from fewbits.kernels.backends.gpu.variants import Variant
from tests.kernels.backends.gpu.machine_code import SIXTEEN, SIXTY_FOUR, resident_ctas
from tests.kernels.backends.gpu.test_cuda_kernels_fit import CLASSES, usage
from tests.kernels.backends.gpu.test_machine_code import BY_ELEMENT, ELEMENTS, compiled, variants_of

TARGET = Path(__file__).parents[4] / "docs/measured/cuda-kernels-predicted.md"
COPY = 3.0e12  # bytes a second that a copy moves on an H100 SXM
MULTIPROCESSORS, CLOCK = 132, 1.755e9
WIDTHS = {"Bf16": 2, "Fp16": 2, "Fp32": 4}
HEAD = """# CUDA kernels: predicted speed

**Predicted, not measured.** A roofline model of an H100 SXM (3.0 TB/s for a copy, 132 multiprocessors at 1.755 GHz),
from the machine code for sm_90 by NVRTC 13.5: `python -m tests.kernels.backends.gpu.predict` writes this page.
Instructions are those of the longest path without rare code, for each of a thread's 64 elements. `of copy` compares
with a copy of the tensor, and adds the times of all launches of a call; a second read counts fully, although a cache
may hold it. Latency, launch overhead and divergence are not modelled.

| class | kernel | registers | CTAs a multiprocessor | instructions an element | limited by | of copy, predicted |
|---|---|---|---|---|---|---|
"""


def seconds(variant: Variant, path: Counter[str]) -> tuple[float, str]:
    """Return the predicted time for an element, and what limits it."""
    width = WIDTHS[variant.dtypes[0]]
    writes = 0 if variant.kernel != "quantize" else sum(s.encodes / 8 if s.encodes else width for s in variant.specs)
    rate = MULTIPROCESSORS * CLOCK * ELEMENTS

    def at(operations: tuple[str, ...], each_clock: int) -> float:
        return sum(n for op, n in path.items() if op.split(".")[0] in operations) / each_clock / rate

    times = {
        "memory": (width + writes) / COPY,
        "issue": path.total() / 128 / rate,
        "integer and comparison": at(SIXTY_FOUR, 64),
        "conversion": at(SIXTEEN, 16),
    }
    limit = max(times, key=lambda name: times[name])
    return times[limit], limit


def main(names: Sequence[str]) -> None:
    rows = []
    for name in names or CLASSES:
        variants = variants_of(name)
        if name in BY_ELEMENT or any(variant.file != "quantize.cu" for variant in variants):
            continue
        used = [usage(variant, "sm_90") for variant in variants]
        results = [(v, compiled(v)[1].common_path(), u) for v, u in zip(variants, used, strict=True)]
        times = [seconds(variant, path) for variant, path, _ in results]
        share = 2 * WIDTHS[variants[0].dtypes[0]] / COPY / sum(time for time, _ in times)
        for i, ((variant, path, use), (_, limit)) in enumerate(zip(results, times, strict=True)):
            ctas = resident_ctas(use.registers, variant.shape.threads, use.shared_bytes)
            last = f"{share:.0%}" if i == len(results) - 1 else ""
            count = path.total() / ELEMENTS
            rows.append(f"| {name} | {variant.kernel} | {use.registers} | {ctas} | {count:.1f} | {limit} | {last} |\n")
        print(rows[-1], end="", flush=True)
        TARGET.write_text(HEAD + "".join(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
