"""Send a store's trials to MLflow, and serve MLflow's web page from this machine until Ctrl-C (`fewbits ui`)."""

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
from typing import IO

from fewbits.common.arguments import CommandParser, existing, warn_in_lines
from fewbits.common.process import handled
from fewbits.common.redaction import redacted
from fewbits.common.store_folder import store_folder
from fewbits.common.terminal import notice
from fewbits.common.wording import plural

EXAMPLES = """\
examples:
  fewbits ui
  fewbits ui --port 5001 --runs /shared/runs
  MLFLOW_TRACKING_URI=http://server:5000 fewbits ui --sync-only     to a server that somebody else runs

The page shows the MLflow database that MLFLOW_TRACKING_URI names or, without this variable, the store's own database.
To open it from another machine: ssh -L 5000:127.0.0.1:5000 HOST. There is no log-in: with --host 0.0.0.0, everybody who
can reach this machine can read, change and delete the runs; MLflow's variables MLFLOW_SERVER_ALLOWED_HOSTS and
MLFLOW_SERVER_CORS_ALLOWED_ORIGINS set under which names.
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
    parser.add_argument("--sync-only", action="store_true", help="send the trials, and serve no page")
    options = parser.parse_args(argv)
    existing(options.runs)
    from fewbits.sweeps.tracking.connection import ARTIFACTS, tracking_uri
    from fewbits.sweeps.tracking.mirror import send_store

    warn_in_lines()
    runs = store_folder(options.runs)
    uri = tracking_uri(runs)
    if not options.sync_only:
        if uri.startswith(("http://", "https://")):
            raise ValueError(
                f"ui: MLFLOW_TRACKING_URI {redacted(uri)} is a server: open that address in the browser; --sync-only "
                "sends the store's trials to it"
            )
        _check_free(options.host, options.port)
    try:
        sent = send_store(runs, uri)  # also creates the database if needed: the server does not do it safely
    except Exception as error:  # any error of MLflow, for example if another version of MLflow made the database
        advice = "" if os.environ.get("MLFLOW_TRACKING_URI") else "; move it away, and `fewbits ui` makes a new one"
        reason = redacted(" ".join(str(error).split()))[:300]
        raise ValueError(f"ui: MLflow cannot open {redacted(uri)}: {reason}{advice}") from None
    print(f"{plural(sent, 'trial')} sent to {redacted(uri)}", file=sys.stderr, flush=True)
    if not options.sync_only:
        arguments = ["--artifacts-destination", str(runs.resolve() / ARTIFACTS), "--host", options.host]
        _serve(options.host, options.port, arguments, uri, runs.resolve() / LOG)
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


def _serve(host: str, port: int, arguments: Sequence[str], uri: str, log: Path) -> None:
    """Run MLflow's server until Ctrl-C. The URI may contain a password, so it is no argument, which all could read."""
    arguments = [*arguments, "--port", str(port), "--workers", "1", "--uvicorn-opts", "--log-level warning"]
    environment = {**os.environ, **LIGHT, "MLFLOW_BACKEND_STORE_URI": uri}
    base = f"http://{'127.0.0.1' if host in ('0.0.0.0', '::') else f'[{host}]' if ':' in host else host}:{port}"
    if host not in ("127.0.0.1", "localhost", "::1"):
        notice(
            f"ui: --host {host}: there is no log-in: who can reach port {port} can read, change and delete every run"
        )
        names = [f"{name}:{port}" for name in dict.fromkeys((host, socket.gethostname(), "localhost", "127.0.0.1"))]
        environment.setdefault("MLFLOW_SERVER_ALLOWED_HOSTS", ",".join(names))
        environment.setdefault("MLFLOW_SERVER_CORS_ALLOWED_ORIGINS", ",".join(f"http://{name}" for name in names))
    with log.open("w") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # in its own process group, so that `_end` also ends the server's children
        )
        copying = threading.Thread(target=_copy_redacted, args=(server.stdout, output), daemon=True)
        copying.start()
        try:
            with handled(signal.default_int_handler, signal.SIGINT, signal.SIGTERM):
                if _answers(server, base, log):
                    print(f"{base}/#/experiments   (Ctrl-C ends it)", flush=True)
                server.wait()
                raise ValueError(f"ui: MLflow's server ended with status {server.returncode}; read its log, {log}")
        except KeyboardInterrupt:
            print(file=sys.stderr)
        finally:
            _end(server)
            copying.join(10)


def _copy_redacted(source: IO[bytes], log: IO[str]) -> None:
    """Copy the server's output to the log, line by line, without credentials."""
    for line in source:
        with contextlib.suppress(OSError):  # a full disk must not end this thread, which would block the server
            log.write(redacted(line.decode(errors="replace")))
            log.flush()


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
