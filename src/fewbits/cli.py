"""Run the `fewbits` command line: find the command, pass it the other arguments, and print errors as one line.

Each command is a row of `COMMANDS`: its name, and the module whose `main(argv)` parses the options and returns the exit
status. The module is imported only when its command runs, so that the command line starts in a fraction of a second.

Exit statuses that all commands have:
2    wrong input: a `ValueError`, printed as one line on stderr (`python -X dev -m fewbits.cli …` prints its traceback)
1    an error of the operating system, for example a full disk, or a missing Python module
130  Ctrl-C
141  the output is a pipe, and the process that reads it has closed it
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import takewhile

from fewbits import __version__
from fewbits.common.terminal import notice


@dataclass(frozen=True)
class Command:
    """One command of the command line, for example `fewbits sweep`."""

    words: tuple[str, ...]  # the words of its name, such as ("bench", "train")
    module: str  # the module that implements it
    summary: str  # its line in `fewbits --help`
    example: str = ""  # arguments for an example in the help
    flags: tuple[str, ...] = ()  # if not empty, the command is chosen only if one of these options is used
    function: str = "main"  # the function of the module that gets the arguments

    @property
    def name(self) -> str:
        return " ".join((*self.words, *self.flags[:1]))

    def called_by(self, argv: tuple[str, ...]) -> bool:
        return argv[: len(self.words)] == self.words and (not self.flags or not {*self.flags}.isdisjoint(argv))


COMMANDS = (
    Command(
        ("doctor",),
        "fewbits.doctor",
        "show this machine's hardware, the kernels in use, and how to fix problems",
        "--json",
    ),
    Command(
        ("train",),
        "fewbits.commands.multirun",
        "run a grid of trials: overrides with several values",
        "recipe.threshold=0.03,0.045",
        flags=("--multirun", "-m", "hydra.mode=MULTIRUN"),
    ),
    Command(
        ("train",),
        "fewbits.commands.train",
        "train one trial on this machine",
        "--config",
    ),
    Command(
        ("sweep",),
        "fewbits.commands.sweep",
        "run the missing trials of a study or of your own sweep file",
        "study=mor scale=smoke --dry-run",
    ),
    Command(
        ("status",),
        "fewbits.commands.status",
        "list the states of a sweep's trials, or print the end of a trial's log",
        "study=mor scale=smoke",
    ),
    Command(("stop",), "fewbits.sweeps.live.stop", "stop running trials at a checkpoint", "RUN"),
    Command(
        ("prune",),
        "fewbits.sweeps.live.prune",
        "list what can be removed from a store and how much space that frees, and remove it",
        "--delete",
    ),
    Command(
        ("explain",),
        "fewbits.commands.explain",
        "show why two trials differ, or why a result is stale, field by field",
        "RUN RUN",
    ),
    Command(
        ("probe",),
        "fewbits.commands.probe",
        "compare recipes at a checkpoint: loss, gradients, operands",
        "RUN bf16 mor/block nvfp4",
    ),
    Command(
        ("evaluate",),
        "fewbits.commands.evaluate",
        "evaluate finished runs: loss, other text, tasks of lm-eval",
        "RUN loss --text notes.txt",
    ),
    Command(
        ("import",),
        "fewbits.commands.import_checkpoint",
        "turn a published model into a run, to probe it, evaluate it and branch from it",
        "smollm2",
    ),
    Command(
        ("export",),
        "fewbits.commands.export",
        "write a run's model as a folder that Hugging Face's transformers loads",
        "RUN --format huggingface",
    ),
    Command(
        ("sync",),
        "fewbits.commands.sync",
        "send a sweep's trials to MLflow again, from the store",
        "study=mor scale=smoke",
    ),
    Command(
        ("report",),
        "fewbits.commands.report",
        "write a study's report: its tables, figures and claims, compared with the paper's",
        "study=mor scale=cpu",
    ),
    Command(
        ("claims",),
        "fewbits.commands.claims",
        "list a study's claims with their verdicts",
        "study=mor scale=cpu",
    ),
    Command(("ui",), "fewbits.commands.ui", "show the store's trials in MLflow, in the browser", "--port 5000"),
    Command(
        ("number",),
        "fewbits.commands.number",
        "show how each format rounds and encodes a number, and its neighbours",
        "0.3",
    ),
    Command(("list",), "fewbits.commands.list", "list recipes, models, scales and so on", "recipes nvfp4"),
    Command(
        ("data", "prepare"),
        "fewbits.commands.prepare_data",
        "download and tokenize a collection of web text: OpenWebText, C4",
        "openwebtext",
    ),
    Command(
        ("bench", "kernels"),
        "fewbits.commands.bench",
        "measure the speed of noise generators for several matrix shapes",
        "--store runs",
        function="generators",
        flags=("--generators",),
    ),
    Command(
        ("bench", "kernels"),
        "fewbits.commands.bench",
        "measure the speed and memory of the kernels and of other libraries",
        "--no-peers",
        function="kernels",
    ),
    Command(
        ("bench", "train"),
        "fewbits.commands.bench",
        "measure the training speed of recipes, compared with plain BF16",
        "--steps 5",
        function="train",
    ),
    Command(
        ("bench", "sweep"),
        "fewbits.commands.bench_sweep",
        "measure how busy a sweep keeps the machine's cores",
        "--trials 4",
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (None: the arguments of this process) and return the exit status."""
    _open_closed_streams()
    try:
        try:
            return _dispatch(tuple(sys.argv[1:] if argv is None else argv))
        finally:
            sys.stdout.flush()  # here, since it raises the BrokenPipeError handled below if the pipe is closed
    except ValueError as error:
        if sys.flags.dev_mode:
            raise
        notice(error)
        return 2
    except KeyboardInterrupt:
        notice("interrupted")
        return 130
    except BrokenPipeError:
        # The interpreter flushes stdout again when it exits; redirect it to /dev/null to avoid a second error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except RuntimeError as error:
        # Path.expanduser raises a RuntimeError about the "home directory" for ~NAME without a user NAME.
        if sys.flags.dev_mode or "home directory" not in str(error):
            raise
        notice(
            "a path begins with ~NAME, which means the home folder of the user NAME, but this machine has no such user"
        )
        return 2
    except OSError as error:
        if sys.flags.dev_mode or error.errno is None:
            raise
        prefix = f"{error.filename}: " if error.filename else ""
        notice(f"{prefix}{error.strerror}")
        return 1
    except ModuleNotFoundError as error:
        if sys.flags.dev_mode or error.name is None or error.name.partition(".")[0] == "fewbits":
            raise
        notice(
            f"{sys.executable} has no module {error.name!r}: run fewbits in the Python environment in which its "
            "dependencies are installed; on a Ray cluster, run `ray start` in that environment"
        )
        return 1


