"""Run Python programs in processes forked from a process that has already imported large packages such as torch.

Each program gets its own arguments, folder, environment variables and streams, as if a new Python had been started, but
it does not need seconds to import torch. Use it in tests that do not test the start of Python itself.
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TEMPLATE = """
import json, os, runpy, sys, traceback


def run(arguments, folder, environment, streams):
    for number, path in enumerate(streams):
        os.dup2(os.open(path, os.O_RDWR), number)
    sys.stdin, sys.stdout, sys.stderr = open(0, closefd=False), open(1, "w", closefd=False), open(2, "w", closefd=False)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    first, *rest = arguments
    sys.path[:1] = ["" if first == "-c" else folder if first == "-m" else os.path.dirname(first)]
    sys.path[1:1] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    elif first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(first, run_name="__main__")


def start(program):
    if child := os.fork():
        return child
    status = 1
    try:
        run(*program)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


for line in sys.stdin:
    children = [start(program) for program in json.loads(line)]
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]), flush=True)
"""


@dataclass(frozen=True)
class Program:
    """The command `python ARGUMENTS`, run in this folder with only these environment variables."""

    arguments: Sequence[str]
    folder: Path
    environment: Mapping[str, str]
    stdin: str = ""


class WarmPython:
    """A process that has imported modules, and from which programs are forked; it ends when this process ends."""

    def __init__(self, imports: str, environment: Mapping[str, str], folder: Path | None = None) -> None:
        """Start the process in `folder` and execute the statements `imports` in it. folder None: the current folder."""
        command = [sys.executable, "-c", imports + TEMPLATE]
        self.process = subprocess.Popen(
            command, env=environment, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, programs: Sequence[Program]) -> "list[subprocess.CompletedProcess[str]]":
        """Run the programs at the same time; return exit status and output of each, in the order of `programs`."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with tempfile.TemporaryDirectory() as name:
            streams = [
                [Path(name, f"{stream}-{number}") for stream in ("stdin", "stdout", "stderr")]
                for number in range(len(programs))
            ]
            requests = []
            for one, (stdin, *outputs) in zip(programs, streams, strict=True):
                stdin.write_text(one.stdin)
                for path in outputs:
                    path.touch()
                paths = [str(path) for path in (stdin, *outputs)]
                requests.append([list(one.arguments), str(one.folder), dict(one.environment), paths])
            self.process.stdin.write(json.dumps(requests) + "\n")
            self.process.stdin.flush()
            statuses = json.loads(self.process.stdout.readline())
            return [
                subprocess.CompletedProcess(one.arguments, status, out.read_text(), err.read_text())
                for one, status, (_, out, err) in zip(programs, statuses, streams, strict=True)
            ]


@functools.cache
def _without_our_modules() -> WarmPython:
    """Return a process that has imported large packages, but no module of fewbits.

    Programs import fewbits themselves, since their PYTHONPATH may name another version of fewbits.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return WarmPython("import hydra, numpy, omegaconf, pandas, pyarrow.parquet, torch, yaml", environment)


def run_python(
    arguments: Sequence[str], *, folder: Path, environment: Mapping[str, str], stdin: str = ""
) -> "subprocess.CompletedProcess[str]":
    """Run `python ARGUMENTS` in this folder with only these environment variables; return its status and output."""
    (done,) = _without_our_modules().run([Program(arguments, folder, environment, stdin)])
    return done
