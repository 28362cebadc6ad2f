"""Measure which mistakes the tests notice: make small mistakes in sources, one at a time, and run the tests.

    make mutate                                    a sample of every target; writes docs/measured/mutation.md
    .venv/bin/python -m tests.mutate headers --sample 0 --files 'kernels/csrc/scale.h'    all mutants of one header

The mistakes are made in a copy of the checkout, whose tests first have to pass without a mistake. A mutant
(tests/mutants.py) is killed if a test fails or the tests take far too long, and survives if all tests pass. A mutant
that does not compile, or that compiles to the same library, does not count. The kernels are compiled with fewer
optimizations, which is faster and changes no bit. The random examples of hypothesis are fixed, so that the same sample
of mutants gives the same score.
"""

import argparse
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.mutants import Mutant, mutants

ROOT = Path(__file__).resolve().parents[1]
WRITTEN = ROOT / "docs" / "measured" / "mutation.md"
KILLED, SURVIVED, SAME, NOT_COMPILED = "killed", "survived", "same library", "does not compile"
HEAD = """\
# Mutation testing, measured

This page shows how many small mistakes in the sources the tests detect. `make mutate` (tests/mutate.py) makes mutants:
a *mutant* is the sources with one small mistake. It is *killed* if a test fails, and *survives* if all tests pass. Each
section below is about one target, which is a set of sources and the tests that should detect mistakes in them. Targets
are measured one by one, so their commits differ.
"""
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
PATIENCE = 4  # a mutant is killed if its tests take more than this many times as long as without a mutant


@dataclass(frozen=True)
class Target:
    """Sources, the tests that should notice mistakes in them, and the command that compiles the sources."""

    files: tuple[str, ...]  # glob patterns of the sources
    tests: tuple[str, ...]  # test files and folders
    # Arguments of a `python` command that compiles the sources. It fails if they do not compile, and prints the path of
    # the library if it makes one. Empty: nothing is compiled.
    compiled: tuple[str, ...] = ()


CHECKS_THE_SYNTAX = """
import shlex, subprocess, sys
from fewbits.kernels.backends import build, compilation
from tests.kernels.backends.gpu.emulated import FLAGS, SIMT
command = [*build.compiler(), *shlex.split(FLAGS), "-fsyntax-only", f"-I{compilation.SOURCES}", f"-I{SIMT}"]
sys.exit(subprocess.run([*command, str(SIMT / "emulate.cpp")]).returncode)
"""
TARGETS = {
    "headers": Target(
        ("kernels/csrc/*.h", "kernels/csrc/*.cpp"),
        (
            "tests/kernels/test_block_scales.py",
            "tests/kernels/test_packed.py",
            "tests/kernels/test_noise.py",
            "tests/kernels/test_products.py",
            "tests/kernels/backends/test_parity.py",
            "tests/kernels/test_mix.py",
            "tests/kernels/layers",
        ),
        ("-m", "fewbits.kernels.backends.build"),
    ),
    "cuda": Target(
        ("kernels/csrc/*.cuh", "kernels/csrc/*.cu"),
        ("tests/kernels/backends/gpu/test_cuda_emulated.py",),
        ("-c", CHECKS_THE_SYNTAX),
    ),
    "verdicts": Target(
        (
            "analysis/engine/statistics/*.py",
            *(f"analysis/engine/claims/{name}.py" for name in ("judging", "tests", "verdicts")),
            *(f"analysis/engine/results/{name}.py" for name in ("pairing", "pooling")),
        ),
        ("tests/analysis/test_statistics.py", "tests/analysis/engine", "tests/analysis/test_frames.py"),
    ),
}


