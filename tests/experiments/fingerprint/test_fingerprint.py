"""Test that the numerics fingerprint changes if and only if the sources compute something else."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fewbits.experiments.fingerprint import computing_modules, equal_bits, numerics
from fewbits.experiments.fingerprint.computing_modules import COMPUTING, CONFIG_CLASSES, CPP_ROOTS, NOT_COMPUTING
from fewbits.experiments.fingerprint.cpp_source import source_digest
from fewbits.experiments.fingerprint.equal_bits import EqualPair, equal_fingerprints
from fewbits.experiments.fingerprint.numerics import (
    computing_files,
    file_digest,
    module_file,
    numerics_fingerprint,
    source_digests,
)
from fewbits.experiments.fingerprint.python_source import module_digest
from fewbits.experiments.identity import provenance
from tests.experiments.trial_inputs import MOR, overrides
from tests.forked_python import run_python

ROOT = numerics.ROOT
PACKAGES = ("kernels", "models", "experiments")


# Python sources


BASE = '''
"""A module."""
import math

def f(x: int, y: float = 0.5) -> float:
    """Return something."""
    # a comment
    if x < 0:
        raise ValueError(f"x is {x}: valid are 0 or more")
    warnings.warn("slow")
    logger.info("step %d", x)
    assert y, "y is missing"
    z: float = x * y
    return z + 1.0
'''
# Edits (before, after) of BASE that must not change its digest, and edits that must.
SAME = {
    "comments": ("# a comment", "# another comment\n\n"),
    "module docstring": ('"""A module."""', '"""Another text."""'),
    "docstring": ('"""Return something."""', '"""Use other words."""'),
    "no docstring": ('    """Return something."""\n', ""),
    "annotations": ("x: int, y: float = 0.5) -> float", "x, y=0.5)"),
    "a local annotation": ("z: float = x", "z: int = x"),
    "error": ('f"x is {x}: valid are 0 or more"', 'f"{x} is no x"'),
    "warning": ('"slow"', '"very slow"'),
    "log": ('"step %d"', '"update %d"'),
    "assertion": ('"y is missing"', '"no y"'),
    "positions": ("return z + 1.0", "return (\n        z\n        + 1.0\n    )"),
}
OTHER = {
    "constant": ("1.0", "1.5"),
    "default": ("0.5", "0.25"),
    "operator": ("x * y", "x / y"),
    "condition": ("x < 0", "x <= 0"),
    "error's class": ("raise ValueError", "raise TypeError"),
    "name": ("z + 1.0", "x + 1.0"),
    "import": ("import math", "import cmath"),
    "type of a constant": ("1.0", "1"),
}


@pytest.mark.parametrize("edit", SAME.values(), ids=SAME)
def test_an_edit_for_people_leaves_a_modules_digest(edit: tuple[str, str]) -> None:
    """Check edits that do not change what is computed, such as those of comments and messages."""
    edited = BASE.replace(*edit)
    assert edited != BASE
    assert module_digest(edited) == module_digest(BASE)


@pytest.mark.parametrize("edit", OTHER.values(), ids=OTHER)
def test_an_edit_of_what_is_computed_changes_a_modules_digest(edit: tuple[str, str]) -> None:
    assert module_digest(BASE.replace(*edit)) != module_digest(BASE)


def test_fields_of_configuration_classes_are_left_to_the_id() -> None:
    """Check that a new field of a configuration class does not change a digest, because the id has its value."""
    base = "@dataclass\nclass Config:\n    size: int\n    def f(self): return self.size"
    grown = base.replace("size: int\n", "size: int\n    new: float = 1.0\n")
    assert module_digest(grown, ["Config"]) == module_digest(base, ["Config"])
    assert module_digest(grown) != module_digest(base)
    assert module_digest(grown.replace("self.size", "self.new"), ["Config"]) != module_digest(base, ["Config"])


def test_strings_elsewhere_than_in_messages_count() -> None:
    assert module_digest('KIND = "a"') != module_digest('KIND = "b"')
    assert module_digest('f("a")') != module_digest('f("b")')


# C++ sources


CPP = """#define TWO(x) \\
    (x + 2)
