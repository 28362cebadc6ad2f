"""Run the `fewbits` command line: find the command, pass it the other arguments, and print errors as one line.

Each command is a row of `GROUPS`: its name, and the module whose `main(argv)` parses the options and returns the exit
status. The module is imported only when its command runs, so that the command line starts in a fraction of a second.

Exit statuses that all commands have:
2    wrong input or a missing extra: a `ValueError`, printed as one line on stderr (`python -X dev -m fewbits.cli …`
     prints its traceback)
1    an error of the operating system, for example a full disk, or another missing Python module
130  Ctrl-C
141  the output is a pipe, and the process that reads it has closed it
"""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from itertools import takewhile
from typing import NamedTuple

from fewbits.common.process import extras
from fewbits.common.terminal import notice
from fewbits.version import __version__

COMPLETE = {"report": "report", "claims": "report", "compare": "report", "sweep": "sweep"}  # command → what it needs


class Command(NamedTuple):
    """One command of the command line, for example `fewbits bench train`."""

    name: str
    summary: str  # its line in `fewbits --help`
    example: str  # arguments for an example in the help
    module: str = ""  # the module that implements it, below fewbits; "": commands.NAME
    function: str = "main"  # the function of the module that gets the arguments

    @property
    def words(self) -> tuple[str, ...]:
        return tuple(self.name.split())

    def run(self, argv: Sequence[str]) -> int:
        if self.name in ("report", "claims"):
            # OpenMP's threads would otherwise spin while they wait, which takes the cores from a running sweep.
            os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        with extras(COMPLETE.get(self.name, "")):
            module = import_module(f"fewbits.{self.module or f'commands.{self.name}'}")
            status: int = getattr(module, self.function)(argv)
        return status


GROUPS = {
    "run": (
        Command("train", "train one trial, or with --multirun a grid of trials", "recipe=nvfp4 scale=cpu"),
        Command("sweep", "run the missing trials of a study or of your own sweep file", "study=mor --dry-run"),
        Command("status", "list the states of a sweep's trials, or print the end of a trial's log", "study=mor"),
        Command("stop", "stop running trials at a checkpoint", "RUN", "sweeps.live.commands", "stop"),
        Command("explain", "show why two trials differ, or why a result is stale, field by field", "RUN RUN"),
        Command(
            "prune", "list what can be removed from a store, and remove it", "--delete", "sweeps.live.commands", "prune"
        ),
    ),
    "read": (
        Command("report", "write a study's report: its tables, figures and claims", "study=mor scale=cpu"),
        Command("claims", "list a study's claims with their verdicts", "study=mor scale=cpu"),
        Command("probe", "compare recipes at a checkpoint: loss, gradients, operands", "RUN bf16 mor/block nvfp4"),
        Command("compare", "compare losses of runs, of a sweep's arms, or of other programs' logs", "RUN RUN"),
        Command("evaluate", "evaluate finished runs: loss, other text, tasks of lm-eval", "RUN loss --text notes.txt"),
    ),
    "share": (
        Command("list", "list recipes, models, scales, studies and other valid names", "recipes nvfp4"),
        Command(
            "import", "turn a published model into a run, to branch from it", "smollm2", "commands.import_checkpoint"
        ),
        Command("export", "write a run's model as a folder that transformers loads", "RUN --format huggingface"),
        Command(
            "conform", "compare a quantizing function with another project's", "mine.py:quantize --dialect te-nvfp4"
        ),
        Command("verify", "check a packed checkpoint: scales, kept layers, error", "FOLDER --source BF16-FOLDER"),
        Command("number", "show how a format, or each, rounds and encodes a number", "-0.3 e4m3"),
    ),
    "care": (
        Command("doctor", "show this machine's hardware and the kernels in use", "--json"),
        Command("bench kernels", "measure the kernels and other libraries", "--no-peers", "commands.bench", "kernels"),
        Command("bench train", "measure training steps, against plain BF16", "--steps 5", "commands.bench", "train"),
        Command("data", "download and tokenize web text: OpenWebText, C4", "openwebtext"),
        Command("ui", "show the store's trials in MLflow, in the browser", "--port 5000"),
    ),
}
COMMANDS = tuple(command for commands in GROUPS.values() for command in commands)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (None: the arguments of this process) and return the exit status."""
    for name in ("stdout", "stderr"):  # closed by the parent process: the next opened file would get its descriptor
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    try:
        try:
            return _dispatch(tuple(sys.argv[1:] if argv is None else argv))
        finally:
            sys.stdout.flush()  # here, since it raises the BrokenPipeError handled below if the pipe is closed
    except KeyboardInterrupt:
        notice("interrupted")
        return 130
    except BrokenPipeError:
        # The interpreter flushes stdout again when it exits; redirect it to /dev/null to avoid a second error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        status, text = _explained(error)
        if sys.flags.dev_mode or not status:
            raise
        notice(text)
        return status


def _explained(error: Exception) -> tuple[int, str]:
    """Return the exit status for an error and the text to print; the status is 0 if the error is a bug."""
    if isinstance(error, ValueError):
        return 2, str(error)
    if isinstance(error, RuntimeError) and "home directory" in str(error):  # from Path.expanduser
        return 2, "a path begins with ~, but there is no such home directory: set HOME, or name another path"
    if isinstance(error, OSError) and error.errno is not None:
        return 1, f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)
    if isinstance(error, ModuleNotFoundError) and error.name and error.name.partition(".")[0] != "fewbits":
        advice = "run fewbits, and on a Ray cluster `ray start`, in the Python environment that has its dependencies"
        return 1, f"{sys.executable} has no module {error.name!r}: {advice}"
    return 0, ""


def _dispatch(argv: tuple[str, ...]) -> int:
    for command in COMMANDS:
        if argv[: len(command.words)] == command.words:
            return command.run(argv[len(command.words) :])
    if argv == ("--version",):
        print(f"fewbits {__version__}")
        return 0
    words = tuple(takewhile(lambda word: not word.startswith("-"), argv))
    matching = [command for command in COMMANDS if command.words[: len(words)] == words]
    if matching and (not argv or argv[len(words) :] in (("-h",), ("--help",))):
        print(_help(matching))
        return 0
    group = [command for command in COMMANDS if command.words[:1] == words[:1]]  # all commands `bench …`
    names = ", ".join(command.name for command in group or COMMANDS)
    raise ValueError(f"unknown command {' '.join(words[: 2 if group else 1] or argv[:1])!r}; choose from: {names}")


def _help(shown: list[Command]) -> str:
    lines = ["usage: fewbits [--help] [--version] COMMAND ...", "", "Reproduce low-precision pre-training papers."]
    width = max(len(command.name) for command in shown)
    for title, commands in GROUPS.items():
        rows = [f"  {command.name:{width}}  {command.summary}" for command in commands if command in shown]
        lines += ["", f"{title}:", *rows] if rows else []
    example = f"Example: fewbits {shown[0].name} {shown[0].example}"
    return "\n".join([*lines, "", f"fewbits COMMAND --help shows its options. {example}"])


if __name__ == "__main__":
    sys.exit(main())
