"""Provide the paths of the repository and the versions in its constraints, with which infra has to agree."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
INFRA = ROOT / "infra"


def constrained(package: str) -> str:
    """Return the version of a package in constraints.txt, without a trailing `.*`."""
    found = re.search(rf"^{re.escape(package)}==(.+?)(?:\.\*)?$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert found, f"constraints.txt does not name {package}"
    return found[1]


def agrees(version: str, package: str) -> bool:
    return version == constrained(package) or version.startswith(f"{constrained(package)}.")
