"""A sweep as a Ray job: `fewbits sweep … --address http://head:8265` runs the same command on the cluster.

The package is shipped as it is here (shipment.py), the log comes back line by line, and the job's exit status becomes
ours. The job does not need us: a closed terminal or a lost connection leaves it running. Ctrl-C asks it to stop as
Ctrl-C asks a sweep at home, so it ends at checkpoints and the same command goes on from there; a second Ctrl-C leaves
without waiting for that.

What breaks on the way is borne: the first submit to a young cluster may be answered with HTTP 500, and connections
that carry the log drop. A job is given its name here, so that a repeated submit cannot start it twice.
"""

import asyncio
import logging
import os
import re
import secrets
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from fewbits.common.redaction import redacted
from fewbits.experiments.tracking.owner import user
from fewbits.sweeps.cluster.environment import TRACKING, means_the_same_elsewhere, variables
from fewbits.sweeps.cluster.shipment import pack

if TYPE_CHECKING:
    from ray.job_submission import JobDetails, JobSubmissionClient

PATIENCE = 120.0  # seconds that a cluster may take to accept a job, or be out of reach while one runs
POLL = 1.0  # seconds
SILENCE = 60.0  # seconds without a line after which the connection that carries the log is made anew
STOP_WAIT = 600  # seconds in which a stopped job may reach its checkpoints before Ray kills it
INTERRUPTED = 130
END = 10_000  # characters of a log that are kept
FEWBITS = ("python", "-m", "fewbits.cli")  # the command line, on the cluster


def submit(words: Sequence[str], address: str, named: Sequence[str] = ()) -> int:
    """Run `fewbits sweep WORDS --address auto` on the cluster whose dashboard is at `address`; its exit status.

    named: environment variables that the job gets beside the usual ones (environment.py).
    """
    lasting_store(words)
    files = [Path(word).expanduser() for word in words if word.endswith((".yaml", ".yml")) and "=" not in word]
    for file in files:
        if not file.is_file():
            raise ValueError(f"no sweep file {file}")
    told = [Path(word).name if Path(word).expanduser() in files else word for word in words]
    return run_job([*FEWBITS, "sweep", "--address", "auto", *told], address, files, named)


def run_job(command: Sequence[str], address: str, files: Sequence[Path] = (), named: Sequence[str] = ()) -> int:
    """Run a command on the cluster with this fewbits, and files, as its working directory, show its log, return its
    exit status."""
    return watch_job(command, address, files, named)[0]


def watch_job(
    command: Sequence[str], address: str, files: Sequence[Path] = (), named: Sequence[str] = ()
) -> tuple[int, str]:
    """As run_job; also return the end of the log."""
    environment = job_variables(os.environ, named)
    client = _connect(address)
    job = f"fewbits-{secrets.token_hex(4)}"
    log = _Log(client, job)
    try:
        _start(client, job, command, environment, files)
        _say(
            f"job {job} on {address}: Ctrl-C stops it where it can be resumed; without this terminal it goes on "
            f"(ray job logs --follow {job} --address {address})"
        )
        return _status(log.follow()), log.end
    except KeyboardInterrupt:
        _stop(log)
        return INTERRUPTED, log.end


def lasting_store(words: Sequence[str]) -> PurePosixPath:
    """Return the store that the words name, a path of the cluster; ValueError where it would end with the job, whose
    working directory is removed."""
    said = [found[1] for word in words if (found := re.fullmatch(r"\+{0,2}runtime\.runs=(.*)", word))]
    said += [word.removeprefix("--runs=") for word in words if word.startswith("--runs=")]
    said += [value for option, value in pairwise(words) if option == "--runs"]
    path = said[-1].strip("\"'") if said else None
    if path is None or not PurePosixPath(path).is_absolute():
        where = "no store is named" if path is None else f"the store {path!r} is relative"
        raise ValueError(
            f"{where}, but a job's own folder is gone when it ends: name an absolute path that every node of the "
            "cluster shares, as in runtime.runs=/mnt/fewbits/runs"
        )
    return PurePosixPath(path)


