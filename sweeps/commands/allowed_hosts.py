"""Choose the host names that MLflow's server accepts when `fewbits ui` runs it.

The server refuses a request with an unknown Host header, as a protection from DNS rebinding, and one with an unknown
Origin header, as a protection from other web pages. By default it accepts loopback names and private addresses as
hosts, but only loopback names as origins, so browsers can use its page only under loopback names. If the server listens
on other interfaces too, `fewbits ui` therefore passes the list of all allowed hosts and origins to it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from dataclasses import dataclass

ANY = ("0.0.0.0", "::")  # listening on all interfaces
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True)
class AllowedHosts:
    """The host names that the server accepts."""

    loopback: bool  # only this machine can reach the server
    names: tuple[str, ...]  # empty: the server's defaults

    @staticmethod
    def of(host: str, more: str) -> AllowedHosts:
        """Return the names to accept when the server listens at `host`. more: further names, separated by commas."""
        extra = [name.strip() for name in more.split(",") if name.strip()]
        for name in extra:
            if not re.fullmatch(r"[\w.*:\[\]-]*\w[\w.*:\[\]-]*", name):
                raise ValueError(
                    f"ui: --allowed-hosts {name!r}: host names are expected, such as runs.example.org,*.lab.example"
                )
        loopback = _is_loopback(host)
        own = [] if loopback else _own_names(host)
        return AllowedHosts(loopback, tuple(dict.fromkeys([*LOOPBACK, *own, *extra])) if own or extra else ())

    def options(self, port: int) -> list[str]:
        """Return the options of `mlflow server`, which listens at `port`, that allow these names."""
        if not self.names:
            return []
        hosts = [form for name in self.names for form in _with_port(name, port)]
        origins = [f"{scheme}://{form}" for scheme in ("http", "https") for form in hosts]
        return ["--allowed-hosts", ",".join(hosts), "--cors-allowed-origins", ",".join(origins)]


def address_of(host: str) -> str:
    """Return the host part of a URL with which this machine reaches a server that listens at `host`."""
    if host in ANY:
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def _with_port(name: str, port: int) -> tuple[str, ...]:
    """Return the name without a port, with this port and, as a pattern, with any port; as it is if it has a port.

    MLflow 3.10 compares origins with names only, later versions with patterns too.
    """
    if re.search(r":[\d*]+$", name):
        return (name,)
    pattern = name.replace("[", "[[]")  # in a pattern with a *, the server reads [ as the start of a set
    return name, f"{name}:{port}", f"{pattern}:*"


def _is_loopback(host: str) -> bool:
    try:
        addresses = {entry[4][0] for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return False  # the check of the port reports the error
    return all(ipaddress.ip_address(str(address).partition("%")[0]).is_loopback for address in addresses)


def _own_names(host: str) -> list[str]:
    """Return the names and addresses under which other machines reach a server that listens at `host`."""
    names = [socket.gethostname(), socket.getfqdn()]
    if host not in ANY:
        return [address_of(host), *names]
    with contextlib.suppress(OSError):  # the machine cannot resolve its own name
        entries = socket.getaddrinfo(socket.gethostname(), None)
        names += [address_of(str(entry[4][0]).partition("%")[0]) for entry in entries]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):  # there is no network
        probe.connect(("192.0.2.1", 9))  # sends nothing: the kernel only chooses the outgoing address
        names.append(probe.getsockname()[0])
    return names
