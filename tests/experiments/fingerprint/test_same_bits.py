"""Test `same_bits`: two versions are declared equal only if trials give equal bytes and execute changed statements."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from fewbits.experiments import same_bits
from fewbits.experiments.fingerprint.changed_lines import Statement, only_in_first, read_sources, untried
from fewbits.experiments.fingerprint.commits import unpack
from fewbits.experiments.fingerprint.numerics import ROOT
from fewbits.experiments.same_bits import BACKENDS, Version, prove
from fewbits.experiments.storage import checkpoints
from tests.effort import DEEP
from tests.experiments.trial_inputs import TINY
from tests.forked_python import run_python

NARROW = tuple(f"{key}={value}" for key, value in TINY.items() if key.startswith("model."))
SHORT = ("training.length=32", "training.batch=2", "training.micro_batch=1", "evaluation.windows=1")
TRIALS = {"one": ("recipe=mor/tensor", *NARROW, *SHORT)}
FEW_CALLS = """
from fewbits.experiments.fingerprint import kernel_calls
kernel_calls.FORMATS, kernel_calls.BLOCKS = ("e4m3", "bf16"), ("tensor", "1x16")
kernel_calls.SCALINGS, kernel_calls.OPTIONS = ("gam", "nvfp4"), ("", ":stochastic:rht16:signs=each")
kernel_calls.main()
"""
MODULE = """
SIZE = 16

class Layer:
    limit: int = 8

    def run(self, x, scale=1.0):
        if x > self.limit:
            raise ValueError("too large")
        if x < 0:
            return -x * scale
        return x * scale
