"""Check the roofline model of predict.py, and that docs/measured/cuda-kernels-predicted.md shows its results.

With FEWBITS_TESTS=deep, the rows of all classes of kernels are computed again, otherwise those of a few classes.
"""

from collections import Counter
from typing import Any

import pytest

from fewbits.kernels.backends.build import BuildError
from fewbits.kernels.backends.gpu import cubins
from tests.kernels.backends.gpu.machine_code import nvdisasm
from tests.kernels.backends.gpu.predict import SHOWN, TARGET, heights, of_copy, read_again, rows_of, seconds
from tests.kernels.backends.gpu.test_machine_code import SHORT, variants_of

CLOCK = 1 / (132 * 1.755e9)  # seconds of a clock cycle, divided by the number of multiprocessors of an H100
BYTE = 1 / 3.0e12  # seconds that a copy needs for a byte


def close(expected: Any) -> Any:
    """Return `expected` with a relative tolerance only: all times are below pytest.approx's absolute tolerance."""
    return pytest.approx(expected, rel=1e-9, abs=0)


# The instructions for one element, the resource that limits a kernel which reads and writes two bytes for each element,
# and the seconds for one element.
LIMITS = (
    ({"FADD": 10}, "memory", 4 * BYTE),
    ({"FADD": 128}, "instruction issue", CLOCK),
    ({"FADD": 64, "LOP3.LUT": 64}, "integer and comparison", CLOCK),
    ({"LOP3.LUT": 128}, "integer and comparison", 2 * CLOCK),
    ({"FADD": 100, "MUFU.RCP": 16}, "conversion", CLOCK),
)


@pytest.mark.parametrize(("each", "limit", "time"), LIMITS)
def test_the_slowest_resource_limits_a_kernel(each: dict[str, int], limit: str, time: float) -> None:
    (variant,) = variants_of("128x128, amax")
    path = Counter({op: 64 * count for op, count in each.items()})
    if limit == "integer and comparison" and "FADD" in each:
        path["LOP3.LUT"] += 1  # without this instruction, both resources would need the same time
        time += CLOCK / 64 / 64
    predicted, name = seconds(variant, path, 512)
    assert name == limit
    assert predicted == close(time)


# The bytes that each launch of a class moves for one element: every launch reads it, and the last one writes results.
BYTES = {
    "128x128, amax": (2 + 2,),
    "nvfp4": (2, 2 + 2),
    "nvfp4 16x16, both axes": (2, 2 + 4),
    "encode, e4m3, 128x128, gam": (2, 2 + 1),
    "encode, nvfp4": (2, 2 + 0.5),
    "32x1, e8m0, fp32": (4 + 4,),
}


@pytest.mark.parametrize("name", BYTES)
def test_a_launch_reads_the_matrix_and_the_last_one_writes_results(name: str) -> None:
    variants = variants_of(name)
    times = [seconds(variant, Counter(), 512)[0] for variant in variants]
    assert times == close([count * BYTE for count in BYTES[name]])
    copied = 8 if variants[0].dtypes[0] == "Fp32" else 4
    assert of_copy(variants[0], sum(times)) == close(copied / sum(BYTES[name]))


# The height of columns; how many tiles of 2048 rows a CTA reads twice; how many tiles there are; and whether the L2
# holds the tiles that all CTAs read twice.
AGAIN = ((8192, 0, 4, True), (10240, 1, 5, True), (14336, 3, 7, True), (16384, 4, 8, False), (65536, 28, 32, False))


@pytest.mark.parametrize(("height", "twice", "tiles", "fits"), AGAIN)
def test_strips_read_twice_what_they_cannot_keep(height: int, twice: int, tiles: int, fits: bool) -> None:
    (variant,) = variants_of("channel down, 8192 rows")
    share, in_l2 = read_again(variant, height)
    assert share == close(twice / tiles)
    assert in_l2 == fits
    again = 2 * share / 6.8e12 if fits else 2 * share * BYTE
    assert seconds(variant, Counter(), height)[0] == close(4 * BYTE + again)
    assert seconds(variant, Counter(), height, cached=False)[0] == close((4 + 2 * share) * BYTE)


def of_the_pages_compiler() -> None:
    """Skip the test if NVRTC here has another version than the one that the page names, or if nvdisasm is missing."""
    try:
        version = "{}.{}".format(*cubins.version())
    except BuildError as missing:
        pytest.skip(str(missing))
    if f"NVRTC {version}:" not in TARGET.read_text().replace("\n", " "):
        pytest.skip(f"the page is of another version of NVRTC than {version}")
    if nvdisasm() is None:
        pytest.skip("nvdisasm is missing: pip install nvidia-cuda-nvdisasm")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in SHORT else pytest.mark.deep) for n in SHOWN])
def test_the_page_shows_what_the_model_computes(name: str) -> None:
    of_the_pages_compiler()
    page = TARGET.read_text()
    for row in rows_of(name):
        assert row in page


@pytest.mark.deep
def test_the_page_shows_what_the_model_computes_of_tall_columns() -> None:
    of_the_pages_compiler()
    assert heights() in TARGET.read_text()


def test_the_page_has_the_classes_of_its_command() -> None:
    rows = [line.split("|") for line in TARGET.read_text().partition("\nWhole columns")[0].splitlines()]
    named = [cells[1].strip() for cells in rows if len(cells) > 3 and cells[1].strip() not in ("class", "---")]
    assert list(dict.fromkeys(named)) == list(SHOWN)
