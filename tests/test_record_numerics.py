"""Test that the kernels give the golden digests that `make numerics` records."""

from fewbits.experiments.identity import running
from tests import record_numerics as tool
from tests.effort import DEEP
from tests.golden import digests


def test_the_files_that_need_a_gpu_exist_and_compute() -> None:
    assert set(tool.ON_A_GPU) <= set(running())


def test_the_kernels_give_the_golden_digests() -> None:
    golden = tool.read(tool.GOLDEN)[tool.EVERYWHERE]
    chosen = digests.BASES if DEEP else {base: digests.BASES[base] for base in digests.ON_CUDA}
    rows = digests.kernels(chosen)
    assert rows == {name: golden.get(name) for name in rows}, "run `make numerics` to compare with all sources"
