"""Complete the command line in a shell.

    eval "$(fewbits -sc install=bash)"      in ~/.bashrc; also in ~/.zshrc, after `autoload bashcompinit; bashcompinit`
    fewbits -sc install=fish | source       in ~/.config/fish/config.fish

At each Tab, the shell runs `fewbits -sc query` with the line up to the cursor in the environment variable COMP_LINE.
A user waits for the answer, so names come from files and sources: torch, Hydra and the like would take seconds.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

LINE = "COMP_LINE"
# Bash splits words also at `=`, so the answer must not repeat what is before it; a word may be continued after [=./].
BASH = r"""_fewbits() {
  local line="${COMP_LINE:0:$COMP_POINT}"; local word="${line##* }" IFS=$'\n'
  COMPREPLY=($(COMP_LINE="$line" fewbits -sc query 2>/dev/null))
  [[ ${#COMPREPLY[@]} == 1 && "${COMPREPLY[*]}" == *[=./] ]] && compopt -o nospace 2>/dev/null
  [[ "$COMP_WORDBREAKS" == *=* ]] && COMPREPLY=("${COMPREPLY[@]#"${word%"${word##*=}"}"}")
}
complete -o default -F _fewbits fewbits"""
FISH = "complete -c fewbits -a '(COMP_LINE=(commandline -cp) fewbits -sc query 2>/dev/null)'"
SHELLS = {"bash": BASH, "fish": FISH}

PACKAGE = Path(__file__).parent
CONFIG, SWEEPS = PACKAGE / "experiments" / "config", PACKAGE / "sweeps" / "config"
TRIAL, PRESETS = PACKAGE / "experiments" / "trial.py", PACKAGE / "models" / "networks" / "presets.py"
GROUPS = ("model", *sorted(folder.name for folder in CONFIG.iterdir() if folder.is_dir()))
STUDIES = tuple(sorted(folder.name for folder in SWEEPS.iterdir()))
OF_SWEEP = ("sweep", "report", "claims")  # commands that select a sweep, with overrides for its trials
WITH_RUNS = ("status", "stop", "explain", "probe", "compare", "evaluate", "export")


def complete(arguments: Sequence[str], commands: Mapping[tuple[str, ...], Callable[[Sequence[str]], int]]) -> None:
    """Print the script for `install=SHELL`, or for `query` the completions. commands: a function for each command."""
    (kind, _, shell), *others = [text.partition("=") for text in arguments] or [("", "", "")]
    if kind == "query":
        with contextlib.suppress(OSError, ValueError):  # there is nobody to read an error
            print("\n".join(completions(os.environ.get(LINE, ""), commands)))
    elif kind == "install" and shell in SHELLS and not others:
        print(SHELLS[shell])
    else:
        raise ValueError('-sc: install=bash (or fish) is expected, as in eval "$(fewbits -sc install=bash)"')


def completions(line: str, commands: Mapping[tuple[str, ...], Callable[[Sequence[str]], int]]) -> list[str]:
    """Return how the last word of the line can continue; none for names of files, which the shell completes."""
    *typed, last = line.lstrip().split(" ") if " " in line else (line, "")
    before = [word for word in typed[1:] if word]
    words = next((words for words in commands if tuple(before[: len(words)]) == words), None)
    if words is None:
        begun = [words for words in commands if [*words[: len(before)]] == before]
        found = [words[len(before)] for words in begun]
    elif last.startswith("-"):
        found = [*_options(commands[words])]
    else:
        option = before[-1] if before[-1].startswith("-") else None
        values = _options(commands[words]).get(option) if option else None
        found = [*_arguments(words[0], before[len(words) :], last)] if values is None else values
    return [text for text in dict.fromkeys(found) if text.startswith(last)]


def _options(command: Callable[[Sequence[str]], int]) -> dict[str, list[str] | None]:
    """Return a command's options from its help, and the choices that each has; None for an option without a value."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        command(["--help"])
    options: dict[str, list[str] | None] = {}
    for head in re.findall(r"^  (-.*?)(?:  .*)?$", printed.getvalue(), re.MULTILINE):  # `-c, --cfg {job,hydra}`
        value = head.rpartition(" ")[2]
        choices = value.strip("{}").split(",") if value.startswith("{") else []
        options |= dict.fromkeys(re.findall(r"--[\w-]+", head), None if value.startswith("-") else choices)
    return options


def _arguments(command: str, before: Sequence[str], last: str) -> Iterator[str]:
    """Yield the valid arguments of a command, after those before the last word."""
    settings = dict(text.split("=", 1) for text in before if "=" in text)
    given = {option: value for option, value in pairwise(before) if option.startswith("-")}
    own = [Path(given.get("--config-dir") or given.get("-cd") or "conf"), Path("conf")]
    runs = [path.parent.name for path in sorted(Path(given.get("--runs", "runs")).glob("*/config.yaml"))]
    key, equals, value = last.partition("=")
    if command == "list":
        listed = {"studies": "study", "data": "data", **{f"{group}s": group for group in GROUPS if group != "data"}}
        group = next((listed[text] for text in before if text in listed), None)
        yield from _names(group, own, settings) if group else listed
    if command in WITH_RUNS:
        yield from runs
    if command == "probe":
        yield from _names("recipe", own, settings)
    if equals:
        yield from (f"{key}={name}" for name in (runs if key == "branch.parent" else _names(key, own, settings)))
        folder = value[: value.rfind("/") + 1]  # of a file of the user's own
        for path in sorted(Path(folder).glob("[!.]*")) if key in GROUPS and folder else ():
            if path.is_dir() or path.suffix == ".yaml":
                yield f"{key}={folder}{path.name}{'/' * path.is_dir()}"
        return
    if command in (*OF_SWEEP, "status", "compare"):
        yield from ("study=", "scale=", "sweep=")
    if command in OF_SWEEP:
        yield from ("seeds=", "only=")
    if command in ("train", *OF_SWEEP):
        yield from (f"{group}=" for group in GROUPS)
        yield from _keys(TRIAL, "Trial", last)
        yield from (f"runtime.{key}" for key in _keys(TRIAL, "Runtime", last.removeprefix("runtime.")))
        group, dot, _ = last.partition(".")
        if dot and group in settings:
            yield from (f"{group}.{key}=" for key in _settings(group, settings[group], own))


def _names(key: str, own: Sequence[Path], settings: Mapping[str, str]) -> list[str]:
    """Return the names that `KEY=` can choose; none if the key is no group of configs."""
    study = SWEEPS / settings["study"] if settings.get("study") in STUDIES else None
    if key == "study":
        return [*STUDIES]
    if key == "sweep" and study:
        return sorted(file.stem for file in study.glob("*.yaml"))
    if key not in (*GROUPS, "sweep"):
        return []
    folders = [study / key] if key == "scale" and study else [CONFIG / key, *(folder / key for folder in own)]
    files = [file.relative_to(folder).with_suffix("") for folder in folders for file in folder.rglob("*.yaml")]
    # Models are defined in Python: by `name="llama2-1b"` or `_nano(_LLAMA2, "llama2-nano")`.
    models = (
        re.findall(r'(?:\bname=|_nano\(\s*\w+,\s*)"([\w.-]+)"', PRESETS.read_text("utf-8")) if key == "model" else []
    )
    return sorted([*models, *(file.as_posix() for file in files)])


def _settings(group: str, name: str, own: Sequence[Path]) -> Iterator[str]:
    """Yield the keys of a config, such as `rht` of recipe=nvfp4, and of the configs of its group that it includes."""
    import yaml

    for path in (CONFIG / group / f"{name}.yaml", *(folder / group / f"{name}.yaml" for folder in own), Path(name)):
        if path.is_file() and isinstance(content := yaml.safe_load(path.read_text("utf-8")), dict):
            for included in content.pop("defaults", []):
                yield from _settings(group, included, own) if isinstance(included, str) else ()
            yield from (key for key, value in content.items() if not isinstance(value, dict))


def _keys(file: Path, name: str, last: str) -> Iterator[str]:
    """Yield the keys of a dataclass from its source: `seed=`, `training.` or, after `training.`, `training.steps=`."""
    classes: dict[str, ast.ClassDef | Path] = {}  # a class of this file, or the file that defines it
    for node in ast.parse(file.read_text("utf-8")).body:
        if isinstance(node, ast.ClassDef):
            classes[node.name] = node
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fewbits."):
            path = PACKAGE.joinpath(*str(node.module).split(".")[1:]).with_suffix(".py")
            classes |= {each.name: path for each in node.names}
    defined = classes[name]
    if isinstance(defined, Path):
        yield from _keys(defined, name, last)
        return
    for node in defined.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            field, kind = node.target.id, ast.unparse(node.annotation)
            if kind not in classes:
                yield f"{field}="
            elif last.startswith(f"{field}."):
                yield from (f"{field}.{key}" for key in _keys(file, kind, last.removeprefix(f"{field}.")))
            else:
                yield f"{field}."
