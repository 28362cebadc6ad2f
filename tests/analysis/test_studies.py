"""A shelf is full when it is asked for: a study's modules register what they make."""

import subprocess
import sys

from fewbits.analysis.engine.old_loading import load


def test_a_shelf_is_full_without_anybody_importing_the_studys_modules() -> None:
    words = "from fewbits.analysis.registry import shelf; s = shelf('mor'); print(len(s.claims) >= 20, [*s.controls])"
    done = subprocess.run((sys.executable, "-c", words), capture_output=True, text=True, check=True)
    assert done.stdout == "True ['bad-arm']\n"


def test_a_study_without_modules_has_none_to_load() -> None:
    load("of-tomorrow")
