"""Check the first words of docstrings: a function's is an imperative verb, and none begins a fragment of a sentence.

Ruff's rules (pyproject.toml) check the form of docstrings. D401 finds verbs in the third person, but accepts nouns. No
rule finds fragments that only complete the function's name, such as "Of each trial…".
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ("kernels", "models", "experiments", "sweeps", "analysis", "src/fewbits/common", "src/hydra_plugins")
# fmt: off
FRAGMENTS = frozenset(
    {
        "after", "all", "as", "at", "before", "beside", "both", "by", "each", "either", "every", "for",
        "from", "how", "if", "in", "into", "its", "nothing", "of", "on", "since", "so", "than", "that",
        "their", "through", "to", "under", "until", "what", "whatever", "when", "where", "whether", "which",
        "who", "whoever", "whose", "why", "with", "without",
    }
)
NOUNS = frozenset(
    {
        "a", "an", "bits", "bytes", "elements", "largest", "mean", "one", "relative", "rows", "seconds",
        "the", "values", "whole",
    }
)
# fmt: on
Node = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def wrong_openings(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, first word) of each docstring that begins with a fragment or, in a function, not with a verb."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, Node) or not (text := ast.get_docstring(node)):
            continue
        first = re.sub(r"\W+$", "", text.split()[0])
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_property(node)
        if first.lower() in FRAGMENTS or (is_function and not is_verb(first)):
            yield getattr(node, "lineno", 1), first


def is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("property" in ast.unparse(decorator) for decorator in node.decorator_list)


def is_verb(word: str) -> bool:
    """Tell whether the word can be an imperative: it is capitalised, not one of NOUNS, and not in the third person."""
    return bool(re.fullmatch(r"[A-Z][a-z]+", word)) and word.lower() not in NOUNS and not re.search(r"[^s]s$", word)


def files() -> list[Path]:
    package = ROOT / "src" / "fewbits"
    return [*package.glob("*.py"), *(file for name in SOURCES for file in sorted((ROOT / name).rglob("*.py")))]


@pytest.mark.parametrize("file", files(), ids=lambda file: file.relative_to(ROOT).as_posix())
def test_docstrings_open_with_a_verb(file: Path) -> None:
    assert list(wrong_openings(file.read_text("utf-8"))) == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("Return the trials that still have to run.", False),
        ("Pass the value on.", False),
        ("Returns the trials.", True),
        ("Of each trial, the bytes.", True),
        ("The bytes of a trial.", True),
        ("Seconds that it took.", True),
        ("x, rounded.", True),
    ],
)
def test_fragments_are_found(text: str, wrong: bool) -> None:
    assert bool(list(wrong_openings(f'def f():\n    """{text}"""\n'))) == wrong


def test_modules_and_properties_may_start_with_a_noun() -> None:
    source = '''"""The formats."""

class A:
    """A format."""

    @property
    def bits(self):
        """The bits."""
'''
    assert not list(wrong_openings(source))
    assert list(wrong_openings('"""What the formats are."""\n'))
