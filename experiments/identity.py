"""Compute a trial's id, and describe where its numbers come from (its provenance).

The id is a hash of everything that determines a trial's numbers, and is the same on every machine: the settings, the
fingerprint of the data, the requested kind of device, the numbers of ranks and threads, the parent of a branch, and the
numerics version of the sources. It does not cover names, intervals between checkpoints, or evaluation
other than the loss. A trial that uses hooks of the user's own has a digest of their file. The environment (torch,
processor, GPU, compiler) and the git commit are provenance, not identity.

All settings are hashed, so defaults may change. A setting that is added later would change all ids: it declares its
neutral value, with which a trial computes what it did before the setting existed, and is hashed only where it differs:
`new: int = field(default=0, metadata={"neutral": 0})`.

Trials whose ids have the same *numerics version*, an integer, were computed by sources that give the same bits. The
file `numerics.txt` records this version and a digest of each source file that computes. While the running sources have
the recorded digests, a trial's id contains only the version. If they were edited, it also contains a digest of the
running sources; undoing the edit finds the earlier results again. `make numerics` records other sources under the same
version if they give the same golden digests, and otherwise under a new version.

The files that compute are those of START, those that they import, directly or indirectly, and the C++ and CUDA sources.
A change of comments, docstrings, annotations or messages does not change a digest.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fewbits.common.terminal import notice
from fewbits.experiments.environment import process_facts
from fewbits.experiments.trial import Trial
from fewbits.models.hooks import OWN, THEN, is_own
from fewbits.models.recipe import Recipe

# Paths of settings that change no number of a trial, so the id does not contain them.
FREE = {
    "model.name",
    "recipe.name",
    "recipe.about",
    "recipe.source",
    "recipe.differs",
    "training.checkpoint_every",
    "training.recompute",
    "evaluation.tasks",
    "evaluation.tasks_path",
    "evaluation.tasks_every",
    "evaluation.texts",
    "evaluation.run_code",
}
_BY_CONTENT = ("data", "branch")  # for these settings, the id has the data's fingerprint and the parent's identity
IMPORTED = "imported"  # key in the identity of an imported checkpoint: the hash of its weights

Identity = dict[str, Any]


@dataclass(frozen=True)
class ParentPoint:
    """The checkpoint that a branch starts from: the parent's id, and a step."""

    id: str
    step: int


def identity(
    trial: Trial,
    data_fingerprint: str,
    device: str,
    *,
    ranks: int = 1,
    threads: int = 1,
    parent: ParentPoint | None = None,
) -> Identity:
    """Return the values whose hash is the trial's id. device: the requested kind of device, cpu or cuda."""
    announce()
    return _settings_and_inputs(trial, data_fingerprint, device, ranks, threads, parent) | numerics()


def imported_identity(trial: Trial, data_fingerprint: str, weights: str) -> Identity:
    """Return the identity of an imported checkpoint: `weights`, their hash, stands in place of the numerics version."""
    return _settings_and_inputs(trial, data_fingerprint, "cpu", 1, 1, None) | {IMPORTED: weights}


def _settings_and_inputs(
    trial: Trial, data_fingerprint: str, device: str, ranks: int, threads: int, parent: ParentPoint | None
) -> Identity:
    return {
        "config": all_settings(trial),
        "data": data_fingerprint,
        "device": device,
        "ranks": ranks,  # each rank draws its own noise
        "threads": threads if device == "cpu" else 1,  # torch splits some sums over threads
        "parent": dataclasses.asdict(parent) if parent else None,
    } | own_hooks(trial.recipe)


def own_hooks(recipe: Recipe) -> dict[str, str]:
    """Return a digest of the user's hooks, and of the modules beside them that they import, if the recipe uses one."""
    chains = [text.split(THEN) for text in _strings(dataclasses.asdict(recipe)) if THEN in text]
    if not any(is_own(stage.partition(":")[0].strip()) for stages in chains for stage in stages):
        return {}
    waiting, digests = [OWN], dict[str, str]()
    while waiting:
        file = waiting.pop()
        if file.name not in digests and file.is_file():
            tree = ast.parse(file.read_bytes())
            digests[file.name] = python_digest(tree)
            waiting += [OWN.parent / f"{name.partition('.')[0]}.py" for name in _imports(tree)]
    return {"hooks": total(digests)}


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)


