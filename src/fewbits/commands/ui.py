"""Send a store's trials to MLflow, and serve MLflow's web page from this machine until Ctrl-C (`fewbits ui`)."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import webbrowser
from collections.abc import Mapping, Sequence
from pathlib import Path

from fewbits.common.arguments import CommandParser, positive, warn_in_lines
from fewbits.common.process import MissingExtra, handled
from fewbits.common.wording import plural, redacted

EXAMPLES = """\
examples:
  fewbits ui
  fewbits ui --port 5001 --runs /shared/runs
  MLFLOW_TRACKING_URI=http://server:5000 fewbits ui --sync-only     to a server that somebody else runs

The page shows the MLflow database that MLFLOW_TRACKING_URI names or, without this variable, the store's own database.
Once a store has its own database, `fewbits train` sends to it while it trains (see runtime.tracking there).
Only this machine can open the page, which has no log-in; from another one: ssh -L 5000:127.0.0.1:5000 HOST.
"""
HOST = "127.0.0.1"  # only this machine reaches the server, which has no log-in
OFF = ("MLFLOW_DISABLE_TELEMETRY", "MLFLOW_DISABLE_AGENT_HINT")
# With these settings, the server has two processes and about 380 MB, instead of 15 processes and 1.8 GB.
LIGHT = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", **dict.fromkeys(OFF, "true")}
LOG = ".mlflow-ui.log"  # the file in the store with the server's output
START = 120.0  # seconds that the server may take until it answers
TRAINING = "?workflowType=machine_learning"  # without it, MLflow opens an experiment on its page of LLM traces


def main(argv: Sequence[str]) -> int:
    parser = CommandParser("fewbits ui", __doc__, EXAMPLES)
    parser.add_argument("--port", type=positive, default=5000, help="the port to listen at (default: %(default)s)")
    parser.add_store()
    parser.add_argument("--sync-only", action="store_true", help="send the trials, and serve no page")
    options = parser.parse_args(argv)
    runs: Path = options.runs
    if not runs.is_dir():
        raise ValueError(f"ui: there is no store {runs}: name one with --runs DIR")

    from fewbits.sweeps.tracking.connection import ARTIFACTS, tracking_uri
    from fewbits.sweeps.tracking.mirror import experiments, send_store

    warn_in_lines()
    uri = tracking_uri(runs)
    if not options.sync_only:
        if uri.startswith(("http://", "https://")):
            advice = "open that address in the browser; --sync-only sends the store's trials to it"
            raise ValueError(f"ui: MLFLOW_TRACKING_URI {redacted(uri)} is a server: {advice}")
        _check_free(options.port)
    try:
        sent = send_store(runs, uri)  # also creates the database if needed: the server does not do it safely
    except MissingExtra:
        raise
    except Exception as error:  # any error of MLflow, for example if another version of MLflow made the database
        advice = "" if os.environ.get("MLFLOW_TRACKING_URI") else "; move it away, and `fewbits ui` makes a new one"
        reason = redacted(" ".join(str(error).split()))[:300]
        raise ValueError(f"ui: MLflow cannot open {redacted(uri)}: {reason}{advice}") from None
    print(f"{plural(sent, 'trial')} sent to {redacted(uri)}", file=sys.stderr, flush=True)
    if not options.sync_only:
        arguments = ["--artifacts-destination", str(runs.resolve() / ARTIFACTS), "--workers", "1"]
        arguments += ["--uvicorn-opts", "--log-level warning"]
        base = f"http://{HOST}:{options.port}"
        pages = {name: f"{base}/#/experiments/{number}{TRAINING}" for name, number in experiments(runs, uri).items()}
        _serve(base, arguments, uri, runs.resolve() / LOG, pages or {"no trial yet": f"{base}/#/experiments{TRAINING}"})
    return 0


def _check_free(port: int) -> None:
    try:
        socket.create_server((HOST, port)).close()
    except (OSError, OverflowError) as error:  # the port is in use, or no number from 0 to 65535
        raise ValueError(f"ui: --port {port}: {error}; choose another --port") from None


def _serve(base: str, arguments: Sequence[str], uri: str, log: Path, pages: Mapping[str, str]) -> None:
    """Run MLflow's server at the URL `base` until Ctrl-C; print the pages, and open the first one in a browser.

    The URI of the database may contain a password, so it is no argument of the server, which all users could read, and
    only the user can read the log.
    """
    environment = {**os.environ, **LIGHT, "MLFLOW_BACKEND_STORE_URI": uri}
    command = [sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", base.rpartition(":")[2], *arguments]
    # The server has its own process group, so that its children can be ended, too.
    log.unlink(missing_ok=True)
    log.touch(0o600)
    with (
        log.open("w") as output,
        subprocess.Popen(
            command,
            env=environment,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        ) as server,
    ):
        try:
            with handled(signal.default_int_handler, signal.SIGINT, signal.SIGTERM):
                _wait(server, base, log)
                print("".join(f"{page}   {name}\n" for name, page in pages.items()), end="", flush=True)
                print("Ctrl-C ends the server", file=sys.stderr, flush=True)
                if _has_display():
                    webbrowser.open(next(iter(pages.values())))
                server.wait()
                raise ValueError(f"ui: MLflow's server ended with status {server.returncode}; read its log, {log}")
        except KeyboardInterrupt:
            print(file=sys.stderr)
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(server.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    server.wait(10)


def _has_display() -> bool:
    """Tell whether a user at this machine's display runs the command; without one, a text browser could be opened."""
    display = sys.platform == "darwin" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
    return display and sys.stdout.isatty()


def _wait(server: subprocess.Popen[bytes], base: str, log: Path) -> None:
    """Wait until the server answers at the URL `base`; raise ValueError if it has not after START seconds."""
    until = time.monotonic() + START
    while time.monotonic() < until:
        if server.poll() is not None:
            raise ValueError(f"ui: MLflow's server ended with status {server.returncode}; read its log, {log}")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{base}/health", timeout=5):
            return
        time.sleep(0.2)
    raise ValueError(f"ui: MLflow's server has not answered for {START:.0f} s; read its log, {log}")
