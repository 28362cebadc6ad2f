"""Test that mutants change operators and constants of sources, but not comments, strings and type annotations."""

import pytest

from tests.mutants import mutants
from tests.mutate import HEAD, ROOT, TARGETS, with_section


def changes(file: str, text: str) -> list[tuple[str, str]]:
    return [(mutant.before, mutant.after) for mutant in mutants(file, text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("if (a <= b) return;", [("<=", "<")]),
        ("x = a < 3;", [("<", "<="), ("<", ">="), ("3", "4"), ("3", "2")]),
        ("x = a >> 23u;", [(">>", "<<"), ("23", "24"), ("23", "22")]),
        ("x = 0x7f800000u;", [("0x7f800000", "0x7f800001")]),
        ("y = 0.5f * x;", [("0.5", "1.0"), ("*", "/")]),
        ("return std::max(a, b) && true;", [("max", "min"), ("&&", "||"), ("true", "false")]),
        ("// a + b\n/* 1 < 2 */", []),
        ("#define N 16\n#include <cmath>", []),
        ('const char *s = "a + 1";', []),
        ("template <int N = 4> struct A {};", []),
        ("static_assert(sizeof(A) == 4);", []),
        ("int32_t x = bits16;", []),
    ],
)
def test_a_cpp_source_is_changed_in_its_operators_and_constants(text: str, expected: list[tuple[str, str]]) -> None:
    assert changes("a.h", text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = a < b", [("<", "<="), ("<", ">=")]),
        ("x = not a and b", [("not", ""), ("and", "or")]),
        ("x = 2 * a - 0.5", [("2", "3"), ("2", "1"), ("*", "/"), ("-", "+"), ("0.5", "1.0")]),
        ("x = a is not b", []),
        ("def f(x: int | None = 1) -> int | str: pass", [("1", "2"), ("1", "0")]),
        ("def f(*a, **b): g(*a, **b)", []),
        ("def f(a, *, b): pass", []),
        ('"""One < 2."""\nx = "1 + 1"  # 1 + 1', []),
        ("x = all(a) or min(b)", [("all", "any"), ("or", "and"), ("min", "max")]),
    ],
)
def test_a_python_source_is_changed_in_its_operators_and_constants(text: str, expected: list[tuple[str, str]]) -> None:
    assert changes("a.py", text) == expected


def test_a_mutant_differs_at_its_line_alone() -> None:
    text = "a = 1\nb = a + 2\n"
    first, *_, last = mutants("a.py", text)
    assert (first.line, first.of(text)) == (1, "a = 2\nb = a + 2\n")
    assert (last.line, last.of(text)) == (2, "a = 1\nb = a + 1\n")


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_names_sources_and_tests_that_exist(name: str) -> None:
    for path in (*TARGETS[name].files, *TARGETS[name].tests):
        assert list(ROOT.glob(path)), path


def test_a_section_replaces_the_earlier_one_of_its_target_alone() -> None:
    page = HEAD
    for name, text in (("a", "1"), ("b", "2"), ("a", "3")):
        page = with_section(page, name, [f"## {name}", "", text, ""])
    assert page == f"{HEAD.rstrip()}\n\n## a\n\n3\n\n## b\n\n2\n"
