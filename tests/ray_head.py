"""Start a real Ray head for a test, with free ports, a token and its own folder, and end all its processes afterwards.

Each process that a head starts inherits the environment variable MARK with a unique value, by which it is found and
killed. `ray stop` is not used, since it would also end other instances of Ray on this machine.
"""

import fcntl
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread

import pytest

PATIENCE = 180.0  # seconds after which a wait fails; so many, since the machine may be busy
MARK = "MARK_OF_A_TEST"  # the name of the environment variable
AT_NORMAL_PRIORITY = {"RAY_worker_niceness": "0"}  # Ray's default, 15, stops its workers beside other tests


@dataclass(frozen=True)
class Head:
    address: str  # the URL of the dashboard
    gcs: str  # HOST:PORT, the address with which drivers and nodes join
    token_file: Path
    joining: list[Thread] = field(default_factory=list)  # threads, each of which ends when its node has joined

    def wait_for_nodes(self) -> None:
        for thread in self.joining:
            thread.join(PATIENCE)


@contextmanager
def ray_head(nodes: Sequence[Mapping[str, str]] = ()) -> Iterator[Head]:
    """Start a Ray head and worker nodes on this machine, and yield the head; end all their processes after the block.

    The head has no CPUs, as on a real cluster.

    nodes: for each worker node, its environment variables. A node has one CPU and reports one GPU. It may still be
        joining when the block begins; `Head.wait_for_nodes` waits until all have joined.
    """
    with marked_environment() as environment, short_folder() as folder:
        token_file = folder / "token"
        token_file.write_text(secrets.token_hex(32))
        gcs, dashboard, agent, client, *agents = free_ports(4 + len(nodes))
        command = [ray(), "start", "--head", "--block", f"--port={gcs}", "--num-cpus=0"]
        command += [f"--temp-dir={folder / 'ray'}", f"--dashboard-port={dashboard}"]
        command += ["--dashboard-host=127.0.0.1", "--disable-usage-stats"]
        command += [f"--dashboard-agent-listen-port={agent}", f"--ray-client-server-port={client}"]
        of_each = ["--object-store-memory=80000000", "--min-worker-port=0", "--max-worker-port=0"]
        of_each += ["--memory=1000000000"]  # a fixed amount: Ray would not start if other programs use most memory
        command += of_each
        # RAY_AUTH_MODE is not set for the head, which requires a token because a token file exists.
        environment = environment | {"RAY_AUTH_TOKEN_PATH": str(token_file)}
        with (folder / "log").open("wb") as log:
            starting = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        head = Head(f"http://127.0.0.1:{dashboard}", f"127.0.0.1:{gcs}", token_file)
        give_up = time.monotonic() + PATIENCE
        while not is_up(head, folder / "log"):
            if time.monotonic() > give_up or starting.poll() is not None:
                raise RuntimeError(f"Ray's head did not start:\n{(folder / 'log').read_text()}")
            time.sleep(0.1)
        ended = Event()
        worker = [ray(), "start", "--block", f"--address=127.0.0.1:{gcs}", "--num-cpus=1", "--num-gpus=1", *of_each]
        worker += ["--disable-usage-stats"]
        environment = environment | {"RAY_AUTH_MODE": "token"}  # without it, worker nodes do not send the token
        threads = [
            Thread(
                target=_join,
                args=(
                    # Each node gets its own folder, as on separate machines. In a shared folder, a node whose last
                    # worker of a job has ended would remove the job's files, which other nodes still need.
                    [*worker, f"--dashboard-agent-listen-port={port}", f"--temp-dir={folder / str(port)}"],
                    {**environment, **node},
                    folder / f"log-{port}",
                    ended,
                ),
            )
            for port, node in zip(agents, nodes, strict=True)
        ]
        for thread in threads:
            thread.start()
        head.joining.extend(threads)
        try:
            yield head
        finally:
            ended.set()
            for thread in threads:
                thread.join()


def _join(command: list[str], environment: Mapping[str, str], log: Path, ended: Event) -> None:
    """Start a worker node, and restart it until it has joined or `ended` is set.

    `ray start` gives up after 30 s, which is too early on a busy machine.
    """
    while not ended.is_set():
        with log.open("wb") as out:
            node = subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)
        while node.poll() is None and not ended.wait(0.2):
            if b"Ray runtime started" in log.read_bytes():
                return


def is_up(head: Head, log: Path) -> bool:
    """Tell whether the head has started and its dashboard answers with status 401 (a token is required)."""
    if b"Ray runtime started" not in log.read_bytes():
        return False
    try:
        urllib.request.urlopen(f"{head.address}/api/version", timeout=5)
    except urllib.error.HTTPError as answer:
        return answer.code == 401
    except OSError:
        return False
    return False


@contextmanager
def marked_environment() -> Iterator[dict[str, str]]:
    """Yield environment variables: a new MARK, none of Ray's (RAY_…), and this Python's folder first on PATH.

    At the end, all processes that were started with these variables are killed. The `with` block holds a lock of all
    test processes of this machine: clusters that start at the same time on two cores would exceed Ray's time limits.
    """
    mark = secrets.token_hex(16)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    with Path(tempfile.gettempdir(), "cluster-of-fewbits-tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield kept | AT_NORMAL_PRIORITY | {"PATH": path, MARK: mark}
        finally:
            kill_all(f"{MARK}={mark}".encode())


def kill_all(mark: bytes) -> None:
    give_up = time.monotonic() + PATIENCE
    while found := marked(mark):
        if time.monotonic() > give_up:
            raise RuntimeError(f"these processes are still alive although SIGKILL was sent to them: {found}")
        for process in found:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.05)


def marked(mark: bytes) -> list[int]:
    processes = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [process for process in processes if mark in _environment_of(process)]


def _environment_of(process: int) -> list[bytes]:
    try:
        return Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    except OSError:  # the process has ended, or belongs to another user
        return []


@contextmanager
def short_folder() -> Iterator[Path]:
    """Yield a temporary folder with a short path, since paths of Ray's Unix sockets may have at most 107 characters."""
    folder = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:  # all sockets are open at the same time, so that their ports differ
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


def ray() -> str:
    return str(Path(sys.executable).parent / "ray")


def client_environment(head: Head) -> Mapping[str, str]:
    return {"RAY_AUTH_TOKEN_PATH": str(head.token_file)}


@contextmanager
def joining(head: Head) -> Iterator[None]:
    """Set this process's environment so that `ray.init` in the `with` block can join the cluster with its token."""
    from ray._private.authentication_test_utils import reset_auth_token_state

    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("RAY_")]:
            patch.delenv(name)
        for name, value in client_environment(head).items():
            patch.setenv(name, value)
        patch.setenv("RAY_AUTH_MODE", "token")
        reset_auth_token_state()  # Ray reads the token once per process, but tests of a process use several clusters
        yield
    reset_auth_token_state()


def parent_of(process: int) -> int:
    """Return the id of a process's parent; for a Ray worker, that is the raylet, the main process of its node."""
    (parent,) = re.findall(r"^PPid:\t(\d+)$", Path(f"/proc/{process}/status").read_text(), re.MULTILINE)
    return int(parent)
