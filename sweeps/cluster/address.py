"""Check the address of a Ray cluster (`--address`), so that a wrong one is reported at once."""

from __future__ import annotations

import socket


def is_dashboard(address: str | None) -> bool:
    """Tell whether the address is the URL of a Ray dashboard, to which a sweep is submitted as a job."""
    return (address or "").startswith(("http://", "https://"))


def check_reachable(address: str) -> None:
    """Raise ValueError if the address is HOST:PORT and nothing answers there; Ray itself would retry for minutes.

    Addresses of other forms, such as `auto`, are not checked.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        except OSError as error:
            raise ValueError(
                f"no Ray at {address}: {error.strerror or error}: check that Ray runs there, and the address in "
                "--address or RAY_ADDRESS"
            ) from None
