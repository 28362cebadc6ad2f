"""Check the address of a Ray cluster (`--address`), and choose the environment variables that its workers get.

Jobs and workers get the settings of fewbits, of Hugging Face's libraries, of NCCL and of gloo, and the address of the
MLflow server. A variable that looks like a credential is sent only if `--env NAME` names it, since Ray's dashboard
shows the variables of a job to everybody who has the cluster's token.
"""

from __future__ import annotations

import json
import os
import re
import socket
from argparse import ArgumentTypeError
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

TRACKING = "MLFLOW_TRACKING_URI"
PREFIXES = ("FEWBITS_", "HF_", "NCCL_", "TORCH_NCCL_", "GLOO_")
_CREDENTIAL = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|ACCESS_?KEY")
_JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # Ray sets it in a job's processes; JSON with the job's variables


def is_dashboard(address: str | None) -> bool:
    """Tell whether the address is the URL of a Ray dashboard, to which a sweep is submitted as a job."""
    return (address or "").startswith(("http://", "https://"))


def check_reachable(address: str) -> None:
    """Raise ValueError if the address is HOST:PORT and nothing answers there; Ray itself would retry for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        except OSError as error:
            raise ValueError(
                f"no Ray at {address}: {error.strerror or error}: check --address or RAY_ADDRESS, and that Ray runs"
            ) from None


def check_name(text: str) -> str:
    """Return the argument of `--env` if it is the name of a variable that is set, else raise ArgumentTypeError.

    The error is not ValueError, because argparse would then print the whole argument, which may contain a secret.
    """
    name, equals, _ = text.partition("=")
    if equals:
        raise ArgumentTypeError(
            f"{name}=…: write only the name after --env, and set the value in the environment ({name}=… fewbits …)"
        )
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ArgumentTypeError(f"{name!r}: expected the name of an environment variable, as in --env HF_TOKEN")
    if name not in os.environ:
        raise ArgumentTypeError(f"{name}: the variable is not set on this machine; export it first")
    return name


def variables(environment: Mapping[str, str], named: Sequence[str] = ()) -> dict[str, str]:
    """Return the variables to send to a cluster, by name, from this machine's `environment`.

    They are: variables that begin with one of PREFIXES and do not look like credentials; MLFLOW_TRACKING_URI, unless it
    means something else on another machine; and the variables whose names are in `named`.
    """
    ours = [name for name in environment if name.startswith(PREFIXES) and not _CREDENTIAL.search(name.upper())]
    tracking = environment.get(TRACKING)
    ours += [TRACKING] if tracking and means_the_same_elsewhere(tracking) else []
    return {name: environment[name] for name in [*ours, *named]}


def worker_variables(environment: Mapping[str, str], named: Sequence[str] = ()) -> dict[str, str]:
    """Return the variables that a driver with this environment has to pass to its workers: the result of `variables`.

    Inside a Ray job, the job's own variables are left out: Ray passes them itself, and refuses to get them again.
    """
    job = json.loads(environment.get(_JOB_CONFIG) or "{}")
    of_job = (job.get("runtime_env") or {}).get("env_vars") or {}
    return {name: value for name, value in variables(environment, named).items() if name not in of_job}


def means_the_same_elsewhere(uri: str) -> bool:
    """Tell whether an MLflow address means the same on every machine: it is a server's URL or an absolute path."""
    parts = urlsplit(uri)
    if parts.scheme in ("", "file"):
        return parts.path.startswith("/") or uri == "databricks"
    return not parts.scheme.startswith("sqlite") or parts.path.startswith("//")