def trial_id(identity: Mapping[str, Any]) -> str:
    """Return the trial's id, the SHA-256 of its identity."""
    text = json.dumps(identity, sort_keys=True, allow_nan=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def is_current(provenance: Mapping[str, Any]) -> bool:
    """Tell whether the running sources would give a run's bits; else it is stale, unless it was imported."""
    made_of = provenance.get("identity")
    if not isinstance(made_of, dict):
        return False
    return IMPORTED in made_of or {key: made_of[key] for key in ("numerics", "edited") if key in made_of} == numerics()


def all_settings(trial: Trial) -> dict[str, Any]:
    """Return the settings that affect results, nested, without `data`, `branch` and settings with a neutral value."""
    return {key: value for key, value in _settings(trial, "").items() if key not in _BY_CONTENT}


def _settings(value: Any, path: str) -> dict[str, Any]:
    result = {}
    for field in dataclasses.fields(value):
        item, key = getattr(value, field.name), f"{path}{field.name}"
        if key not in FREE and not ("neutral" in field.metadata and item == field.metadata["neutral"]):
            result[field.name] = _settings(item, f"{key}.") if dataclasses.is_dataclass(item) else item
            if isinstance(item, tuple):  # such as the rules of a recipe
                result[field.name] = tuple(
                    dataclasses.asdict(one) if dataclasses.is_dataclass(one) and not isinstance(one, type) else one
                    for one in item
                )
    return result


def provenance(identity: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return values for provenance.json, with `facts`, such as a description of the data and the parent's folder."""
    return {
        "identity": dict(identity),
        # Files that were edited since numerics.txt recorded them; None: a file that was removed.
        "sources": {path: running().get(path) for path in changed()},
        "process": os.getpid(),
        **process_facts(),
        **facts,
    }


# ------------------------------------------------------------------------------------------------ sources

ROOT = Path(__file__).resolve().parents[1]  # of the repository, or of the installed package
FILE = ROOT / "experiments" / "numerics.txt"
START = ("experiments.training", "kernels.backends.compilation")  # the second has the flags of the C++ compiler
PACKAGES = ("kernels", "models", "experiments")
# Paths that begin like this compute no numbers of trials (data: the id has the fingerprint of the tokens), except BUT.
NOT_COMPUTING = (
    *("experiments/config", "experiments/data/", "experiments/environment", "experiments/evaluation/"),
    *("experiments/identity", "experiments/storage/"),
    *("models/importing/", "models/networks/presets"),
    *("kernels/backends/build", "kernels/backends/choice", "kernels/backends/gpu/cubins"),
)
BUT = ("experiments/data/corpus", "experiments/evaluation/loss")
WARNINGS = ("warn", "_warn", "notice")  # functions whose arguments are messages
# Fields of syntax nodes that are not in the digest: only some Python versions have them, or they are annotations.
SKIPPED = ("annotation", "returns", "type_comment", "type_params", "type_ignores", "kind", "ctx")
_CPP = re.compile(r'("(?:\\.|[^"\\\n])*")|//[^\n]*|/\*.*?\*/|\\\n', re.DOTALL)

Digests = Mapping[str, str]  # digest of a source file by its path in the repository


def numerics() -> dict[str, Any]:
    """Return the part of an id that names the running sources: `numerics`, the version, and `edited` if they differ."""
    version, _ = recorded()
    return {"numerics": version} | ({"edited": total(running())} if changed() else {})


def label(made_of: Mapping[str, Any]) -> str:
    """Return a text for the sources that an identity names: `2`, or `2, edited 1a2b3c4d5e6f`; "" if it names none."""
    version, edited = made_of.get("numerics", ""), made_of.get("edited")
    if isinstance(version, list):  # fewbits 0.1.0 had digests in place of a version
        return f"1 ({version[0][:12]})"
    return f"{version}" + (f", edited {edited[:12]}" if edited else "")


@cache
def announce() -> None:
    """Print a line on stderr, once per process, if the running sources differ from the recorded ones."""
    if files := changed():
        shown = ", ".join(files[:3]) + (f" and {len(files) - 3} more" if len(files) > 3 else "")
        notice(f"edited sources compute these trials, which get their own ids: {shown}")


def changed(before: Digests | None = None, after: Digests | None = None) -> list[str]:
    """Return the paths of files that differ in two sets of sources: by default, the recorded and the running ones."""
    before, after = recorded()[1] if before is None else before, running() if after is None else after
    return sorted(path for path in {*before, *after} if before.get(path) != after.get(path))


def total(digests: Digests) -> str:
    return _digest("\n".join(f"{path} {digests[path]}" for path in sorted(digests)))


@cache
def recorded(file: Path = FILE) -> tuple[int, dict[str, str]]:
    """Return the version and the digests that numerics.txt records."""
    head, *lines = file.read_text("utf-8").split()[1:]
    return int(head), dict(zip(lines[::2], lines[1::2], strict=True))


def record(version: int, digests: Digests, file: Path = FILE) -> None:
    lines = [f"{path}\n    {digest}\n" for path, digest in sorted(digests.items())]
    file.write_text("".join([f"version {version}\n", *lines]), "utf-8")
    recorded.cache_clear()


@cache
def running(root: Path = ROOT) -> dict[str, str]:
    """Return the digest of each source file below `root` that computes."""
    digests: dict[str, str] = {}
    waiting = [*START, *(path.replace("/", ".") for path in BUT)]
    while waiting:
        path = f"{waiting.pop().replace('.', '/')}.py"
        computes = path.startswith(PACKAGES) and (path.startswith(BUT) or not path.startswith(NOT_COMPUTING))
        if computes and path not in digests and (root / path).is_file():
            tree = ast.parse((root / path).read_bytes())
            digests[path] = python_digest(tree)
            waiting += [name.removeprefix("fewbits.") for name in _imports(tree) if name.startswith("fewbits.")]
    for file in (root / "kernels" / "csrc").glob("[!.]*.*"):
        if file.suffix in (".h", ".cpp", ".cu", ".cuh"):
            digests[file.relative_to(root).as_posix()] = cpp_digest(file.read_text("utf-8"))
    return dict(sorted(digests.items()))


def _imports(tree: ast.Module) -> Iterator[str]:
    """Yield the dotted names of modules, and of what is imported from them; also of imports inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))


def python_digest(source: str | bytes | ast.Module) -> str:
    """Return the digest of what a Python module computes; it is the same in every version of Python."""
    return _digest(_serialised(source if isinstance(source, ast.Module) else ast.parse(source)))


def cpp_digest(source: str) -> str:
    """Return the digest of a C++ or CUDA source without comments and white space; a directive is a line of its own."""
    text = _CPP.sub(lambda match: match[1] or " ", source)
    lines = filter(None, (" ".join(line.split()) for line in text.splitlines()))
    return _digest("".join(f"\n{line}\n" if line.startswith("#") else f"{line} " for line in lines))


def _serialised(value: object, silent: bool = False) -> str:
    """Return what computes in a syntax node or its field as text, which unlike ast.dump is the same in all Pythons.

    silent: the node is part of an error, an assertion or a warning, whose texts are messages.
    """
    if isinstance(value, list):
        return ",".join(_serialised(item, silent) for item in value if not _is_docstring(item))
    if not isinstance(value, ast.AST):
        return "" if value is None else repr(value)
    silent = silent or isinstance(value, ast.Raise | ast.Assert) or _warns(value)
    if silent and (_is_text(value) or isinstance(value, ast.JoinedStr)):
        return "message"
    fields = ((name, _serialised(item, silent)) for name, item in ast.iter_fields(value) if name not in SKIPPED)
    return f"{type(value).__name__}({','.join(f'{name}=[{text}]' for name, text in fields if text)})"


def _is_text(node: object) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_docstring(statement: object) -> bool:
    return isinstance(statement, ast.Expr) and _is_text(statement.value)


def _warns(node: ast.AST) -> bool:
    called = node.func if isinstance(node, ast.Call) else None
    return getattr(called, "attr", getattr(called, "id", None)) in WARNINGS


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
