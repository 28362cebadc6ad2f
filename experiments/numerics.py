"""Tell which numerics version the running sources have, and whether somebody has edited them.

Trials whose ids have the same *numerics version*, an integer, were computed by sources that give the same bits. The
file `numerics.txt` records this version and a digest of each source file that computes. While the running sources have
the recorded digests, a trial's id contains only the version. If they were edited, it also contains a digest of the
running sources; undoing the edit finds the earlier results again. `make numerics` records other sources under the same
version if they give the same golden digests, and otherwise under a new version.

The files that compute are those of START, those that they import, directly or indirectly, and the C++ and CUDA sources.
Each path in numerics.txt has its own line, so that git merges the changes of two branches in different files.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from fewbits.common.terminal import notice
from fewbits.experiments.sources import cpp_digest, imported, python_digest, statements
from fewbits.experiments.trial import Trial

ROOT = Path(__file__).resolve().parents[1]  # of the repository, or of the installed package
FILE = Path(__file__).with_name("numerics.txt")
START = ("experiments.run_trial", "kernels.backends.compilation")  # the second has the flags of the C++ compiler
PACKAGES = ("kernels", "models", "experiments")
# Paths that begin like this compute no numbers of trials (data: the id has the fingerprint of the tokens), except BUT.
NOT_COMPUTING = (
    *("experiments/config", "experiments/data/", "experiments/environment", "experiments/evaluation/"),
    *("experiments/identity", "experiments/machine_kinds", "experiments/numerics", "experiments/storage/"),
    *("models/importing/", "models/networks/presets"),
    *("kernels/backends/build", "kernels/backends/choice", "kernels/backends/gpu/cubins"),
)
BUT = ("experiments/data/corpus", "experiments/data/order", "experiments/evaluation/loss")

Digests = Mapping[str, str]  # digest of a source file by its path in the repository


def numerics() -> dict[str, Any]:
    """Return the part of an id that names the running sources: `numerics`, the version, and `edited` if they differ."""
    version, _ = recorded()
    return {"numerics": version} | ({"edited": total(running())} if changed() else {})


def label(made_of: Mapping[str, Any]) -> str:
    """Return a text for the sources that an identity names: `2`, or `2, edited 1a2b3c4d5e6f`; "" if it names none.

    fewbits 0.1.0 had digests in place of a version.
    """
    version, edited = made_of.get("numerics", ""), made_of.get("edited")
    return (
        f"1 ({version[0][:12]})"
        if isinstance(version, list) and version
        else f"{version}" + (f", edited {edited[:12]}" if edited else "")
    )


@cache
def announce() -> None:
    """Print a line on stderr, once per process, if the running sources differ from the recorded ones."""
    if files := changed():
        shown = ", ".join(files[:3]) + (f" and {len(files) - 3} more" if len(files) > 3 else "")
        notice(f"edited sources compute these trials, which get their own ids: {shown}")


def changed(before: Digests | None = None, after: Digests | None = None) -> list[str]:
    """Return the paths of files that are in only one of two sets of sources; a file that was moved is in both.

    before, after: the sources; None: those that are recorded, and those that run.
    """
    before, after = recorded()[1] if before is None else before, running() if after is None else after
    old, new = set(before.values()), set(after.values())
    differing = {path for path, digest in after.items() if digest not in old}
    return sorted(differing | {path for path, digest in before.items() if digest not in new})


def total(digests: Digests) -> str:
    """Return the digest of all sources, which does not depend on their paths."""
    return hashlib.sha256("\n".join(sorted(set(digests.values()))).encode()).hexdigest()


@cache
def recorded(file: Path = FILE) -> tuple[int, dict[str, str]]:
    """Return the version and the digests that numerics.txt records."""
    head, *lines = file.read_text("utf-8").split()[1:]
    return int(head), dict(zip(lines[::2], lines[1::2], strict=True))


def record(version: int, digests: Digests, file: Path = FILE) -> None:
    """Write numerics.txt."""
    lines = [f"{path}\n    {digest}\n" for path, digest in sorted(digests.items())]
    file.write_text("".join([f"version {version}\n", *lines]), "utf-8")
    recorded.cache_clear()


@cache
def running(root: Path = ROOT) -> dict[str, str]:
    """Return the digest of each source file below `root` that computes."""
    stems: dict[str, list[str]] = {}
    for package in PACKAGES:
        for file in (root / package).rglob("*.py"):
            stems.setdefault(file.stem, []).append(".".join(file.relative_to(root).with_suffix("").parts))
    modules = {module for same in stems.values() for module in same}

    def spelled(name: str) -> str:
        """Return an imported name with the shortest name of its module: its file's name if no other file has it."""
        module, _, inside = (name, "", "") if name in modules else name.rpartition(".")
        stem = module.rpartition(".")[2]
        return f"{stem if len(stems.get(stem, ())) == 1 else module}:{inside}"

    trees: dict[str, ast.Module] = {}
    waiting = [*START, *(path.replace("/", ".") for path in BUT)]
    while waiting:
        module = waiting.pop()
        path = f"{module.replace('.', '/')}.py"
        computes = path.startswith(BUT) or not path.startswith(NOT_COMPUTING)
        if path not in trees and module in modules and computes:
            trees[path] = ast.parse((root / path).read_bytes())
            waiting += [name for found in _imports(trees[path].body) for name in (found, found.rpartition(".")[0])]
    config_classes = {kind.__name__ for kind in _dataclasses(Trial)}
    digests = {path: python_digest(tree, config_classes, spelled)[:32] for path, tree in trees.items()}
    for file in (root / "kernels" / "csrc").glob("[!.]*.*"):
        if file.suffix not in (".h", ".cpp", ".cu", ".cuh"):
            continue
        digests[file.relative_to(root).as_posix()] = cpp_digest(file.read_text("utf-8"))[:32]
    return dict(sorted(digests.items()))


def _imports(body: list[ast.stmt]) -> Iterable[str]:
    """Yield the dotted names, without `fewbits.`, that statements import from fewbits; also those inside functions."""
    for statement in statements(body):
        for node in ast.walk(statement):
            if isinstance(node, ast.ImportFrom):
                yield from (name for name, _ in imported(node))


def _dataclasses(kind: Any) -> Iterable[Any]:
    """Yield a dataclass and those of its fields: the configuration classes, if it is Trial."""
    yield kind
    for hint in get_type_hints(kind).values():
        if dataclasses.is_dataclass(hint):
            yield from _dataclasses(hint)
