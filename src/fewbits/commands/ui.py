"""Serve MLflow's web page with a store's trials from this machine until Ctrl-C (`fewbits ui`)."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

from fewbits.commands.allowed_hosts import ANY, AllowedHosts, address_of
from fewbits.common.arguments import CommandParser, existing, warn_in_lines
from fewbits.common.process import handled
from fewbits.common.redaction import redacted
from fewbits.common.store_folder import store_folder
from fewbits.common.terminal import notice

if TYPE_CHECKING:
    from fewbits.sweeps.tracking.comparison import View

EXAMPLES = """\
examples:
  fewbits ui
  fewbits ui --port 5001 --runs /shared/runs

The page shows the MLflow database that MLFLOW_TRACKING_URI names or, without this variable, the store's own database.
To open it from another machine: ssh -L 5000:127.0.0.1:5000 HOST. There is no log-in: with --host 0.0.0.0, everybody who
can reach this machine can read, change and delete the runs.
"""
LIGHT = {  # with these settings, the server has two processes and about 380 MB, instead of 15 processes and 1.8 GB
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_DISABLE_AGENT_HINT": "true",
}
LOG = ".mlflow-ui.log"  # the file in the store with the server's output
START = 120.0  # seconds that the server may take until it answers


def main(argv: Sequence[str]) -> int:
    parser = CommandParser("fewbits ui", __doc__, EXAMPLES)
    parser.add_argument("--port", type=int, default=5000, help="the port to listen at (default: %(default)s)")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen at (default: this machine only)")
    parser.add_argument("--runs", default="runs", metavar="DIR", help="the store (default: runs)")
    parser.add_argument(
        "--allowed-hosts",
        default="",
        metavar="NAME,…",
        help="further host names under which browsers reach the page, for example a proxy's; * matches any characters",
    )
    options = parser.parse_args(argv)
    existing(options.runs)
    hosts = AllowedHosts.of(options.host, options.allowed_hosts)
    from fewbits.experiments.tracking.connection import tracking_uri

    warn_in_lines()
    runs = store_folder(options.runs)
    uri = tracking_uri(runs)
    if uri.startswith(("http://", "https://")):
        raise ValueError(f"ui: MLFLOW_TRACKING_URI {redacted(uri)} is a server: open that address in the browser")
    _check_free(options.host, options.port)
    if not hosts.loopback:
        notice(
            f"ui: --host {options.host}: there is no log-in: everybody who can reach port {options.port} of this "
            "machine can read, change and delete every run; without --host only this machine can"
        )
    _serve(options.host, options.port, runs, uri, hosts)
    return 0


def _check_free(host: str, port: int) -> None:
    if not 0 < port < 1 << 16:
        raise ValueError(f"ui: --port {port}: expected a port from 1 to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise ValueError(f"ui: --host {host} --port {port}: {error}; choose another --port or --host") from None


def _serve(host: str, port: int, runs: Path, uri: str, hosts: AllowedHosts) -> None:
    from fewbits.experiments.tracking.connection import ARTIFACTS, connect
    from fewbits.sweeps.tracking.comparison import views_in

    print(f"starting MLflow for {redacted(uri)} …", file=sys.stderr, flush=True)
    try:
        views = views_in(connect(runs, uri))  # also creates the database if needed: the server does not do it safely
    except Exception as error:  # any error of MLflow, for example if another version of MLflow made the database
        advice = "" if os.environ.get("MLFLOW_TRACKING_URI") else "; move it away, and `fewbits sync` makes a new one"
        reason = redacted(" ".join(str(error).split()))[:300]
        raise ValueError(f"ui: MLflow cannot open {redacted(uri)}: {reason}{advice}") from None
    arguments = ["--artifacts-destination", str(runs.resolve() / ARTIFACTS), *hosts.options(port)]
    arguments += ["--host", host, "--port", str(port), "--workers", "1", "--uvicorn-opts", "--log-level warning"]
    log = runs.resolve() / LOG
    with log.open("w") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", *arguments],
            # The URI may contain a password; it is not passed as an argument, since all users can read arguments.
            env={**os.environ, **LIGHT, "MLFLOW_BACKEND_STORE_URI": uri},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # in its own process group, so that `_end` also ends the server's children
        )
        copying = threading.Thread(target=_copy_redacted, args=(server.stdout, output), daemon=True)
        copying.start()
        try:
            with handled(signal.default_int_handler, signal.SIGINT, signal.SIGTERM):
                _show_until_ended(server, host, port, views, log)
        finally:
            copying.join(10)


def _copy_redacted(source: IO[bytes], log: IO[str]) -> None:
    """Copy the server's output to the log, line by line, without credentials."""
    for line in source:
        with contextlib.suppress(OSError):  # a full disk must not end this thread, which would block the server
            log.write(redacted(line.decode(errors="replace")))
            log.flush()


def _show_until_ended(server: subprocess.Popen[bytes], host: str, port: int, views: list[View], log: Path) -> None:
    try:
        base = f"http://{address_of(host)}:{port}"
        if _answers(server, base, log):
            print(f"{base}   (Ctrl-C ends it)")
            if host in ANY:
                print(f"http://{socket.gethostname()}:{port}   (from other machines)")
            for view in views:
                print(f"  {view.name}: {view.link(base)}")
            sys.stdout.flush()
        server.wait()
        raise ValueError(f"ui: MLflow's server ended with status {server.returncode}; read its log, {log}")
    except KeyboardInterrupt:
        print(file=sys.stderr)
    finally:
        _end(server)


def _answers(server: subprocess.Popen[bytes], base: str, log: Path) -> bool:
    """Wait until the server answers at the URL `base`, and return True; return False if the server ends before.

    Raise ValueError if it has not answered after START seconds. log: the file with the server's output.
    """
    until = time.monotonic() + START
    while server.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{base}/health", timeout=5):
            return True
        if time.monotonic() > until:
            raise ValueError(f"ui: MLflow's server has not answered for {START:.0f} s; read its log, {log}")
        time.sleep(0.2)
    return False


def _end(server: subprocess.Popen[bytes]) -> None:
    """End the server and all processes that it has started: by SIGTERM and, after ten seconds, SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(10)
