"""Compute the numerics fingerprint: one hash of all sources that compute a trial's numbers on a kind of device.

The fingerprint is part of a trial's id. It does not change with comments, docstrings, annotations and messages, nor
with modules that do not compute numbers (computing_modules.py). It does not depend on the machine.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path

from fewbits.experiments.fingerprint.computing_modules import COMPUTING, CONFIG_CLASSES, CPP_ROOTS, PROBING
from fewbits.experiments.fingerprint.cpp_source import source_digest, with_includes
from fewbits.experiments.fingerprint.python_source import module_digest

ROOT = Path(__file__).resolve().parents[2]


@cache
def source_digests(device: str, root: Path) -> dict[str, str]:
    """Return the digest of each source that computes trials on this kind of device, by its path in the repository.

    device: `cpu` or `cuda`. root: the repository's folder; it has no default value, because calls with and without an
    explicit root would be cached separately.
    """
    return {path: file_digest(path, root) for path in computing_files(device, root)}


def computing_files(device: str, root: Path = ROOT) -> list[str]:
    """Return the paths in the repository, sorted, of the sources that compute trials on this kind of device."""
    python = [module_file(module) for module, needed_on in COMPUTING.items() if needed_on in ("any", device)]
    cpp = with_includes(root / "kernels" / "csrc" / name for name in CPP_ROOTS[device])
    return sorted([*python, *(file.relative_to(root).as_posix() for file in cpp)])


def file_digest(path: str, root: Path = ROOT) -> str:
    """Return the digest of one Python or C++ source file, without comments and other text that computes nothing."""
    if path.endswith(".py"):
        config_classes = CONFIG_CLASSES.get(path.removesuffix(".py").replace("/", "."), ())
        return module_digest((root / path).read_bytes(), config_classes)
    return source_digest((root / path).read_text("utf-8"))


def numerics_fingerprint(device: str, root: Path = ROOT) -> str:
    """Return the numerics fingerprint for this kind of device."""
    return hashlib.sha256(json.dumps(source_digests(device, root)).encode()).hexdigest()


@cache
def probe_fingerprint() -> str:
    """Return the hash of the sources that only probe trials use, in addition to those of the numerics fingerprint."""
    digests = {path: file_digest(path) for path in sorted(map(module_file, PROBING))}
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest()


def module_file(module: str) -> str:
    """Return the path in the repository of the module with this dotted name (without `fewbits.`)."""
    return f"{module.replace('.', '/')}.py"
