"""Set how much the tests try: `make test` a small number of new random examples, `make test-deep` all of them.

FEWBITS_TESTS=deep also runs the tests marked `deep`: repetitions of a mechanism that another test covers, and checks
whose cost is out of proportion to what they have found. Tests of a law for all combinations of properties try pairs of
them in a short run, and all combinations if DEEP is true.
"""

import os

from hypothesis import settings

DEEP = os.environ.get("FEWBITS_TESTS") == "deep"
SHARE, LEAST = 10, 10  # `make test` tries a tenth of the examples, but at least ten


def examples(full: int) -> settings:
    """Return hypothesis settings with this number of examples in a deep run; each run draws new ones."""
    return settings(max_examples=full if DEEP else max(full // SHARE, LEAST))


def load_profile() -> None:
    """Set the number of examples of tests that name none; a failure prints what reproduces it elsewhere."""
    # How long an example takes depends on the load of the machine.
    settings.register_profile("fewbits", examples(100), deadline=None, derandomize=False, print_blob=True)
    settings.load_profile("fewbits")
