"""Test fewbits without its extras and without a compiler, as `pip install fewbits` installs it."""

import json
import os
import platform
import shutil
import subprocess
import sys
import venv
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from fewbits.common.process import EXTRAS
from fewbits.kernels.backends import build, compilation
from tests.test_project import ROOT, build_wheel

# With None in sys.modules, an import fails as if the package were not installed.
WITHOUT = f"import sys; sys.modules.update(dict.fromkeys({[name for names in EXTRAS.values() for name in names]}));"
CONSTRAINED = ("--constraint", ROOT / "constraints.txt")
ORACLES = ("ml_dtypes", "transformers")  # that the tests of kernels and models compare with
NEED_MORE = (  # a compiler, or an extra
    *("--ignore=tests/kernels/backends/test_build.py", "--ignore=tests/models/importing/test_gguf.py"),
    *(
        "--deselect=tests/models/test_transformers.py::test_every_product_of_a_blocks_weight_reads_its_quantized_values",
    ),
    *("-k", "not inductor"),
)
USE = ROOT / "tests" / "use_core.py"


def run(*command: str | Path, cwd: Path = ROOT, environment: Mapping[str, str] = MappingProxyType({})) -> str:
    """Run a command and return its stdout."""
    done = subprocess.run(command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_the_core_casts_quantizes_imports_and_exports_without_extras(tmp_path: Path) -> None:
    program = f"{WITHOUT} import runpy; sys.argv = ['', {str(tmp_path)!r}]; runpy.run_path({str(USE)!r})"
    run(sys.executable, "-c", program)
    assert (tmp_path / "exported" / "model.safetensors").is_file()


COMMANDS = {
    "train model=gpt2-nano data=synthetic scale=smoke": "train",
    "claims study=mor scale=smoke": "report",
    "sweep study=mor scale=smoke --dry-run": "sweep",
    "train recipe=bf16,nvfp4 model=gpt2-nano data=synthetic scale=smoke --multirun": "train",
    "data openwebtext": "data",
}


def test_a_missing_extra_is_one_line_with_the_command_that_installs_it(tmp_path: Path) -> None:
    program = f"""{WITHOUT}
import contextlib, io, json
import fewbits
from fewbits.cli import main

def said(command):
    with contextlib.redirect_stderr(io.StringIO()) as text:
        return main(command.split()), text.getvalue().splitlines()[-1]

try:
    fewbits.read
except ImportError as error:
    api = str(error)
print(json.dumps([api, *map(said, {[*COMMANDS]})]))"""
    api, *answers = json.loads(run(sys.executable, "-c", program, cwd=tmp_path).splitlines()[-1])
    assert api.endswith("pip install 'fewbits[report]'")
    for (status, line), extra in zip(answers, COMMANDS.values(), strict=True):
        assert status == 2
        assert line.startswith("fewbits: ")
        assert line.endswith(f"pip install 'fewbits[{extra}]'") or (extra == "data" and "fewbits[bpe]" in line)


def processor_seconds() -> float:
    """Return the processor time of all child processes so far, which other processes of the machine do not change."""
    times = os.times()
    return times.children_user + times.children_system


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Return the Python of an environment with the wheel alone, and variables without compilers and caches."""
    tmp = tmp_path_factory.mktemp("core")
    wheel = build_wheel(tmp)
    assert "manylinux" in wheel.name
    venv.create(tmp / "venv", with_pip=True)
    run(tmp / "venv" / "bin" / "pip", "install", *CONSTRAINED, "torch", wheel)
    (tmp / "bin").mkdir()
    for name in ("uname", "ldconfig", "env", "cat", "bash", "sh"):
        if path := shutil.which(name):
            (tmp / "bin" / name).symlink_to(path)
    return tmp / "venv" / "bin" / "python", {"PATH": str(tmp / "bin"), "HOME": str(tmp), "PYTHONPATH": ""}


needs_x86 = pytest.mark.skipif(platform.machine() != "x86_64" or build.compiler() is None, reason="builds x86 wheels")


@needs_x86
@pytest.mark.deep
def test_an_empty_environment_without_a_compiler_works_within_a_minute(
    installed: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    python, environment = installed
    before = processor_seconds()
    output = run(python, USE, tmp_path, "gpt2-124m", cwd=tmp_path, environment=environment)
    assert processor_seconds() - before < 60
    assert "/site-packages/fewbits/kernels/prebuilt/cpu-" in output


@needs_x86
@pytest.mark.deep
def test_the_tests_of_kernels_and_models_pass_with_the_wheel(installed: tuple[Path, dict[str, str]]) -> None:
    """Run them with the library that fits this processor, and those of the bits with the libraries for older ones."""
    python, environment = installed
    run(python, "-m", "pip", "install", *CONSTRAINED, "pytest", "pytest-xdist", "hypothesis", *ORACLES)
    environment = environment | {"FEWBITS_TESTS": ""}
    run(python, "-m", "pytest", "-n", "2", "tests/kernels", "tests/models", *NEED_MORE, environment=environment)
    flags = build.cpu_flags()
    for name in [name for name, level in compilation.LEVELS.items() if level.needs <= flags]:
        bits = ("tests/kernels/test_golden.py", "tests/kernels/backends/test_parity.py")
        run(python, "-m", "pytest", *bits, environment=environment | {compilation.ARCHITECTURE: name})