float f(float x) {
    // add
    return TWO(x) - -1.0f; /* "two" */
}
auto s = "a // b";
"""


@pytest.mark.parametrize(
    "edit",
    [
        ("// add", "// subtract\n    // twice"),
        ('/* "two" */', ""),
        ("float f(float x) {", "float f(float x)\n{"),
        ("\\\n    (x + 2)", "(x+2)"),
        ("return TWO(x) - -1.0f", "return TWO( x )- -1.0f"),
    ],
    ids=["comment", "block comment", "line break", "continued line", "spaces"],
)
def test_comments_and_white_space_leave_a_cpp_digest(edit: tuple[str, str]) -> None:
    edited = CPP.replace(*edit)
    assert edited != CPP
    assert source_digest(edited) == source_digest(CPP)


@pytest.mark.parametrize(
    "edit",
    [
        ("1.0f", "2.0f"),
        ("- -1", "--1"),
        ("x + 2", "x + 3"),
        ("a // b", "a / / b"),
        ("float x", "double x"),
        ("(x + 2)\n", "(x + 2) "),
    ],
    ids=["constant", "operator", "macro", "string", "type", "end of a directive"],
)
def test_other_tokens_change_a_cpp_digest(edit: tuple[str, str]) -> None:
    assert source_digest(CPP.replace(*edit)) != source_digest(CPP)


# All sources together


@pytest.fixture
def copied(tmp_path: Path) -> Iterator[Path]:
    """Copy the packages' sources into a separate folder; return the folder."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__", "config"))
    shutil.copytree(ROOT / "src", tmp_path / "src", symlinks=True)
    yield tmp_path
    source_digests.cache_clear()


def fingerprints(root: Path) -> dict[str, str]:
    source_digests.cache_clear()
    return {device: numerics_fingerprint(device, root) for device in CPP_ROOTS}


@pytest.fixture(scope="module")
def unedited() -> dict[str, str]:
    """Return the fingerprints of the repository's sources by kind of device; an unedited copy has the same."""
    return fingerprints(ROOT)


def changed_on(root: Path, before: dict[str, str]) -> set[str]:
    """Return the kinds of device whose fingerprint differs from `before`."""
    return {device for device, digest in fingerprints(root).items() if digest != before[device]}


def with_another_statement(path: Path) -> str:
    """Return the text of a source file with an added statement.

    The statement is in the first Python function that does not end with `raise`, or else at the end of the file.
    """
    text = path.read_text("utf-8")
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and not isinstance(node.body[-1], ast.Raise):
                last = node.body[-1]
                lines = text.splitlines(keepends=True)
                indent = " " * last.col_offset
                return "".join([*lines[: last.lineno - 1], f"{indent}unused_name = 1\n", *lines[last.lineno - 1 :]])
        return text + "\nunused_name = 1\n"
    return text + "\nstatic const int unused_name = 1;\n"


def test_every_listed_source_counts_by_its_meaning(copied: Path) -> None:
    for file in sorted({*computing_files("cpu"), *computing_files("cuda")}):
        path, before = copied / file, file_digest(file)
        original = path.read_text("utf-8")
        remark = "# a remark\n" if path.suffix == ".py" else "// a remark\n"
        path.write_text(remark + original + remark, "utf-8")
        assert file_digest(file, copied) == before, file
        path.write_text(original, "utf-8")
        path.write_text(with_another_statement(path), "utf-8")
        assert file_digest(file, copied) != before, file


def test_sources_count_on_their_devices_alone() -> None:
    on_cpu, on_cuda = set(computing_files("cpu")), set(computing_files("cuda"))
    assert {"kernels/csrc/cpu.cpp", "kernels/backends/cpu.py"} <= on_cpu - on_cuda
    assert {"kernels/csrc/quantize.cu", "kernels/backends/gpu/device.py"} <= on_cuda - on_cpu
    assert {"kernels/csrc/philox.h", "models/networks/layers.py"} <= on_cpu & on_cuda


