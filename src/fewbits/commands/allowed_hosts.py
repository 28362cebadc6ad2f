"""Choose the host names that MLflow's server accepts when `fewbits ui` runs it.

The server refuses requests with an unknown Host header, to protect from DNS rebinding, and requests with an unknown
Origin header, to protect from other web pages. By default, it accepts loopback names and private addresses as hosts,
but only loopback names as origins, so that its page works only on the same machine. Therefore, if the server also
listens on other interfaces, `fewbits ui` passes it the list of all allowed hosts and origins.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from dataclasses import dataclass

ANY = ("0.0.0.0", "::")  # values of --host that mean: listen on all interfaces
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True)
class AllowedHosts:
    """The host names that MLflow's server accepts when `fewbits ui` runs it."""

    loopback: bool  # the server listens on loopback only, so that no other machine can reach it
    names: tuple[str, ...]  # the accepted names; empty: MLflow's defaults

    @staticmethod
    def of(host: str, more: str) -> AllowedHosts:
        """Return the names to accept if the server listens at `host`. more: the text of `--allowed-hosts NAME,NAME`."""
        extra = [name.strip() for name in more.split(",") if name.strip()]
        for name in extra:
            if not re.fullmatch(r"[\w.*:\[\]-]*\w[\w.*:\[\]-]*", name):
                raise ValueError(
                    f"ui: --allowed-hosts {name!r}: expected host names, such as runs.example.org,*.lab.example"
                )
        loopback = _is_loopback(host)
        own = [] if loopback else _own_names(host)
        return AllowedHosts(loopback, tuple(dict.fromkeys([*LOOPBACK, *own, *extra])) if own or extra else ())

    def options(self, port: int) -> list[str]:
        """Return the options with which `mlflow server`, listening at `port`, accepts these names."""
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
    """Return the forms NAME, NAME:PORT and, as a pattern, NAME:*; if the name has a port already, only the name itself.

    MLflow 3.10 does not read patterns for origins, later versions do; therefore all forms are needed.
    """
    if re.search(r":[\d*]+$", name):
        return (name,)
    pattern = name.replace("[", "[[]")  # in a pattern, [ starts a set of characters; [[] matches [ itself
    return name, f"{name}:{port}", f"{pattern}:*"


def _is_loopback(host: str) -> bool:
    try:
        addresses = {entry[4][0] for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return False  # `_check_free` in ui.py reports the error
    return all(ipaddress.ip_address(str(address).partition("%")[0]).is_loopback for address in addresses)


def _own_names(host: str) -> list[str]:
    """Return the names and addresses under which other machines reach a server that listens at `host`."""
    names = [socket.gethostname(), socket.getfqdn()]
    if host not in ANY:
        return [address_of(host), *names]
    with contextlib.suppress(OSError):  # raised if the machine cannot resolve its own name
        entries = socket.getaddrinfo(socket.gethostname(), None)
        names += [address_of(str(entry[4][0]).partition("%")[0]) for entry in entries]
    # The suppressed error is raised if there is no network.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # for UDP this sends nothing; the kernel only chooses the outgoing address
        names.append(probe.getsockname()[0])
    return names
