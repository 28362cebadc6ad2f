"""Prove that two versions of the sources compute the same bits, so that the trials stored by the older one stay valid.

    python -m fewbits.experiments.same_bits --against COMMIT

The newer version is the checkout with its uncommitted changes. Both versions train the same tiny trials (every recipe,
the samplers, the optimizers, every architecture, a branch and a resumed trial) with the compiled kernels and with the
reference kernels, and both quantize the same adversarial tensors with about a thousand quantizers. If all bytes are
equal and every changed statement was executed, the numerics fingerprints of both versions (hashes of the sources that
compute) are added as a pair to `experiments/fingerprint/equal_bits.json`, for this kind of device and instruction set.
Otherwise nothing is added, the exit status is 1, and the stored trials of the older version stay stale. After a large
refactoring, some changed statements, such as error paths, are executed by none of the trials. A person who has read
these statements may declare the versions equal by --reviewed REASON; the reason is recorded. The command takes about 15
minutes on two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fewbits.common.atomic import write_json
from fewbits.experiments.fingerprint.changed_lines import Statement, only_in_first, read_sources, untried
from fewbits.experiments.fingerprint.commits import commit_name, unpack
from fewbits.experiments.fingerprint.equal_bits import EqualPair, add_pairs
from fewbits.experiments.fingerprint.numerics import ROOT, computing_files, numerics_fingerprint
from fewbits.kernels.backends.build import cache_folder

DEVICE = "cpu"  # CUDA kernels cannot be traced, so nothing is proven for them here
BACKENDS = ("cpu", "reference")
KERNEL_CALLS = Path(__file__).parent / "fingerprint" / "kernel_calls.py"
PRINTS_RECIPES = """
import json
from fewbits.experiments.config import load_recipe
try:
    from fewbits.experiments.config_files import names
except ImportError:  # an earlier version
    from fewbits.experiments.config import names
