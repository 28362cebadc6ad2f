"""Find statements that only one version of the sources has, and tell whether a run executed them.

Statements are compared by their meaning, independent of their place, so moved, reformatted or commented code is no
change. A changed statement of a function counts as tried if its lines were executed. Statements that only declare
(constants, tables, default values, C++ declarations) are executed by every run, so they count as tried only if the
other version has a statement with the same literals: then a name changed and no value did.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fewbits.experiments.fingerprint.computing_modules import CONFIG_CLASSES
from fewbits.experiments.fingerprint.cpp_source import tokens
from fewbits.experiments.fingerprint.python_source import serialised, statements

_NESTED = ("body", "orelse", "finalbody", "handlers", "cases")


@dataclass(frozen=True)
class Statement:
    """A statement with its place, its meaning, its literals, and whether it only declares something."""

    file: str
    line: int
    last_line: int
    meaning: str
    literals: tuple[str, ...]
    declares: bool

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


def read_statements(files: Collection[str], root: Path) -> list[Statement]:
    """Return all statements of the files, which are paths below `root`."""
    result: list[Statement] = []
    for file in files:
        text = (root / file).read_text("utf-8")
        result += _python(file, text) if file.endswith(".py") else _cpp(file, text)
    return result


def only_in_first(first: list[Statement], second: list[Statement]) -> list[Statement]:
    """Return the statements of the first list whose meaning the second does not have, counting repetitions."""
    remaining = Counter(statement.meaning for statement in second)
    result = []
    for statement in first:
        if remaining[statement.meaning]:
            remaining[statement.meaning] -= 1
        else:
            result.append(statement)
    return result


def untried(
    changed: list[Statement],
    of_the_other: list[Statement],
    executed: Mapping[str, Collection[int]],
    executable: Mapping[str, Collection[int]] | None = None,
) -> list[Statement]:
    """Return the changed statements that the run did not try.

    executed: executed lines by file. executable: for C++ files, the lines that the compiler has code for.
    """
    literals = {statement.literals for statement in of_the_other}
    result = []
    for statement in changed:
        lines = range(statement.line, statement.last_line + 1)
        declares = statement.declares
        if not statement.file.endswith(".py"):
            declares = not any(line in (executable or {}).get(statement.file, ()) for line in lines)
        if declares:
            tried = not statement.literals or statement.literals in literals
        else:
            tried = any(line in executed.get(statement.file, ()) for line in lines)
        if not tried:
            result.append(statement)
    return result


def _python(file: str, text: str) -> Iterator[Statement]:
    config_classes = CONFIG_CLASSES.get(file.removesuffix(".py").replace("/", "."), ())
    yield from _body_statements(file, ast.parse(text).body, config_classes, declares=True, is_config=False)


def _body_statements(
    file: str, body: list[ast.stmt], config_classes: Collection[str], declares: bool, is_config: bool
) -> Iterator[Statement]:
    for node in statements(body, is_config):
        if isinstance(node, ast.Raise | ast.Assert | ast.Import | ast.ImportFrom | ast.Pass):
            continue
        yield from _node_statements(file, node, config_classes, declares)


def _node_statements(file: str, node: ast.AST, config_classes: Collection[str], declares: bool) -> Iterator[Statement]:
    """Yield a statement without the statements nested in it, and then the nested ones."""
    nested = {name: value for name in _NESTED if isinstance(value := getattr(node, name, None), list)}
    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    first = min((child.lineno for part in nested.values() for child in part if hasattr(child, "lineno")), default=None)
    for name in nested:
        setattr(node, name, [])
    line = getattr(node, "lineno", 0)
    last = getattr(node, "end_lineno", line) if first is None else max(first - 1, line)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        values = node.bases if isinstance(node, ast.ClassDef) else node.args.defaults
        constants = [value for part in (*node.decorator_list, *values) for value in _constants(part)]
        yield Statement(file, line, line, serialised(node), tuple(constants), declares=True)
    elif line:
        yield Statement(file, line, last, serialised(node), tuple(_constants(node)), declares)
    for name, children in nested.items():
        setattr(node, name, children)
        is_config = isinstance(node, ast.ClassDef) and node.name in config_classes
        for child in statements(children, is_config):
            if not isinstance(child, ast.Raise | ast.Assert | ast.Import | ast.ImportFrom | ast.Pass):
                yield from _node_statements(file, child, config_classes, declares and not is_function)


def _constants(node: ast.AST) -> list[str]:
    return [
        repr(child.value)
        for child in ast.walk(node)
        if isinstance(child, ast.Constant) and not isinstance(child.value, bool | None)
    ]


def _cpp(file: str, text: str) -> Iterator[Statement]:
    """Yield a statement for each line that has tokens; `untried` asks the compiler's data whether it declares."""
    lines: dict[int, list[str]] = {}
    for line, token in tokens(text):
        if token != "end of directive":
            lines.setdefault(line, []).append(token)
    for line, parts in lines.items():
        if any(part[0].isalnum() or part[0] in "_\"'" for part in parts) and parts[:2] != ["#", "include"]:
            literals = tuple(part for part in parts if part[0].isdigit() or part[0] in "\"'.")
            yield Statement(file, line, line, " ".join(parts), tuple(t for t in literals if t != "."), declares=False)
