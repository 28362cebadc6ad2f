"""Compute a digest of everything that a report depends on: code, versions of packages, and the files of the runs.

A report is not written again if this digest is the same as at the last time and the report's files are unchanged.
Checkpoints (the files in subfolders of run folders) are too large to be read each time; their names, sizes and
modification times are hashed instead.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from fewbits.analysis.engine.results.frames import Results
from fewbits.common.store_folder import BENCH

SOURCES = ("kernels", "models", "experiments", "sweeps", "analysis")
COMPUTING = ("torch", "numpy", "scipy", "pandas", "pyarrow", "matplotlib")
PACKAGES = (*COMPUTING, "jupytext", "nbformat", "markdown-it-py", "jinja2")
CODE = {".py", ".yaml", ".css", ".html", ".h", ".cpp", ".cu", ".cuh"}
NEVER_READ = (".lock", ".lease.lock", "lease.json", "log.txt", "stop", "timing.parquet")
MADE_OF = "made-of.json"
_ROOT = Path(__file__).resolve().parents[2]


def made_of(results: Results, overrides: tuple[str, ...]) -> str:
    """Return the digest of all inputs of a report.

    overrides: further texts that the report depends on, such as the values of its notebook's parameters.
    """
    parts = {
        "overrides": overrides,
        "code": sources(SOURCES),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
        "standing": results.trials.to_json(orient="records", double_precision=15),
        "files": {one.folder.path.name: _contents(one.folder.path) for one in results.plan.trials.values()},
        "timings": _contents(results.plan.store / BENCH),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def sources(folders: tuple[str, ...]) -> str:
    """Return one digest of the names and contents of the files in these folders of fewbits whose suffix is in CODE."""
    total = hashlib.sha256()
    for name in folders:
        for path in sorted(path for path in (_ROOT / name).rglob("*") if path.suffix in CODE):
            total.update(f"{path.relative_to(_ROOT).as_posix()} {digest(path.read_bytes())}\n".encode())
    return total.hexdigest()


def unchanged(folder: Path, inputs_digest: str) -> bool:
    """Tell whether the folder has a report whose inputs had this digest, with no file changed since it was written."""
    try:
        record = json.loads((folder / MADE_OF).read_text("utf-8"))
        return record["made of"] == inputs_digest and all(
            digest((folder / name).read_bytes()) == written for name, written in record["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def record(inputs_digest: str, files: Mapping[str, bytes]) -> bytes:
    """Return the content of a report's `made-of.json`, which `unchanged` reads.

    It has the digest of the report's inputs, and the digest of each file of the report by name.
    """
    entries = {"made of": inputs_digest, "files": {name: digest(content) for name, content in files.items()}}
    return (json.dumps(entries, indent=2) + "\n").encode()


def digest(content: bytes) -> str:
    """Return the SHA-256 digest of a file's content in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def _contents(folder: Path) -> dict[str, str]:
    contents = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name not in NEVER_READ:
            if path.parent == folder:
                contents[path.name] = digest(path.read_bytes())
            else:
                stat = path.stat()
                contents[path.relative_to(folder).as_posix()] = f"{stat.st_size} {stat.st_mtime_ns}"
    return contents
