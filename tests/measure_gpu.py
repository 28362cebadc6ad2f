"""Test and measure the CUDA kernels and training on a machine with a GPU, in at most half an hour: `make measure-gpu`.

    make measure-gpu
    make measure-gpu QUICK=1                                  # at most five minutes, in reports/gpu-quick
    .venv/bin/python -m tests.measure_gpu smoke profile       # only these parts, even if they passed before

Each part is a command with a time limit. The order is that of what a first contact with a GPU needs: each class of
kernels once, training speed and where its time goes, kernels beside other libraries, all GPU tests, FP8, repeated and
resumed runs, NVIDIA's sanitizers (installed from the package index if the machine has none), torchtitan.

While a part runs, its output is written to FOLDER/PART.log. When it ends, its result is written to FOLDER/PART.json,
and FOLDER/results.md, a block of Markdown for docs/measured/cuda-kernels.md, is written again.

A part that has passed is not run again with the same GPU, commit and uncommitted changes. So after an interruption,
the same command runs only the other parts. The exit status is 2 without a GPU, and 1 if a part failed or exceeded its
time limit.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fewbits.common.atomic import write_atomically, write_json
from fewbits.kernels.backends.gpu import cubins
from fewbits.kernels.scaled_products import FP8_SINCE
from tests.gpu_parts import lacks_titan

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "reports" / "gpu"
PAGE = "results.md"
MINUTES, QUICK_MINUTES = 30, 5  # the time limits for all parts together
PASSED, FAILED, TIMED_OUT, SKIPPED = "passed", "failed", "out of time", "skipped"
LINES = 80  # the last lines of a part's output that its result contains


@dataclass(frozen=True)
class Part:
    """A command that tests or measures one thing.

    lacks: why the command cannot run on this machine; empty if it can.
    shows: a text; the table of PAGE shows the last line of the output that contains it. Empty: the last line.
    table: PAGE also shows the output's last LINES lines.
    target: the folder that the command writes. It is deleted before the part runs, since a trial with a result would
        not be trained again.
    """

    name: str
    command: tuple[str, ...]
    seconds: int  # the time limit
    lacks: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    shows: str = ""
    table: bool = False
    target: Path | None = None


@dataclass(frozen=True)
class Result:
    """The result of a part: the content of FOLDER/PART.json."""

    part: str  # the part's name
    status: str  # PASSED, FAILED, TIMED_OUT or SKIPPED
    seconds: float  # how long it ran
    gpu: str  # the GPU's name
    commit: str  # the commit of the sources, with a digest of uncommitted changes
    command: str
    tail: tuple[str, ...] = ()  # the last LINES lines of the output; if the part was skipped, the reason
    shows: str = ""  # as in Part
    table: bool = False  # as in Part

    @property
    def last(self) -> str:
        """The line that the page shows: the last with the text `shows`; if none has it, the last non-empty line."""
        lines = [line for line in self.tail if line.strip()]
        return ([line for line in lines if self.shows in line] or lines or [""])[-1]


def parts(
    folder: Path, capability: tuple[int, int] = FP8_SINCE, sanitizer: str = "", *, quick: bool = False
) -> tuple[Part, ...]:
    """Return all parts in the order in which they run; their time limits add up to at most MINUTES, or QUICK_MINUTES.

    folder: the folder into which the parts write. capability: the compute capability of the GPU. sanitizer: the path of
    compute-sanitizer; empty if it is missing. quick: a few parts only, with fewer cases.
    """
    python, fewbits = sys.executable, (sys.executable, "-m", "fewbits.cli")
    own = (python, "-m", "tests.gpu_parts")
    workers = str(min(16, os.cpu_count() or 1))
    marked = ("tests/kernels", "tests/experiments/test_devices.py", "tests/experiments/optimization/test_optimizers.py")
    tests = (python, *["-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "-n"], workers, *marked)
    kernels = (*fewbits, "bench", "kernels", "--device", "cuda")

    def train(model: str, batch: int, seconds: int, *more: str) -> Part:
        sizes = ("--model", model, "--batch", str(batch), "--length", "1024", *more)
        return Part(f"train-{model}", (*fewbits, "bench", "train", "--device", "cuda", *sizes), seconds, table=True)

    smoke = Part("smoke", (*own, "smoke"), 60, shows="classes:")
    recipes = (*tests, "-k", "every_family or every_class or mixtures or sampled_weights")
    products = Part("products", (*own, "products"), 30, table=True)
    if quick:
        return (
            smoke,
            train("gpt2-124m", 12, 70, "--steps", "5", "--recipes", "nvfp4,mor/block"),
            Part("profile", (*own, "profile", "--recipes", "nvfp4"), 40, table=True),
            Part("kernels", (*kernels, "--no-peers", "--size", "4096", "--runs", "3"), 40, table=True),
            Part("parity-recipes", recipes, 60),
            products,
        )
    trial = (*fewbits, "train", "scale=gpu", "model=gpt2-124m", "training.steps=10", "training.batch=96")
    fp8 = ("recipe=fp8", "recipe.weights=channel", "recipe.block=channel", "recipe.execute=fp8")
    store = folder / "runs" / "fp8"
    lacks = "" if sanitizer else "compute-sanitizer is missing, and pip cannot install it"
    # --error-exitcode: without it, the exit status would be that of the tests even if the sanitizer found errors.
    # --report-api-errors no: torch calls functions that the driver may lack, which is no error.
    checked = (sanitizer, "--error-exitcode", "1", "--report-api-errors", "no", "--tool")
    uncached = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return (
        smoke,
        train("gpt2-124m", 12, 120, "--steps", "10"),
        train("llama2-1b", 8, 210, "--steps", "5"),
        Part("profile", (*own, "profile"), 90, table=True),
        Part("kernels", kernels, 240, table=True),
        Part("parity-recipes", recipes, 120),
        Part("parity", tests, 380),
        products,
        Part(
            "fp8",
            (*trial, "evaluation.every=10", "evaluation.windows=24", *fp8, f"runtime.runs={store}"),
            90,
            _lacks_fp8(capability),
            shows="tokens/s",
            target=store,
        ),
        Part("repeat", (*own, "repeat", str(folder / "repeat")), 150, shows="two runs", target=folder / "repeat"),
        *(
            Part(tool, (*checked, tool, *own, "smoke"), 70, lacks, uncached, "SUMMARY")
            for tool in ("memcheck", "racecheck", "initcheck")
        ),
        Part("torchtitan", (*own, "titan", str(folder / "titan")), 100, lacks_titan(), shows="step: 10"),
    )


def install_sanitizer(folder: Path, cuda_major: int) -> str:
    """Return the path of compute-sanitizer; if the machine has none, install it into `folder`. Empty: it is missing."""
    if path := shutil.which("compute-sanitizer"):
        return path
    target = folder / "sanitizer"
    if not target.is_dir():
        package = cubins.install(cuda_major).replace("nvrtc", "sanitizer-api").split()
        subprocess.run((sys.executable, "-m", *package, "-q", "--no-deps", "--target", str(target)), check=False)
    return next((str(path) for path in target.rglob("bin/compute-sanitizer")), "")


def _lacks_fp8(capability: tuple[int, int]) -> str:
    if capability >= FP8_SINCE:
        return ""
    has, needs = (".".join(map(str, version)) for version in (capability, FP8_SINCE))
    return f"the GPU has compute capability {has}; FP8 products need {needs} or later"


def run(part: Part, folder: Path, gpu: str, commit: str, seconds: float) -> Result:
    """Run a part, write its result into `folder`, and return it.

    seconds: the time that is left for all parts, after which the part is ended even before its own limit. If the part
    cannot run or no time is left, its status is SKIPPED.
    """
    log, command, start = folder / f"{part.name}.log", " ".join(part.command), time.monotonic()
    if part.lacks or seconds < 1:
        result = Result(part.name, SKIPPED, 0.0, gpu, commit, command, (part.lacks or "no time is left",))
    else:
        if part.target is not None:
            shutil.rmtree(part.target, ignore_errors=True)
        with log.open("w") as output:
            process = subprocess.Popen(
                part.command,
                cwd=ROOT,
                env={**os.environ, **part.environment},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = PASSED if process.wait(min(part.seconds, seconds)) == 0 else FAILED
            except subprocess.TimeoutExpired:
                status = TIMED_OUT
            finally:
                _end(process)
        tail = tuple(log.read_text(errors="replace").splitlines()[-LINES:])
        took = round(time.monotonic() - start, 1)
        result = Result(part.name, status, took, gpu, commit, command, tail, part.shows, part.table)
    write_json(folder / f"{part.name}.json", asdict(result))
    return result


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill all processes of a part that still run: the command and its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def stored(folder: Path, names: Iterable[str]) -> dict[str, Result]:
    """Return part → its result stored in `folder`; parts of `names` without a stored result are omitted."""
    results = {}
    for name in names:
        if (path := folder / f"{name}.json").is_file():
            data = json.loads(path.read_text())
            results[name] = Result(**{**data, "tail": tuple(data["tail"])})
    return results


def measure(
    chosen: Sequence[Part],
    folder: Path,
    gpu: str,
    commit: str,
    *,
    again: bool = False,
    seconds: float = 60 * MINUTES,
) -> list[Result]:
    """Run the parts that have not passed on this GPU and commit, write the page after each, and return all results.

    again: also run parts that have passed. seconds: the time limit for all parts together.
    """
    folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + seconds
    before, results = stored(folder, (part.name for part in chosen)), []
    for part in chosen:
        old = before.get(part.name)
        if not again and old and (old.status, old.gpu, old.commit) == (PASSED, gpu, commit):
            print(f"{part.name}: passed before", flush=True)
            results.append(old)
            continue
        print(f"{part.name}: at most {part.seconds} s", flush=True)
        result = run(part, folder, gpu, commit, end - time.monotonic())
        results.append(result)
        print(f"{part.name}: {result.status} in {result.seconds:.0f} s: {result.last}", flush=True)
        write_atomically(folder / PAGE, measured(folder).encode())
    return results


def measured(folder: Path) -> str:
    """Return the results in `folder` as Markdown: a table of the parts, and the output of those that print tables."""
    results = stored(folder, (path.stem for path in sorted(folder.glob("*.json"))))
    ordered = sorted(results.values(), key=lambda result: _ORDER.get(result.part, len(_ORDER)))
    lines = [
        "Measured by `make measure-gpu`.",
        "",
        "| part | result | seconds | GPU and commit | line of its output |",
        "|---|---|---|---|---|",
    ]
    lines += [f"| {r.part} | {r.status} | {r.seconds:.0f} | {r.gpu}, {r.commit} | {_cell(r.last)} |" for r in ordered]
    for r in ordered:
        if r.table and r.status != SKIPPED:
            lines += ["", f"{r.part} ({r.status}):", "", "```text", *map(_plain, r.tail), "```"]
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    """Return a line of output without escape sequences for colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text).rstrip()


