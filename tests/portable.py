"""Run the tests that train or multiply matrices under three instruction sets: `make test-portable`.

    python tests/portable.py                 all of these tests
    python tests/portable.py -k probe -x     further arguments go to pytest

The order of sums and BF16 instructions change the last bits of a product, and training amplifies the change. Therefore
a test that passes on one processor may fail on another. torch (ATen), oneDNN, MKL and the kernels of fewbits each read
an environment variable that limits the instructions that they use. With these, one processor can simulate older ones.

The three instruction sets (levels) are the processor's own and the next two below it. Levels that are not run are
printed with the reason. The exit status is 1 if tests fail under any level.
"""

import ast
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
VARIABLES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "FEWBITS_CPU_ARCH")
COUNT = 3  # the largest number of levels that are run

# Modules whose results depend on the order of sums. Tests of sweeps and reports train too, but they only compare runs
# of the same processor with each other, so their files are not run.
COMPUTES = {
    "fewbits.kernels.layers.activations",
    "fewbits.kernels.layers.attention",
    "fewbits.kernels.layers.cross_entropy",
    "fewbits.kernels.layers.norms",
    "fewbits.kernels.products",
    "fewbits.sample_weight",
    "fewbits.models.networks.decoder",
    "fewbits.models.networks.layers",
    "fewbits.models.networks.mamba2",
    "fewbits.models.networks.registry.build",
    "fewbits.models.quantize",
    "fewbits.models.quantized_linear",
    "fewbits.experiments.optimization.adam_mini",
    "fewbits.experiments.optimization.muon",
    "fewbits.experiments.optimization.optimizers",
    "fewbits.experiments.probes.probe",
    "fewbits.experiments.state",
    "fewbits.experiments.training",
    "fewbits.experiments.bench.train",
    "fewbits.experiments.evaluation.loss",
    "torchtitan.train",
}
PACKAGES = ("kernels", "models", "experiments")
OF_COMMANDS = "commands/test_train.py"  # the only one of commands that compares with recorded numbers
HELPER = re.compile(r"(?:^|\b(?:from|import) )(tests\.[\w.]+)")  # a text that is or imports a module of tests


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


def test_files() -> list[str]:
    """Return the paths in tests/ of the test files that train or multiply matrices."""
    files = [file for package in PACKAGES for file in sorted((TESTS / package).rglob("test_*.py"))]
    return [file.relative_to(TESTS).as_posix() for file in files if COMPUTES & imports(file)] + [OF_COMMANDS]


@cache
def imports(file: Path) -> frozenset[str]:
    """Return all names that a test file imports, itself and through modules of tests/ that it imports or runs."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names |= set(HELPER.findall(node.value))  # for example in the text of a program for another process
    helpers = [TESTS.parent / f"{name.replace('.', '/')}.py" for name in names if name.startswith("tests.")]
    return frozenset(names.union(*(imports(helper) for helper in helpers if helper.is_file() and helper != file)))


def run(level: Level, arguments: Sequence[str]) -> int:
    """Run the tests that train, limited to a level, and return pytest's exit status."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES} | level.settings
    command = [sys.executable, "-m", "pytest", *arguments, *(f"tests/{name}" for name in test_files())]
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
