"""Hash the tokens of a C++ source, so that comments and spaces do not change the digest; list included files."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

_TOKEN = re.compile(
    r"""
      (?P<comment>//(?:\\\n|[^\n])*|/\*.*?\*/)
    | (?P<continued>\\\n)
    | (?P<newline>\n)
    | (?P<space>[ \t\r\f\v]+)
    | (?P<raw>(?:u8|[uUL])?R"(?P<delimiter>[^()\\\s]*)\(.*?\)(?P=delimiter)")
    | (?P<text>(?:u8|[uUL])?(?:"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'))
    | (?P<number>\.?\d(?:[eEpP][+-]|'?[\w.])*)
    | (?P<word>[A-Za-z_$]\w*)
    | (?P<operator><=>|<<=|>>=|->\*|\.\.\.|::|\+\+|--|->|\.\*|[-+*/%&|^=!<>]=|&&|\|\||<<|>>|\#\#|.)
    """,
    re.VERBOSE | re.DOTALL,
)
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)


def tokens(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, token) for each token of a source; the end of a preprocessor directive is a token, too."""
    line, in_directive, first_of_line = 1, False, True
    for match in _TOKEN.finditer(source):
        kind, text = match.lastgroup, match.group()
        if kind == "delimiter":
            kind = "raw"
        if kind == "newline":
            if in_directive:
                yield line, "end of directive"
            in_directive, first_of_line = False, True
        elif kind not in ("comment", "space", "continued"):
            in_directive = in_directive or (first_of_line and text == "#")
            first_of_line = False
            yield line, text
        line += text.count("\n")
    if in_directive:
        yield line, "end of directive"


def source_digest(source: str) -> str:
    """Return the digest of a C++ source's tokens."""
    return hashlib.sha256("\n".join(text for _, text in tokens(source)).encode()).hexdigest()


def with_includes(roots: Iterable[Path]) -> list[Path]:
    """Return `roots` and all existing files that they include by a quoted name, directly or indirectly, sorted."""
    files: set[Path] = set()
    waiting = list(roots)
    while waiting:
        path = waiting.pop()
        if path not in files:
            files.add(path)
            included = (path.parent / name for name in _INCLUDE.findall(path.read_text("utf-8")))
            waiting += [path for path in included if path.is_file()]
    return sorted(files)