recipes = {name: load_recipe(name).to_dict() for name in names("recipe")}
print(json.dumps({name: {**recipe, "name": "", "about": ""} for name, recipe in recipes.items()}))
"""
SHOWN = 20  # number of differences that are printed at most
RESULT = "result.json"
COMPARED = ("metrics.parquet", "numerics.parquet", RESULT, "tensors")

TINY = (
    *("model.layers=2", "data=synthetic", "data.size=65536", "runtime.device=cpu", "training.checkpoint_every=2"),
    *("training.steps=4", "training.batch=4", "training.micro_batch=2", "training.length=128", "evaluation.every=2"),
    *("evaluation.windows=2", "observer.window=2", "observer.every=1", "observer.gradients_every=2", "scale=smoke"),
)
# Quantize all layers: a recipe that keeps the first and the last block in high precision would not quantize any layer
# of a tiny model, which has only two blocks.
KEEPS_NOTHING = ("recipe.keep.first=0", "recipe.keep.last=0")
OTHERS = {  # the trials besides one for each recipe: their overrides by name
    "keep": ("recipe=fp8", "model.layers=4", "recipe.keep.first=1", "recipe.keep.last=1", "recipe.keep.parts=[down]"),
    "gpt2": ("model=gpt2-nano", "recipe=mor/block", "optimizer=adam-mini", "optimizer.lr=3e-3"),
    "llama2": ("model=llama2-nano", "recipe=nvfp4", *KEEPS_NOTHING, "schedule=wsd", "optimizer.decay_vectors=true"),
    "hybrid": (
        "model=hybrid-nano",
        "model.layers=4",
        "model.pattern=M-*-",
        "recipe=nvfp4",
        *KEEPS_NOTHING,
        "optimizer=adam-mini",
    ),
    "fp32": ("recipe=bf16", "training.dtype=fp32", "schedule=linear", "optimizer.clip=null"),
    "penalty": ("recipe=gaussws", "recipe.sampler.penalty=0.01", "optimizer=adam-mini", "optimizer.bits_lr_ratio=10"),
    "switch": ("recipe=nvfp4", "recipe.keep.last=0", "recipe.switch.at=0.5"),
    "switch-backward": ("recipe=nvfp4", "recipe.keep.last=0", "recipe.switch.at=0.5", "recipe.switch.passes=backward"),
    "executed": ("recipe=fp8", "recipe.block=tensor", "recipe.weights=tensor", "recipe.execute=fp8", *KEEPS_NOTHING),
    "fp16": ("recipe=bf16", "precision=fp16"),
    "stochastic-weights": ("recipe=bf16", "precision=bf16-weights-stochastic"),
    "long": ("recipe=bf16", "model.vocab=2048", "training.length=256", "model.context=1024", "schedule=constant"),
}
BRANCH = ("recipe=mxfp4", *KEEPS_NOTHING)
STOPPED_AT = 3  # the resumed trial is interrupted after this step, one step after its last checkpoint


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("python -m fewbits.experiments.same_bits", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--against", metavar="COMMIT", help="the commit of the older version (required)")
    parser.add_argument(
        "--reviewed",
        metavar="REASON",
        default="",
        help="accept changed statements that no trial executed, because you have read them; REASON and their number "
        "are recorded",
    )
    parser.add_argument("--describe", action="store_true", help=argparse.SUPPRESS)  # called by `Version`
    parser.add_argument("--train", metavar="FOLDER", type=Path, help=argparse.SUPPRESS)  # trials on stdin
    parser.add_argument("--trace", metavar="MODE", choices=("python", "cpp"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.describe:
        print(json.dumps(description()))
        return 0
    if options.train:
        train_all(options.train, json.load(sys.stdin), options.trace)
        return 0
    if not options.against:
        parser.error("--against COMMIT is missing")
    with tempfile.TemporaryDirectory() as folder:
        old = Path(folder, "old")
        unpack(options.against, old)
        if not (old / "experiments" / "same_bits.py").is_file():
            raise ValueError(f"--against {options.against}: this commit has no same_bits.py; choose a later commit")
        versions = Version(old, Path(folder, "of-old")), Version(ROOT, Path(folder, "of-new"))
        return prove(*versions, commit_name(options.against), reviewed=options.reviewed)


@dataclass(frozen=True)
class Version:
    """A version of the sources: its checkout, and a folder for the output of its processes."""

    root: Path
    work: Path

    @cached_property
    def description(self) -> dict[str, Any]:
        return json.loads(self._run("--describe"))

    def train(self, trials: Mapping[str, Sequence[str]], trace: str) -> Path:
        """Train trials with this version, and record which lines of its sources are executed (see `train_all`).

        Return the folder with the runs (`runs/`) and the record (for Python `lines.json`, for C++ gcov's counts in
        `objects/`). A second call with the same `trace` trains nothing and returns the same folder.
        trials: the overrides of each trial, by the trial's name.
        trace: the language of the files whose executed lines are recorded, `python` or `cpp`.
        """
        folder = self.work / trace
        if not folder.exists():
            self._run("--train", str(folder / "runs"), "--trace", trace, trials=trials)
        return folder

    @cached_property
    def recipes(self) -> dict[str, Any]:
        """The fields of each recipe as a dictionary, by the recipe's name; `name` and `about` are empty."""
        return dict(json.loads(self._python("-c", PRINTS_RECIPES)))

    def call_kernels(self, backend: str) -> dict[str, str]:
        """Run the newer version's kernel_calls.py with this version's kernels; return the digest of each call's result.

        backend: cpu or reference.
        """
        return dict(json.loads(self._python(str(KERNEL_CALLS), FEWBITS_BACKEND=backend)))

    def _run(self, *arguments: str, trials: object = None) -> str:
        return self._python("-m", "fewbits.experiments.same_bits", *arguments, stdin=json.dumps(trials))

    def _python(self, *arguments: str, stdin: str = "", **variables: str) -> str:
        """Run Python with this version's packages; return what it prints. variables: environment variables to set."""
        environment = {**os.environ, "PYTHONPATH": str(self.root / "src"), **variables}
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=self.root, env=environment, input=stdin, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            raise ValueError(f"{' '.join(arguments[:3])} failed in {self.root} with status {done.returncode}")
        return done.stdout