"""


# Changed statements that trials executed or did not execute


@pytest.fixture
def compared(tmp_path: Path) -> Callable[..., list[str]]:
    """Return a function that compares two texts of a file, and lists the changed statements that no trial executed.

    Each is listed as FILE:LINE, with its line in the new text. executed: the lines of the new text that trials
    executed. executable: for C++, the lines that have compiled code.
    """

    def compare(old: str, new: str, executed: list[int], file: str = "a.py", executable: object = None) -> list[str]:
        versions = []
        for name, text in (("old", old), ("new", new)):
            (tmp_path / name).mkdir()
            (tmp_path / name / file).write_text(text)
            versions.append(read_sources([file], tmp_path / name))
        known = {file: executed} if executable is None else {file: executable}
        left = untried(versions[1], versions[0], {file: executed}, known)  # type: ignore[arg-type]
        return [statement.place for statement in left]

    return compare


def edited(before: str, after: str) -> str:
    assert before in MODULE
    return MODULE.replace(before, after)


@pytest.mark.parametrize(
    ("new", "executed", "left"),
    [
        (edited("return x * scale", "y = x * scale\n        return y"), [12, 13], []),
        (edited("return x * scale", "y = x * scale\n        return y"), [12], ["a.py:13"]),
        (edited("-x * scale", "-(x * scale)"), [12], ["a.py:11"]),
        (edited("-x * scale", "-(x * scale)"), [11], []),
        (edited('"too large"', '"x is too large"'), [], []),
        # The changed condition, the statement inside it, and the statement after it.
        (edited("x < 0", "x <= 0"), [], ["a.py:10", "a.py:11", "a.py:12"]),
        (edited("SIZE = 16", "_SIZE = 16"), [], []),
        (edited("SIZE = 16", "SIZE = 32"), [2], ["a.py:2"]),
        (edited("scale=1.0", "scale=2.0"), [7], ["a.py:7"]),
        (edited("limit: int = 8", "limit: int = 9"), [5], ["a.py:5"]),
        (edited("SIZE = 16\n\n", "\n# moved\n") + "\nSIZE = 16\n", [], []),
    ],
    ids=[
        *("tried", "half tried", "a branch not taken", "a branch taken", "message", "condition", "renamed constant"),
        *("changed constant", "changed default", "changed attribute", "moved"),
    ],
)
def test_a_changed_statement_counts_as_tried_when_it_ran(
    compared: Callable[..., list[str]], new: str, executed: list[int], left: list[str]
) -> None:
    assert compared(MODULE, new, executed) == left


# Pairs of texts with a changed declaration, which counts as untried even if its lines were executed.
RAN_OR_NOT = [
    ("from fewbits.a import up as r", "from fewbits.a import down as r"),
    ("from math import ceil as r", "from math import floor as r"),
    ("import torch\nR = torch.ceil", "import torch\nR = torch.floor"),
    ("def f(x, *, eps=1e-5): return x", "def f(x, *, eps=1e-3): return x"),
    ("def f(x, up=True): return x", "def f(x, up=False): return x"),
    ("@wrap(True)\ndef f(x): return x", "@wrap(False)\ndef f(x): return x"),
    ("A = True", "A = False"),
    ("A = 1e-3", "A = -1e-3"),
    ("A = 2**3", "A = 2*3"),
    ("A = 1.5\nB = 2.5", "A = 2.5\nB = 1.5"),
    ("T = {1: lambda x: x + 1}", "T = {1: lambda x: x - 1}"),
    ("class A(int): pass", "class A(float): pass"),
    ("def up(x): return x\ndef down(x): return -x\nR = up", "def up(x): return x\ndef down(x): return -x\nR = down"),
]


@pytest.mark.parametrize(("old", "new"), RAN_OR_NOT, ids=[old for old, _ in RAN_OR_NOT])
def test_a_changed_declaration_is_untried_whatever_ran(compared: Callable[..., list[str]], old: str, new: str) -> None:
    assert compared(old, new, list(range(9)))


# Pairs of texts in which statements of functions were swapped, moved or removed.
UNLESS_IT_RAN = [
    ("def f(x):\n    x = x + 1\n    x = x * 2\n    return x", "def f(x):\n    x = x * 2\n    x = x + 1\n    return x"),
    (
        "def f(x):\n    if x:\n        return 1\n    else:\n        return 2",
        "def f(x):\n    if x:\n        return 2\n    else:\n        return 1",
    ),
    ("def up(x):\n    return x\ndef down(x):\n    return -x", "def up(x):\n    return -x\ndef down(x):\n    return x"),
    (
        "def f(x):\n    match x:\n        case 1:\n            return 1",
        "def f(x):\n    match x:\n        case 5:\n            return 1",
    ),
    ("def f(x):\n    if x < 0:\n        raise ValueError\n    return x", "def f(x):\n    return x"),
]


@pytest.mark.parametrize(("old", "new"), UNLESS_IT_RAN)
def test_what_changed_its_place_is_untried_unless_it_ran(
    compared: Callable[..., list[str]], old: str, new: str
) -> None:
    assert compared(old, new, [])


def test_every_line_of_a_changed_statement_has_to_run(compared: Callable[..., list[str]]) -> None:
    old = "def f(x):\n    return (\n        x + 1\n        if x\n        else x\n    )"
    assert compared(old, old.replace("else x", "else x - 1"), [1, 2, 3, 4]) == ["a.py:2"]


def test_a_renamed_function_is_no_change_of_what_calls_it(compared: Callable[..., list[str]]) -> None:
    old = "def up(x): return x\nTABLE = {1: up}"
    assert compared(old, old.replace("up", "raise_"), [1, 2]) == []


CPP = "float f(float x) {\n    if (x > 2.0f)\n        return 2.0f;\n    return x;\n}\nconstexpr int size = 8;\n"


@pytest.mark.parametrize(
    ("new", "left"),
    [
        (CPP.replace("return x;", "return x + 0.0f;"), []),
        (CPP.replace("return 2.0f;", "return 3.0f;"), ["a.h:3"]),
        (CPP.replace("size = 8", "size = 9"), ["a.h:6"]),
        (CPP.replace("int size = 8", "int width = 8"), []),
        (CPP.replace("size = 8", "size = -8"), ["a.h:6"]),
        (CPP.replace("    return x;\n", "    return x\n    +\n    x;\n"), ["a.h:5", "a.h:6"]),
        ("// first\n" + CPP, []),
    ],
    ids=["ran", "did not run", "changed constant", "renamed constant", "changed sign", "operator", "comment"],
)
def test_a_changed_line_of_cpp_counts_as_tried_when_it_ran(
    compared: Callable[..., list[str]], new: str, left: list[str]
) -> None:
    assert compared(CPP, new, [1, 2, 4], file="a.h", executable=[1, 2, 3, 4]) == left


def test_moved_statements_are_no_change() -> None:
    one, two = (Statement(file, line, line, "x = 1") for file, line in (("a.py", 1), ("b.py", 9)))
    assert only_in_first([two], [one]) == []
    assert only_in_first([two, two], [one]) == [two]


# Whole versions


class Forked(Version):
    """A version whose processes are forked from a process that has already imported torch, pandas and Hydra."""

    def _python(self, *arguments: str, stdin: str = "", **variables: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(self.root / "src"), **variables}
        done = run_python(arguments, folder=self.root, environment=environment, stdin=stdin)
        assert done.returncode == 0, done.stderr
        return done.stdout


class Unchanged(Forked):
    """A version that calls its kernels only once for all tests of this file."""

    @cached_property
    def digests(self) -> dict[str, dict[str, str]]:
        return {backend: super(Unchanged, self).call_kernels(backend) for backend in BACKENDS}

    def call_kernels(self, backend: str) -> dict[str, str]:
        return self.digests[backend]


@pytest.fixture(scope="module")
def few_calls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let same_bits call the kernels with only a few quantizers; with DEEP, with all of them."""
    with pytest.MonkeyPatch.context() as patch:
        if not DEEP:
            script = tmp_path_factory.mktemp("calls") / "few_calls.py"
            script.write_text(FEW_CALLS)
            patch.setattr(same_bits, "KERNEL_CALLS", script)
        yield


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory, few_calls: None) -> Version:
    version = copied(tmp_path_factory.mktemp("old"))
    return Unchanged(version.root, version.work)


