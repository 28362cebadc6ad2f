"""Run a sweep as a Ray job: `fewbits sweep … --address http://head:8265` runs the same command on the cluster.

This machine's sources are shipped (shipment.py), the job's log is shown line by line, and its exit status is returned.
The job does not depend on this process: it continues after a closed terminal or a lost connection. Ctrl-C stops the job
like a local sweep: its trials end at checkpoints, and the same command resumes them. A second Ctrl-C returns without
waiting for the trials.

Connection errors are handled: a new cluster may answer the first submit with HTTP 500, and any request may fail. This
process chooses the job's name, so a repeated submit cannot start the job twice. Every second, or less often if that
takes long, one request reads the whole log again, so no connection has to last.
"""

import logging
import os
import secrets
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from fewbits.common.environment import environment
from fewbits.common.redaction import redacted
from fewbits.common.terminal import notice
from fewbits.experiments.config_files import GROUPS, folders, is_path, is_search_path
from fewbits.experiments.tracking.owner import user
from fewbits.sweeps.cluster.environment import TRACKING, means_the_same_elsewhere, variables
from fewbits.sweeps.cluster.shipment import pack
from fewbits.sweeps.planning.overrides import runs_named

if TYPE_CHECKING:
    from ray.job_submission import JobDetails, JobSubmissionClient

PATIENCE = 120.0  # seconds that a cluster may take to accept a job, or be unreachable while one runs
POLL = 1.0  # seconds
SHARE = 10  # a log that took one second to read is read again after this many seconds
STOP_WAIT = 600  # seconds that a stopped job has to write its checkpoints before Ray kills it
INTERRUPTED = 130
END = 10_000  # characters of a log that are kept
FEWBITS = ("python", "-m", "fewbits.cli")  # the command line, on the cluster


def submit(arguments: Sequence[str], address: str, named: Sequence[str] = ()) -> int:
    """Run `fewbits sweep ARGUMENTS --address auto` on the cluster with this dashboard, and return its exit status.

    named: names of environment variables that the job gets in addition to the usual ones (environment.py).
    """
    lasting_store(arguments)
    files, passed = _shipped_files(arguments)
    for file in files:
        if not file.is_file():
            raise ValueError(f"no sweep file {file}")
    own = folders(arguments).paths  # they become the folder `conf` of the job's working directory
    return run_job([*FEWBITS, "sweep", "--address", "auto", *passed], address, [*files, *own], named)