def test_a_process_digests_each_source_once_for_the_id_and_the_provenance() -> None:
    """Check that the digests are cached, because computing them takes half a second, as long as a tiny trial."""
    source_digests.cache_clear()
    files = provenance({"device": "cpu", "numerics": [numerics_fingerprint("cpu")]}, {})["sources"]
    assert list(files) == computing_files("cpu")
    assert source_digests.cache_info().misses == 1


@pytest.mark.parametrize(
    ("file", "edit", "devices"),
    [
        ("kernels/csrc/element.h", (r"\breturn ", "return 1 + "), {"cpu", "cuda"}),
        (
            "experiments/optimization/optimizers.py",
            ("@ torch.no_grad|torch.no_grad", "torch.enable_grad"),
            {"cpu", "cuda"},
        ),
        ("models/networks/layers.py", (r"offset = 1\.0", "offset = 2.0"), {"cpu", "cuda"}),
        ("kernels/csrc/quantize.cu", (r"\breturn\b", "return;;"), {"cuda"}),
        ("kernels/backends/gpu/tiles.py", (r"= (\d+)\n", r"= 1\1\n"), {"cuda"}),
        ("kernels/backends/build.py", (r"\Z", "\nOTHERS = 1\n"), set()),
        ("src/fewbits/common/terminal.py", (r"\Z", "\nWIDTH = 1\n"), set()),
        ("experiments/tracking/tracker.py", (r"\Z", "\nWIDTH = 1\n"), set()),
        ("models/networks/presets.py", (r"\Z", "\nOTHERS = 1\n"), set()),
        ("experiments/storage/checkpoints.py", (r"\Z", "\nOTHERS = 1\n"), set()),
    ],
)
def test_an_edit_changes_the_trials_that_it_can_reach(
    unedited: dict[str, str], copied: Path, file: str, edit: tuple[str, str], devices: set[str]
) -> None:
    path = copied / file
    edited, count = re.subn(*edit, path.read_text("utf-8"), count=1)
    assert count
    path.write_text(edited, "utf-8")
    assert changed_on(copied, unedited) == devices


# A script that prints the modules that training imports directly or indirectly, found in the sources.
IMPORTED = """
import ast, sys
from pathlib import Path
root, waiting, seen = Path(sys.argv[1]), ["experiments.training"], set()
while waiting:
    name = waiting.pop()
    paths = (folder.joinpath(*name.split(".")).with_suffix(".py") for folder in (root, root / "src" / "fewbits"))
    path = next((path for path in paths if path.is_file()), None)
    if name in seen or path is None:
        continue
    seen.add(name)
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("fewbits.")]
            waiting += [name.removeprefix("fewbits.") for name in names]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fewbits"):
            module = node.module.removeprefix("fewbits").removeprefix(".")
            waiting += [module, *(f"{module}.{alias.name}" if module else alias.name for alias in node.names)]
print(*sorted(seen))
"""


def test_every_module_that_training_imports_is_listed_once() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTED, str(ROOT)], capture_output=True, text=True, check=True)
    imported = set(done.stdout.split())
    assert not set(COMPUTING) & set(NOT_COMPUTING)
    assert imported == {*COMPUTING, *NOT_COMPUTING}, "list the module, with a reason if it computes nothing"
    assert all(NOT_COMPUTING.values())


# A script that trains a trial and prints the modules of fewbits that were imported.
LOADED = """
import sys
from fewbits.experiments.config import load_trial
from fewbits.experiments.run_trial import run
trial, runtime = load_trial(sys.argv[1:])
run(trial, runtime)
print(*(name.removeprefix("fewbits.") for name in sys.modules if name.startswith("fewbits.")))
"""
# Modules that make the resolved config, which is in the id, so they need not be listed.
COMPOSING = {
    f"experiments.{name}" for name in ("composed_cache", "composition", "config", "config_files", "hydra_settings")
}


