"""Tell which numerics version the running sources have, and whether somebody has edited them.

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
import hashlib
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from fewbits.common.terminal import notice

ROOT = Path(__file__).resolve().parents[1]  # of the repository, or of the installed package
FILE = ROOT / "experiments" / "numerics.txt"
START = ("experiments.training", "kernels.backends.compilation")  # the second has the flags of the C++ compiler
PACKAGES = ("kernels", "models", "experiments")
# Paths that begin like this compute no numbers of trials (data: the id has the fingerprint of the tokens), except BUT.
NOT_COMPUTING = (
    *("experiments/config", "experiments/data/", "experiments/environment", "experiments/evaluation/"),
    *("experiments/identity", "experiments/numerics", "experiments/storage/"),
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
            waiting += _imports(tree)
    for file in (root / "kernels" / "csrc").glob("[!.]*.*"):
        if file.suffix in (".h", ".cpp", ".cu", ".cuh"):
            digests[file.relative_to(root).as_posix()] = cpp_digest(file.read_text("utf-8"))
    return dict(sorted(digests.items()))


def _imports(tree: ast.Module) -> Iterator[str]:
    """Yield the dotted names, without `fewbits.`, that a module imports from fewbits; also those inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("fewbits."):
            module = node.module.removeprefix("fewbits.")
            yield from (module, *(f"{module}.{alias.name}" for alias in node.names))


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
