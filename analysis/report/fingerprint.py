"""The digest of all that a report depends on: code, packages that compute or draw, and every byte of the results.

A report whose digest is today's, and whose files are as they were written, would come out the same and is not made
again. Checkpoints, too large to be read each time, enter by name, size and time.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from fewbits.analysis.engine.frames import Results
from fewbits.sweeps.planning.plan import folders

SOURCES = ("kernels", "models", "experiments", "sweeps", "analysis")
COMPUTING = ("torch", "numpy", "scipy", "pandas", "pyarrow", "matplotlib")
PACKAGES = (*COMPUTING, "jupytext", "nbformat", "markdown-it-py", "jinja2")
CODE = {".py", ".yaml", ".css", ".html", ".h", ".cpp", ".cu", ".cuh"}
NEVER_READ = (".lock", ".lease.lock", "lease.json", "log.txt", "stop", "timing.parquet")
MADE_OF = "made-of.json"
_ROOT = Path(__file__).resolve().parents[2]


def made_of(results: Results, overrides: tuple[str, ...]) -> str:
    """Return the digest of a report of these results."""
    parts = {
        "overrides": overrides,
        "code": sources(SOURCES),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
        "standing": results.trials.to_json(orient="records", double_precision=15),
        "files": {folder.path.name: _contents(folder.path) for folder in folders(results.plan)},
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def sources(folders: tuple[str, ...]) -> str:
    """Return a digest of the folders' code and data."""
    found = hashlib.sha256()
    for name in folders:
        for path in sorted(path for path in (_ROOT / name).rglob("*") if path.suffix in CODE):
            found.update(f"{path.relative_to(_ROOT).as_posix()} {digest(path.read_bytes())}\n".encode())
    return found.hexdigest()


def unchanged(folder: Path, made_of: str) -> bool:
    """Tell whether the report in a folder has this digest and is whole."""
    try:
        record = json.loads((folder / MADE_OF).read_text("utf-8"))
        return record["made of"] == made_of and all(
            digest((folder / name).read_bytes()) == was for name, was in record["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def record(made_of: str, files: Mapping[str, bytes]) -> bytes:
    """Return the record that `unchanged` compares with."""
    found = {"made of": made_of, "files": {name: digest(content) for name, content in files.items()}}
    return (json.dumps(found, indent=2) + "\n").encode()


def digest(content: bytes) -> str:
    """Return the digest of a file."""
    return hashlib.sha256(content).hexdigest()


def _contents(folder: Path) -> dict[str, str]:
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name not in NEVER_READ:
            if path.parent == folder:
                found[path.name] = digest(path.read_bytes())
            else:
                stat = path.stat()
                found[path.relative_to(folder).as_posix()] = f"{stat.st_size} {stat.st_mtime_ns}"
    return found
