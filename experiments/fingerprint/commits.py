"""Unpack other commits of this repository, to compare them with the checkout."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

from fewbits.experiments.fingerprint.numerics import ROOT


def unpack(commit: str, folder: Path) -> None:
    """Write the files of a commit into `folder`, which must not exist; raise ValueError if there is no such commit."""
    done = subprocess.run(["git", "archive", commit_name(commit)], cwd=ROOT, capture_output=True, check=True)
    folder.mkdir(parents=True)
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="tar")


def commit_name(commit: str) -> str:
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
