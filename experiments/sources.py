"""Hash what a source file computes, so that a change of comments, docstrings or messages does not change its digest.

Of a Python module, the syntax tree is serialised without docstrings, positions, annotations and the text of errors,
assertions, warnings and log calls. Fields of configuration classes are omitted, since a trial's id contains their
values. A name imported from fewbits counts with its module's name, not with the module's folder, so that a file may be
moved. Python's own serialisation (ast.dump) is not used, because it differs between Python versions.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Callable, Collection, Iterator

LOG_METHODS = {"debug", "info", "warning", "error", "exception", "critical", "log"}
LOGGERS = {"log", "logger", "logging", "_log", "_logger"}
WARNINGS = {"warn", "_warn", "notice"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
BODIES = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# Fields of syntax nodes that are not serialised: only some Python versions have them, or they are annotations.
SKIPPED = {"annotation", "returns", "type_comment", "type_params", "type_ignores", "kind", "ctx"}
_CPP = re.compile(
    r"""
      (?P<skipped>//(?:\\\n|[^\n])*|/\*.*?\*/|\\\n|[ \t\r\f\v]+)
    | (?P<newline>\n)
    | (?P<raw>(?:u8|[uUL])?R"(?P<delimiter>[^()\\\s]*)\(.*?\)(?P=delimiter)")
    | (?P<text>(?:u8|[uUL])?(?:"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'))
    | (?P<number>\.?\d(?:[eEpP][+-]|'?[\w.])*)
    | (?P<word>[A-Za-z_$]\w*)
    | (?P<operator><=>|<<=|>>=|->\*|\.\.\.|::|\+\+|--|->|\.\*|[-+*/%&|^=!<>]=|&&|\|\||<<|>>|\#\#|.)
    """,
    re.VERBOSE | re.DOTALL,
)


def python_digest(
    source: str | bytes | ast.Module, config_classes: Collection[str] = (), spelled: Callable[[str], str] = str
) -> str:
    """Return the digest of a Python module.

    config_classes: names of the classes whose annotated fields are settings. spelled: returns the text that stands for
    a module of fewbits in an import, given its dotted name without `fewbits.`.
    """
    tree = source if isinstance(source, ast.Module) else ast.parse(source)
    return hashlib.sha256(_Serialiser(config_classes, spelled).text(tree).encode()).hexdigest()


def cpp_digest(source: str) -> str:
    """Return the digest of the tokens of a C++ or CUDA source; the end of a preprocessor directive is a token, too."""
    tokens, in_directive, first_of_line = [], False, True
    for match in _CPP.finditer(source + "\n"):
        if match.lastgroup == "newline":
            if in_directive:
                tokens.append("end of directive")
            in_directive, first_of_line = False, True
        elif match.lastgroup != "skipped":
            in_directive = in_directive or (first_of_line and match.group() == "#")
            first_of_line = False
            tokens.append(match.group())
    return hashlib.sha256("\n".join(tokens).encode()).hexdigest()


def imported(node: ast.ImportFrom) -> Iterator[tuple[str, ast.alias]]:
    """Yield (the dotted name without `fewbits.`, alias) for each name that a statement imports from fewbits."""
    package, _, module = (node.module or "").partition(".")
    if package == "fewbits" and not node.level:
        yield from ((f"{module}.{alias.name}".lstrip("."), alias) for alias in node.names)


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a body, without docstrings, imports from `__future__`, and `if TYPE_CHECKING`."""
    for statement in body:
        expression = statement.value if isinstance(statement, ast.Expr) else None
        if isinstance(expression, ast.Constant) and isinstance(expression.value, str):
            continue
        if isinstance(statement, ast.ImportFrom) and statement.module == "__future__":
            continue
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in (
            getattr(statement.test, "id", ""),
            getattr(statement.test, "attr", ""),
        ):
            continue
        yield statement


class _Serialiser:
    def __init__(self, config_classes: Collection[str], spelled: Callable[[str], str]) -> None:
        self._config_classes, self._spelled = config_classes, spelled

    def text(self, node: ast.AST) -> str:
        return self._fields(node, silent=isinstance(node, ast.Raise | ast.Assert) or _is_message(node))

    def _fields(self, node: ast.AST, silent: bool) -> str:
        parts = []
        for name, value in ast.iter_fields(node):
            if name in SKIPPED:
                continue
            if name == "body" and isinstance(node, BODIES):
                value = self._body(node)
            text = self._value(value, silent)
            if text:
                parts.append(f"{name}={text}")
        return f"{type(node).__name__}({','.join(parts)})"

    def _body(self, node: ast.AST) -> list[ast.stmt | str]:
        """Return the statements of a body that compute something, the imports from fewbits sorted and first."""
        imports: list[str] = []
        others: list[ast.stmt | str] = []
        is_config = isinstance(node, ast.ClassDef) and node.name in self._config_classes
        for statement in statements(node.body):  # type: ignore[attr-defined]
            if isinstance(statement, ast.ImportFrom) and (names := list(imported(statement))):
                imports += [f"{self._spelled(name)} as {alias.asname or alias.name}" for name, alias in names]
            elif not (is_config and isinstance(statement, ast.AnnAssign)):
                others.append(statement)
        return [*sorted(imports), *others]

    def _value(self, value: object, silent: bool) -> str:
        if isinstance(value, ast.AST):
            if silent and isinstance(value, ast.JoinedStr):
                return "message"
            if silent and isinstance(value, ast.Constant) and isinstance(value.value, str):
                return "message"
            return self._fields(value, silent) if silent and not isinstance(value, FUNCTIONS) else self.text(value)
        if isinstance(value, list):
            return f"[{','.join(self._value(item, silent) for item in value)}]" if value else ""
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
