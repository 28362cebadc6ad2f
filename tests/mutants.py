"""Make the mutants of a C++ or Python source: copies of it with one small mistake, which tests should notice.

The mistakes are: another operator or comparison; an integer changed by one, or another number doubled; min in place of
max or the reverse; true in place of false or the reverse. Tests cannot notice changes of comments, strings,
preprocessor lines, static assertions and type annotations, so these stay unchanged.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass

OPERATORS = {
    "+": ("-",),
    "-": ("+",),
    "*": ("/",),
    "/": ("*",),
    "%": ("/",),
    "<": ("<=", ">="),
    "<=": ("<",),
    ">": (">=", "<="),
    ">=": (">",),
    "==": ("!=",),
    "!=": ("==",),
    "<<": (">>",),
    ">>": ("<<",),
    "&": ("|",),
    "|": ("&",),
    "^": ("|",),
}
CPP_WORDS = {"&&": ("||",), "||": ("&&",), "true": ("false",), "false": ("true",), "min": ("max",), "max": ("min",)}
PYTHON_WORDS = {
    "//": ("*",),
    "and": ("or",),
    "or": ("and",),
    "True": ("False",),
    "False": ("True",),
    "min": ("max",),
    "max": ("min",),
    "any": ("all",),
    "all": ("any",),
    "not": ("",),
}
CPP = re.compile(
    r"""
    (?P<skipped> //[^\n]* | /\*.*?\*/ | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*'
        | ^[ \t]*\#(?:\\\n|[^\n])* | \bstatic_assert\b[^;]*; | \btemplate[ ]?<[^{;]*?>(?=\s) )
    | (?P<number> (?<![\w.])(?: 0x[0-9a-fA-F]+ | \d+\.\d*(?:e[+-]?\d+)? | \d+ )(?= [uUlLfF]*\b | [^\w.] ) )
    | (?P<changed> (?<=[ ])(?: <<|>>|<=|>=|==|!=|&&|\|\| | [-+*/%<>&|^] )(?=[ ])
        | \b(?:true|false|min|max)\b )
    """,
    re.VERBOSE | re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Mutant:
    """A change of a source: the text `before` at position `start` is replaced by `after`."""

    file: str  # the path of the source
    line: int  # the line of the change, from 1
    start: int  # the position in the source, in characters from 0
    before: str
    after: str

    def of(self, text: str) -> str:
        end = self.start + len(self.before)
        assert text[self.start : end] == self.before
        return text[: self.start] + self.after + text[end:]

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.before} → {self.after or 'nothing'}"


def mutants(file: str, text: str) -> list[Mutant]:
    """Return all mutants of a source, in the order of their positions. file: its path; text: its content."""
    found = _python(text) if file.endswith(".py") else _cpp(text)
    return [
        Mutant(file, text.count("\n", 0, start) + 1, start, before, after)
        for start, before, changes in found
        for after in changes
    ]


def _cpp(text: str) -> Iterator[tuple[int, str, tuple[str, ...]]]:
    for match in CPP.finditer(text):
        token = match[0]
        if match["number"]:
            yield match.start(), token, _numbers(token)
        elif match["changed"]:
            yield match.start(), token, OPERATORS.get(token) or CPP_WORDS[token]


def _python(text: str) -> Iterator[tuple[int, str, tuple[str, ...]]]:
    starts = [0]  # the position of the first character of each line
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    annotated = list(_annotations(text))
    before = ""  # the previous token, to tell a product from the star of an argument such as *args
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        start = starts[token.start[0] - 1] + token.start[1]
        unary = token.string in "*/" and before in ("(", ",", "[", "{", "*", "lambda", "")
        if not unary and not any(first <= token.start < last for first, last in annotated):
            if token.type == tokenize.NUMBER:
                yield start, token.string, _numbers(token.string)
            elif token.type in (tokenize.OP, tokenize.NAME) and not (token.string == "not" and before == "is"):
                changes = OPERATORS.get(token.string) or PYTHON_WORDS.get(token.string)
                if changes and not (token.string in ("*", "**", "/") and before in ("(", ",")):
                    yield start, token.string, changes
        before = token.string


def _annotations(text: str) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield the start and the end of each type annotation, each as (line, column)."""
    for node in ast.walk(ast.parse(text)):
        for name in ("annotation", "returns"):
            child = getattr(node, name, None)
            if isinstance(child, ast.expr):
                assert child.end_lineno is not None
                assert child.end_col_offset is not None
                yield (child.lineno, child.col_offset), (child.end_lineno, child.end_col_offset)


def _numbers(token: str) -> tuple[str, ...]:
    if token.startswith("0x"):
        return (hex(int(token, 16) + 1),)
    if token.isdigit():
        value = int(token)
        return (str(value + 1), str(value - 1)) if value else ("1",)
    try:
        value_of = float(token)
    except ValueError:  # for example a complex number, which is left unchanged
        return ()
    return (repr(2 * value_of) if value_of else "1.0",)
