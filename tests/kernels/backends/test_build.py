"""Test that the CPU library is built once for each content of its sources, by one process, and that errors are shown.

A build by g++ takes half a minute, so all tests share one build, which a stub compiler copies (`quick`).
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from fewbits import fake_quantize, gaussian_noise
from fewbits.kernels.backends import build, compilation
from tests.effort import DEEP
from tests.forked_python import run_python

USE = """
import hashlib, json, sys, warnings
import torch
from fewbits import fake_quantize, gaussian_noise, mix
from fewbits.kernels.backends import build
x = torch.linspace(-3, 3, 4096).view(64, 64)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    results = [fake_quantize(x, "e2m1:1x16:nvfp4:stochastic:rht16", seed=3), gaussian_noise(4096, 3)]
    mix(x, "e4m3:16x16:gam @ error<0.03 | bf16")
    fake_quantize(x, "bf16", axis=0)
print(json.dumps({
    "digest": hashlib.sha256(b"".join(r.numpy().tobytes() for r in results)).hexdigest(),
    "warnings": [str(w.message) for w in caught],
    "library": str(build.library_path()),
}))
"""
needs_gcc = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")


def command_and_environment(cache: Path, **changes: str) -> dict[str, Any]:
    kept = {k: v for k, v in os.environ.items() if k not in ("CXX", "FEWBITS_BACKEND", "FEWBITS_CACHE")}
    return {"args": [sys.executable, "-c", USE], "env": kept | {"FEWBITS_CACHE": str(cache)} | changes, "text": True}


def use(cache: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    environment = command_and_environment(cache, **changes)["env"]
    return run_python(["-c", USE], folder=cache.parent, environment=environment)


@pytest.fixture(scope="module")
def digest() -> str:
    """Compute in this process the results that the program USE computes, and return their hash."""
    x = torch.linspace(-3, 3, 4096).view(64, 64)
    results = [fake_quantize(x, "e2m1:1x16:nvfp4:stochastic:rht16", seed=3), gaussian_noise(4096, 3)]
    return hashlib.sha256(b"".join(r.numpy().tobytes() for r in results)).hexdigest()


class Quick(NamedTuple):
    """An empty cache, a stub compiler that copies the library that g++ has built, and the stub's log (`diary`)."""

    cache: Path
    compiler: Path
    diary: Path

    def compilations(self) -> Counter[str]:
        """Return how often each unit was compiled, and, under `-shared`, how often the library was linked."""
        named = [re.search(r"\S*/(\w+\.cpp)|-shared", call) for call in self.diary.read_text().splitlines()]
        return Counter((unit[1] or unit[0]) if unit else "?" for unit in named)


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Quick:
    made = tmp_path / "made.so"
    made.write_bytes(build.build().read_bytes()[:-32])  # without the hash at its end
    quick = Quick(*(tmp_path / name for name in ("cache", "compiler", "diary")))
    script = f'echo "$@" >> {quick.diary}\n[[ "$1" = -shared ]] && cp {made} "${{@: -1}}" || : > "${{@: -1}}"'
    quick.compiler.write_text(f"#!/bin/bash\nsleep 0.2\n{script}\n")  # others must wait for the lock
    quick.compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(quick.compiler))
    monkeypatch.setenv("FEWBITS_CACHE", str(quick.cache))
    return quick


# One build


