"""Check that the headers of the CPU kernels also compile for GPUs, without a GPU.

NVRTC, which the CUDA backend compiles with, comes as a package; nvcc is used too if it is installed.
"""

import ctypes
import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest

from fewbits.kernels.backends.build import SOURCES

ARCHITECTURES = ("sm_80", "sm_90", "sm_100a")
FLAGS = ["-std=c++17", "-fmad=false", f"-I{SOURCES}"]
UNIT = SOURCES / "headers.cu"


def nvrtc() -> ctypes.CDLL:
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    libraries = [path for folder in folders for path in sorted(folder.rglob("libnvrtc.so*"))]
    if not libraries:
        pytest.skip("no NVRTC: the package nvidia-cuda-nvrtc of the dev extra is for Linux only")
    return ctypes.CDLL(str(libraries[0]))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_nvrtc_compiles_every_header(architecture: str) -> None:
    assert compile_with_nvrtc(nvrtc(), UNIT.read_text(), architecture) == "", "NVRTC's log"


def test_nvrtc_reports_what_does_not_compile() -> None:
    assert "undefined" in compile_with_nvrtc(nvrtc(), "__global__ void f() { nothing_of_the_kind(); }", "sm_90")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_nvcc_compiles_every_header(architecture: str, tmp_path: Path) -> None:
    compiler = shutil.which("nvcc")
    if compiler is None:
        pytest.skip("no nvcc on the path")
    command = [compiler, *FLAGS, "-cubin", f"-arch={architecture}", str(UNIT), "-o", str(tmp_path / "headers.cubin")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def compile_with_nvrtc(library: ctypes.CDLL, source: str, architecture: str) -> str:
    """Return the log of NVRTC, which is empty if it compiled without a warning."""
    program = ctypes.c_void_p()
    assert library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"unit.cu", 0, None, None) == 0
    options = [option.encode() for option in [*FLAGS, f"--gpu-architecture={architecture}"]]
    status = library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    size = ctypes.c_size_t()
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    text = log.value.decode().strip()
    return text or ("" if status == 0 else f"status {status}")
