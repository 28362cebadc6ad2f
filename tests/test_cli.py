"""Test the command line: it starts fast, has help, and reports errors in one line."""

import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from fewbits import __version__, cli
from fewbits.commands import doctor

COMMAND = [sys.executable, "-m", "fewbits.cli"]


def fewbits(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key != "FEWBITS_BACKEND"} | environment
    return subprocess.run([*COMMAND, *words], capture_output=True, text=True, env=env, check=False)


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_help_has_a_row_for_every_command_in_four_groups(words: list[str]) -> None:
    answer = fewbits(*words)
    assert answer.returncode == 0
    shown = answer.stdout.splitlines()
    assert [line for line in shown if line.endswith(":") and " " not in line] == ["run:", "read:", "share:", "care:"]
    rows = [line for line in shown if line.startswith("  ")]
    assert len(rows) <= 22
    for row, command in zip(rows, cli.COMMANDS, strict=True):
        assert row.split() == f"{command.name} {command.summary}".split()
    assert all(len(line) <= 120 for line in shown)


@pytest.mark.parametrize("command", cli.COMMANDS, ids=lambda command: command.name)
def test_help_of_a_command_has_an_example(command: cli.Command, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([*command.words, "--help"])
    assert not stop.value.code
    shown = capsys.readouterr().out
    assert f"fewbits {command.name}" in shown
    assert "example" in shown.lower()


def test_version() -> None:
    assert fewbits("--version").stdout == f"fewbits {__version__}\n"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["trian"], ["trian", "doctor", "bench kernels"]),
        (["bench", "kernel"], ["bench kernel", "bench kernels"]),
        (["doctor", "--jsn"], ["doctor", "--jsn"]),
        (["doctor", "--tokens", "64"], ["doctor", "--tokens", "--warm"]),
        (["doctor", "--warm", "nvfp4", "llama2-nano", "--tokens", "-5"], ["--tokens", "'-5'", "≥ 1"]),
        (["bench", "kernels", "--no-such-option"], ["--no-such-option"]),
    ],
)
def test_wrong_input_is_one_line_and_status_2(words: list[str], named: list[str]) -> None:
    answer = fewbits(*words)
    assert answer.returncode == 2
    assert answer.stdout == ""
    assert answer.stderr.startswith("fewbits: ")
    assert answer.stderr.count("\n") == 1
    assert all(name in answer.stderr for name in named)


@pytest.fixture
def command_that(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], int]], None]:
    """Return a function `install(run)` that makes the command `fewbits made-up` call `run`."""

    def install(run: Callable[[], int]) -> None:
        module = ModuleType("made_up")
        module.main = lambda argv: run()  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "fewbits.made_up", module)
        monkeypatch.setattr(cli, "COMMANDS", (cli.Command("made-up", "made up", "", "made_up"),))

    return install


