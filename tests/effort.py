"""Set how thorough the tests are: in `make test`, few random examples; in `make test-deep`, all of them.

`make test-deep` sets FEWBITS_TESTS=deep, which makes DEEP true. It also runs the tests marked `deep`: further scenarios
of a mechanism that another test covers, and slow checks that have rarely found errors. Where a law holds for all
combinations of properties, such as format, scaling and axis, `make test` covers all pairs of values, and
`make test-deep` all combinations.
"""

import os

from hypothesis import settings

DEEP = os.environ.get("FEWBITS_TESTS") == "deep"
SHARE, LEAST = 10, 10  # `make test` tries 1 / SHARE of the examples, but at least LEAST


def examples(full: int) -> settings:
    """Return hypothesis settings: `full` random examples in `make test-deep`, and fewer in `make test`.

    Each run draws new examples.
    """
    return settings(max_examples=full if DEEP else max(full // SHARE, LEAST))


def load_profile() -> None:
    """Set hypothesis's defaults for all tests: `examples(100)`; a failure prints code that reproduces it."""
    # There is no deadline, since the time of an example depends on the load of the machine.
    settings.register_profile("fewbits", examples(100), deadline=None, derandomize=False, print_blob=True)
    settings.load_profile("fewbits")
