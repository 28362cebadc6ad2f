"""Record the digests of the sources that compute, if they still give the golden bits: `make numerics`.

    python -m tests.record_numerics                  record edited sources under the same numerics version
    python -m tests.record_numerics --new-version    record them under a new version, whose trials have new ids

The sources are recorded in experiments/numerics.txt, the golden digests in tests/golden/numerics.json. Those of kernels
are the same on every machine; the compiled library, the reference and (a part of them) the CUDA sources on an emulator
must give them. Those of trials are kept for each instruction set and version of torch. Digests that the file lacks are
computed from the sources of the commit that recorded the present digests, and then compared. Without --new-version,
nothing is recorded if a digest differs, or if an edited file cannot be executed on this machine. An edit of code that
no golden computation executes needs a new one in tests/golden/digests.py, or --new-version. Commit both files together
with the edit.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from fewbits.experiments.identity import FILE, ROOT, changed, record, recorded, running
from fewbits.kernels.backends.processor import instruction_set
from tests.kernels.backends.gpu import stubbed

GOLDEN = ROOT / "tests" / "golden" / "numerics.json"
SCRIPT = ROOT / "tests" / "golden" / "digests.py"
EVERYWHERE = "kernels"  # the key in GOLDEN of the digests that are the same on every machine
# Sources that only a GPU executes, or CuPy on a stand-in for the driver, which launches the emulated kernels.
ON_A_GPU = tuple(f"kernels/backends/gpu/{name}.py" for name in ("calls", "cuda"))
SHOWN = 8

Rows = dict[str, str]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m tests.record_numerics", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--new-version", action="store_true", help="trials of these sources have new ids")
    new = parser.parse_args(arguments).new_version
    version, _ = recorded()
    golden, files = read(GOLDEN), changed()
    if not files and not new and here() in golden:
        print(f"the sources are those of numerics version {version}: nothing to record")
        return 0
    print(f"{len(files)} files differ from those of numerics version {version}: {shown(files)}", flush=True)
    rows, wrong = digests(ROOT)
    if not new:
        known = {key: golden.get(key, {}) for key in rows}
        if any(rows[key].keys() - known[key].keys() for key in rows):
            print("computing the golden digests that are missing from the recorded sources", flush=True)
            before = recorded_digests()
            known = {key: before[key] | known[key] for key in rows}
        unseen = (f"{file} is not executed here: {why}" for file, why in not_executed(files))
        wrong = [*wrong, *differing(known, rows), *unseen]
    if wrong:
        print("not recorded:", *wrong[:SHOWN], *([f"and {len(wrong) - SHOWN} more"] * (len(wrong) > SHOWN)), sep="\n  ")
        if not new:
            print("if the change is intended, and earlier trials may become stale: add --new-version")
        return 1
    write(golden if not new else {}, rows)
    record(version + new, running())
    print(f"recorded as numerics version {version + new}: commit {FILE.name} and {GOLDEN.name}")
    return 0


def here() -> str:
    """Return the key in GOLDEN of the trials of this kind of machine."""
    return f"{instruction_set()}, torch {torch.__version__.partition('+')[0]}"


def digests(root: Path) -> tuple[dict[str, Rows], list[str]]:
    """Return the digests that the sources in `root` give here, and lines that name backends which differ."""
    kernels = compute(root, "kernels", FEWBITS_BACKEND="cpu")
    others = {"the reference": compute(root, "kernels", FEWBITS_BACKEND="reference")}
    trials = compute(root, "trials")
    if root == ROOT:
        others["CUDA sources"] = compute(root, "cuda")
        if has_gpu():
            others["CUDA"] = compute(root, "kernels", FEWBITS_BACKEND="cuda")
    trials |= compute(root, "tiles")
    wrong = [f"{who}: {name}" for who, rows in others.items() for name in rows if rows[name] != kernels.get(name)]
    return {EVERYWHERE: kernels, here(): trials}, wrong


def recorded_digests() -> dict[str, Rows]:
    """Return the digests that the recorded sources give: those of the last commit that changed numerics.txt."""
    command = ["git", "log", "-1", "--format=%H", "--", str(FILE.resolve())]
    commit = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "recorded")
        subprocess.run(["git", "worktree", "add", "--detach", "-q", str(root), commit], cwd=ROOT, check=True)
        try:
            require_recorded(commit, running(root))
            return digests(root)[0]
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(root)], cwd=ROOT, check=True)


def require_recorded(commit: str, sources: Mapping[str, str]) -> None:
    """Raise SystemExit if the sources of a commit are not those that numerics.txt records."""
    if files := changed(recorded()[1], sources):
        raise SystemExit(
            f"commit {commit[:12]} recorded other sources than its own ({shown(files)}): run this command where the "
            "golden digests exist, or with --new-version"
        )


def compute(root: Path, which: str, **variables: str) -> Rows:
    """Run tests/golden/digests.py of this checkout with the sources in `root`; return what it prints."""
    environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}{os.pathsep}{ROOT}", **variables}
    command = [sys.executable, str(SCRIPT), which]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{SCRIPT.name} {which} failed with the sources in {root}:\n{done.stderr[-2000:]}")
    return dict(json.loads(done.stdout))


def differing(known: Mapping[str, Rows], rows: Mapping[str, Rows]) -> list[str]:
    """Return a line for each golden digest that `rows` does not have; a digest of something new is no difference."""
    return [
        f"other bits: {name} ({key})"
        for key, golden in known.items()
        for name, digest in golden.items()
        if rows[key].get(name) != digest
    ]


def has_gpu() -> bool:
    return torch.cuda.is_available()


def not_executed(files: list[str]) -> Iterator[tuple[str, str]]:
    """Yield each file that was not executed on this machine, with the reason and what to do."""
    for file in files:
        if file in ON_A_GPU and not has_gpu() and (reason := stubbed.unavailable()):
            yield file, f"run this command on a machine with an NVIDIA GPU, or with CuPy and a C++ compiler ({reason})"


def read(file: Path) -> dict[str, Rows]:
    return dict(json.loads(file.read_text("utf-8"))) if file.exists() else {}


def write(golden: dict[str, Rows], rows: Mapping[str, Rows]) -> None:
    """Write GOLDEN: the rows of other machines that `golden` has, and `rows` in place of those of this machine."""
    GOLDEN.write_text(json.dumps({**golden, **rows}, indent=1, sort_keys=True) + "\n", "utf-8")


def shown(files: list[str]) -> str:
    return ", ".join(files[:SHOWN]) + (f" and {len(files) - SHOWN} more" if len(files) > SHOWN else "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