@needs_gcc
def test_processes_at_once_build_one_library_and_all_work(quick: Quick, digest: str) -> None:
    asked = command_and_environment(quick.cache, CXX=str(quick.compiler), FEWBITS_BACKEND="cpu")
    count = 4 if DEEP else 2
    running = [subprocess.Popen(**asked, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(count)]
    outputs = [process.communicate() for process in running]
    assert all(out for out, _ in outputs), outputs
    answers = [json.loads(out) for out, _ in outputs]
    assert [answer["digest"] for answer in answers] == [digest] * count
    assert not any(answer["warnings"] for answer in answers)
    assert quick.compilations() == Counter([*build.UNITS, "-shared"])
    left = sorted(path.suffix for path in quick.cache.iterdir())
    assert left == [".lock", ".so"]
    assert {answer["library"] for answer in answers} == {str(next(quick.cache.glob("*.so")))}


def test_a_library_is_named_by_what_it_is_made_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the file's name depends on the content of every source and on the flags, but not on paths or dates."""
    original = build.library_path()
    copy = tmp_path / "elsewhere"
    shutil.copytree(compilation.SOURCES, copy)
    monkeypatch.setattr(compilation, "SOURCES", copy)
    assert build.library_path() == original
    names = {original}
    for source in compilation.cpu_sources():
        text = source.read_text()
        source.write_text(text + "// edited\n")
        names.add(build.library_path())
        source.write_text(text)
        assert build.library_path() == original
    assert len(names) == 1 + len(compilation.cpu_sources())
    monkeypatch.setattr(compilation, "FLAGS", (*compilation.FLAGS, "-DEDITED"))
    assert build.library_path() not in names


@needs_gcc
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the levels of x86_64 are tried")
def test_a_lower_instruction_set_has_a_library_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [build.library_path()]
    for level in ("x86-64-v2", "x86-64-v3"):
        monkeypatch.setenv(compilation.ARCHITECTURE, level)
        names.append(build.library_path())
        command = ["g++", *compilation.flags(compilation.requested()), "-dM", "-E", "-x", "c++", "/dev/null"]
        macros = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert ("__AVX2__" in macros) == (level == "x86-64-v3")
        assert "__AVX512F__" not in macros
    assert len(set(names)) == 3
    monkeypatch.setenv(compilation.ARCHITECTURE, "x86-64-v9")
    monkeypatch.setenv("FEWBITS_CACHE", str(tmp_path))
    with pytest.raises(build.BuildError, match="x86-64-v9"):
        build.build()


@pytest.mark.parametrize("newest", compilation.LEVELS)
def test_a_wheels_library_for_the_newest_instruction_set_is_used_while_it_fits(
    newest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = build.library_path()
    monkeypatch.setattr(build, "cpu_flags", lambda: compilation.LEVELS[newest].needs | {"other"})
    monkeypatch.setattr(build, "PREBUILT", tmp_path)
    assert build.library_path() == cached
    shipped = {level: build.cached(tmp_path / build.file_name(level), lambda: b"") for level in compilation.LEVELS}
    assert build.library_path() == build.build() == shipped[newest]
    monkeypatch.setenv(compilation.ARCHITECTURE, "x86-64-v3")
    assert build.library_path() == shipped["x86-64-v3"]
    monkeypatch.delenv(compilation.ARCHITECTURE)
    shipped[newest].write_bytes(b"damaged")
    assert build.library_path() != shipped[newest]  # an older one, if there is one
    for library in shipped.values():
        library.write_bytes(b"damaged")
    assert build.library_path() == cached
    monkeypatch.setattr(compilation, "FLAGS", (*compilation.FLAGS, "-DEDITED"))
    assert build.library_path().parent == cached.parent


# No build


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        pytest.param({"CXX": "false"}, "do not work here", id="broken"),
        pytest.param({"PATH": ""}, "no C\\+\\+ compiler found: install", id="none", marks=pytest.mark.deep),
    ],
)
def test_without_a_compiler_the_reference_serves_after_one_warning(
    changes: dict[str, str], pattern: str, tmp_path: Path, digest: str
) -> None:
    answer = use(tmp_path, **changes)
    assert answer.returncode == 0, answer.stderr
    report = json.loads(answer.stdout)
    assert len(report["warnings"]) == 1
    assert re.search(pattern, report["warnings"][0])
    assert "reference" in report["warnings"][0]
    assert report["digest"] == digest
    assert not list(tmp_path.glob("*.so"))


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        pytest.param({"CXX": "false"}, "false .*failed with status 1", id="broken", marks=pytest.mark.deep),
        pytest.param({"PATH": ""}, "no C\\+\\+ compiler found: install g\\+\\+", id="none"),
    ],
)
def test_a_backend_that_was_asked_for_fails_loudly(changes: dict[str, str], pattern: str, tmp_path: Path) -> None:
    answer = use(tmp_path, FEWBITS_BACKEND="cpu", **changes)
    assert answer.returncode != 0
    assert answer.stdout == ""
    assert re.search(rf"BuildError: .*{pattern}", answer.stderr)


def put_in_its_place(library: Path, content: bytes) -> None:
    """Replace the library by a new file, because a change of the file that this process has mapped would kill it."""
    library.unlink()
    library.write_bytes(content)


def cut_short(library: Path) -> None:
    put_in_its_place(library, library.read_bytes()[:50_000])


def empty(library: Path) -> None:
    put_in_its_place(library, b"")


def overwrite_its_middle(library: Path) -> None:
    content = bytearray(library.read_bytes())
    content[20_000:40_000] = bytes(20_000)
    put_in_its_place(library, bytes(content))


def replace_by_one_of_other_sources(library: Path) -> None:
    other = library.with_name("cpu-0123456789abcdef.so")
    put_in_its_place(library, build.cached(other, lambda: build.content_of(library)).read_bytes())
    other.unlink()


DAMAGES = (cut_short, empty, overwrite_its_middle, replace_by_one_of_other_sources)


@needs_gcc
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_library_is_built_again(quick: Quick, damage: Callable[[Path], None]) -> None:
    """Check damage such as a full disk causes; loading such a library would kill the process with a bus error."""
    library = build.build()
    good = library.read_bytes()
    damage(library)
    assert not build.is_whole(library)
    assert build.build().read_bytes() == good


# The test above checks every kind of damage. In the next test each kind of damage needs a process that imports torch,
# so a run without FEWBITS_TESTS=deep checks only one kind.
@needs_gcc
@pytest.mark.parametrize("damage", [cut_short, *(pytest.param(one, marks=pytest.mark.deep) for one in DAMAGES[1:])])
def test_a_damaged_library_is_not_loaded_where_none_can_be_built(quick: Quick, damage: Callable[[Path], None]) -> None:
    damage(build.build())
    answer = use(quick.cache, CXX="none")
    assert answer.returncode == 0, answer.stderr
    (warning,) = json.loads(answer.stdout)["warnings"]
    assert re.search("is damaged, and no C\\+\\+ compiler found: CXX=none is not installed", warning)


@pytest.mark.parametrize(
    ("script", "pattern"),
    [
        ('for name; do :; done; echo garbage > "$name"', "cannot load the compiled library: .*file too short"),
        ("exit 0", "cannot load the compiled library"),
        (r"printf '\377 is no UTF-8'; exit 4", "failed with status 4:\n\ufffd is no UTF-8"),
    ],
)
def test_a_compiler_that_lies_is_found_out(
    script: str, pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/bash\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("FEWBITS_CACHE", str(tmp_path / "cache"))
    with pytest.raises(build.BuildError, match=pattern):
        build.build()
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


# Speed