def _cell(text: str) -> str:
    """Return a line of output as the text of a Markdown table's cell."""
    return _plain(text).replace("|", "\\|").strip()


_ORDER = {part.name: index for index, part in enumerate(parts(FOLDER))}


def version(root: Path = ROOT) -> str:
    """Return the short commit id; `COMMIT+DIGEST` if files have uncommitted changes."""

    def git(*arguments: str) -> bytes:
        return subprocess.run(("git", *arguments), cwd=root, capture_output=True, check=False).stdout

    commit = git("rev-parse", "--short=10", "HEAD").decode().strip() or "unknown"
    changes = git("diff", "HEAD")
    return f"{commit}+{hashlib.sha256(changes).hexdigest()[:8]}" if changes else commit


def _stop(*_: object) -> None:
    """Handle SIGTERM like Ctrl-C, so that `run` also kills the running part, which is in its own session."""
    raise KeyboardInterrupt


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="make measure-gpu", description="Test and measure fewbits on a GPU.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"parts to run again: {', '.join(_ORDER)}")
    parser.add_argument(
        "--folder", type=Path, help="where results are kept (default: reports/gpu, or reports/gpu-quick)"
    )
    parser.add_argument("--quick", action="store_true", help="at most five minutes: a few parts with fewer cases")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.parts) - set(_ORDER)):
        parser.error(f"no part {', '.join(unknown)}; the parts are {', '.join(_ORDER)}")

    import torch

    from fewbits.kernels.backends.gpu import cuda

    if complaint := cuda.complaint():
        print(f"measure-gpu: nothing was measured: {complaint}", file=sys.stderr)
        return 2
    folder = (options.folder or FOLDER.with_name("gpu-quick" if options.quick else "gpu")).resolve()
    tool = "" if options.quick else install_sanitizer(folder, int((torch.version.cuda or "13").partition(".")[0]))
    every = parts(folder, torch.cuda.get_device_capability(), tool, quick=options.quick)
    chosen = [part for part in every if not options.parts or part.name in options.parts]
    signal.signal(signal.SIGTERM, _stop)
    seconds = 60.0 * (QUICK_MINUTES if options.quick else MINUTES)
    results = measure(
        chosen, folder, torch.cuda.get_device_name(), version(), again=bool(options.parts), seconds=seconds
    )
    print(f"\n{measured(folder)}\nThis is in {folder / PAGE}, for docs/measured/cuda-kernels.md.")
    return int(any(result.status in (FAILED, TIMED_OUT) for result in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
