"""`fewbits explain`: the fields in which two trials differ, or a trial and what today's code would make of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fewbits.kernels.store_folder import store_folder
from fewbits.sweeps.command_line import Parser

EXAMPLES = """\
examples:
  fewbits explain nemotron-nano-bf16-python-s0-1a2b3c4d 5e6f7a8b     two runs, by folder or by the end of its name
  fewbits explain 1a2b3c4d                                           a run, and today's code and packages
"""


def main(argv: Sequence[str]) -> int:
    parser = Parser("fewbits explain", __doc__, EXAMPLES)
    parser.add_argument("a", metavar="A", help="a run: its folder, or the hash that its name ends with")
    parser.add_argument("b", nargs="?", metavar="B", help="another run; without, A as it would be computed now")
    parser.add_argument("--runs", metavar="DIR", default="runs", help="the store (default: runs)")
    options = parser.parse_intermixed_args(argv)
    runs = store_folder(options.runs)

    from fewbits.sweeps.explain import differences

    left = _of(_run(options.a, runs))
    right = _of(_run(options.b, runs)) if options.b else _today(_run(options.a, runs))
    found = differences(left, right)
    print("\n".join(found) if found else "the same trial" if options.b else "today's code computes the same trial")
    return 0


def _run(name: str, runs: Path) -> Path:
    for path in (Path(name).expanduser(), runs / name):
        if (path / "provenance.json").is_file():
            return path
    found = [path.parent for path in runs.glob(f"*-{name}*/provenance.json")]
    if len(found) != 1:
        what = f"{len(found)} runs {name!r} in {runs}" if found else f"no run {name!r} has begun in {runs}"
        raise ValueError(f"{what}: name a run folder, or the hash that its name ends with")
    return found[0]


def _of(path: Path) -> dict[str, Any]:
    """What the id is made of, and the sources file by file."""
    from fewbits.experiments.run_folder import opened

    provenance = opened(path).provenance() or {}
    return _by_file(provenance["identity"], provenance.get("sources", {}))


def _by_file(identity: Mapping[str, Any], files: Mapping[str, str]) -> dict[str, Any]:
    return {**identity, "sources": dict(files)} if files else dict(identity)


def _today(path: Path) -> dict[str, Any]:
    """The same config, data, device, threads and ranks, with the code, torch and backend of now."""
    from fewbits.experiments.sources import sources

    from fewbits.experiments import devices
    from fewbits.experiments.data.load import load
    from fewbits.experiments.data.once import default_cache
    from fewbits.experiments.identity import identity
    from fewbits.experiments.run_folder import opened, saved_trial
    from fewbits.experiments.trial import Runtime

    trial, made_of = saved_trial(path), (opened(path).provenance() or {})["identity"]
    device = str(made_of["backend"]).partition(":")[0]
    world = devices.expected(Runtime(device=device, threads=made_of["threads"] or 1), made_of["ranks"])
    parent = made_of["config"]["branch"]
    now = identity(trial, load(trial.data, default_cache()).fingerprint, world, parent)
    return _by_file(now, sources())
