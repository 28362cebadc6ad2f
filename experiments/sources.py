"""The sources that compute a trial: what its bits depend on in this repository, and nothing that only shows them.

They are the modules that the training script imports, and those that these import, wherever in a module that stands;
and everything that the kernels are compiled from. An edit of a command, a listing or a benchmark makes no trial stale.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = "fewbits"
ROOT = f"{PACKAGE}.experiments.training"
ROOMS = ("kernels", "models", "experiments")
COMPILED = {".h", ".cpp", ".cu", ".cuh"}
_HERE = Path(__file__).resolve().parent.parent


@cache
def sources() -> dict[str, str]:
    """Each file, from the rooms' folder on, with its SHA-256."""
    files = {room: _HERE / room for room in ROOMS}
    found = {path for module in _imported(ROOT, set()) if (path := _file(module)) is not None}
    found |= {path for path in files["kernels"].rglob("*") if path.suffix in COMPILED}
    return {path.relative_to(_HERE).as_posix(): _digest(path) for path in sorted(found)}


def sources_digest(room: str) -> str:
    """Of all of a room's."""
    lines = (f"{path} {digest}\n" for path, digest in sources().items() if path.startswith(f"{room}/"))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _imported(module: str, seen: set[str]) -> set[str]:
    seen.add(module)
    path = _file(module)
    if path is not None:
        for name in _names(ast.parse(path.read_bytes())):
            if name not in seen:
                _imported(name, seen)
    return seen


def _names(tree: ast.AST) -> Iterator[str]:
    """Modules of the rooms that are imported: `from package import thing` may name a module too."""
    for node in _statements(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        yield from (name for name in names if name.partition(".")[0] == PACKAGE)


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """All of them, wherever they stand; a walk through their expressions as well takes three times as long."""
    for part in ("body", "orelse", "finalbody", "handlers", "cases"):
        for child in getattr(node, part, ()):
            yield child
            yield from _statements(child)


def _file(module: str) -> Path | None:
    words = module.split(".")[1:]
    if not words or words[0] not in ROOMS:
        return None
    path = _HERE.joinpath(*words).with_suffix(".py")
    return path if path.is_file() else None


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
