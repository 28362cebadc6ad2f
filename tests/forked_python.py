"""Run Python programs in processes that are forked from one that has imported torch and pandas, but no module of ours.

A program finds the modules of whatever version its PYTHONPATH names, as if Python had been started for it, and saves
the seconds of importing the large packages. Use it where the start of Python is not what is tested.
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

TEMPLATE = """
import json, os, runpy, sys, traceback
import hydra, numpy, omegaconf, pandas, pyarrow.parquet, torch, yaml


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


for line in sys.stdin:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            run(*json.loads(line))
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@functools.cache
def _template() -> "subprocess.Popen[str]":
    """Return the process that programs are forked from; it ends with this one, which closes its stdin."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", TEMPLATE]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def run_python(
    arguments: Sequence[str], *, folder: Path, environment: Mapping[str, str], stdin: str = ""
) -> "subprocess.CompletedProcess[str]":
    """Run `python ARGUMENTS` in this folder with these environment variables alone; return its status and output."""
    template = _template()
    assert template.stdin is not None
    assert template.stdout is not None
    with tempfile.TemporaryDirectory() as name:
        streams = [Path(name, stream) for stream in ("stdin", "stdout", "stderr")]
        for path, text in zip(streams, (stdin, "", ""), strict=True):
            path.write_text(text)
        request = [list(arguments), str(folder), dict(environment), [str(path) for path in streams]]
        template.stdin.write(json.dumps(request) + "\n")
        template.stdin.flush()
        status = int(template.stdout.readline())
        _, out, err = (path.read_text() for path in streams)
    return subprocess.CompletedProcess(list(arguments), status, out, err)
