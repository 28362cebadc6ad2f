"""Check the address of a Ray cluster before anything is planned or written."""

from __future__ import annotations

import socket


def is_dashboard(address: str | None) -> bool:
    """Tell whether the address is the URL of a Ray dashboard, which runs a sweep as a job on its cluster."""
    return (address or "").startswith(("http://", "https://"))


def check_reachable(address: str) -> None:
    """Raise ValueError if the address is HOST:PORT and nothing answers there, since Ray would retry for minutes.

    Addresses of other forms, such as `auto`, are not checked.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        except OSError as error:
            raise ValueError(f"no Ray at {address}: {error.strerror or error}") from None