class Checkout:
    """A copy of the repository's checkout, in which mutants are made and tested.

    seconds: how long compilation and tests take without a mutant.
    """

    def __init__(self, folder: Path, target: Target) -> None:
        self.root, self.cache, self.target = folder / "root", folder / "cache", target
        listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True)
        for name in listed.stdout.decode().splitlines():
            if (ROOT / name).exists():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name, follow_symlinks=False)
        self.cache.mkdir()
        flags = self.root / "kernels/backends/compilation.py"
        flags.write_text(flags.read_text().replace('"-O3"', '"-O1"'))
        start = time.monotonic()
        self.library = self.compiled()
        outcome = self._tests(limit=None)
        if self.library is None or outcome.returncode:
            raise SystemExit(f"the sources do not compile or tests fail without a mutant; fix them:\n{outcome.stdout}")
        self.seconds = time.monotonic() - start

    def outcome(self, mutant: Mutant) -> str:
        """Make a mutant, run the tests, and undo the mutant; return KILLED, SURVIVED, SAME or NOT_COMPILED.

        SAME: the library is the same as without the mutant, so no test can notice the mutant.
        """
        path = self.root / mutant.file
        text = path.read_text()
        path.write_text(mutant.of(text))
        try:
            library = self.compiled()
            if library is None:
                return NOT_COMPILED
            if library and library == self.library:
                return SAME
            return KILLED if self._tests(PATIENCE * self.seconds).returncode else SURVIVED
        except subprocess.TimeoutExpired:
            return KILLED
        finally:
            path.write_text(text)

    def compiled(self) -> bytes | None:
        """Compile the sources and return the bytes of the library; None if the sources do not compile.

        Return empty bytes if nothing is compiled, or if the command makes no library.
        """
        if not self.target.compiled:
            return b""
        for old in self.cache.glob("*.so"):
            old.unlink()
        done = subprocess.run(
            [sys.executable, *self.target.compiled], cwd=self.root, env=self._environment, capture_output=True
        )
        if done.returncode:
            return None
        made = [Path(line) for line in done.stdout.decode().splitlines() if line.endswith(".so")]
        return b"".join(path.read_bytes() for path in made)

    def _tests(self, limit: float | None) -> "subprocess.CompletedProcess[str]":
        """Run the target's tests until one fails; raise TimeoutExpired after `limit` seconds (None: no limit)."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
        command += ["--hypothesis-seed=0", *self.target.tests]
        environment = self._environment | {"FEWBITS_BACKEND": "cpu"} if self.library else self._environment
        done = subprocess.run(
            command,
            cwd=self.root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit,
        )
        # pytest's status is 0 if tests passed, 1 if one failed, 2 after errors while tests are imported. It is negative
        # if a signal ended the process: one of CRASHES if a mutant, for example, writes to wrong addresses.
        if done.returncode not in (0, 1, 2, *(-number for number in CRASHES)):
            raise SystemExit(f"pytest ended with status {done.returncode}:\n{done.stdout}")
        return done

    @property
    def _environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(self.root / "src"), "FEWBITS_CACHE": str(self.cache)}


def measure(name: str, target: Target, sample: int, seed: int) -> list[str]:
    """Run a sample of a target's mutants; return the lines of the target's section in docs/measured/mutation.md.

    name: the target's name. sample: the number of mutants to run; 0: all. seed: the seed of the choice.
    """
    files = sorted({path for pattern in target.files for path in ROOT.glob(pattern)})
    found = [mutant for file in files for mutant in mutants(file.relative_to(ROOT).as_posix(), file.read_text())]
    if not found:
        raise SystemExit(f"{name}: no mutants can be made in {' '.join(target.files)}; choose other --files")
    chosen = found if sample in (0, len(found)) else random.Random(seed).sample(found, min(sample, len(found)))
    outcomes: dict[Mutant, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        checkout = Checkout(Path(folder), target)
        for mutant in chosen:
            start = time.monotonic()
            outcomes[mutant] = checkout.outcome(mutant)
            seconds = time.monotonic() - start
            print(f"{name} {len(outcomes)}/{len(chosen)} {outcomes[mutant]} in {seconds:.0f} s: {mutant}", flush=True)
    counts = {kind: list(outcomes.values()).count(kind) for kind in (KILLED, SURVIVED, SAME, NOT_COMPILED)}
    judged = counts[KILLED] + counts[SURVIVED]
    which = "all" if len(chosen) == len(found) else f"a sample of {len(chosen)} (seed {seed}) of"
    share = f"**{counts[KILLED]} of {judged} killed ({counts[KILLED] / judged:.0%})**" if judged else "none judged"
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    lines = [f"## {name}", "", f"Commit {commit.stdout.strip()}, {time.strftime('%Y-%m-%d')}, {_machine()}.", ""]
    lines += [f"{which} {len(found)} mutants of {', '.join(target.files)}: {share}; "]
    lines[-1] += f"{counts[SAME]} compiled to the same library, {counts[NOT_COMPILED]} did not compile."
    lines += [f"Tests: {', '.join(target.tests)}.", ""]
    if survivors := [mutant for mutant, outcome in outcomes.items() if outcome == SURVIVED]:
        lines += ["Survivors:", "", *(f"- {mutant}, of `{_source_line(mutant)}`" for mutant in survivors), ""]
    return lines


def _source_line(mutant: Mutant) -> str:
    return (ROOT / mutant.file).read_text().splitlines()[mutant.line - 1].strip()


def _machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{named[0] if named else platform.processor()}, Python {platform.python_version()}"


def main(argv: Sequence[str]) -> int:
    assert __doc__
    parser = argparse.ArgumentParser("tests.mutate", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "targets", nargs="*", metavar="TARGET", help=f"one or more of {', '.join(TARGETS)} (default: all)"
    )
    parser.add_argument("--files", nargs="+", metavar="GLOB", help="make mutants of these sources of the target")
    parser.add_argument("--tests", nargs="+", metavar="PATH", help="run these tests instead of the target's tests")
    parser.add_argument("--sample", type=int, default=40, help="number of mutants of each target; 0: all (default: 40)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the choice of mutants (default: 0)")
    parser.add_argument("--write", action="store_true", help=f"write {WRITTEN.relative_to(ROOT)}")
    options = parser.parse_args(argv)
    if unknown := set(options.targets) - set(TARGETS):
        parser.error(f"no target {', '.join(sorted(unknown))}: valid values are {', '.join(TARGETS)}")
    for name in options.targets or TARGETS:
        target = TARGETS[name]
        target = replace(target, files=tuple(options.files or target.files), tests=tuple(options.tests or target.tests))
        section = measure(name, target, options.sample, options.seed)
        print("\n".join(section))
        if options.write:
            WRITTEN.write_text(with_section(WRITTEN.read_text() if WRITTEN.exists() else HEAD, name, section))
    return 0


def with_section(page: str, name: str, section: list[str]) -> str:
    """Return the page with `section` in place of its section `name`, or at the end if the page has no such section."""
    before, *sections = page.split("\n## ")
    kept = {text.partition("\n")[0]: text.rstrip() for text in sections}
    kept[name] = "\n".join(section).removeprefix("## ").rstrip()
    return "\n\n## ".join([before.rstrip(), *kept.values()]) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
