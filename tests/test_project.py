"""Test the project as a whole: layout, public API, contents of the wheel, `make reproduce`, and code in the README."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import fewbits
from fewbits.experiments.identity import changed, running, total
from tests.forked_python import run_python

ROOT = Path(__file__).parents[1]
PACKAGES = ("kernels", "models", "experiments", "sweeps", "analysis")
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md")


# Layout


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_is_a_relative_link(package: str) -> None:
    link = ROOT / "src" / "fewbits" / package
    assert os.readlink(link) == f"../../{package}"
    assert link.resolve() == ROOT / package


# The public API


def test_every_public_name_resolves_to_the_thing_of_that_name() -> None:
    source = Path(fewbits.__file__).read_text()
    assert set(re.findall(r" as (\w+)$", source, re.MULTILINE)) == {*fewbits.__all__, "__version__"}
    for name in fewbits.__all__:
        assert getattr(fewbits, name).__name__ == name
    assert set(fewbits.__all__) <= set(dir(fewbits))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'fake_quantise'"):
        fewbits.fake_quantise  # type: ignore[attr-defined]  # noqa: B018


def test_importing_fewbits_loads_no_torch() -> None:
    probe = "import sys, fewbits; fewbits.Quantizer.parse('e4m3:128x128:gam'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0


# The wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"), FEWBITS_PREBUILT="0")


def build_wheel(tmp: Path, **environment: str) -> Path:
    """Return a wheel built from a copy of the repository; from a copy, since setuptools writes beside the sources."""
    unwanted = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "runs", "reports")
    shutil.copytree(ROOT, tmp / "tree", symlinks=True, ignore=unwanted)
    script = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    command = [sys.executable, "-W", "ignore", "-c", script, str(tmp)]
    env = os.environ | environment
    done = subprocess.run(command, cwd=tmp / "tree", env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return next(tmp.glob("fewbits-*.whl"))


def test_the_wheel_contains_every_file_of_every_package_but_readmes(wheel: Path) -> None:
    carried = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    top = ROOT / "src" / "fewbits"
    wanted = {"fewbits/py.typed"} | {f"fewbits/{file.name}" for file in top.glob("*.py")}
    wanted |= {f"fewbits/{name}/{file.name}" for name in ("commands", "common") for file in (top / name).glob("*.py")}
    for name in PACKAGES:
        sources = [file for file in (ROOT / name).rglob("*") if file.is_file() and file.suffix not in (".md", ".pyc")]
        wanted |= {f"fewbits/{file.relative_to(ROOT)}" for file in sources}
    wanted |= {f"hydra_plugins/{file.name}" for file in (ROOT / "src" / "hydra_plugins").glob("*.py")}
    assert carried == wanted
    assert "fewbits/kernels/formats.py" in carried
    assert any(name.startswith("fewbits/kernels/csrc/") for name in carried)
    assert "fewbits/experiments/config/recipe/mor/block.yaml" in carried


def test_the_wheel_trains_where_it_lies(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    probe = """
import sys
import fewbits, fewbits.kernels.backends.build as build, fewbits.kernels.formats as formats
from fewbits.cli import main
from fewbits.experiments.identity import changed, running, total
print(fewbits.__file__, formats.__file__, build.__file__)
print(total(running()), changed())
sys.exit(main(sys.argv[1:]))
"""
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    trial = ("model=nemotron-nano", "model.layers=2", "data=synthetic", "scale=smoke", "training.steps=2")
    arguments = ["-c", probe, "train", *trial, "recipe=nvfp4", f"runtime.runs={tmp_path / 'runs'}"]
    done = run_python(arguments, folder=tmp_path, environment=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"{tmp_path}/fewbits/") == 3
    assert f"{total(running())} {changed()}" in done.stdout.splitlines(), "the sources have the checkout's digest"
    assert list(tmp_path.glob("runs/*/result.json"))


# Make


def reproduced(folder: Path, study: str, swept: int, reported: int, *words: str) -> tuple[int, str, list[list[str]]]:
    """Run `make reproduce-STUDY` with a replacement for `fewbits`, which records its arguments.

    Return make's exit status, its stderr, and the arguments of each call of `fewbits`. swept: the replacement's exit
    status for `fewbits sweep`. reported: its exit status for `fewbits report`. words: further arguments of make.
    """
    command = folder / "bin" / "fewbits"
    command.parent.mkdir()
    ends = f"case $1 in sweep) exit {swept};; bench) exit 0;; *) exit {reported};; esac"
    command.write_text(f'#!/bin/sh\necho "$@" >> {folder}/commands\n{ends}\n')
    command.chmod(0o755)
    for second, stamp in ((2_000_000_000, ".installed"), (2_000_000_001, ".kernels-built")):
        (folder / stamp).touch()
        os.utime(folder / stamp, (second, second))
    every = [f"VENV={folder}", "EXTRAS=", "SCALE=smoke", "SEEDS=0,1", "RUNS=there", *words]
    env = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    done = subprocess.run(
        ["make", f"reproduce-{study}", *every], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    commands_run = [line.split() for line in (folder / "commands").read_text().splitlines()]
    return done.returncode, done.stderr, commands_run


@pytest.mark.parametrize(
    ("swept", "reported", "status", "commands"),
    [
        (0, 0, 0, ["sweep", "bench", "bench", "report"]),
        (1, 1, 1, ["sweep", "bench", "bench", "report"]),  # some trials failed, which the report names
        (130, 0, 130, ["sweep"]),  # the user interrupted the sweep, and may resume it with the same command
    ],
)
def test_what_is_timed_too_is_timed_between_the_sweep_and_the_report(
    tmp_path: Path, swept: int, reported: int, status: int, commands: list[str]
) -> None:
    code, stderr, commands_run = reproduced(tmp_path, "gaussws", swept, reported)
    assert bool(code) == bool(status)
    assert f"Error {status}" in stderr or not status
    assert [line[0] for line in commands_run] == commands
    for line in (commands_run[0], *commands_run[3:]):
        assert line[1:] == ["study=gaussws", "scale=smoke", "seeds=[0,1]", "--runs", "there"]


# README and CONTRIBUTING


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, made as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_every_relative_link_of_a_page_leads_to_a_file_and_a_heading() -> None:
    broken = []
    for page in (*ROOT.glob("*.md"), *ROOT.glob("*/README.md")):  # make docs checks docs/
        text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
        for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                broken.append((page.relative_to(ROOT).as_posix(), link))
    assert broken == []


@pytest.mark.parametrize(
    "page", [PAGES[0], *sorted((ROOT / "docs" / "howto").glob("*.md"))], ids=lambda page: page.stem
)
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE):
        exec(compile(block, page.name, "exec"), names)
