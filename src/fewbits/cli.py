"""The `fewbits` command: finds the command that the words name, hands it the rest, and turns errors into one line.

A command is a row of `COMMANDS`: its words and the module whose `main(argv)` owns its options and returns the exit
status. That module is imported only when its command runs, so the command line starts in a fraction of a second.

Exit status 2 is wrong input: a `ValueError`, said in one line on stderr (`python -X dev -m fewbits.cli …` shows where
it came from); 1 what the system refuses, a full disk say; 130 is Ctrl-C; 141 a pipe whose reader has gone.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import takewhile

from fewbits import __version__
from fewbits.common.redaction import redacted


@dataclass(frozen=True)
class Command:
    words: tuple[str, ...]
    module: str
    summary: str
    example: str = ""
    flags: tuple[str, ...] = ()  # one of them among its words makes it this command and not the next of that name

    @property
    def name(self) -> str:
        return " ".join((*self.words, *self.flags[:1]))

    def called_by(self, argv: tuple[str, ...]) -> bool:
        return argv[: len(self.words)] == self.words and (not self.flags or not {*self.flags}.isdisjoint(argv))


COMMANDS = (
    Command(
        ("doctor",), "fewbits.doctor", "what this machine has, which kernels run on it, and what to mend", "--json"
    ),
    Command(
        ("train",),
        "fewbits.sweeps.commands.multirun",
        "many trials, of words with several values, through the store",
        "recipe.threshold=0.03,0.045",
        flags=("--multirun", "-m"),
    ),
    Command(
        ("train",),
        "fewbits.experiments.commands.train",
        "one trial, here: model, recipe, data, scale by name",
        "--config",
    ),
    Command(
        ("sweep",),
        "fewbits.sweeps.commands.sweep",
        "many trials: those that are missing of a study's or of your own sweep",
        "study=mor scale=smoke --dry-run",
    ),
    Command(
        ("status",),
        "fewbits.sweeps.commands.status",
        "how the trials of a sweep stand: planned, running, done, failed, diverged, blocked",
        "study=mor scale=smoke",
    ),
    Command(
        ("explain",),
        "fewbits.sweeps.commands.explain",
        "why two trials are not the same one, or a result is stale: field by field",
        "RUN RUN",
    ),
    Command(
        ("probe",),
        "fewbits.experiments.commands.probe",
        "recipes compared at a checkpoint: loss, gradients, operands",
        "RUN bf16 mor/block nvfp4",
    ),
    Command(
        ("sync",),
        "fewbits.sweeps.commands.sync",
        "a sweep's trials sent to MLflow once more, from their files: all that it lacks",
        "study=mor scale=smoke",
    ),
    Command(
        ("report",),
        "fewbits.analysis.report_command",
        "a study's tables, figures and claims beside the paper's, as one page",
        "study=mor scale=cpu",
    ),
    Command(
        ("claims",),
        "fewbits.analysis.claims_command",
        "a study's claims, each with its verdict",
        "study=mor scale=cpu",
    ),
    Command(
        ("ui",), "fewbits.sweeps.commands.ui", "MLflow's page of the store's trials, in the browser", "--port 5000"
    ),
    Command(("models",), "fewbits.models.networks.listing", "the models there are, with their parameters", "--json"),
    Command(
        ("recipes",), "fewbits.experiments.commands.recipes", "the recipes there are, with their operands", "--json"
    ),
    Command(("studies",), "fewbits.sweeps.commands.studies", "the papers there are, with their recipes", "--json"),
    Command(
        ("data", "prepare"), "fewbits.experiments.data.prepare", "web text to tokens: OpenWebText, C4", "openwebtext"
    ),
    Command(
        ("bench", "kernels"),
        "fewbits.kernels.bench.command",
        "speed and memory of the kernels, and of peers",
        "--no-peers",
    ),
    Command(
        ("bench", "train"),
        "fewbits.experiments.bench.command",
        "what recipes cost in training, beside plain BF16",
        "--steps 5",
    ),
    Command(
        ("bench", "sweep"),
        "fewbits.sweeps.commands.bench",
        "how well a sweep uses the machine, and what it costs",
        "--trials 4",
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (that of the process, if None) and return the exit status."""
    _open_what_is_closed()
    try:
        try:
            return _dispatch(tuple(sys.argv[1:] if argv is None else argv))
        finally:
            sys.stdout.flush()  # here, where a reader that has gone is handled
    except ValueError as error:
        if sys.flags.dev_mode:
            raise
        print(f"fewbits: {redacted(' '.join(str(error).split()))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("fewbits: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The interpreter flushes stdout once more on its way out: let that go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if sys.flags.dev_mode or error.errno is None:
            raise
        where = f"{error.filename}: " if error.filename else ""
        print(redacted(f"fewbits: {where}{error.strerror}"), file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        if sys.flags.dev_mode or error.name is None or error.name.partition(".")[0] == "fewbits":
            raise
        print(
            f"fewbits: {sys.executable} has no module {error.name!r}: this fewbits wants the environment in which it "
            "was installed with what it depends on; a job on a Ray cluster has the one that `ray start` was called in",
            file=sys.stderr,
        )
        return 1


def _open_what_is_closed() -> None:
    """Whoever started us may have closed stdout or stderr: what is said goes nowhere, here and in our own processes.
    The descriptor has to be there, else the next file that is opened takes it and gets all that is said."""
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            try:
                os.fstat(descriptor)
            except OSError:
                os.dup2(nowhere, descriptor)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, open(nowhere, "w"))  # noqa: SIM115


def _dispatch(argv: tuple[str, ...]) -> int:
    for command in COMMANDS:
        if command.called_by(argv):
            status: int = import_module(command.module).main(argv[len(command.words) :])
            return status
    if argv == ("--version",):
        print(f"fewbits {__version__}")
        return 0
    words = tuple(takewhile(lambda word: not word.startswith("-"), argv))
    below = [command for command in COMMANDS if command.words[: len(words)] == words]
    if below and (not argv or argv[len(words) :] in (("-h",), ("--help",))):
        print(_help(below))
        return 0
    group = [command for command in COMMANDS if command.words[:1] == words[:1]]  # bench, data
    names = ", ".join(command.name for command in group or COMMANDS)
    raise ValueError(f"no command {' '.join(words[: 2 if group else 1] or argv[:1])!r}; choose from: {names}")


def _help(commands: list[Command]) -> str:
    width = max(len(command.name) for command in commands)
    rows = [f"  {command.name:{width}}  {command.summary}" for command in commands]
    return "\n".join(
        [
            "usage: fewbits [--help] [--version] COMMAND ...",
            "",
            "Low-precision pre-training papers, reproduced.",
            "",
            "commands:",
            *rows,
            "",
            f"fewbits COMMAND --help says more of each. Example: fewbits {commands[0].name} {commands[0].example}",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
