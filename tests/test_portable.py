"""Test that `make test-portable` runs all test files that train, under the right instruction sets."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests import portable

TESTS = portable.ROOT / "tests"
# Modules whose results depend on the order of sums. Tests of sweeps and reports train too, but they only compare runs
# of the same processor with each other, so their files need not be in the list.
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
    "fewbits.experiments.optimization.optimizers",
    "fewbits.experiments.probes.probe",
    "fewbits.experiments.state",
    "fewbits.experiments.training",
    "fewbits.experiments.bench.train",
    "fewbits.experiments.evaluation.loss",
    "torchtitan.train",
}
WITHOUT_PRODUCTS = {  # files that import such a module but assert nothing about products → what they assert about
    "experiments/data/test_gguf_tokenizer.py": "tokens of text",
    "kernels/test_scalings.py": "tables of scalings",
    "kernels/test_bad_use.py": "arguments that are refused",
    "models/test_kernel_calls.py": "which kernels are launched",
    "models/test_layer_table.py": "the layers' quantizers as data",
    "models/test_recipe.py": "recipes as data",
}
PACKAGES = ("kernels", "models", "experiments")
HELPER = re.compile(r"(?:^|\b(?:from|import) )(tests\.[\w.]+)")  # a text that is or imports a module of tests


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


def test_every_file_that_trains_is_run() -> None:
    files = [file for package in PACKAGES for file in (TESTS / package).rglob("test_*.py")]
    training = {file.relative_to(TESTS).as_posix() for file in files if COMPUTES & imports(file)}
    of_commands = {"commands/test_train.py"}  # the only one of commands that compares with recorded numbers
    assert training | of_commands == {*portable.FILES, *WITHOUT_PRODUCTS}
    assert len(portable.FILES) == len(set(portable.FILES))


AVX2 = {"sse4_2", "popcnt", "avx", "pclmulqdq", "avx2", "fma", "f16c", "bmi2"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


@pytest.mark.parametrize(
    ("flags", "levels"),
    [
        (AVX512 | {"avx512_bf16", "amx_bf16"}, ["own", "avx512", "avx2"]),
        (AVX512, ["own", "avx2", "avx"]),
        (AVX2, ["own", "avx", "sse"]),
        ({"sse4_2", "popcnt"}, ["own"]),
        (set(), ["own"]),  # a processor of another architecture than x86-64
    ],
)
def test_a_processor_runs_its_own_level_and_the_next_two_below(flags: set[str], levels: list[str]) -> None:
    run, reasons = portable.choose(flags)
    assert [level.name for level in run] == levels
    assert {*levels, *reasons} == {"own", "avx512", "avx2", "avx", "sse"}
    assert not set(levels) & set(reasons)


@pytest.mark.skipif("sse4_2" not in portable.cpu_flags(), reason="the levels of x86-64 are tried")
def test_a_level_limits_torch_and_a_failure_under_one_level_is_the_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_level.py").write_text(
        "import torch\ndef test_level():\n    assert torch.backends.cpu.get_cpu_capability() != 'DEFAULT'\n"
    )
    monkeypatch.setattr(portable, "ROOT", tmp_path)
    monkeypatch.setattr(portable, "FILES", ("test_level.py",))
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")  # a limit that the user has set must not limit the level `own`
    sse = portable.LOWER[-1]
    monkeypatch.setattr(portable, "choose", lambda flags: ([portable.OWN, sse], {}))
    assert portable.main(["-q"]) == 1
    lines = capfd.readouterr().out.splitlines()
    expected = "passed" if "avx2" in portable.cpu_flags() else "FAILED"
    assert any(line.startswith(f"own: {expected}") for line in lines)
    assert any(line.startswith("sse: FAILED") for line in lines)
