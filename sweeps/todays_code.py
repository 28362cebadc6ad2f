"""Whether a result was computed by the code that is here now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fewbits.experiments.sources import ROOMS, sources_digest


def computed_by_todays_code(made_of: Mapping[str, Any]) -> bool:
    """Return whether today's sources are those that the trial's id was made of."""
    return bool(made_of["sources"] == {room: sources_digest(room) for room in ROOMS})
