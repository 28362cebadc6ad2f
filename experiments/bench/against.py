"""Time the training steps of this checkout and of another commit alternately (`fewbits bench train --against COMMIT`).

The commit is unpacked into a temporary folder. In each round, each of the two checkouts runs `fewbits bench train` in a
new process; the order of the two alternates from round to round. The other commit's Python modules may differ from this
checkout's, because only the command line of the other commit is used. Ratios of times are computed within a round, so a
change in the machine's speed between rounds does not affect them.
"""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from fewbits.experiments.bench.measure import Ratio
from fewbits.experiments.numerics import ROOT

ROUNDS = 5

Key = tuple[str, str, str]  # model, recipe, optimizer


@dataclass(frozen=True)
class Change:
    """The times of a training step in this checkout and in the other commit, as medians over the rounds.

    In a round, each of the two is timed once.
    """

    model: str
    variant: str  # a recipe, or bf16
    optimizer: str
    milliseconds: float  # in this checkout
    other_milliseconds: float  # in the other commit
    speed: Ratio  # median and range over the rounds of: time in the other commit / time in this checkout
    rest: Ratio | None  # of: step minus products in this checkout / step in the other commit minus the same products


@dataclass(frozen=True)
class Times:
    """The times, in milliseconds, that one run of `fewbits bench train` measured."""

    steps: dict[Key, float]
    products: dict[str, float]  # of all linear layers in BF16, by model; NaN from commits that did not measure them


def compare(commit: str, arguments: Sequence[str], rounds: int = ROUNDS) -> list[Change]:
    """Run `fewbits bench train` with these arguments in this checkout and in `commit`, in alternating order.

    Return the change of the step time for each model, variant (a recipe or plain BF16) and optimizer.
    rounds: how often the command runs in each of the two.
    """
    times: list[tuple[Times, Times]] = []
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / "checkout"
        unpack(commit, other)
        for number in range(rounds):
            print(f"fewbits: round {number + 1} of {rounds}", file=sys.stderr, flush=True)
            both = {root: _times(root, arguments) for root in ((ROOT, other), (other, ROOT))[number % 2]}
            times.append((both[ROOT], both[other]))
    return changes(times)


def changes(times: Sequence[tuple[Times, Times]]) -> list[Change]:
    """Return a Change for each model, recipe and optimizer that was measured in this checkout and in the other commit.

    times: for each round, the times in this checkout and those in the other commit.
    """
    result = []
    for key in times[0][0].steps:
        if key in times[0][1].steps:
            model, variant, _ = key
            ours, theirs = [ours.steps[key] for ours, _ in times], [theirs.steps[key] for _, theirs in times]
            products = [ours.products[model] for ours, _ in times]
            rests = [[ms - p for ms, p in zip(each, products, strict=True)] for each in (ours, theirs)]
            # Other recipes compute their products in another way.
            rest = Ratio.of(*rests) if variant == "bf16" and min(map(min, rests)) > 0 else None
            result.append(Change(*key, median(ours), median(theirs), Ratio.of(theirs, ours), rest))
    return result


def unpack(commit: str, folder: Path) -> None:
    """Write the files of a commit into `folder`, which must not exist; raise ValueError if there is no such commit."""
    done = subprocess.run(["git", "archive", _commit_name(commit)], cwd=ROOT, capture_output=True, check=True)
    folder.mkdir(parents=True)
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="tar")


def _commit_name(commit: str) -> str:
    """Return the full hash of a commit, which may be given as a branch, a tag or an abbreviated hash.

    Raise ValueError if there is no such commit. A text that begins with a hyphen is not passed to git as an option.
    """
    command = ["git", "rev-parse", "--verify", "--end-of-options", f"{commit}^{{commit}}"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except OSError as error:
        raise ValueError(f"--against {commit}: git cannot run: {error}") from None
    if done.returncode:
        raise ValueError(f"--against {commit!r}: there is no such commit: {done.stderr.strip()}")
    return done.stdout.strip()


def _times(root: Path, arguments: Sequence[str]) -> Times:
    """Run `fewbits bench train` with these arguments in the checkout `root`, and return the times that it measured."""
    command = [sys.executable, "-m", "fewbits.cli", "bench", "train", *arguments, "--json"]
    environment = {**os.environ, "PYTHONPATH": str(root / "src")}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    if done.returncode:
        version = "this checkout" if root == ROOT else "the other commit"
        raise ValueError(
            f"--against: fewbits bench train failed in {version}: {done.stderr.strip().rpartition(chr(10))[2]}"
        )
    models = json.loads(done.stdout)
    steps = {(m["model"], row["variant"], row["optimizer"]): row["milliseconds"] for m in models for row in m["rows"]}
    return Times(steps, {m["model"]: m.get("gemm_milliseconds", math.nan) for m in models})
