"""Test which Host and Origin headers MLflow's server accepts with the options of `fewbits ui`."""

import socket

import pytest

from fewbits.commands.allowed_hosts import AllowedHosts, address_of


def accepted(hosts: AllowedHosts, host: str) -> bool:
    """Return whether MLflow accepts this host in the Host header; check that the Origin header has the same effect."""
    from mlflow.server.security_utils import (
        get_default_allowed_hosts,
        is_allowed_host_header,
        should_block_cors_request,
    )

    options = hosts.options(5000)
    named = options[1].split(",") if options else get_default_allowed_hosts()
    origins = options[3].split(",") if options else []
    allowed = is_allowed_host_header(named, host)
    blocked = should_block_cors_request(f"http://{host}", "POST", origins)
    assert allowed != blocked, "a page that is shown must work, and one that is not must not"
    return allowed


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.0.0.2"])
def test_on_loopback_mlflows_defaults_hold(host: str) -> None:
    assert AllowedHosts.of(host, "") == AllowedHosts(loopback=True, names=())


def test_on_all_interfaces_this_machines_names_are_accepted_and_no_others() -> None:
    hosts = AllowedHosts.of("0.0.0.0", "")
    assert not hosts.loopback
    own = {socket.gethostname(), socket.getfqdn(), "localhost", "127.0.0.1", "[::1]"}
    for name in own:
        for form in (name, f"{name}:5000"):
            assert accepted(hosts, form), form
    for name in ("evil.example", "evil.example:5000", f"{socket.gethostname()}.evil.example", "10.evil.example"):
        assert not accepted(hosts, name), name


def test_further_names_are_accepted_with_any_port_and_by_pattern() -> None:
    for listens in ("0.0.0.0", "127.0.0.1"):
        hosts = AllowedHosts.of(listens, "runs.example.org, *.lab.example,proxy:8443")
        for name in ("runs.example.org", "runs.example.org:80", "a.lab.example:5000", "proxy:8443", "localhost:5000"):
            assert accepted(hosts, name), name
        for name in ("example.org", "lab.example", "proxy:1", "proxy"):
            assert not accepted(hosts, name), name


@pytest.mark.parametrize("name", ["*", "**", "http://host", "a/b", "user@host"])
def test_what_is_no_host_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="expected host names"):
        AllowedHosts.of("0.0.0.0", name)


@pytest.mark.parametrize(("host", "address"), [("0.0.0.0", "127.0.0.1"), ("::1", "[::1]"), ("a.b", "a.b")])
def test_an_address_is_written_as_urls_have_it(host: str, address: str) -> None:
    assert address_of(host) == address