def prove(
    old: Version, new: Version, commit: str, trials: Mapping[str, Sequence[str]] | None = None, reviewed: str = ""
) -> int:
    """Compare two versions; if they are proven to give the same bits, add their fingerprints to equal_bits.json.

    This equal_bits.json is the one in the checkout of the new version. Without a proof, print the reason and write
    nothing. Return the exit status: 1 without a proof, else 0. Versions with the same fingerprint need no proof; for
    them, write nothing and return 0.

    commit: the name of the older version, which is written with the pair.
    trials: the overrides of each trial, by the trial's name; None: the trials that `compare` chooses.
    reviewed: the reason for accepting changed statements that no trial executed; empty: do not accept them.
    """
    before, after = old.description["fingerprint"], new.description["fingerprint"]
    if before == after:
        print("the sources that compute have the same fingerprint: nothing to prove")
        return 0
    facts = new.description
    compared = json.dumps([before, after, facts["instruction_set"], facts["torch"], trials and dict(trials)])
    kept = cache_folder() / "same-bits" / f"{hashlib.sha256(compared.encode()).hexdigest()[:32]}.json"
    if reviewed and kept.is_file():
        left = json.loads(kept.read_text("utf-8"))
    else:
        left = compare(old, new, trials)
    if left is None:
        return 1
    if left:
        shown = left if reviewed else left[:SHOWN]
        print(f"the same bits, but no trial executed {len(left)} changed statements; the first {len(shown)} of them:")
        print("\n".join(f"  {line}" for line in shown))
        if not reviewed:
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_json(kept, left)
            print("read them; if they compute the same, add --reviewed REASON to the command: it does not train again")
            return 1
    pair = EqualPair(DEVICE, facts["instruction_set"], before, after, commit, facts["torch"], time.strftime("%Y-%m-%d"))
    pair = replace(pair, untried=len(left), reviewed=reviewed if left else "")
    add_pairs([pair], new.root / "experiments" / "fingerprint" / "equal_bits.json")
    print(f"the same bits on {DEVICE}, {facts['instruction_set']}: added to experiments/fingerprint/equal_bits.json")
    return 0


def compare(old: Version, new: Version, trials: Mapping[str, Sequence[str]] | None) -> list[str] | None:
    """Compare the bits that two versions compute, in trials and in single calls of kernels.

    Return None if any bits differ, else the changed statements that no trial executed, as `untried_statements` does.
    trials: the overrides of each trial, by the trial's name, besides those of TINY, which every trial gets; None: a
        trial for each recipe that is equal in both versions, and the trials in OTHERS, which use other models,
        optimizers and settings.
    """
    if trials is None:
        recipes = recipes_of_both(old, new)
        trials = {**{f"recipe-{name}": (f"recipe={name}", *KEEPS_NOTHING) for name in recipes}, **OTHERS}
    chosen = {name.replace("/", "-"): [*TINY, *overrides] for name, overrides in trials.items()}
    print(f"training {len(chosen)} trials, a resumed one and a branch with both versions, on two backends", flush=True)
    runs = [version.train(chosen, "python") / "runs" for version in (old, new)]
    if different := [*differing_files(*runs), *differing_kernels(old, new)]:
        print("not the same bits: the new sources define different trials")
        print("\n".join(f"  {line}" for line in different[:SHOWN]))
        return None
    return untried_statements(old, new, chosen)


def recipes_of_both(old: Version, new: Version) -> list[str]:
    """Return the names of the recipes that have the same content in both versions; print recipes that have changed.

    A changed recipe defines a different trial in each version, so the versions cannot be compared with it.
    """
    shared = [name for name in new.recipes if name in old.recipes]
    if changed := [name for name in shared if new.recipes[name] != old.recipes[name]]:
        print(f"not compared, because their content differs between the versions: {', '.join(changed)}")
    return [name for name in shared if name not in changed]


def description() -> dict[str, Any]:
    """Return facts about the version of the sources that runs this function, and about the machine.

    Keys: `fingerprint`, the hash of the sources that compute; `files`, the paths of these sources; `instruction_set`,
    that of this machine's processor; `torch`, the version of torch.
    """
    import torch

    from fewbits.kernels.backends.processor import instruction_set

    return {
        "fingerprint": numerics_fingerprint(DEVICE),
        "files": computing_files(DEVICE),
        "instruction_set": instruction_set(),
        "torch": str(torch.__version__),
    }


# ------------------------------------------------------------------------------------------------ in each version


