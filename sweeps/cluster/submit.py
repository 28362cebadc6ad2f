"""Run a sweep as a Ray job: `fewbits sweep … --address http://head:8265` runs the same command on the cluster.

A job's working directory is a zip of the running fewbits' sources, which comes first on Python's path in the driver and
every worker, so the job runs the same version. The job's log is printed as it grows, and the job's exit status is
returned. The job continues if the terminal is closed or the connection is lost. Ctrl-C stops the job like a local
sweep: its trials end at checkpoints, and the same command resumes them. After a second Ctrl-C, this process does not
wait for the trials.

A request that fails is repeated, since a new cluster may answer the first ones with HTTP 500. This process chooses the
job's name, so a repeated submit cannot start the job twice.
"""

import contextlib
import logging
import os
import secrets
import shlex
import signal
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path, PurePosixPath
from types import FrameType
from typing import TYPE_CHECKING, Any

from fewbits.common.process import environment, handled
from fewbits.common.terminal import notice
from fewbits.common.wording import redacted
from fewbits.experiments.config_files import CONF, GROUPS, folders, is_path, is_search_path
from fewbits.sweeps.cluster.access import TRACKING, is_dashboard, means_the_same_elsewhere, variables
from fewbits.sweeps.planning.stored_plans import runs_named
from fewbits.sweeps.tracking.connection import user

if TYPE_CHECKING:
    from ray.job_submission import JobDetails, JobSubmissionClient

PATIENCE = 120.0  # seconds for which requests are repeated if the cluster accepts no job or is unreachable
POLL = 1.0  # the least number of seconds between two requests
SHARE = 10  # after a request that took t seconds, the next one follows SHARE * t seconds later
STOP_WAIT = 600  # seconds that a stopped job has to write its checkpoints before Ray kills it
INTERRUPTED = 130
FEWBITS = ("python", "-m", "fewbits.cli")  # the command `fewbits` on the cluster


def submit(arguments: Sequence[str], address: str, named: Sequence[str] = ()) -> int:
    """Run `fewbits sweep ARGUMENTS --address auto` as a job, and return its exit status.

    address: the URL of the dashboard. named: environment variables of the job besides the usual ones (access.py).
    """
    lasting_store(arguments)
    files, passed = list[Path](), list[str]()
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if is_path(argument if not equals else value) and (not equals or key in GROUPS):
            files.append(Path(value if equals else argument).expanduser())
            passed.append(f"{key}={files[-1].name}" if equals else files[-1].name)
        elif not is_search_path(argument):
            passed.append(argument)
    for file in files:
        if not file.is_file():
            raise ValueError(f"no sweep file {file}: give the path of a file that exists on this machine")
    own = folders(arguments).paths  # the user's config folders; the job finds their files in its folder `conf`
    return run_job([*FEWBITS, "sweep", "--address", "auto", *passed], address, [*files, *own], named)


def submit_study(
    overrides: Sequence[str], address: str, reports: str, options: Sequence[str] = (), named: Sequence[str] = ()
) -> int:
    """Submit a job that runs a study's trials and writes its report, and return the job's exit status.

    reports: the folder for reports, relative to the folder that contains the store. options: of `fewbits report`.
    """
    out = lasting_store(overrides).parent / reports
    command = [*FEWBITS, "report", *overrides, "--sweep", "--address", "auto", "--out", str(out), *options]
    return run_job(command, address, named=named)


def is_study(overrides: Sequence[str]) -> bool:
    """Tell whether the overrides select a whole study, as `study=NAME` without `sweep=NAME` does."""
    keys = [override.partition("=")[0] for override in overrides]
    return "study" in keys and "sweep" not in keys


def lasting_store(arguments: Sequence[str]) -> PurePosixPath:
    """Return the store in the override `runtime.runs=STORE`; raise ValueError if there is none or STORE is relative."""
    path = runs_named(arguments)
    if path is None or not PurePosixPath(path).is_absolute():
        problem = "no store is named" if path is None else f"the store {path!r} is relative"
        raise ValueError(
            f"{problem}, so runs would be lost when the job ends: name an absolute path that all nodes of the cluster "
            "share, as in runtime.runs=/mnt/fewbits/runs"
        )
    return PurePosixPath(path)


