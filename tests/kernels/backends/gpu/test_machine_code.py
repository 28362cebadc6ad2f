"""Check the disassembled machine code of kernels for Hopper: the instructions of a thread on a tile without edges.

With FEWBITS_TESTS=deep, all classes of kernels are compiled, otherwise only a few.
"""

import ctypes

import pytest
import torch

from fewbits.kernels.backends.build import BuildError
from fewbits.kernels.backends.compiled import DecideCall
from fewbits.kernels.backends.gpu import cubins
from fewbits.kernels.backends.gpu.calls import Call, DecodeCall, WeightCall
from fewbits.kernels.backends.gpu.device import Device
from fewbits.kernels.backends.gpu.tiles import STATIC_SHARED
from fewbits.kernels.backends.gpu.variants import Variant
from fewbits.kernels.backends.gpu.warm import Recorder
from tests.kernels.backends.gpu.machine_code import Code, disassemble, nvdisasm, parameter_bytes, parse, resident_ctas
from tests.kernels.backends.gpu.test_cuda_kernels_fit import CLASSES, Usage, usage

ELEMENTS = 64  # elements that a thread processes
# The most instructions that a thread may execute for one element, by class and kernel: the count when the ceiling was
# set, plus a few percent.
CEILINGS = {
    ("128x128, amax", "quantize"): 17.7,
    ("channel down, many rows", "quantize_strip"): 20.4,
    ("channel down, 8192 rows", "quantize_strip"): 20.4,
    ("channel down, many rows, gam", "measure"): 7.0,
    ("gam by row", "measure"): 5.4,
    ("channel", "quantize"): 18.4,
    ("tensor, amax", "measure"): 5.1,
    ("tensor, amax", "quantize"): 17.0,
    ("1x32, mx", "quantize"): 20.5,
    ("nvfp4", "measure"): 5.1,
    ("nvfp4", "quantize"): 26.0,
    ("nvfp4, stochastic", "quantize"): 44.5,
    ("nvfp4, stochastic, rht16", "measure"): 13.4,
    ("nvfp4, stochastic, rht16", "quantize"): 53.0,
    ("nvfp4, stochastic, rht16 down", "quantize"): 53.0,
    ("nvfp4, stochastic, rht16, both axes", "measure"): 26.0,
    ("nvfp4, stochastic, rht16, both axes", "quantize"): 106.0,
    ("128x128, statistics of blocks", "quantize"): 38.8,
    ("encode, e4m3, 128x128, gam", "measure"): 4.4,
    ("encode, e4m3, 128x128, gam", "quantize"): 20.0,
}
STRUCTS = {"quantize.cu": Call, "decide.cu": DecideCall, "decode.cu": DecodeCall, "weights.cu": WeightCall}
SHORT = ("128x128, amax", "channel down, many rows")
# Classes whose kernels access memory element by element, by design (docs/measured/cuda-kernels.md).
BY_ELEMENT = ("odd blocks", "odd partition, parts left out", "overflow to inf", "nvfp4, stochastic, ragged rht16")

# Kernels that process a thread's vectors in a loop, which a common path does not contain.
LOOPED = tuple(name for name in CLASSES if name.startswith("fouroversix"))
MANY_PARTS = ("1x16, statistics of blocks",)  # classes in which a thread's vectors lie in different parts


def variants_of(name: str) -> list[Variant]:
    ask, dtype, shape = CLASSES[name]
    recorder = Recorder()
    ask(Device(recorder), torch.empty(shape, dtype=dtype))
    return recorder.variants


def resources(variant: Variant) -> Usage:
    """Compile a kernel for Hopper, and return the resources that it uses; skip the test if NVRTC is missing."""
    try:
        cubins.nvrtc()
    except BuildError as missing:
        pytest.skip(str(missing))
    return usage(variant, "sm_90")