class _Interrupted(BaseException):
    """An exception that interrupts a trial between two checkpoints, so that it can be resumed."""


def train_all(folder: Path, trials: Mapping[str, Sequence[str]], trace: str | None) -> None:
    """Train all trials with each backend of the kernels (cpu and reference); write the runs into `folder`.

    Then the first trial is trained again with an interruption, and a branch is trained from the first trial's end. The
    file lines.json is written into the parent folder of `folder`.
    trials: the overrides of each trial, by name.
    trace: `python` records the executed lines of each Python file in lines.json. `cpp` uses only the backend cpu, which
        is compiled C++, and gcov's counters record the executed lines of C++ files. None records nothing. Without
        `python`, lines.json contains an empty dictionary.
    """
    lines: dict[str, set[int]] = {}
    if trace == "cpp":
        _build_with_counters(folder.parent)
    elif trace == "python":
        files = {str((ROOT / file).resolve()): file for file in computing_files(DEVICE) if file.endswith(".py")}
        _trace(files, lines)
    try:
        for backend in BACKENDS[:1] if trace == "cpp" else BACKENDS:
            os.environ["FEWBITS_BACKEND"] = backend
            for name, overrides in trials.items():
                _train(folder / backend / name, overrides)
            first = next(iter(trials.values()))
            _train(folder / backend / "resumed", first, interrupted=True)
            (parent,) = (folder / backend / next(iter(trials))).iterdir()
            _train(folder / backend / "branch", [*first, f"branch.parent={parent}", "branch.step=4", *BRANCH])
    finally:
        sys.settrace(None)
    (folder.parent / "lines.json").write_text(json.dumps({file: sorted(numbers) for file, numbers in lines.items()}))


def _train(runs: Path, overrides: Sequence[str], interrupted: bool = False) -> None:
    from fewbits.experiments.config import load_trial
    from fewbits.experiments.run_trial import run
    from fewbits.experiments.session import Events, Progress

    class Stop(Events):
        def step(self, progress: Progress) -> None:
            if progress.step == STOPPED_AT:
                raise _Interrupted

    trial, runtime = load_trial([*overrides, f"runtime.runs={runs}"])
    if interrupted:
        with contextlib.suppress(_Interrupted):
            run(trial, runtime, Stop())
    run(trial, runtime)


def _trace(files: Mapping[str, str], lines: dict[str, set[int]]) -> None:
    """Record in `lines` (file name → line numbers) the lines that this thread executes from now on.

    files: the names of the files to record, by path. Lines of backward passes are recorded, too, because on a CPU they
        run in the thread that calls them.
    """

    def trace_frame(frame: Any, event: str, _: object) -> Any:
        path = frame.f_code.co_filename
        file = resolved.get(path)
        if file is None:
            file = resolved[path] = files.get(os.path.realpath(path), "")
        if not file:
            return None
        seen = lines.setdefault(file, set())
        seen.add(frame.f_lineno)

        def trace_line(frame: Any, event: str, _: object) -> Any:
            seen.add(frame.f_lineno)
            return trace_line

        return trace_line

    resolved: dict[str, str] = {}
    sys.settrace(trace_frame)


def _build_with_counters(folder: Path) -> None:
    """Compile the CPU kernels with gcov's counters of executed lines, and make this process load them.

    The compiled library is in a cache folder inside `folder`.
    """
    from fewbits.kernels.backends import build, compilation

    os.environ["FEWBITS_CACHE"] = str(folder / "cache")
    compiler = build.compiler()
    if compiler is None:
        raise ValueError(build.no_compiler())
    compilation.FLAGS = tuple("-O1" if flag == "-O3" else flag for flag in compilation.FLAGS)  # type: ignore[assignment]
    objects = folder / "objects"
    objects.mkdir(parents=True)
    build.cached(build.library_path(), lambda: build.compile_in(objects, (*compiler, "--coverage")).read_bytes())


# ------------------------------------------------------------------------------------------------ comparing


