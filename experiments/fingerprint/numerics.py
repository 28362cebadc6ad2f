"""Compute the numerics fingerprint: one hash of the meaning of all sources that compute a trial on a kind of device.

Edits of comments, docstrings, annotations and messages do not change it, nor does any edit of a module that does not
compute. It does not depend on the machine: equal sources have equal fingerprints.
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
    """Return the digest of each source, by its path in the repository, that computes trials on this kind of device.

    root: the repository. It has no default, because a call without it would be cached apart from a call with it.
    """
    return {path: file_digest(path, root) for path in computing_files(device, root)}


def computing_files(device: str, root: Path = ROOT) -> list[str]:
    """Return the sorted paths of the sources that compute trials on this kind of device."""
    python = [module_file(module) for module, needed_on in COMPUTING.items() if needed_on in ("any", device)]
    cpp = with_includes(root / "kernels" / "csrc" / name for name in CPP_ROOTS[device])
    return sorted([*python, *(file.relative_to(root).as_posix() for file in cpp)])


def file_digest(path: str, root: Path = ROOT) -> str:
    """Return the digest of the meaning of one source file."""
    if path.endswith(".py"):
        config_classes = CONFIG_CLASSES.get(path.removesuffix(".py").replace("/", "."), ())
        return module_digest((root / path).read_bytes(), config_classes)
    return source_digest((root / path).read_text("utf-8"))


def numerics_fingerprint(device: str, root: Path = ROOT) -> str:
    """Return the numerics fingerprint for this kind of device."""
    return hashlib.sha256(json.dumps(source_digests(device, root)).encode()).hexdigest()


@cache
def probe_fingerprint() -> str:
    """Return the fingerprint of the sources that compute probes, without those that training uses, too."""
    digests = {path: file_digest(path) for path in sorted(map(module_file, PROBING))}
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest()


def module_file(module: str) -> str:
    """Return the path of a module's file, relative to the repository."""
    return f"{module.replace('.', '/')}.py"
