"""Check the address of a Ray cluster before anything is planned or written."""

from __future__ import annotations

import socket


def is_dashboard(address: str | None) -> bool:
    """Tell whether the address is that of a dashboard, which runs commands as jobs, and not of a cluster to join."""
    return (address or "").startswith(("http://", "https://"))


def check_reachable(address: str) -> None:
    """Raise ValueError if nothing answers at HOST:PORT; Ray would retry for minutes. Other addresses pass."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        except OSError as error:
            raise ValueError(f"no Ray at {address}: {error.strerror or error}") from None