def copied(folder: Path, kind: type[Version] = Forked) -> Version:
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    for name in ("kernels", "models", "experiments", "src"):
        shutil.copytree(ROOT / name, folder / "root" / name, symlinks=True, ignore=ignored)
    (folder / "root/experiments/fingerprint/equal_bits.json").write_text("[]")
    return kind(folder / "root", folder / "work")


def replace(version: Version, file: str, before: str, after: str) -> None:
    path = version.root / file
    text = path.read_text("utf-8")
    assert before in text
    path.write_text(text.replace(before, after), "utf-8")


def declared(version: Version) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((version.root / "experiments/fingerprint/equal_bits.json").read_text())
    return found


def test_a_refactoring_is_declared_equal_after_a_review_if_no_trial_executed_a_part_of_it(
    old: Version, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    new = copied(tmp_path)
    layers = "models/networks/layers.py"
    replace(new, layers, "steps = theta ** (", "steps = float(theta) ** (")
    assert prove(old, new, "abc", TRIALS) == 0
    (pair,) = declared(new)
    assert (pair["old"], pair["new"]) == (old.description["fingerprint"], new.description["fingerprint"])
    assert pair["old"] != pair["new"]
    assert (pair["device"], pair["instruction_set"]) == ("cpu", new.description["instruction_set"])
    assert (pair["untried"], pair["reviewed"]) == (0, "")
    assert "fingerprint/equal_bits.json" in capsys.readouterr().out

    # No trial executes the statement that is edited next, so the results of the previous version's trials are reused.
    edited = Forked(new.root, tmp_path / "edited")
    shutil.copytree(new.work, edited.work)
    replace(edited, layers, "super().__init__(width, eps, bias=False)", "super().__init__(width, eps, False)")
    assert prove(old, edited, "abc", TRIALS) == 1
    assert declared(edited) == [pair]
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines() if f" {layers}:" in line] == ["old", "new"]
    monkeypatch.delattr(same_bits, "compare")  # the second call must use the stored comparison
    assert prove(old, edited, "abc", TRIALS, reviewed="the same argument") == 0
    _, reviewed = declared(edited)
    assert reviewed["new"] == edited.description["fingerprint"] != pair["new"]
    assert (reviewed["untried"], reviewed["reviewed"]) == (2, "the same argument")  # one statement in each version


def test_a_changed_rounding_is_refused(old: Version, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = copied(tmp_path)
    replace(new, "kernels/reference/elements.py", "steps.round()", "steps.floor()")
    assert prove(old, new, "abc", TRIALS) == 1
    assert declared(new) == []
    printed = capsys.readouterr().out
    assert "reference" in printed
    assert "metrics.parquet" in printed


def test_equal_sources_need_no_proof(old: Version, tmp_path: Path) -> None:
    new = copied(tmp_path, Version)
    replace(new, "models/networks/layers.py", "class LayerNorm1p", "# a remark\nclass LayerNorm1p")
    assert prove(old, new, "abc", TRIALS) == 0
    assert declared(new) == []


def test_a_version_without_the_command_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no-such-commit"):
        unpack("no-such-commit", tmp_path / "old")


def kept_run(runs: Path, result: dict[str, float], weight: float = 1.0) -> None:
    """Write the files of a finished trial that `differing_files` reads. result: further entries of result.json."""
    folder = runs / "run-0"
    checkpoint = folder / "checkpoints" / "step-00000002"
    checkpoint.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps({"id": str(runs), "step": 2} | result))
    for name in ("metrics.parquet", "numerics.parquet"):
        (folder / name).write_bytes(b"table")
    (checkpoint / checkpoints.TENSORS).write_bytes(str(weight).encode())


@pytest.mark.parametrize(
    ("result", "weight", "differs"),
    [
        ({"loss": 1.0}, 1.0, []),
        ({"loss": 1.0, "loss_unquantized": 2.0}, 1.0, []),
        ({"loss": 1.5}, 1.0, ["cpu/bf16: result.json"]),
        ({"other": 1.0}, 1.0, ["cpu/bf16: result.json"]),
        ({"loss": 1.0}, 2.0, ["cpu/bf16: tensors"]),
    ],
)
def test_a_result_may_gain_numbers_but_not_change_any(
    result: dict[str, float], weight: float, differs: list[str], tmp_path: Path
) -> None:
    kept_run(tmp_path / "old" / "cpu" / "bf16", {"loss": 1.0})
    kept_run(tmp_path / "new" / "cpu" / "bf16", result, weight)
    assert same_bits.differing_files(tmp_path / "old", tmp_path / "new") == differs


@pytest.mark.parametrize("only", ["old", "new"])
def test_a_trial_that_only_one_version_has_differs(only: str, tmp_path: Path) -> None:
    kept_run(tmp_path / only / "cpu" / "bf16", {"loss": 1.0})
    differing = same_bits.differing_files(tmp_path / "old", tmp_path / "new")
    assert differing == [f"cpu/bf16: {name}" for name in same_bits.COMPARED]
