"""Test which edits of the sources change the ids of trials, and that numerics.txt records the running sources."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from fewbits import cli
from fewbits.experiments import numerics
from fewbits.experiments.numerics import (
    BUT,
    NOT_COMPUTING,
    ROOT,
    changed,
    cpp_digest,
    python_digest,
    record,
    recorded,
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


def test_strings_elsewhere_than_in_messages_count() -> None:
    assert python_digest('KIND = "a"') != python_digest('KIND = "b"')
    assert python_digest('f("a")') != python_digest('f("b")')
    assert python_digest('{**a, "b": c}') != python_digest('{"b": a, **c}')


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


def test_every_name_of_files_that_do_not_compute_is_that_of_a_file() -> None:
    for name in (*NOT_COMPUTING, *BUT):
        assert list(ROOT.glob(f"{name}*")) or (ROOT / name).is_dir(), name


def test_the_files_that_compute_include_those_that_are_imported_inside_functions_and_all_kernels() -> None:
    files = set(running())
    assert {"kernels/backends/cpu.py", "kernels/backends/gpu/cuda.py", "kernels/csrc/quantize.cu"} <= files
    assert {"models/networks/layers.py", "experiments/optimization/optimizers.py", f"{BUT[0]}.py"} <= files
    assert {*(f"{name.replace('.', '/')}.py" for name in numerics.START), "experiments/probes/variants.py"} <= files
    assert not files & {"experiments/data/tokenizing.py", "experiments/config.py", "models/networks/presets.py"}


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
    script = f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r})\nfrom fewbits.experiments.numerics import *\n"
    script += f"print(*[python_digest(open(file, 'rb').read()) for file in {[str(ROOT / file) for file in PYTHON]}])"
    # Version managers may provide a program for a version that is not installed; it only prints an error.
    if program is None or subprocess.run([program, "-c", ""], capture_output=True).returncode:
        pytest.skip(f"{version} is not installed here")
    done = subprocess.run([program, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [python_digest((ROOT / file).read_bytes()) for file in PYTHON]


# The record


def git(folder: Path, *arguments: str) -> str:
    settings = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main")
    done = subprocess.run(["git", *settings, *arguments], cwd=folder, capture_output=True, text=True)
    assert not done.returncode, done.stdout + done.stderr
    return done.stdout


def test_branches_that_touch_different_files_merge(tmp_path: Path) -> None:
    """Check the closest case: two files whose entries follow each other."""
    first, second, *_ = before = dict(running())
    file = tmp_path / "numerics.txt"
    record(2, before, file)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "base")
    for branch, edited in (("one", first), ("two", second)):
        git(tmp_path, "checkout", "-qb", branch, "main")
        record(2, before | {edited: branch * 5}, file)
        git(tmp_path, "commit", "-qam", branch)
    git(tmp_path, "merge", "-q", "one", "-m", "merge")
    recorded.cache_clear()
    assert recorded(file) == (2, before | {first: "one" * 5, second: "two" * 5})


def test_edited_sources_have_other_ids_which_is_said_once_and_the_old_ids_after_the_edit_is_undone(
    copied: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before_edit = running(copied)
    monkeypatch.setattr(numerics, "recorded", lambda: (2, before_edit))
    monkeypatch.setattr(numerics, "running", lambda: running.__wrapped__(copied))

    def ids() -> tuple[set[str], str]:
        numerics.announce.cache_clear()
        for _ in range(2):
            assert cli.main(["train", "data=synthetic", f"runtime.cache={cache}", "runtime.device=cpu", "--id"]) == 0
        printed = capsys.readouterr()
        return set(printed.out.split()), printed.err

    before = ids()
    assert before[1] == ""
    original = (copied / "models/observer.py").read_text("utf-8")
    edit(copied, "models/observer.py", r"\Z", "\nOTHERS = 1\n")
    edited, printed = ids()
    assert edited.isdisjoint(before[0])
    assert len(edited) == 1
    assert printed.count("\n") == 1
    assert "models/observer.py" in printed
    (copied / "models/observer.py").write_text(original, "utf-8")
    assert ids() == before