def test_every_module_that_a_trial_loads_is_listed(cache: Path, tmp_path: Path) -> None:
    chosen = overrides(cache, tmp_path, *MOR, "training.steps=2", "data=python")
    done = run_python(["-c", LOADED, *chosen], folder=ROOT, environment=os.environ)
    assert done.returncode == 0, done.stderr
    loaded = {name for name in done.stdout.split() if (ROOT / module_file(name)).is_file()}
    assert {"kernels.backends.cpu", "models.networks.decoder", "experiments.storage.checkpoints"} <= loaded
    assert loaded - COMPOSING <= {*COMPUTING, *NOT_COMPUTING}


def test_the_classes_named_as_configuration_are_those_of_a_trial() -> None:
    import dataclasses

    from fewbits.common.from_dict import _hints
    from fewbits.experiments.trial import Trial

    waiting: list[Any] = [Trial]
    found = set()
    while waiting:
        kind = waiting.pop()
        found.add((kind.__module__.removeprefix("fewbits."), kind.__name__))
        waiting += [hint for hint in _hints(kind).values() if dataclasses.is_dataclass(hint)]
    in_computing = {(module, name) for module, name in found if module in COMPUTING}
    assert in_computing == {(module, name) for module, names in CONFIG_CLASSES.items() for name in names}


@pytest.mark.parametrize("version", ["python3.12", "python3.13", "python3.14"])
def test_other_versions_of_python_find_the_same_fingerprint(version: str) -> None:
    def run(command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([program or "", "-c", command], capture_output=True, text=True, env=environment)

    program, environment = shutil.which(version), {"PYTHONPATH": str(ROOT / "src")}
    # Version managers may provide a program for a version that is not installed; it only prints an error.
    if program is None or run("").returncode:
        pytest.skip(f"{version} is not installed here")
    done = run("from fewbits.experiments.fingerprint.numerics import numerics_fingerprint as f; print(f('cpu'))")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == numerics_fingerprint("cpu")


# Proven equality


def pair(old: str, new: str, instruction_set: str = "avx2", device: str = "cpu") -> EqualPair:
    return EqualPair(device, instruction_set, old, new, "commit", "2.13.0", "2026-11-22")


@pytest.fixture
def declared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Replace equal_bits.json by an empty file for a test; return its path."""
    file = tmp_path / "equal_bits.json"
    file.write_text("[]")
    original = equal_bits.declared_pairs
    monkeypatch.setattr(equal_bits, "declared_pairs", lambda _=file: original(file))
    monkeypatch.setattr(equal_bits.declared_pairs, "cache_clear", original.cache_clear, raising=False)
    yield file
    original.cache_clear()


def test_equality_holds_along_pairs_of_one_device_and_instruction_set(declared: Path) -> None:
    equal_bits.add_pairs(
        [pair("a", "b"), pair("b", "c"), pair("c", "d", "amx"), pair("a", "x", device="cuda")], declared
    )
    assert equal_fingerprints("c", "cpu", "avx2") == ["c", "b", "a"]
    assert equal_fingerprints("c", "cpu", "amx") == ["c", "d"]
    assert set(equal_fingerprints("a", "cpu")) == {"a", "b", "c", "d"}
    assert equal_fingerprints("a", "cuda", "sm90") == ["a"]


def test_a_pair_is_added_once(declared: Path) -> None:
    equal_bits.add_pairs([pair("a", "b")], declared)
    equal_bits.add_pairs([pair("a", "b"), pair("b", "c")], declared)
    assert [row["new"] for row in json.loads(declared.read_text())] == ["b", "c"]


def test_the_shipped_pairs_are_readable() -> None:
    module: ModuleType = computing_modules
    assert set(module.DEVICES) >= {one.device for one in equal_bits.declared_pairs()}
