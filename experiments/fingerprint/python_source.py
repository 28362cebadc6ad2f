"""Hash what a Python module computes, so that changes of comments, docstrings and messages do not change the digest.

The syntax tree is serialised without docstrings, comments, positions and annotations, and without the text of raised
errors, assertions, warnings and log calls. It is also serialised without the fields of configuration classes, because a
trial's id contains their values, and a new field with a default must not change the id. The standard library's
serialisation (ast.dump) is not used, because it differs between Python versions.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Collection, Iterator

LOG_METHODS = {"debug", "info", "warning", "error", "exception", "critical", "log"}
LOGGERS = {"log", "logger", "logging", "_log", "_logger"}
WARNINGS = {"warn", "_warn"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
BODIES = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# Fields of syntax nodes that are not serialised: only some Python versions have them, or they are annotations.
SKIPPED = {"annotation", "returns", "type_comment", "type_params", "type_ignores", "kind", "ctx"}


def module_digest(source: str | bytes, config_classes: Collection[str] = ()) -> str:
    """Return the digest of a module's serialised syntax tree.

    config_classes: names of the module's classes whose annotated fields are settings, which are not serialised.
    """
    return hashlib.sha256(serialised(ast.parse(source), config_classes).encode()).hexdigest()


def serialised(node: ast.AST, config_classes: Collection[str] = ()) -> str:
    """Return a syntax tree as text, without statements that compute nothing, such as docstrings.

    Fields of syntax nodes are omitted if they are empty or if the constant SKIPPED lists them. The texts of raised
    errors, assertions, warnings and log calls are replaced by `message`. config_classes: names of classes whose
    annotated fields are settings, which are not serialised.
    """
    if isinstance(node, ast.Raise | ast.Assert) or _is_message(node):
        return _fields(node, config_classes, silent=True)
    return _fields(node, config_classes, silent=False)


def statements(body: list[ast.stmt], config_class: bool = False) -> Iterator[ast.stmt]:
    """Yield the statements of a body that compute something.

    Docstrings, imports from `__future__`, `if TYPE_CHECKING` and, with config_class=True (the body is that of a
    configuration class), annotated fields are skipped.
    """
    for statement in body:
        expression = statement.value if isinstance(statement, ast.Expr) else None
        if isinstance(expression, ast.Constant) and isinstance(expression.value, str):
            continue  # a docstring
        if isinstance(statement, ast.ImportFrom) and statement.module == "__future__":
            continue
        if isinstance(statement, ast.If) and _names_type_checking(statement.test):
            continue
        if config_class and isinstance(statement, ast.AnnAssign):
            continue
        yield statement


def _fields(node: ast.AST, config_classes: Collection[str], silent: bool) -> str:
    parts = []
    for name, value in ast.iter_fields(node):
        if name in SKIPPED:
            continue
        if name == "body" and isinstance(node, BODIES):
            is_config = isinstance(node, ast.ClassDef) and node.name in config_classes
            value = list(statements(value, is_config))
        text = _value(value, config_classes, silent)
        if text:
            parts.append(f"{name}={text}")
    return f"{type(node).__name__}({','.join(parts)})"


def _value(value: object, config_classes: Collection[str], silent: bool) -> str:
    if isinstance(value, ast.AST):
        if silent and isinstance(value, ast.JoinedStr):
            return "message"
        if silent and isinstance(value, ast.Constant) and isinstance(value.value, str):
            return "message"
        if silent and not isinstance(value, FUNCTIONS):
            return _fields(value, config_classes, silent)
        return serialised(value, config_classes)
    if isinstance(value, list):
        return f"[{','.join(_value(item, config_classes, silent) for item in value)}]" if value else ""
    return "" if value is None else repr(value)


def _is_message(node: ast.AST) -> bool:
    """Tell whether the node is a call that only writes a message: a warning or a log call."""
    if not isinstance(node, ast.Call):
        return False
    called = node.func
    if isinstance(called, ast.Name):
        return called.id in WARNINGS
    if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
        name = called.value.id
        return (name == "warnings" and called.attr == "warn") or (name in LOGGERS and called.attr in LOG_METHODS)
    return False


def _names_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )
