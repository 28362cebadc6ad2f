"""Compare two versions of the sources, and find changed statements that the test trials did not execute.

`same_bits.py` runs the same small trials with both versions. If they give the same bits, this module lists the changed
statements that these trials did not execute ("untried"), which a person then has to review.

Two statements are equal if their syntax is the same (without comments and messages), they are inside the same functions
and branches, and they follow the same statement. File names are not compared, so moving code to another file is no
change. Swapping two statements is a change.

A changed statement inside a function counts as tried if all its lines with code were executed. A declaration (a
constant, a table, a signature, a line of C++ without code) is executed even if no trial uses what it declares, so the
executed lines prove nothing. A changed declaration counts as tried only if the other version has the same declaration
with other names, and each of these names exists in only one of the two versions: then names were merely changed. A
changed import counts as tried unless the other version imports another object under the same name.

Executed lines are evidence, not proof: a statement was executed only with the values that occurred in these trials.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import CodeType

from fewbits.experiments.fingerprint.computing_modules import CONFIG_CLASSES
from fewbits.experiments.fingerprint.cpp_source import tokens
from fewbits.experiments.fingerprint.python_source import serialised, statements

_NESTED = ("body", "orelse", "finalbody", "handlers", "cases")  # the fields of syntax nodes that contain statements
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_SILENT = (ast.Raise, ast.Assert, ast.Pass)  # statements that are not compared
# The names of configuration classes, without modules, because a class may be in another module in the other version.
_CONFIG_CLASSES = frozenset(name for names in CONFIG_CLASSES.values() for name in names)
_NAME = re.compile(r"(?<![\w'\"])(?:id|attr|arg|name|asname)='(\w+)'")
_CPP_NAME = re.compile(r"[A-Za-z_]\w*")
# Words of C++ that are not names, and names of its library: a rename never replaces them.
_CPP_KEPT = frozenset(
    """auto bool break case char class const constexpr continue default do double else enum extern false float for
    goto if inline int long namespace noexcept operator private public return short signed sizeof static std struct
    switch template true typedef typename union unsigned using void volatile while""".split()  # noqa: SIM905
)
_CPP_LIBRARY = re.compile(
    r"u?int\d+_t|size_t|__\w+|f?(?:abs|ceil|floor|round|trunc|rint|nearbyint|max|min|ma|mod|sqrt)f?"
)


@dataclass(frozen=True)
class Statement:
    """A statement of a source file, without the statements inside it."""

    file: str
    line: int
    last_line: int
    meaning: str  # text that is the same for equal statements: syntax, enclosing functions, statement before
    shape: str = ""  # the statement's syntax with `_` in place of every name, to recognise renamed declarations
    names: tuple[str, ...] = ()  # the names that are `_` in `shape`, in order
    declares: bool = False  # the statement is a declaration (see the module's docstring)
    binds: str | None = None  # for an import: the name under which it imports

    @property
    def place(self) -> str:
        """The file and the line, as FILE:LINE."""
        return f"{self.file}:{self.line}"


@dataclass
class Sources:
    """The statements and names of one version of the sources, for the comparison with another version."""

    statements: list[Statement] = field(default_factory=list)
    names: set[str] = field(default_factory=set)  # all names that the statements contain
    bound: set[str] = field(default_factory=set)  # names that the sources themselves define
    code_lines: dict[str, set[int]] = field(default_factory=dict)  # Python file: its lines that have code


def read_sources(files: Collection[str], root: Path) -> Sources:
    """Read Python and C++ files, whose paths are relative to `root`, and return their statements and names."""
    sources = Sources()
    for file in files:
        text = (root / file).read_text("utf-8")
        if file.endswith(".py"):
            tree = ast.parse(text)
            sources.code_lines[file] = set(_lines(compile(text, file, "exec")))
            sources.bound |= set(_bound(tree))
            sources.statements += _of_body(file, tree.body, "", in_function=False, is_config=False)
        else:
            statements = list(_cpp(file, text))
            sources.bound |= {name for statement in statements for name in statement.names if not _of_library(name)}
            sources.statements += statements
    sources.names = {name for statement in sources.statements for name in statement.names}
    return sources


def only_in_first(first: Iterable[Statement], second: Iterable[Statement]) -> list[Statement]:
    """Return the statements of `first` that are left after each statement of `second` has cancelled one equal to it."""
    remaining = Counter(statement.meaning for statement in second)
    result = []
    for statement in first:
        if remaining[statement.meaning]:
            remaining[statement.meaning] -= 1
        else:
            result.append(statement)
    return result


def untried(
    own: Sources,
    other: Sources,
    executed: Mapping[str, Collection[int]],
    executable: Mapping[str, Collection[int]] | None = None,
) -> list[Statement]:
    """Return the statements that only `own` has and that a person has to review.

    Statements that the trials executed, declarations whose names merely changed, and imports that give no name a new
    meaning need no review.

    own, other: two versions of the sources. executed: for each file of `own`, the lines that the test trials executed.
    executable: for each C++ file of `own`, the lines that the compiler translated to code; other lines are treated as
        declarations. None: all C++ lines are treated as declarations.
    """
    with_code = {**(executable or {}), **own.code_lines}
    theirs = only_in_first(other.statements, own.statements)
    left = []
    for statement in only_in_first(own.statements, other.statements):
        lines = [
            line for line in range(statement.line, statement.last_line + 1) if line in with_code.get(statement.file, ())
        ]
        if statement.binds is not None:
            tried = all(
                _is_renamed(statement, another, own, other) for another in theirs if another.binds == statement.binds
            )
        elif statement.declares or not lines:
            tried = any(_is_renamed(statement, another, own, other) for another in theirs)
        else:
            tried = all(line in executed.get(statement.file, ()) for line in lines)
        if not tried:
            left.append(statement)
    return left


def _is_renamed(one: Statement, another: Statement, own: Sources, other: Sources) -> bool:
    """Tell whether two statements differ only in names, and each differing name exists in only one version.

    one, another: a statement of the version `own`, and a statement of the version `other`.
    """
    if one.shape != another.shape or len(one.names) != len(another.names):
        return False
    return all(
        a == b or (a in own.bound - other.names and b in other.bound - own.names)
        for a, b in zip(one.names, another.names, strict=True)
    )


def _lines(code: CodeType) -> Iterator[int]:
    """Yield the line numbers that a code object contains, also those of the functions and classes inside it."""
    yield from (line for _, _, line in code.co_lines() if line)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _lines(constant)


def _bound(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a module defines: functions, classes, arguments, assigned variables and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def _of_body(file: str, body: list[ast.stmt], place: str, in_function: bool, is_config: bool) -> Iterator[Statement]:
    """Yield the statements of the body of a module, class, function or branch, including nested statements.

    place: the enclosing functions and branches, as text. in_function: whether the body is inside a function.
    is_config: True for the body of a configuration class, whose fields are skipped.
    """
    before = ""  # the previous statement, as text
    for node in statements(body, is_config):
        if isinstance(node, _SILENT):
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from _of_import(file, node)
            continue
        text = ""
        for statement in _of_node(file, node, place, in_function, before if in_function else ""):
            text = text or statement.shape + "".join(statement.names)
            yield statement
        before = text


def _of_import(file: str, node: ast.Import | ast.ImportFrom) -> Iterator[Statement]:
    """Yield a statement for each name that an import statement imports.

    For `from fewbits.MODULE import NAME`, the text that is compared does not contain MODULE, because moving code to
    another module is no change.
    """
    module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
    ours = module.partition(".")[0] == "fewbits"
    for alias in node.names:
        target = alias.name if ours else f"{module}:{alias.name}"
        binds = alias.asname or alias.name
        names = (alias.name,) if ours else ()
        shape = "import _" if ours else f"import {target}"
        yield Statement(
            file, node.lineno, node.lineno, f"import {target} as {binds}", shape, names, declares=True, binds=binds
        )


def _of_node(file: str, node: ast.AST, place: str, in_function: bool, before: str) -> Iterator[Statement]:
    """Yield a statement for the syntax node without its nested statements, and then the nested statements.

    place: the enclosing functions and branches, as text. in_function: whether the node is inside a function.
    before: the statement before the node, as text; "" for the first statement of a body, and outside functions.
    """
    nested = {name: value for name in _NESTED if isinstance(value := getattr(node, name, None), list)}
    starts = [line for part in nested.values() for child in part if (line := _first_line(child)) is not None]
    for name in nested:
        setattr(node, name, [])
    line = _first_line(node) or 0
    last = getattr(node, "end_lineno", None) or line
    header = isinstance(node, (*_FUNCTIONS, ast.ClassDef))
    own = _statement(
        file, line, line if header else min([last, *(start - 1 for start in starts if start > line)]), node
    )
    own = replace(own, declares=header or not in_function)
    yield replace(own, meaning=f"{place}|{before}|{own.meaning}" if in_function else f"{place}|{own.meaning}")
    for name, children in nested.items():
        setattr(node, name, children)
        inner = f"{place}.{getattr(node, 'name', '')}" if header else f"{place}[{name} of {own.meaning}]"
        is_config = isinstance(node, ast.ClassDef) and node.name in _CONFIG_CLASSES
        function = in_function or isinstance(node, _FUNCTIONS)
        if name in ("handlers", "cases"):
            for child in children:
                yield from _of_node(file, child, inner, function, "")
        else:
            yield from _of_body(file, children, inner, function, is_config)


def _first_line(node: ast.AST) -> int | None:
    if isinstance(node, ast.match_case):
        return node.pattern.lineno
    return getattr(node, "lineno", None)


def _statement(file: str, line: int, last: int, node: ast.AST) -> Statement:
    meaning = serialised(node)
    return Statement(file, line, last, meaning, _NAME.sub("_", meaning), tuple(_NAME.findall(meaning)))


def _cpp(file: str, text: str) -> Iterator[Statement]:
    """Yield a statement for each line of C++, except #include and lines of only brackets, commas and semicolons.

    Some of these lines, such as declarations, compile to no code.
    """
    lines: dict[int, list[str]] = {}
    for line, token in tokens(text):
        if token != "end of directive":
            lines.setdefault(line, []).append(token)
    before = ""
    for line, parts in lines.items():
        if parts[:2] == ["#", "include"] or not set(parts) - set("{}();,"):
            continue
        is_name = [bool(_CPP_NAME.fullmatch(part)) and part not in _CPP_KEPT for part in parts]
        shape = " ".join("_" if named else part for part, named in zip(parts, is_name, strict=True))
        names = tuple(part for part, named in zip(parts, is_name, strict=True) if named)
        yield Statement(file, line, line, f"{before}|{' '.join(parts)}", shape, names)
        before = " ".join(parts)


def _of_library(name: str) -> bool:
    return _CPP_LIBRARY.fullmatch(name) is not None
