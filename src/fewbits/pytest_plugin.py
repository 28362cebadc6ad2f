"""Provide the pytest fixture `conforms`: `def test_mine(conforms): conforms(quantize, "te-nvfp4")`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def conforms() -> Callable[..., None]:
    """Return a function that fails the test, with the explanation, if a quantizer differs from a dialect."""

    def check(function: Callable[..., Any], dialect: str, *, seed: int = 0) -> None:
        from fewbits.kernels.conformance import conform

        report = conform(function, dialect, seed=seed)
        if not report.equal:
            pytest.fail("\n".join(report.lines()), pytrace=False)

    return check
