"""Show this machine's hardware, the kernels in use, and problems with their fixes (`fewbits doctor`).

The facts are those that a trial on this machine records. The CPU kernels are built if they are not built yet.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

from fewbits.common.arguments import CommandParser, positive
from fewbits.common.terminal import print_json, print_table
from fewbits.version import __version__

EXAMPLES = """\
examples:
  fewbits doctor --test
  fewbits doctor --warm nvfp4 llama2-134m --architecture sm_90

Exit status 1 if something does not work. What works, but slower than it could, is a note."""
TOKENS = 8192  # the default number of tokens of a micro-batch for --warm

Facts = dict[str, dict[str, str | None]]  # by part (fewbits and the devices) and name; None: unknown


def main(argv: Sequence[str]) -> int:
    parser = CommandParser("fewbits doctor", __doc__, EXAMPLES)
    parser.add_argument("--json", action="store_true", help="print the facts as JSON")
    parser.add_argument("--test", action="store_true", help="also run the kernels' self-test")
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

    facts, notes, problems = examine()
    checks = _self_test() if options.test and not problems else []
    well = not problems and all(passed for _, passed, _ in checks)
    if options.json:
        tested = [dict(zip(("name", "passed", "detail"), check, strict=True)) for check in checks]
        found = {"well": well, "facts": facts, "notes": notes, "problems": problems, "self_test": tested}
        print_json(found)
        return 0 if well else 1
    rows = [(part, name, value) for part, named in facts.items() for name, value in named.items() if value is not None]
    print_table([""] * 3, rows)
    for text in (*(f"note: {text}" for text in notes), *(f"problem: {text}" for text in problems)):
        print(text)
    if checks:
        print_table([""] * 3, [("pass" if passed else "FAIL", name, detail) for name, passed, detail in checks])
    return 0 if well else 1


def examine() -> tuple[Facts, list[str], list[str]]:
    """Return facts about this machine, notes about what works slowly, and problems: what does not work."""
    import torch

    from fewbits.experiments.environment import environment
    from fewbits.kernels.backends.gpu import cuda

    cores = f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}"
    facts: Facts = {"fewbits": {"version": __version__, "executable": sys.executable, "cores": cores}}
    errors = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            try:
                facts[device] = environment(torch.device(device))
            except ValueError as error:  # FEWBITS_BACKEND forces a backend that does not work for this device
                errors.append(str(error))
    notes = [" ".join(str(one.message).split()) for one in caught]
    if "cuda" not in facts and Path("/proc/driver/nvidia").exists():
        notes.append(cuda.complaint() or "")
    works = len(facts) > 1  # then FEWBITS_BACKEND is for the other device
    return facts, [*notes, *(errors if works else ())], [] if works else errors


def _self_test() -> list[tuple[str, bool, str]]:
    """Run the kernels' self-test on this machine's CPU and, if it has one, its GPU: (name, passed, detail) of each."""
    from torch.cuda import is_available

    from fewbits.kernels import selftest

    return [result for device in (("cpu", "cuda") if is_available() else ("cpu",)) for result in selftest.run(device)]


def _warm(recipe: str, model: str, architecture: str | None, tokens: int) -> int:
    """Compile, in parallel, the CUDA kernels that training the model with the recipe calls; return the exit status 0.

    architecture: such as `sm_90`; None: this machine's GPU. tokens: tokens of a micro-batch.
    """
    import torch

    from fewbits.experiments.config import load_recipe
    from fewbits.kernels.backends import build
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
        if architecture.replace("compute_", "sm_").rstrip("af") not in (valid := cubins.architectures()):
            raise ValueError(f"--architecture {architecture!r}: NVRTC compiles only for {', '.join(valid)}")
        count = compile_all(variants, architecture)
    except build.BuildError as error:
        raise ValueError(str(error)) from None
    print(f"{count} kernels for {architecture} are in {build.cache_folder()} ({time.monotonic() - start:.0f} s)")
    return 0