def run_job(command: Sequence[str], address: str, files: Sequence[Path] = (), named: Sequence[str] = ()) -> int:
    """Run a command as a job on the cluster, print its log, and return its exit status.

    files: config files and folders, which the job's working directory contains too. address, named: as for `submit`.
    """
    sent = job_variables(os.environ, named)
    client = _connect(address)
    job = f"fewbits-{secrets.token_hex(4)}"
    presses: list[int] = []

    def press(number: int, frame: FrameType | None) -> None:
        presses.append(number)  # the first Ctrl-C stops the job as soon as the present request is answered
        if len(presses) > 1:
            raise KeyboardInterrupt

    log = _Log(client, job)
    with handled(press, signal.SIGINT):
        try:
            _start(client, job, command, sent, files)
            notice(
                f"job {job} on {address}: Ctrl-C stops it at checkpoints; it continues if this terminal is closed "
                f"(its log: ray job logs --follow {job} --address {address})"
            )
            if log.follow(presses):
                return log.exit_status()
            client.stop_job(job)
            notice("asked the job to stop at checkpoints; the same command resumes it (Ctrl-C again: do not wait)")
            log.follow()
        except KeyboardInterrupt:
            notice(f"not waiting for job {job}")
        except (RuntimeError, OSError) as error:
            notice(f"the request to stop job {job} failed: {_last_line(error)}")
    return INTERRUPTED


def job_variables(environment: Mapping[str, str], named: Sequence[str] = ()) -> dict[str, str]:
    """Return the environment variables of a job; raise ValueError if MLFLOW_TRACKING_URI is relative."""
    tracking = environment.get(TRACKING)
    if tracking and not means_the_same_elsewhere(tracking):
        raise ValueError(
            f"{TRACKING}={redacted(tracking)} is relative, so it would name another place on the cluster: set it to a "
            "server (http://…) or an absolute path, or unset it"
        )
    # By default Ray sends SIGTERM and, after three seconds, SIGKILL; trials need longer to write checkpoints.
    graceful = {"RAY_JOB_STOP_SIGNAL": "SIGINT", "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT)}
    # On a cluster all jobs run as the same system user, but MLflow runs belong to the user who submits the job.
    return {"FEWBITS_USER": user(), **variables(environment, named), **graceful}


# -------------------------------------------------------------------------------- the working directory


def pack(package: Path | None = None, beside: Sequence[Path] = ()) -> bytes:
    """Return a zip that contains the folder `package` under its own name; None: the folder of fewbits itself.

    beside: config files and config folders of the user. A config file is packed with the YAML files of the folder
    `scale/` beside it, which sweep files include. The YAML files of a config folder, and Python files, are packed into
    `conf/`; of files with the same name, the first is packed, as on Hydra's search path.
    """
    folder = Path(__file__).parents[2] if package is None else package
    files: dict[str, Path] = {}
    for parent, below, names in os.walk(folder, followlinks=True):
        below[:] = sorted(name for name in below if name != "__pycache__" and not name.startswith("."))
        paths = [Path(parent, name) for name in sorted(names) if not name.startswith(".")]
        files |= {path.relative_to(folder.parent).as_posix(): path for path in paths}
    of_user: dict[str, Path] = {}
    for path in beside:
        if path.is_dir():
            own = [*sorted(path.rglob("*.yaml")), *sorted(path.glob("*.py"))]  # the latter are hooks (models/hooks.py)
            shipped = {f"{CONF}/{file.relative_to(path).as_posix()}": file for file in own}
        else:
            of_scales = sorted((path.parent / "scale").glob("*.yaml"))
            shipped = {file.relative_to(path.parent).as_posix(): file for file in (path, *of_scales)}
        of_user = shipped | of_user
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as archive:
        for name, file in (files | of_user).items():
            archive.write(file, name)
    return buffer.getvalue()


# -------------------------------------------------------------------------------- requests


def token(environment: Mapping[str, str]) -> str | None:
    """Return the token for the cluster, or None if there is none or RAY_AUTH_MODE is `disabled`.

    Ray's own client reads RAY_AUTH_TOKEN, the file of RAY_AUTH_TOKEN_PATH, or ~/.ray/auth_token only if
    RAY_AUTH_MODE=token, but a cluster that `ray start` starts requires a token as soon as one of them exists.
    """
    if environment.get("RAY_AUTH_MODE", "").lower() == "disabled":
        return None
    if value := environment.get("RAY_AUTH_TOKEN", "").strip():
        return value
    named = environment.get("RAY_AUTH_TOKEN_PATH")
    try:
        return Path(named or Path.home() / ".ray" / "auth_token").read_text("utf-8").strip() or None
    except OSError as error:
        if named:
            raise ValueError(f"RAY_AUTH_TOKEN_PATH={named}: {error.strerror}; name a file with the token") from error
        return None


def _connect(address: str) -> "JobSubmissionClient":
    if not is_dashboard(address):
        raise ValueError(f"--address {address!r}: expected the URL of a Ray dashboard, as in http://head:8265")
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    logging.getLogger("ray.dashboard").setLevel(logging.WARNING)  # otherwise it logs each upload and closed connection
    secret = token(os.environ)
    try:
        with environment({"RAY_API_SERVER_ADDRESS": address}):  # otherwise RAY_ADDRESS would override --address
            return JobSubmissionClient(address, headers={"Authorization": f"Bearer {secret}"} if secret else None)
    except AuthenticationError as error:
        problem = "rejects the token" if secret else "requires a token"
        raise ValueError(
            f"the cluster at {address} {problem}: set RAY_AUTH_TOKEN to the output of `ray get-auth-token` on the head"
        ) from error
    except (OSError, RuntimeError) as error:
        raise ValueError(f"no Ray dashboard answers at {address}: check the address, and that the head runs") from error


def _start(
    client: "JobSubmissionClient", job: str, command: Sequence[str], sent: Mapping[str, str], files: Sequence[Path]
) -> None:
    """Submit the job; repeat a failed request for PATIENCE seconds, unless the cluster has the job already."""
    entrypoint = f"exec {shlex.join(command)}"  # exec: Ray's signals reach the command itself and not a shell
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder, "fewbits.zip")
        package.write_bytes(pack(beside=files))
        runtime: dict[str, Any] = {"working_dir": str(package), "env_vars": dict(sent)}
        give_up = time.monotonic() + PATIENCE
        while True:
            try:
                client.submit_job(entrypoint=entrypoint, submission_id=job, runtime_env=runtime)
                return
            except (RuntimeError, OSError) as error:  # HTTP 500 while the head still starts, or a dropped connection
                with contextlib.suppress(RuntimeError, OSError):
                    client.get_job_info(job)
                    return
                if time.monotonic() > give_up:
                    raise ValueError(f"the cluster does not accept the job: {_last_line(error)}") from error
            time.sleep(POLL)