@pytest.mark.parametrize(
    ("error", "status", "shown"),
    [
        (ValueError("unknown block '3y3': valid are\n  tensor"), 2, "unknown block '3y3': valid are tensor"),
        (OSError(errno.ENOSPC, "No space left on device", "runs/plans"), 1, "runs/plans: No space left on device"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_an_error_is_one_line_and_a_status(
    error: BaseException,
    status: int,
    shown: str,
    command_that: Callable[[Callable[[], int]], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run() -> int:
        raise error

    command_that(run)
    assert cli.main(["made-up"]) == status
    assert capsys.readouterr().err == f"fewbits: {shown}\n"


def test_a_module_that_is_not_there_is_one_line_and_status_1(tmp_path: Path) -> None:
    """Check that the error in a Python without fewbits' dependencies is one line with advice.

    On a cluster this happens if `ray start` was run in another Python environment.
    """
    command = [sys.executable, "-S", "-m", "fewbits.cli", "sweep", "study=mor", "--dry-run"]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(cli.__file__).parents[1])}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith(f"fewbits: {sys.executable} has no module '")
    assert "`ray start`" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_bug_keeps_its_traceback(command_that: Callable[[Callable[[], int]], None]) -> None:
    def run() -> int:
        raise RuntimeError("a bug")

    command_that(run)
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["made-up"])


@pytest.mark.parametrize("words", [["--help"], ["doctor"], ["doctor", "--help"]])
def test_a_pipe_whose_reader_has_gone_is_silent(words: list[str]) -> None:
    env = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as gone:
        answer = subprocess.run(
            [*COMMAND, *words], stdout=gone, stderr=subprocess.PIPE, text=True, env=env, check=False
        )
    assert answer.returncode == 141
    assert answer.stderr == ""


HEAVY = {"torch", "pandas", "cupy", "ray", "mlflow", "hydra"}


def test_help_of_a_command_imports_no_heavy_library() -> None:
    """No command with `--help` imports a library that is slow to import, such as torch (see HEAVY).

    One process runs all commands with --help, and prints after each the libraries of HEAVY that are imported by then.
    """
    probe = f"""
import sys
from fewbits import cli
for command in cli.COMMANDS:
    try:
        cli.main([*command.words, "--help"])
    except SystemExit:
        print(command.name, *({HEAVY} & sys.modules.keys()), file=sys.stderr)
"""
    answer = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    assert answer.stderr.splitlines() == [command.name for command in cli.COMMANDS]


# doctor


def test_doctor_says_the_same_in_text_and_json() -> None:
    text, answer = fewbits("doctor"), json.loads(fewbits("doctor", "--json").stdout)
    assert answer["well"] == (text.returncode == 0)
    assert set(answer["facts"]) >= {"fewbits", "cpu"}
    lines = [line.split(maxsplit=2) for line in text.stdout.splitlines()]
    for part, facts in answer["facts"].items():
        for name, value in facts.items():
            assert ([part, name, value] in lines) == (value is not None)


@pytest.mark.parametrize("forced", ["", "reference", "cpu", "cuda", "fast"])
def test_doctor_names_the_backend_that_the_kernels_choose(monkeypatch: pytest.MonkeyPatch, forced: str) -> None:
    from fewbits.kernels.backends.choice import backend_for

    monkeypatch.setenv("FEWBITS_BACKEND", forced)
    facts, _, problems = doctor.examine()
    for problem in problems:
        assert problem.startswith(f"FEWBITS_BACKEND={forced}")
        with pytest.raises(ValueError, match=f"FEWBITS_BACKEND={forced}"):
            backend_for("cpu")
    if not problems:
        assert facts["cpu"]["backend"] == backend_for("cpu").name
    assert bool(problems) == (forced == "fast" or (forced == "cuda" and "cuda" not in facts))


@pytest.mark.parametrize(
    ("script", "note"),
    [
        (None, "g\\+\\+ is not installed"),
        ("echo 'no include path in which to search for algorithm'; exit 1", "no include path in which to search"),
    ],
)
def test_without_a_working_compiler_doctor_says_reference_and_why(
    script: str | None, note: str, tmp_path: Path
) -> None:
    """A compiler can be missing, or exist but not work, for example a g++ without headers."""
    compiler = tmp_path / "g++"
    if script:
        compiler.write_text(f"#!/bin/sh\n{script}\n")
        compiler.chmod(0o755)
    answer = fewbits("doctor", CXX=str(compiler), FEWBITS_CACHE=str(tmp_path))
    assert re.search(r"^cpu +backend +reference$", answer.stdout, re.MULTILINE)
    assert re.search(rf"^note: .*{note}", answer.stdout, re.MULTILINE)
    assert answer.returncode == 0


def test_doctor_test_runs_the_self_test_of_the_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--test"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("pass  ") for line in lines)
    assert not any(line.startswith("FAIL") for line in lines)


def test_a_failed_self_test_is_status_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    selftest = import_module("fewbits.kernels.selftest")
    results = [("round trip", True, ""), ("stochastic mean", False, "0.0 instead of 0.3")]
    monkeypatch.setattr(selftest, "run", lambda device: results)
    assert cli.main(["doctor", "--test"]) == 1
    assert "FAIL  stochastic mean  0.0 instead of 0.3" in capsys.readouterr().out
    assert cli.main(["doctor", "--test", "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["well"] is False
    assert answer["self_test"][1] == {"name": "stochastic mean", "passed": False, "detail": "0.0 instead of 0.3"}