def compiled(variant: Variant) -> tuple[bytes, Code]:
    if nvdisasm() is None:
        pytest.skip("nvdisasm is missing: pip install nvidia-cuda-nvdisasm")
    cubin = cubins.cubin(variant.source(), "sm_90")
    return cubin, disassemble(cubin)


def test_the_common_path_avoids_rare_code() -> None:
    """Check that the path avoids a call and a loop over single elements, and takes the longer side of a branch."""
    code = parse(
        """
    /*0000*/ LDG.E.128 R4, [R2] ;
    /*0010*/ @P0 BRA `(.L_x_1) ;
    /*0020*/ CALL.REL.NOINC `(slow) ;
    .L_x_1:
    /*0030*/ @P1 BRA `(.L_x_3) ;
    /*0040*/ FMUL R4, R4, R5 ;
    /*0050*/ FADD R4, R4, R5 ;
    .L_x_3:
    /*0060*/ STG.E.128 [R2], R4 ;
    /*0070*/ @!P2 EXIT ;
    .L_x_4:
    /*0080*/ STG.E.U16 [R2], R4 ;
    /*0090*/ @P3 BRA `(.L_x_4) ;
    /*00a0*/ EXIT ;
    """
    )
    assert code.common_path() == {
        "LDG.E.128": 1, "BRA": 2, "FMUL": 1, "FADD": 1, "STG.E.128": 1, "EXIT": 1
    }  # fmt: skip


def test_a_loop_over_tiles_counts_once() -> None:
    """Check that a loop over a thread's vectors counts as one iteration, without a loop inside it."""
    code = parse(
        """
    /*0000*/ MOV R1, R2 ;
    .L_x_1:
    /*0010*/ LDG.E.128 R4, [R2] ;
    /*0020*/ LDG.E.128 R8, [R2+0x10] ;
    .L_x_2:
    /*0030*/ FADD R4, R4, R5 ;
    /*0040*/ @P0 BRA `(.L_x_2) ;
    /*0050*/ FMUL R4, R4, R5 ;
    /*0060*/ @P1 BRA `(.L_x_1) ;
    /*0070*/ STG.E.128 [R2], R4 ;
    /*0080*/ STG.E.128 [R2+0x10], R8 ;
    /*0090*/ EXIT ;
    """
    )
    assert code.common_path() == {"MOV": 1, "LDG.E.128": 2, "FMUL": 1, "BRA": 1, "STG.E.128": 2, "EXIT": 1}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in SHORT else pytest.mark.deep) for n in CLASSES])
def test_machine_code(name: str) -> None:
    for variant in variants_of(name):
        used = resources(variant)
        cubin, code = compiled(variant)
        assert parameter_bytes(cubin) == ctypes.sizeof(STRUCTS[variant.file])
        assert resident_ctas(used.registers, variant.shape.threads, used.shared_bytes) * variant.shape.threads >= 256
        if variant.file != "quantize.cu" or name in BY_ELEMENT or name in LOOPED:
            continue
        path = code.common_path()
        reads = sum(n for op, n in path.items() if op.startswith("LDG") and ".128" in op)
        assert reads >= 8 * len(variant.specs), "not every vector is loaded at once"
        if variant.kernel == "quantize_strip":
            assert used.shared_bytes <= STATIC_SHARED, "too little shared memory is left for tiles"
        if variant.kernel.startswith("quantize") and not variant.specs[0].encodes:
            assert sum(n for op, n in path.items() if op.startswith("STG") and ".128" in op) >= 8
        atomics = sum(n for op, n in path.items() if op.startswith(("RED", "ATOMG", "ATOM.")))
        assert atomics <= 8 * (8 if name in MANY_PARTS else 1), (
            "a thread adds its results to more than one part of the totals"
        )
        if variant.dtypes[0] != "Fp32" and variant.kernel.startswith("quantize"):
            assert not any(op.startswith(("F2F.BF16", "F2F.F16")) for op in path), "elements are narrowed one at a time"
        if ceiling := CEILINGS.get((name, variant.kernel)):
            assert path.total() / ELEMENTS <= ceiling