class _Log:
    """The log of a job, which is printed on stdout as it grows."""

    def __init__(self, client: "JobSubmissionClient", job: str) -> None:
        self._client, self._job = client, job
        self._shown = 0  # the number of characters printed so far
        self._ended: JobDetails | None = None  # Ray's details of the job when it has ended; None: not known

    def follow(self, presses: Sequence[int] = ()) -> bool:
        """Print the log until the job has ended or is out of reach; return False if the user has pressed Ctrl-C.

        Each request reads the whole log, so that no connection has to stay open.
        """
        answered = time.monotonic()
        while not presses:
            began = time.monotonic()
            try:
                # The details are read before the log: if the job has ended by then, the log is complete.
                details = self._client.get_job_info(self._job)
                log = self._client.get_job_logs(self._job)
                sys.stdout.write(log[self._shown :])
                sys.stdout.flush()
                self._shown = len(log)
                if details.status.is_terminal():
                    self._ended = details
                    return True
                answered = time.monotonic()
            except (RuntimeError, OSError) as error:
                if "status code 404" in str(error):
                    notice(f"the cluster does not know job {self._job} any more: the same command continues its work")
                    return True
                if time.monotonic() - answered > PATIENCE:
                    notice(
                        f"the cluster has been unreachable for {PATIENCE:.0f} s; the job may still run there; the same "
                        f"command continues its work: {_last_line(error)}"
                    )
                    return True
            time.sleep(max(POLL, SHARE * (time.monotonic() - began)))
        return False

    def exit_status(self) -> int:
        """Return the status of the job's command: 128 + N after signal N, 130 if it was stopped, 1 if it is unknown."""
        if self._ended is None:
            return 1
        status, code = self._ended.status.value, self._ended.driver_exit_code
        if status == "STOPPED":
            notice("the job was stopped; the same command resumes it from its checkpoints")
            return INTERRUPTED
        if code is None and status != "SUCCEEDED":
            notice(f"the job failed, and Ray reports no exit status of its command: {self._ended.message}")
            return 1
        if code is not None and code < 0:
            notice(f"the job's command was ended by signal {-code}; the same command resumes it")
            return 128 - code
        return code or 0


def _last_line(error: Exception) -> str:
    return str(error).strip().rpartition("\n")[2]