def job_variables(environment: Mapping[str, str], named: Sequence[str] = ()) -> dict[str, str]:
    """Return the variables that a job gets from here, and those that make Ray stop it gently."""
    tracking = environment.get(TRACKING)
    if tracking and not means_the_same_elsewhere(tracking):
        raise ValueError(
            f"MLFLOW_TRACKING_URI={redacted(tracking)} is relative, and means another place on a cluster: "
            "name a server (http://…) or an absolute path, or unset it"
        )
    # Ray sends SIGTERM and, after three seconds, SIGKILL. A sweep stops on SIGINT, after the steps it is in.
    gentle = {"RAY_JOB_STOP_SIGNAL": "SIGINT", "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT)}
    # On a cluster all jobs run as one user of the system; the MLflow runs belong to who submits.
    return {"FEWBITS_USER": user(), **variables(environment, named), **gentle}


def token(environment: Mapping[str, str]) -> str | None:
    """The cluster's token, from where Ray itself looks: a variable, a file that a variable names, ~/.ray/auth_token.

    Ray's own client sends one only if RAY_AUTH_MODE=token, though `ray start` asks for one as soon as there is one.
    """
    if environment.get("RAY_AUTH_MODE", "").lower() == "disabled":
        return None
    if said := environment.get("RAY_AUTH_TOKEN", "").strip():
        return said
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
        raise ValueError(f"jobs are submitted to a Ray dashboard, as in http://head:8265, not to {address!r}")
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    for name in ("ray.dashboard.modules.job.sdk", "ray.dashboard.modules.dashboard_sdk"):
        logging.getLogger(name).setLevel(logging.WARNING)  # else each upload and each closed connection is told
    said = token(os.environ)
    before = os.environ.get("RAY_API_SERVER_ADDRESS")
    os.environ["RAY_API_SERVER_ADDRESS"] = address  # else a RAY_ADDRESS of the environment overrules --address
    try:
        return JobSubmissionClient(address, headers={"Authorization": f"Bearer {said}"} if said else None)
    except AuthenticationError as error:
        what = "does not know the token" if said else "wants a token"
        raise ValueError(
            f"the cluster at {address} {what}: set RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH to its file, to what "
            "`ray get-auth-token` prints on the head"
        ) from error
    except (OSError, RuntimeError) as error:
        raise ValueError(f"no Ray dashboard answers at {address}: is the head up, is this its dashboard?") from error
    finally:
        if before is None:
            del os.environ["RAY_API_SERVER_ADDRESS"]
        else:
            os.environ["RAY_API_SERVER_ADDRESS"] = before


def _start(
    client: "JobSubmissionClient",
    job: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    files: Sequence[Path],
) -> None:
    entrypoint = f"exec {shlex.join(command)}"  # exec: Ray's signal and the status are the command's own
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


class _Lost(Exception):
    """The job can no longer be watched; what it does, nobody here knows."""


class _Log:
    """The log of a job, shown as it grows, each character once."""

    def __init__(self, client: "JobSubmissionClient", job: str) -> None:
        self.client, self.job = client, job
        self.shown = 0  # characters
        self.end = ""  # the last of them

    def follow(self) -> "JobDetails | None":
        """Show the log until the job has ended; how it ended, or None if that cannot be told."""
        try:
            ended = asyncio.run(self._follow())
        except _Lost as lost:
            _say(str(lost))
            return None
        try:
            self._show(self.client.get_job_logs(self.job), at=0)  # a log's connection lags behind the job's end
        except (RuntimeError, OSError) as error:
            _say(f"the end of the log is missing: {_last_line(error)}")
        return ended

    async def _follow(self) -> "JobDetails":
        tail = asyncio.create_task(self._tail())
        try:
            return await self._ended()
        finally:
            tail.cancel()

    async def _tail(self) -> None:
        """The log from its start, over and over as connections end."""
        from aiohttp import ClientError

        while True:
            lines, at = self.client.tail_job_logs(self.job), 0
            try:
                while True:
                    async with asyncio.timeout(SILENCE):
                        chunk = await anext(lines)
                    self._show(chunk, at)
                    at += len(chunk)
            except (StopAsyncIteration, ClientError, RuntimeError, OSError):
                await asyncio.sleep(POLL)

    async def _ended(self) -> "JobDetails":
        seen = time.monotonic()
        while True:
            try:
                details = await asyncio.to_thread(self.client.get_job_info, self.job)
                if details.status.is_terminal():
                    return details
                seen = time.monotonic()
            except (RuntimeError, OSError) as error:
                if "status code 404" in str(error):
                    raise _Lost(
                        f"the cluster knows no job {self.job} any more (is its head a new one?): run the same command "
                        "again, and it goes on from its checkpoints"
                    ) from error
                if time.monotonic() - seen > PATIENCE:
                    raise _Lost(
                        f"the cluster has been out of reach for {PATIENCE:.0f} s; the job may go on there, and the "
                        f"same command finds what it has done: {_last_line(error)}"
                    ) from error
            await asyncio.sleep(POLL)

    def _show(self, text: str, at: int) -> None:
        """Show what is new of a piece of the log that begins at character `at`."""
        new = text[max(0, self.shown - at) :]
        sys.stdout.write(new)
        sys.stdout.flush()
        self.shown += len(new)
        self.end = (self.end + new)[-END:]


def _stop(log: _Log) -> None:
    """Ask the job to stop and show its last lines until it has."""
    try:
        log.client.stop_job(log.job)
        _say("asked the job to stop; it ends at checkpoints, and the same command goes on. Ctrl-C again: do not wait")
        log.follow()
    except (RuntimeError, OSError) as error:
        _say(f"job {log.job} could not be asked to stop: {_last_line(error)}")
    except KeyboardInterrupt:
        _say(f"not waiting for job {log.job}, which ends by itself")


def _status(ended: "JobDetails | None") -> int:
    """The exit status that says how a job ended: its own, 128 + N after signal N, 130 if it was stopped."""
    if ended is None:
        return 1
    if ended.status.value == "STOPPED":
        _say("the job was stopped; the same command goes on from its checkpoints")
        return INTERRUPTED
    if ended.driver_exit_code is None:
        if ended.status.value != "SUCCEEDED":
            _say(f"the job failed before or beside its command: {ended.message}")
        return int(ended.status.value != "SUCCEEDED")
    if ended.driver_exit_code < 0:
        _say(f"the job's command was ended by signal {-ended.driver_exit_code}; the same command goes on")
        return 128 - ended.driver_exit_code
    return ended.driver_exit_code


def _say(text: str) -> None:
    print(f"fewbits: {text}", file=sys.stderr, flush=True)


def _last_line(error: Exception) -> str:
    return str(error).strip().rpartition("\n")[2]
