"""Show the hardware, the kernel backend and the reason for it, and how to fix problems (`fewbits doctor`).

The facts are read from files and package metadata, so the command is fast and works even if torch is missing or broken.
If the CPU kernels are not built yet, the command compiles one line of code to test the compiler.
"""

import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from fewbits.common.arguments import CommandParser, positive
from fewbits.common.terminal import print_table
from fewbits.kernels.backends import build
from fewbits.version import __version__

EXAMPLES = """\
examples:
  fewbits doctor --test
  fewbits doctor --warm nvfp4 llama2-134m --architecture sm_90

Exit status 1 if there is a problem."""
BACKENDS = ("reference", "cpu", "cuda")
OLDEST_TORCH = (2, 11)
OLDEST_DRIVER = 525  # the first version of NVIDIA's driver for CUDA 12; 580 is the first for CUDA 13
TOKENS = 8192  # the default number of tokens of a micro-batch for --warm
CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy")  # the names under which CuPy may be installed
MARKS = {"ok": " ", "note": "-", "problem": "!"}


@dataclass(frozen=True)
class Fact:
    """A fact about this machine, which `fewbits doctor` prints on one line; its fix, if it has one, on the next."""

    name: str
    value: str | int | None  # None: missing
    detail: str = ""
    status: Literal["ok", "note", "problem"] = "ok"  # note: it works, but could be better; problem: it does not work
    fix: str = ""  # what to do about a note or a problem


def main(argv: Sequence[str]) -> int:
    parser = CommandParser("fewbits doctor", __doc__, EXAMPLES)
    parser.add_argument("--json", action="store_true", help="print the facts as JSON")
    parser.add_argument("--test", action="store_true", help="also run the kernels' self-test (loads torch)")
    warm = "only compile the CUDA kernels that training MODEL with RECIPE calls; this needs no GPU"
    parser.add_argument("--warm", nargs=2, metavar=("RECIPE", "MODEL"), help=warm)
    architecture = "with --warm: compile for this GPU architecture, such as sm_90 (default: this machine's)"
    parser.add_argument("--architecture", help=architecture)
    tokens = f"with --warm: tokens of a micro-batch, batch × length (default {TOKENS})"
    parser.add_argument("--tokens", type=positive, help=tokens)
    options = parser.parse_args(argv)
    if options.warm:
        if options.json or options.test:
            parser.error("--warm only compiles kernels and cannot be used with --json or --test: leave out one of them")
        recipe, model = options.warm
        return _warm(recipe, model, options.architecture, options.tokens or TOKENS)
    if options.architecture or options.tokens:
        parser.error("--architecture and --tokens are valid only together with --warm RECIPE MODEL")

    listed, checks = facts(), _self_test() if options.test else []
    well = all(fact.status != "problem" for fact in listed) and all(passed for _, passed, _ in checks)
    if options.json:
        by_name = {fact.name: {key: value for key, value in asdict(fact).items() if key != "name"} for fact in listed}
        tested = [dict(zip(("name", "passed", "detail"), check, strict=True)) for check in checks]
        print(json.dumps({"well": well, "facts": by_name, **({"self_test": tested} if tested else {})}, indent=2))
        return 0 if well else 1
    print_table([""] * 3, _rows(listed))
    if checks:
        print_table([""] * 3, [("pass" if passed else "FAIL", name, detail) for name, passed, detail in checks])
    return 0 if well else 1


def _rows(listed: Sequence[Fact]) -> Iterator[tuple[str, str, str]]:
    for fact in listed:
        yield MARKS[fact.status], fact.name, ", ".join(str(part) for part in (fact.value, fact.detail) if part)
        if fact.fix:
            yield "", "", f"fix: {fact.fix}"


def _self_test() -> list[tuple[str, bool, str]]:
    """Run the kernels' self-test on this machine's CPU and, if it has one, its GPU: (name, passed, detail) of each."""
    try:
        from torch.cuda import is_available

        from fewbits.kernels import selftest
    except (ImportError, OSError) as error:  # torch or one of its shared libraries is missing
        return [("import torch", False, str(error))]
    devices = ("cpu", "cuda") if is_available() else ("cpu",)
    return [result for device in devices for result in selftest.run(device)]


def _warm(recipe: str, model: str, architecture: str | None, tokens: int) -> int:
    """Compile, in parallel, the CUDA kernels that training the model with the recipe calls; return the exit status 0.

    architecture: such as `sm_90`; None: this machine's GPU. tokens: tokens of a micro-batch.
    """
    import torch

    from fewbits.experiments.config import load_recipe
    from fewbits.kernels.backends.gpu import cubins, cuda
    from fewbits.kernels.backends.gpu.warm import compile_all, kernels_of
    from fewbits.models.kernel_calls import calls_of
    from fewbits.models.networks.registry import model as config_of
    from fewbits.models.networks.registry import on_meta
    from fewbits.models.quantize import quantize

    if architecture is None:
        if not torch.cuda.is_available():
            raise ValueError("this machine has no GPU that torch can use: name one, as in --architecture sm_90")
        architecture = cuda.architecture_of(torch.cuda.current_device())
    start = time.monotonic()
    quantization = quantize(on_meta(config_of(model)), load_recipe(recipe))
    variants = kernels_of(calls_of(quantization, tokens, torch.bfloat16))
    try:
        if architecture.rstrip("af") not in (valid := cubins.architectures()):
            raise ValueError(f"--architecture {architecture!r}: NVRTC compiles only for {', '.join(valid)}")
        count = compile_all(variants, architecture)
    except build.BuildError as error:
        raise ValueError(str(error)) from None
    print(f"{count} kernels for {architecture} are in {build.cache_folder()} ({time.monotonic() - start:.0f} s)")
    return 0


