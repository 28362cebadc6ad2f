"""Test without a GPU how NVRTC compiles cubins: errors, unknown GPUs, and which options are used."""

from pathlib import Path

import pytest

from fewbits.kernels.backends.build import BuildError
from fewbits.kernels.backends.gpu import cubins
from fewbits.kernels.backends.gpu.variants import OPTIONS

KERNEL = 'extern "C" __global__ void run(float *x) { x[0] = x[0] * x[1] + x[2] / x[3]; }\n'


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        cubins.nvrtc()
    except BuildError as missing:
        pytest.skip(str(missing))
    monkeypatch.setenv("FEWBITS_CACHE", str(tmp_path))


def test_what_does_not_compile_is_told_with_nvrtcs_reason(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="nothing_of_the_kind"):
        cubins.cubin("__global__ void run() { nothing_of_the_kind(); }", "sm_90")
    assert not list(tmp_path.glob("*.cubin"))


def test_an_architecture_that_nvrtc_does_not_know_is_an_error() -> None:
    with pytest.raises(BuildError, match="sm_1"):
        cubins.cubin(KERNEL, "sm_1")


def test_an_unknown_gpu_gets_ptx_of_the_newest_architecture() -> None:
    newest = max(int(name.removeprefix("sm_")) for name in cubins.architectures())
    assert cubins.target((9, 0)) == "sm_90"
    assert cubins.target((99, 0)) == f"compute_{newest}"
    assert f".target sm_{newest}" in cubins.cubin(KERNEL, f"compute_{newest}").decode()


def test_arithmetic_keeps_subnormals_and_two_roundings() -> None:
    """Check that options forbid fused multiply-add and flushing of subnormals, and require exactly rounded division."""
    assert {"-fmad=false", "-ftz=false", "-prec-div=true"} <= set(OPTIONS)
    assert not any("fast" in option for option in OPTIONS)