def _shipped_files(arguments: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Return the user's files that the arguments name, and the arguments with their names in the job's directory."""
    files, passed = list[Path](), list[str]()
    for argument in arguments:
        key, equals, value = argument.partition("=")
        path = value if equals and key in GROUPS and is_path(value) else argument if is_path(argument) else ""
        if path and (path == value or not equals):
            files.append(Path(path).expanduser())
            passed.append(f"{key}={files[-1].name}" if equals else files[-1].name)
        elif not is_search_path(argument):
            passed.append(argument)
    return files, passed


def run_job(command: Sequence[str], address: str, files: Sequence[Path] = (), named: Sequence[str] = ()) -> int:
    """Run a command as a job on the cluster, show its log, and return its exit status.

    The job's working directory contains the sources of the running fewbits, and `files`: sweep files, other config
    files and the user's config folders.
    """
    return watch_job(command, address, files, named)[0]


def watch_job(
    command: Sequence[str], address: str, files: Sequence[Path] = (), named: Sequence[str] = ()
) -> tuple[int, str]:
    """Run a command as a job like `run_job`, and return its exit status and the end of its log."""
    environment = job_variables(os.environ, named)
    client = _connect(address)
    job = f"fewbits-{secrets.token_hex(4)}"
    log = _Log(client, job)
    try:
        _start(client, job, command, environment, files)
        notice(
            f"job {job} on {address}: Ctrl-C stops it at checkpoints; it continues if this terminal is closed "
            f"(its log: ray job logs --follow {job} --address {address})"
        )
        return _exit_status(log.follow()), log.end
    except KeyboardInterrupt:
        _stop(log)
        return INTERRUPTED, log.end


def lasting_store(arguments: Sequence[str]) -> PurePosixPath:
    """Return the store that the arguments name, as a path on the cluster.

    Raise ValueError if they name none or a relative path: it would be in the job's working directory, which Ray removes
    when the job ends.
    """
    path = runs_named(arguments)
    if path is None or not PurePosixPath(path).is_absolute():
        problem = "no store is named" if path is None else f"the store {path!r} is relative"
        raise ValueError(
            f"{problem}, but Ray removes a job's working directory when the job ends: name an absolute path that every "
            "node of the cluster shares, as in runtime.runs=/mnt/fewbits/runs"
        )
    return PurePosixPath(path)


def job_variables(environment: Mapping[str, str], named: Sequence[str] = ()) -> dict[str, str]:
    """Return a job's variables: those from this machine, the user's name, and those that make Ray stop it gracefully.

    named: names of variables that are sent in addition to the usual ones (environment.py).
    """
    tracking = environment.get(TRACKING)
    if tracking and not means_the_same_elsewhere(tracking):
        raise ValueError(
            f"MLFLOW_TRACKING_URI={redacted(tracking)} is relative, so it means something else on a cluster: "
            "name a server (http://…) or an absolute path, or unset it"
        )
    # By default Ray sends SIGTERM and, after three seconds, SIGKILL. A sweep stops on SIGINT, after the current steps.
    graceful = {"RAY_JOB_STOP_SIGNAL": "SIGINT", "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT)}
    # On a cluster all jobs run as one system user; the MLflow runs belong to the user who submits.
    return {"FEWBITS_USER": user(), **variables(environment, named), **graceful}


def token(environment: Mapping[str, str]) -> str | None:
    """Return the cluster's token; None if there is none.

    It is read from the same places as Ray reads it: RAY_AUTH_TOKEN, the file that RAY_AUTH_TOKEN_PATH names, and
    ~/.ray/auth_token. Ray's own client sends a token only if RAY_AUTH_MODE=token, although `ray start` requires one as
    soon as one of these exists.
    """
    if environment.get("RAY_AUTH_MODE", "").lower() == "disabled":
        return None
    if value := environment.get("RAY_AUTH_TOKEN", "").strip():
        return value
    named = environment.get("RAY_AUTH_TOKEN_PATH")
    file = Path(named) if named else Path.home() / ".ray" / "auth_token"
    try:
        return file.read_text("utf-8").strip() or None
    except OSError as error:
        if named:
            raise ValueError(f"RAY_AUTH_TOKEN_PATH={named}: {error.strerror}") from error
        return None


def _connect(address: str) -> "JobSubmissionClient":
    if urlsplit(address).scheme not in ("http", "https"):
        raise ValueError(f"--address {address!r}: the URL of a Ray dashboard is expected, as in http://head:8265")
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    for name in ("ray.dashboard.modules.job.sdk", "ray.dashboard.modules.dashboard_sdk"):
        logging.getLogger(name).setLevel(logging.WARNING)  # otherwise each upload and each closed connection is logged
    secret = token(os.environ)
    try:
        with environment({"RAY_API_SERVER_ADDRESS": address}):  # otherwise RAY_ADDRESS would override --address
            return JobSubmissionClient(address, headers={"Authorization": f"Bearer {secret}"} if secret else None)
    except AuthenticationError as error:
        problem = "rejects the token" if secret else "requires a token"
        raise ValueError(
            f"the cluster at {address} {problem}: set RAY_AUTH_TOKEN, or a file that RAY_AUTH_TOKEN_PATH names, to the "
            "output of `ray get-auth-token` on the head"
        ) from error
    except (OSError, RuntimeError) as error:
        raise ValueError(
            f"no Ray dashboard answers at {address}: check that the head runs and that this is its dashboard"
        ) from error


def _start(
    client: "JobSubmissionClient",
    job: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    files: Sequence[Path],
) -> None:
    entrypoint = f"exec {shlex.join(command)}"  # exec: the command itself gets Ray's signal and gives the status
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder, "fewbits.zip")
        package.write_bytes(pack(beside=files))
        runtime: dict[str, Any] = {"working_dir": str(package), "env_vars": dict(environment)}
        give_up = time.monotonic() + PATIENCE
        while True:
            try:
                client.submit_job(entrypoint=entrypoint, submission_id=job, runtime_env=runtime)
                return
            except (RuntimeError, OSError) as error:  # HTTP 500 while the head's agents start, a dropped connection
                if _is_known(client, job):
                    return
                if time.monotonic() > give_up:
                    raise ValueError(f"the cluster does not accept a job: {_last_line(error)}") from error
            time.sleep(POLL)


def _is_known(client: "JobSubmissionClient", job: str) -> bool:
    try:
        client.get_job_info(job)
    except (RuntimeError, OSError):
        return False
    return True


class _Log:
    """The log of a job, shown as it grows, each character once."""

    def __init__(self, client: "JobSubmissionClient", job: str) -> None:
        self.client, self.job = client, job
        self.shown = 0  # characters
        self.end = ""  # the last characters shown

    def follow(self) -> "JobDetails | None":
        """Show the log until the job has ended; return how it ended, or None if that is unknown."""
        answered = time.monotonic()
        while True:
            began = time.monotonic()
            try:
                details = self.client.get_job_info(self.job)  # before the log, which is then complete if it has ended
                self._show(self.client.get_job_logs(self.job))
                if details.status.is_terminal():
                    return details
                answered = time.monotonic()
            except (RuntimeError, OSError) as error:
                if "status code 404" in str(error):
                    notice(
                        f"the cluster does not know job {self.job} any more (was its head restarted?): run the same "
                        "command again, which resumes from the checkpoints"
                    )
                    return None
                if time.monotonic() - answered > PATIENCE:
                    notice(
                        f"the cluster has been unreachable for {PATIENCE:.0f} s; the job may still run there, and the "
                        f"same command continues its work: {_last_line(error)}"
                    )
                    return None
            time.sleep(max(POLL, SHARE * (time.monotonic() - began)))

    def _show(self, log: str) -> None:
        new = log[self.shown :]
        sys.stdout.write(new)
        sys.stdout.flush()
        self.shown += len(new)
        self.end = (self.end + new)[-END:]


def _stop(log: _Log) -> None:
    """Ask the job to stop, and show its log until it has stopped."""
    try:
        log.client.stop_job(log.job)
        notice("asked the job to stop at checkpoints; the same command resumes it. Ctrl-C again: do not wait")
        log.follow()
    except (RuntimeError, OSError) as error:
        notice(f"the request to stop job {log.job} failed: {_last_line(error)}")
    except KeyboardInterrupt:
        notice(f"not waiting for job {log.job}, which is stopping")


def _exit_status(ended: "JobDetails | None") -> int:
    """Return the exit status of a job: that of its command, 128 + N after signal N, 130 if it was stopped.

    ended: how the job ended; None, if unknown, gives 1.
    """
    if ended is None:
        return 1
    if ended.status.value == "STOPPED":
        notice("the job was stopped; the same command resumes it from its checkpoints")
        return INTERRUPTED
    if ended.driver_exit_code is None:
        if ended.status.value != "SUCCEEDED":
            notice(f"the job failed outside its command: {ended.message}")
        return int(ended.status.value != "SUCCEEDED")
    if ended.driver_exit_code < 0:
        notice(f"the job's command was ended by signal {-ended.driver_exit_code}; the same command resumes it")
        return 128 - ended.driver_exit_code
    return ended.driver_exit_code


def _last_line(error: Exception) -> str:
    return str(error).strip().rpartition("\n")[2]