# ------------------------------------------------------------------------------------------------ facts


def facts() -> list[Fact]:
    """Return the facts about this machine in the order of the output, without importing torch."""
    cpuinfo = _read(Path("/proc/cpuinfo"))
    name = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    total, ours = os.cpu_count(), len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    compiler, gpu = _compiler(), _gpu()
    library, cupy = _library(compiler), _cupy(gpu)
    return [
        Fact("fewbits", __version__, str(Path(build.__file__).parents[2])),
        Fact("python", platform.python_version(), sys.executable),
        _torch(has_gpu=gpu.value is not None),
        Fact("cpu", name[1] if name else platform.processor() or platform.machine()),
        Fact("cores", ours, "" if ours == total else f"of {total}"),
        compiler,
        library,
        gpu,
        cupy,
        _backend(compiler, library, gpu, cupy),
    ]


def _torch(has_gpu: bool) -> Fact:
    version, oldest = _version_of("torch"), ".".join(map(str, OLDEST_TORCH))
    fix = f"pip install 'torch>={oldest}'"
    if version is None:
        return Fact("torch", None, "not installed", "problem", fix)
    if tuple(int(number) for number in re.findall(r"\d+", version)[:2]) < OLDEST_TORCH:
        return Fact("torch", version, f"older than {oldest}", "problem", fix)
    if has_gpu and version.endswith("+cpu"):
        return Fact("torch", version, "cannot use the GPU", "note", "install a build of torch with CUDA")
    return Fact("torch", version)


def _compiler() -> Fact:
    """Return the C++ compiler. If the CPU kernels are not built yet, also compile one line of code, as a test."""
    command, fix = build.compiler(), "install g++ for the fast CPU kernels (apt install g++)"
    if command is None:
        return Fact("compiler", None, build.no_compiler(), "note", fix)
    complaint = None if build.is_whole(build.library_path()) else build.compiler_error(command)
    if complaint is not None:
        return Fact("compiler", None, " ".join(complaint.split()), "note", f"{fix}, or set CXX to one that works")
    try:
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Fact("compiler", " ".join(command), f"cannot be run: {error}")
    return Fact("compiler", " ".join(command), done.stdout.partition("\n")[0])


def _library(compiler: Fact) -> Fact:
    path = build.library_path()
    if build.is_whole(path):
        return Fact("library", str(path), "built")
    if compiler.value is None:
        missing = f"{path} is damaged" if path.exists() else f"no {path}"
        return Fact("library", None, f"{missing}, and no compiler to build it", "note", compiler.fix)
    fix = "nothing to do, since the first use builds it; to build it now: python -m fewbits.kernels.backends.build"
    return Fact("library", None, f"not built yet: {path}", "note", fix)


def _gpu() -> Fact:
    driver = Path("/proc/driver/nvidia")
    about = "\n".join(_read(path) for path in sorted(driver.glob("gpus/*/information")))
    names = ", ".join(re.findall(r"^Model:\s*(.+)$", about, re.MULTILINE))
    version = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", _read(driver / "version"))
    if not names or not version:
        return Fact("gpu", None, f"no GPU with driver {version[1]}" if version else f"no GPU: no folder {driver}")
    if int(version[1].partition(".")[0]) < OLDEST_DRIVER:
        fix = f"update NVIDIA's driver to {OLDEST_DRIVER} or newer"
        return Fact("gpu", names, f"driver {version[1]}, too old for CUDA 12", "note", fix)
    return Fact("gpu", names, f"driver {version[1]}")


def _cupy(gpu: Fact) -> Fact:
    if find_spec("cupy"):
        return Fact("cupy", next((version for name in CUPY if (version := _version_of(name))), "unknown version"))
    if gpu.value is None:
        return Fact("cupy", None, "not installed; only the CUDA kernels need it")
    fix = "pip install cupy-cuda13x (cupy-cuda12x for a torch with CUDA 12)"
    return Fact("cupy", None, "not installed: the GPU uses the reference backend, many times slower", "note", fix)


def _backend(compiler: Fact, library: Fact, gpu: Fact, cupy: Fact) -> Fact:
    """Return the kernel backend for CPU tensors, or the backend that FEWBITS_BACKEND forces, with the reason.

    The rules repeat those of kernels/backends/choice.py, which is not imported here, because it imports torch.
    """
    forced, why = os.environ.get("FEWBITS_BACKEND"), "FEWBITS_BACKEND forces it"
    can_run = library.value is not None or compiler.value is not None
    if forced and forced not in BACKENDS:
        fix = f"set FEWBITS_BACKEND to one of {', '.join(BACKENDS)}, or unset it"
        return Fact("backend", forced, "FEWBITS_BACKEND names an unknown backend", "problem", fix)
    if forced == "cuda" and (gpu.value is None or cupy.value is None):
        missing = gpu.detail if gpu.value is None else "CuPy is not installed"
        return Fact("backend", forced, f"{why}, but {missing}", "problem", cupy.fix or "unset FEWBITS_BACKEND")
    if forced == "cpu" and not can_run:
        return Fact("backend", forced, f"{why}, but there is no compiler", "problem", compiler.fix)
    if forced:
        return Fact("backend", forced, why)
    if not can_run:
        return Fact("backend", "reference", "exact but slow; there is no compiler", "note", compiler.fix)
    return Fact("backend", "cpu", "its library is built" if library.value else "the compiler will build it")


def _version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace")
    except OSError:
        return ""
