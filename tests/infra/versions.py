"""Provide the package versions that constraints.txt requires, and the paths of the repository and of infra/.

The files in infra/ have to name the same versions.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
INFRA = ROOT / "infra"


def constrained(package: str) -> str:
    """Return the version that constraints.txt requires of a package, such as `2.60` for `ray==2.60.*`."""
    found = re.search(rf"^{re.escape(package)}==(.+?)(?:\.\*)?$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert found, f"constraints.txt does not name {package}"
    return found[1]


def agrees(version: str, package: str) -> bool:
    return version == constrained(package) or version.startswith(f"{constrained(package)}.")
