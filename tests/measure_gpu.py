"""Test and measure the CUDA kernels and training on a machine with a GPU, in at most half an hour: `make measure-gpu`.

    make measure-gpu
    .venv/bin/python -m tests.measure_gpu bench trial    # only these parts, even if they passed before

Each part is a command with a time limit. The parts are: the GPU tests, which also compile the kernels that they need, a
part of them under compute-sanitizer, benchmarks, training at scale gpu, and training with emulated and with executed
FP8 products.

While a part runs, its output is written to FOLDER/PART.log. When it ends, its result is written to FOLDER/PART.json,
and the tables in FOLDER/results.md, for docs/measured/cuda-kernels.md, are written again.

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
from fewbits.experiments.devices import FP8_SINCE

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "reports" / "gpu"
PAGE = "results.md"
MINUTES = 30  # the time limit for all parts together
PASSED, FAILED, TIMED_OUT, SKIPPED = "passed", "failed", "out of time", "skipped"
LINES = 40  # the last lines of a part's output that its result contains
BENCH = "bench.kernels.json"  # the file that the part `bench` writes


@dataclass(frozen=True)
class Part:
    """A command that tests or measures one thing.

    lacks: why the command cannot run on this machine; empty if it can.
    shows: a text; PAGE shows the last line of the output that contains it. Empty: the last line.
    target: the file or folder that the command writes. It is deleted before the part runs, since a trial with a result
        would not be trained again, and rows of an earlier benchmark would look like new ones.
    """

    name: str
    command: tuple[str, ...]
    seconds: int  # the time limit
    lacks: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    shows: str = ""
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

    @property
    def last(self) -> str:
        """The line that the page shows: the last with the text `shows`; if none has it, the last non-empty line."""
        lines = [line for line in self.tail if line.strip()]
        return ([line for line in lines if self.shows in line] or lines or [""])[-1]


def parts(folder: Path, capability: tuple[int, int] = FP8_SINCE) -> tuple[Part, ...]:
    """Return all parts in the order in which they run; their time limits add up to at most MINUTES.

    folder: the folder into which the parts write. capability: the compute capability of the GPU.
    """
    python, fewbits = sys.executable, (sys.executable, "-m", "fewbits.cli")
    tests = (python, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider")
    sanitizer = shutil.which("compute-sanitizer")
    lacks = "" if sanitizer else "compute-sanitizer is not installed (it is a part of the CUDA toolkit)"
    # --error-exitcode: without it, the exit status would be that of the tests even if the sanitizer found errors.
    # --report-api-errors no: torch calls functions that the driver may lack, which is no error.
    checked = (str(sanitizer), "--error-exitcode", "1", "--report-api-errors", "no", "--tool")
    some = ("-k", "every_class or sampled_weights")
    uncached = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    trial = (
        *(*fewbits, "train", "scale=gpu", "model=gpt2-124m", "training.steps=10", "training.batch=96"),
        *("evaluation.every=10", "evaluation.windows=24"),
    )
    fp8 = ("recipe=fp8", "recipe.weights=channel", "recipe.block=channel")

    def training(name: str, seconds: int, *recipe: str, lacks: str = "") -> Part:
        store = folder / "runs" / name
        return Part(name, (*trial, *recipe, f"runtime.runs={store}"), seconds, lacks, shows="tokens/s", target=store)

    return (
        Part("parity", (*tests, "-n", str(min(16, os.cpu_count() or 1))), 540),
        Part("memcheck", (*checked, "memcheck", *tests, *some), 240, lacks, uncached, "ERROR SUMMARY"),
        Part("racecheck", (*checked, "racecheck", *tests, *some), 240, lacks, shows="RACECHECK SUMMARY"),
        Part(
            "bench",
            (*fewbits, "bench", "kernels", "--device", "cuda", "--no-peers", "--json", str(folder / BENCH)),
            180,
            shows="GB/s",
            target=folder / BENCH,
        ),
        training("trial", 180, "recipe=nvfp4"),
        training("fp8-emulated", 120, *fp8),
        training("fp8-executed", 120, *fp8, "recipe.execute=fp8", lacks=_lacks_fp8(capability)),
    )


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
        if part.target is not None and part.target.is_dir():
            shutil.rmtree(part.target, ignore_errors=True)
        elif part.target is not None:
            part.target.unlink(missing_ok=True)
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
        result = Result(part.name, status, took, gpu, commit, command, tail, part.shows)
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
    """Return the results in `folder` as Markdown: a table of the parts, and one of measured speeds."""
    results = stored(folder, (path.stem for path in sorted(folder.glob("*.json")) if path.name != BENCH))
    ordered = sorted(results.values(), key=lambda result: _ORDER.get(result.part, len(_ORDER)))
    lines = [
        "Measured by `make measure-gpu`.",
        "",
        "| part | result | seconds | GPU and commit | line of its output |",
        "|---|---|---|---|---|",
    ]
    lines += [f"| {r.part} | {r.status} | {r.seconds:.0f} | {r.gpu}, {r.commit} | {_cell(r.last)} |" for r in ordered]
    bench, status = folder / BENCH, results["bench"].status if "bench" in results else SKIPPED
    if status != SKIPPED and bench.is_file():  # if the part was skipped, a file is left from an earlier run
        lines += ["", *_speeds(json.loads(bench.read_text()))]
        if status != PASSED:
            lines += ["", f"The benchmark did not end ({status}): these are the cases that it had measured."]
    return "\n".join(lines) + "\n"


def _speeds(bench: Mapping[str, object]) -> list[str]:
    """Return the lines of a table with the measured speed of each case; bench: the content of BENCH."""
    lines = [
        f"Speed as a share of a copy of {bench['rows']} × {bench['cols']} {bench['dtype']} (median, range):",
        "",
        "| case | measured |",
        "|---|---|",
    ]
    for row in bench["measured"]:  # type: ignore[attr-defined]
        share = row["share"]
        lines.append(f"| {_cell(row['case'])} | {share['median']:.0%} ({share['low']:.0%} to {share['high']:.0%}) |")
    return lines


def _cell(text: str) -> str:
    """Return a line of output as the text of a Markdown table's cell, without escape sequences for colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text).replace("|", "\\|").strip()


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
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where results are kept (default: reports/gpu)")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.parts) - set(_ORDER)):
        parser.error(f"no part {', '.join(unknown)}; the parts are {', '.join(_ORDER)}")

    import torch

    from fewbits.kernels.backends.gpu import cuda

    if complaint := cuda.complaint():
        print(f"measure-gpu: nothing was measured: {complaint}", file=sys.stderr)
        return 2
    folder = options.folder.resolve()
    capability = torch.cuda.get_device_capability()
    chosen = [part for part in parts(folder, capability) if not options.parts or part.name in options.parts]
    signal.signal(signal.SIGTERM, _stop)
    results = measure(chosen, folder, torch.cuda.get_device_name(), version(), again=bool(options.parts))
    return int(any(result.status in (FAILED, TIMED_OUT) for result in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