def _open_closed_streams() -> None:
    """Open stdout and stderr on /dev/null, for this process and its children, if the parent process has closed them.

    Otherwise the next file that is opened would get the descriptor 1 or 2, and the output would be written into it.
    """
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_WRONLY)
            try:
                os.fstat(descriptor)
            except OSError:
                os.dup2(null, descriptor)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, open(null, "w"))  # noqa: SIM115


def _dispatch(argv: tuple[str, ...]) -> int:
    for command in COMMANDS:
        if command.called_by(argv):
            if command.module.startswith("fewbits.analysis."):
                # OpenMP's threads would otherwise spin while they wait, which takes the cores from a running sweep.
                os.environ.setdefault("OMP_WAIT_POLICY", "passive")
            status: int = getattr(import_module(command.module), command.function)(argv[len(command.words) :])
            return status
    if argv == ("--version",):
        print(f"fewbits {__version__}")
        return 0
    if argv[:1] in (("-sc",), ("--shell-completion",)):
        from fewbits.commands.run_hydra import complete

        complete(argv[1:], list(dict.fromkeys(command.words[0] for command in COMMANDS)))
        return 0
    words = tuple(takewhile(lambda word: not word.startswith("-"), argv))
    matching = [command for command in COMMANDS if command.words[: len(words)] == words]
    if matching and (not argv or argv[len(words) :] in (("-h",), ("--help",))):
        print(_help(matching))
        return 0
    group = [command for command in COMMANDS if command.words[:1] == words[:1]]  # all commands `bench …` or `data …`
    names = ", ".join(command.name for command in group or COMMANDS)
    raise ValueError(f"unknown command {' '.join(words[: 2 if group else 1] or argv[:1])!r}; choose from: {names}")


def _help(commands: list[Command]) -> str:
    width = max(len(command.name) for command in commands)
    rows = [f"  {command.name:{width}}  {command.summary}" for command in commands]
    return "\n".join(
        [
            "usage: fewbits [--help] [--version] COMMAND ...",
            "",
            "Reproduce low-precision pre-training papers.",
            "",
            "commands:",
            *rows,
            "",
            f"fewbits COMMAND --help shows its options. Example: fewbits {commands[0].name} {commands[0].example}",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