def differing_files(old: Path, new: Path) -> list[str]:
    """Return "BACKEND/TRIAL: FILE" for each file that differs between the runs of the two versions.

    old, new: for each version, the folder into which `train_all` wrote its runs.
    The ids in result.json are ignored, because they depend on the sources. Keys of result.json that only the new
    version writes are ignored, too: they come from an evaluation that the old version did not have. Such an evaluation
    does not affect training, and reports accept stored trials without these numbers.
    """
    differing = []
    for backend_and_name in sorted({path.relative_to(root) for root in (old, new) for path in root.glob("*/*")}):
        before, after = (_contents(root / backend_and_name) for root in (old, new))
        if set(before) == set(after) == set(COMPARED):
            after[RESULT] = {key: value for key, value in after[RESULT].items() if key in before[RESULT]}
        differing += [f"{backend_and_name}: {name}" for name in COMPARED if before.get(name) != after.get(name)]
    return differing


def differing_kernels(old: Version, new: Version) -> list[str]:
    """Return "BACKEND: CALL" for each call in `kernel_calls.py` whose result differs between the versions."""
    differing = []
    for backend in BACKENDS:
        before, after = (version.call_kernels(backend) for version in (old, new))
        common = before.keys() & after.keys()
        differing += [f"{backend}: {call}" for call in common if before[call] != after[call]]
    return sorted(differing)


def _contents(runs: Path) -> dict[str, Any]:
    from fewbits.experiments.storage import checkpoints

    folders = list(runs.iterdir()) if runs.is_dir() else []
    if len(folders) != 1:
        return {}
    (folder,) = folders
    result = json.loads((folder / RESULT).read_text())
    tensors = checkpoints.steps(folder / "checkpoints")[result["step"]] / checkpoints.TENSORS
    tables = {name: (folder / name).read_bytes() for name in COMPARED if name.endswith(".parquet")}
    numbers = {key: json.dumps(value) for key, value in result.items() if key != "id"}
    return {**tables, RESULT: numbers, "tensors": tensors.read_bytes()}


def untried_statements(old: Version, new: Version, trials: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a line of text for each statement that is in only one version and that a person has to review.

    A statement needs review if that version's runs of the trials did not execute it. Exempt are declarations in which
    only names have changed, and imports that give no name a new meaning. The line of text has the version (old or new),
    the file and line number, and the statement's text. trials: the overrides of each trial, by name.
    """
    of_old, of_new = (read_sources(version.description["files"], version.root) for version in (old, new))
    lines = []
    for name, version, own, other in (("old", old, of_old, of_new), ("new", new, of_new, of_old)):
        executed = json.loads((version.train(trials, "python") / "lines.json").read_text())
        executable: dict[str, list[int]] = {}
        changed = only_in_first(own.statements, other.statements)
        if any(not statement.file.endswith(".py") for statement in changed):
            ran, executable = executed_cpp_lines(version.train(trials, "cpp") / "objects", version.root)
            executed |= ran
        lines += [
            _source_line(name, version.root, statement) for statement in untried(own, other, executed, executable)
        ]
    return lines


def executed_cpp_lines(objects: Path, root: Path) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Return two dictionaries by C++ file: the numbers of the executed lines, and of all lines that have code.

    objects: the folder of the compiled kernels, with gcov's counts. root: the checkout of the version; files outside
        it are omitted, and names of files are relative to it.
    """
    ran: dict[str, set[int]] = {}
    executable: dict[str, set[int]] = {}
    for counts in sorted(objects.rglob("*.gcda")):
        done = subprocess.run(
            ["gcov", "--json-format", "--stdout", str(counts)], cwd=objects, capture_output=True, text=True, check=True
        )
        for document in done.stdout.splitlines():
            for file in json.loads(document)["files"]:
                path = Path(os.path.realpath(objects / file["file"]))
                if path.is_relative_to(root.resolve()):
                    name = path.relative_to(root.resolve()).as_posix()
                    executable.setdefault(name, set()).update(line["line_number"] for line in file["lines"])
                    ran.setdefault(name, set()).update(line["line_number"] for line in file["lines"] if line["count"])
    return {key: sorted(lines) for key, lines in ran.items()}, {key: sorted(lines) for key, lines in executable.items()}


def _source_line(version: str, root: Path, statement: Statement) -> str:
    text = (root / statement.file).read_text("utf-8").splitlines()[statement.line - 1].strip()
    return f"{version} {statement.place}: {text}"


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ValueError as problem:
        print(f"same_bits: {problem}", file=sys.stderr)
        sys.exit(2)
