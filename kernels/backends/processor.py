"""Identify the processor: the instruction set that torch and oneDNN use on it, its vendor and its name."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path

import torch

# The instruction sets by which oneDNN and torch choose their implementations, from the oldest to the newest.
LEVELS = ("sse", "avx2", "avx512", "avx512-bf16", "amx")
_ONEDNN_LIMITS = {
    "SSE41": "sse",
    "AVX": "sse",
    "AVX2": "avx2",
    "AVX2_VNNI": "avx2",
    "AVX2_VNNI_2": "avx2",
    "AVX512_CORE": "avx512",
    "AVX512_CORE_VNNI": "avx512",
    "AVX512_CORE_BF16": "avx512-bf16",
    "AVX512_CORE_FP16": "avx512-bf16",
    "AVX10_1_512": "avx512-bf16",
}
_TORCH_LIMITS = {"DEFAULT": "sse", "NO AVX": "sse", "AVX2": "avx2"}
_VENDORS = {"AuthenticAMD": "amd", "GenuineIntel": "intel"}


def instruction_set() -> str:
    """Return the newest instruction set in LEVELS that the processor supports and that both oneDNN and torch may use.

    If /proc/cpuinfo does not list the processor's flags, return the machine type, for example `aarch64`.
    """
    flags = set((_cpuinfo("flags") or "").split())
    if not flags:
        return platform.machine()
    level = "sse"
    for name, needed in (("avx2", "avx2"), ("avx512", "avx512bw"), ("avx512-bf16", "avx512_bf16"), ("amx", "amx_bf16")):
        level = name if needed in flags else level
    limits = [
        _ONEDNN_LIMITS.get(os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()),
        _TORCH_LIMITS.get(torch.backends.cpu.get_cpu_capability()),
    ]
    return min((level, *(limit for limit in limits if limit)), key=LEVELS.index)


def processor_vendor() -> str:
    vendor = _cpuinfo("vendor_id") or platform.machine()
    return _VENDORS.get(vendor, vendor.lower())


def processor_name() -> str:
    return _cpuinfo("model name") or platform.processor() or "unknown"


@cache
def _cpuinfo(key: str) -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == key), None)


@cache
def has_fast_bf16_products() -> bool:
    """Tell whether torch multiplies BF16 matrices on this processor at the speed of its vector units.

    Below AVX-512 torch falls back to scalar loops: on one Zen 3 core, dgrad's product `dy @ w` in a small model
    runs at 1 GFLOP/s in BF16 and at 64 in FP32. Processors other than x86 are assumed to be fast.
    """
    level = instruction_set()
    return level not in LEVELS or LEVELS.index(level) >= LEVELS.index("avx512")
