"""Test which edits of the sources change the ids of trials, and that numerics.txt records the running sources."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from fewbits.experiments import identity as numerics
from fewbits.experiments.identity import (
    ROOT,
    changed,
    cpp_digest,
    python_digest,
    running,
)


def test_numerics_txt_records_the_running_sources() -> None:
    assert changed() == [], "run `make numerics`, and commit the files that it writes"


# Digests


BASE = '''
"""A module."""
import math

def f(x: int, y: float = 0.5) -> float:
    """Return something."""
    # a comment
    if x < 0:
        raise ValueError(f"x is {x}: valid are 0 or more")
    warnings.warn("slow")
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


CPP = """#define TWO(x) \\
    (x + 2)
float f(float x) {
    // add
    return TWO(x) - -1.0f; /* "two" */
}
auto s = "a // b";
"""
SAME_CPP = {
    "comment": ("// add", "// subtract\n    // twice"),
    "block comment": ('/* "two" */', ""),
    "line break": ("float f(float x) {", "float f(float x)\n{"),
    "continued line": ("\\\n    (x + 2)", "(x + 2)"),
    "spaces": ("return TWO(x)", "return   TWO(x)"),
}
OTHER_CPP = {
    "C++ constant": ("1.0f", "2.0f"),
    "C++ operator": ("- -1", "--1"),
    "macro": ("x + 2", "x + 3"),
    "string": ("a // b", "a / / b"),
    "type": ("float x", "double x"),
    "end of a directive": ("(x + 2)\n", "(x + 2) "),
}


@pytest.mark.parametrize("name", [*SAME, *SAME_CPP])
def test_an_edit_for_people_leaves_a_digest(name: str) -> None:
    """Check edits that do not change what is computed, such as those of comments and messages."""
    base, digest, edit = (BASE, python_digest, SAME[name]) if name in SAME else (CPP, cpp_digest, SAME_CPP[name])
    edited = base.replace(*edit)
    assert edited != base
    assert digest(edited) == digest(base)


@pytest.mark.parametrize("name", [*OTHER, *OTHER_CPP])
def test_an_edit_of_what_is_computed_changes_a_digest(name: str) -> None:
    base, digest, edit = (BASE, python_digest, OTHER[name]) if name in OTHER else (CPP, cpp_digest, OTHER_CPP[name])
    assert digest(base.replace(*edit)) != digest(base)


# All sources together


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """Copy the packages that compute into a separate folder; return the folder."""
    for package in numerics.PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__", "config"))
    return tmp_path


def edit(root: Path, file: str, pattern: str, by: str) -> None:
    path = root / file
    edited, count = re.subn(pattern, by, path.read_text("utf-8"), count=1)
    assert count
    path.write_text(edited, "utf-8")


@pytest.mark.parametrize(
    ("file", "pattern", "by", "counts"),
    [
        ("kernels/csrc/element.h", r"\breturn ", "return 1 + ", True),
        ("models/networks/layers.py", r"offset = 1\.0", "offset = 2.0", True),
        ("kernels/backends/gpu/tiles.py", r"= (\d+)\n", r"= 1\1\n", True),
        ("models/networks/presets.py", r"\Z", "\nOTHERS = 1\n", False),
        ("experiments/storage/checkpoints.py", r"\Z", "\nOTHERS = 1\n", False),
    ],
)
def test_an_edit_counts_if_it_can_change_numbers(copied: Path, file: str, pattern: str, by: str, counts: bool) -> None:
    edit(copied, file, pattern, by)
    assert changed(running(), running(copied)) == [file] * counts


PYTHON = [file for file in running() if file.endswith(".py")]


@pytest.mark.parametrize("version", ["python3.12", "python3.13", "python3.14"])
def test_other_versions_of_python_find_the_same_digest(version: str) -> None:
    program = shutil.which(version)
    script = f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r})\nfrom fewbits.experiments.identity import *\n"
    script += f"print(*[python_digest(open(file, 'rb').read()) for file in {[str(ROOT / file) for file in PYTHON]}])"
    # Version managers may provide a program for a version that is not installed; it only prints an error.
    if program is None or subprocess.run([program, "-c", ""], capture_output=True).returncode:
        pytest.skip(f"{version} is not installed here")
    done = subprocess.run([program, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [python_digest((ROOT / file).read_bytes()) for file in PYTHON]


# The record
