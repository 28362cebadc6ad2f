"""Run the tests that train or multiply matrices under three instruction sets: `make test-portable`.

    python tests/portable.py                 all of these tests
    python tests/portable.py -k probe -x     further arguments go to pytest

The order of sums and BF16 instructions change the last bits of a product, and training amplifies the change. Therefore
a test that passes on one processor may fail on another. torch (ATen), oneDNN, MKL and the kernels of fewbits each read
an environment variable that limits the instructions that they use. With these, one processor can simulate older ones.

The three instruction sets (levels) are the processor's own and the next two below it. Levels that are not run are
printed with the reason. The exit status is 1 if tests fail under any level.
"""

import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VARIABLES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "FEWBITS_CPU_ARCH")
COUNT = 3  # the largest number of levels that are run

# The test files that train or multiply matrices. tests/test_portable.py checks that the list is complete.
FILES = (
    "kernels/layers/test_activations.py",
    "kernels/layers/test_attention.py",
    "kernels/layers/test_cross_entropy.py",
    "kernels/layers/test_norms.py",
    "kernels/test_noise.py",
    "kernels/test_operators.py",
    "kernels/test_ops.py",
    "kernels/test_products.py",
    "models/networks/test_decoder.py",
    "models/test_execution.py",
    "models/test_gemm.py",
    "models/networks/test_gradients.py",
    "models/test_kernel_calls.py",
    "models/test_learned_widths.py",
    "models/networks/test_layers.py",
    "models/networks/test_mamba2.py",
    "models/test_observer.py",
    "models/test_quantize.py",
    "models/test_quantized_linear.py",
    "models/networks/test_registry.py",
    "models/test_updates.py",
    "models/test_samplers.py",
    "models/test_streams.py",
    "experiments/optimization/test_adam_mini.py",
    "experiments/bench/test_bench_train.py",
    "experiments/storage/test_branches.py",
    "experiments/distributed/test_sharding.py",
    "experiments/test_distributed.py",
    "experiments/test_divergence.py",
    "experiments/test_execution.py",
    "experiments/evaluation/test_by_document.py",
    "experiments/evaluation/test_harness.py",
    "experiments/evaluation/test_loss.py",
    "experiments/evaluation/test_final_evaluation.py",
    "experiments/evaluation/test_evaluate.py",
    "experiments/storage/test_huggingface_export.py",
    "models/networks/test_huggingface.py",
    "experiments/test_identity.py",
    "experiments/optimization/test_optimizers.py",
    "experiments/optimization/test_precision.py",
    "experiments/probes/test_probe.py",
    "experiments/probes/test_probe_trial.py",
    "experiments/storage/test_imports.py",
    "models/importing/test_folders.py",
    "models/importing/test_gguf.py",
    "experiments/storage/test_resume.py",
    "experiments/test_titan.py",
    "commands/test_train.py",
    "experiments/test_training.py",
)


@dataclass(frozen=True)
class Level:
    """An instruction set.

    needs: the flags in /proc/cpuinfo that it needs. values: the values of VARIABLES that limit the libraries to it;
    empty: no limit.
    """

    name: str
    needs: frozenset[str]
    values: tuple[str, ...]

    @property
    def settings(self) -> dict[str, str]:
        return dict(zip(VARIABLES, self.values, strict=True)) if self.values else {}


OWN = Level("own", frozenset(), ())
LOWER = (  # the highest first
    Level(
        "avx512",
        frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
        ("avx512", "AVX512_CORE", "AVX512", "x86-64-v4"),
    ),
    Level("avx2", frozenset({"avx2", "fma", "f16c", "bmi2"}), ("avx2", "AVX2", "AVX2", "x86-64-v3")),
    Level("avx", frozenset({"avx", "pclmulqdq"}), ("default", "AVX", "AVX", "sandybridge")),
    Level("sse", frozenset({"sse4_2", "popcnt"}), ("default", "SSE41", "SSE4_2", "x86-64-v2")),
)
# Flags of BF16 instructions. Only a processor with one of them has a level of its own above avx512.
MULTIPLIES_BF16 = frozenset({"avx512_bf16", "amx_bf16"})


def choose(flags: Collection[str]) -> tuple[list[Level], dict[str, str]]:
    """Return the levels to run on a processor with these flags, and name → reason for the levels that are not run."""
    run, reasons = [OWN], {}
    own_is_named = bool(MULTIPLIES_BF16.intersection(flags))
    for level in LOWER:
        if lacking := sorted(level.needs.difference(flags)):
            reasons[level.name] = f"this processor lacks {', '.join(lacking)}"
        elif not own_is_named:
            own_is_named = True
            reasons[level.name] = "it is this processor's own level, which is run as `own`"
        elif len(run) < COUNT:
            run.append(level)
        else:
            reasons[level.name] = f"{COUNT} higher levels are run"
    return run, reasons


def cpu_flags() -> set[str]:
    """Return the flags of instruction sets in /proc/cpuinfo; empty if the processor is not an x86-64."""
    if platform.machine() != "x86_64":
        return set()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return set(next(line for line in lines if line.startswith("flags")).partition(":")[2].split())


def run(level: Level, arguments: Sequence[str]) -> int:
    """Run the tests FILES, limited to a level, and return pytest's exit status."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES} | level.settings
    command = [sys.executable, "-m", "pytest", *arguments, *(f"tests/{name}" for name in FILES)]
    # Each level gets a new cache, since torch's inductor may use code from its default cache that it made for a level
    # with other instructions.
    with tempfile.TemporaryDirectory() as compiled:
        environment["TORCHINDUCTOR_CACHE_DIR"] = compiled
        return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def main(arguments: Sequence[str]) -> int:
    levels, reasons = choose(cpu_flags())
    for name, reason in reasons.items():
        print(f"not run under {name}: {reason}", flush=True)
    results = {}
    for level in levels:
        limits = " ".join(f"{name}={value}" for name, value in level.settings.items()) or "no limit"
        print(f"\n==== {level.name}: {limits}", flush=True)
        start = time.monotonic()
        results[level.name] = (run(level, arguments), time.monotonic() - start)
    print()
    for name, (status, seconds) in results.items():
        print(f"{name}: {'passed' if status == 0 else f'FAILED (pytest {status})'} in {seconds:.0f} s")
    return int(any(status for status, _ in results.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
