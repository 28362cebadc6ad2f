"""Test, with real processes and signals, that one worker at a time holds a trial's lease, even if workers die."""

import json
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import pytest

from fewbits.experiments.storage import lease
from fewbits.experiments.storage.lease import Held, Holder, holder, leased
from tests.messages import naming

FORK = multiprocessing.get_context("fork")


def write(folder: Path, holder: Holder, age: float = 0.0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / lease.NAME
    path.write_text(json.dumps(vars(holder)))
    os.utime(path, (time.time() - age,) * 2)


def dead() -> Holder:
    """Return a holder whose process on this host has ended."""
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    ended.wait()
    return Holder(platform.node(), ended.pid, 1.0, "of the dead")


FAR = Holder("another-host", os.getpid(), 1.0, "far away")


@pytest.fixture
def someone() -> Iterator["subprocess.Popen[bytes]"]:
    """Yield a running process that holds no lease; it is killed after the test."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def test_a_lease_is_held_while_the_block_runs_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "trial"
    assert not folder.exists()
    with leased(folder) as lost:
        here = holder(folder)
        assert here is not None
        assert (here.host, here.pid) == (platform.node(), os.getpid())
        assert not lost.is_set()
        with pytest.raises(Held, match=naming(os.getpid(), platform.node())), leased(folder):
            pass
        assert holder(folder) == here
    assert holder(folder) is None
    with leased(folder):
        pass
    assert not list(folder.glob("*lease.json*"))
    assert not list(folder.glob(".*.partial"))


def test_a_lease_is_given_back_by_a_block_that_raises(tmp_path: Path) -> None:
    with pytest.raises(KeyError), leased(tmp_path):
        raise KeyError
    assert holder(tmp_path) is None


# ------------------------------------------------------------------------------------------------ contenders

ROUNDS, CONTENDERS = 60, 6


def _contend(root: Path, me: int, barrier: "multiprocessing.synchronize.Barrier") -> None:
    """Try once in each round to get its lease, together with the others, and create `won-{me}` after a success."""
    for number in range(ROUNDS):
        folder = root / str(number)
        barrier.wait(120)
        try:
            with leased(folder):
                (folder / f"won-{me}").touch()
                barrier.wait(120)
        except Held:
            barrier.wait(120)
    os._exit(0)


@pytest.mark.parametrize("left_behind", ["nothing", "of a dead process", "of a host that is silent", "half written"])
def test_of_many_contenders_one_gets_it(tmp_path: Path, left_behind: str) -> None:
    gone = dead()
    for number in range(ROUNDS):
        folder = tmp_path / str(number)
        folder.mkdir()
        if left_behind == "of a dead process":
            write(folder, gone)
        elif left_behind == "of a host that is silent":
            write(folder, FAR, age=10 * lease.STALE)
        elif left_behind == "half written":
            (folder / lease.NAME).write_text('{"host": ')
    barrier = FORK.Barrier(CONTENDERS)
    with ExitStack() as stack:
        processes = [FORK.Process(target=_contend, args=(tmp_path, me, barrier)) for me in range(CONTENDERS)]
        for process in processes:
            process.start()
            stack.callback(process.kill)
        for process in processes:
            process.join(120)
            assert process.exitcode == 0
    for number in range(ROUNDS):
        assert len(list((tmp_path / str(number)).glob("won-*"))) == 1
    assert not [path for path in tmp_path.rglob("*") if path.name.endswith(".partial") or path.name == lease.NAME]


# ------------------------------------------------------------------------------------------------ the dead


def _hold(folder: Path) -> None:
    with leased(folder):
        (folder / "held").touch()
        time.sleep(600)


def holding(folder: Path) -> ForkProcess:
    process = FORK.Process(target=_hold, args=(folder,))
    process.start()
    while not (folder / "held").exists():
        process.join(0.01)
        assert process.is_alive()
    return process


def test_a_killed_holder_of_this_host_is_followed_at_once(tmp_path: Path) -> None:
    """The lease of a killed process on this host is free at once, even while the process is a zombie."""
    process = holding(tmp_path)
    try:
        with pytest.raises(Held, match=f"process {process.pid}"), leased(tmp_path):
            pass
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # WNOWAIT: the process stays a zombie
        assert (tmp_path / lease.NAME).exists()
        assert holder(tmp_path) is None
        with leased(tmp_path):
            pass
    finally:
        process.kill()
        process.join()


def test_a_stopped_holder_of_this_host_keeps_it(tmp_path: Path) -> None:
    """A process halted by SIGSTOP keeps its lease, even without heartbeats, since it may continue."""
    process = holding(tmp_path)
    try:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        os.utime(tmp_path / lease.NAME, (1.0, 1.0))
        with pytest.raises(Held), leased(tmp_path):
            pass
    finally:
        process.kill()
        process.join()


def test_a_pid_that_is_used_again_is_another_process(tmp_path: Path, someone: "subprocess.Popen[bytes]") -> None:
    write(tmp_path, Holder(platform.node(), someone.pid, lease._start_time(someone.pid), "alive"))
    assert holder(tmp_path) is not None
    write(tmp_path, Holder(platform.node(), someone.pid, lease._start_time(someone.pid) - 100, "before it"))
    assert holder(tmp_path) is None
    with leased(tmp_path):
        pass


# ------------------------------------------------------------------------------------------------ other hosts


def test_a_holder_elsewhere_is_followed_once_it_has_been_silent(tmp_path: Path) -> None:
    write(tmp_path, FAR, age=lease.STALE / 2)
    assert holder(tmp_path) == FAR
    with pytest.raises(Held, match="of another-host"), leased(tmp_path):
        pass
    for age in (-lease.STALE - 5, lease.STALE + 5):  # a negative age is a time in the future: a clock was set back
        write(tmp_path, FAR, age=age)
        assert holder(tmp_path) is None
    with leased(tmp_path):
        here = holder(tmp_path)
        assert here is not None
        assert here.host == platform.node()


def test_silence_is_counted_by_the_clock_of_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with a wrong clock does not take over a lease that is refreshed, and does not wait for a dead holder."""
    for error in (-1e6, 1e6):
        monkeypatch.setattr(time, "time", lambda error=error: time.clock_gettime(time.CLOCK_REALTIME) + error)
        path = tmp_path / lease.NAME
        path.write_text(json.dumps(vars(FAR)))
        assert holder(tmp_path) == FAR
        now = path.stat().st_mtime
        os.utime(path, (now, now - lease.STALE - 5))
        assert holder(tmp_path) is None


def test_a_file_system_that_is_away_for_a_moment_ends_no_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    utime, refused = os.utime, threading.Event()

    def once_away(*arguments: Any) -> None:
        if not refused.is_set():
            refused.set()
            raise OSError("stale file handle")
        utime(*arguments)

    monkeypatch.setattr(lease, "HEARTBEAT", 0.01)
    with leased(tmp_path) as lost:
        utime(tmp_path / lease.NAME, (1.0, 1.0))
        monkeypatch.setattr(os, "utime", once_away)
        give_up = time.monotonic() + 60
        while (tmp_path / lease.NAME).stat().st_mtime < 2 and time.monotonic() < give_up:
            time.sleep(0.01)
        assert refused.is_set()
        assert (tmp_path / lease.NAME).stat().st_mtime > 2
        assert not lost.is_set()


@pytest.mark.parametrize("how", ["taken over", "removed"])
def test_a_lost_lease_is_noticed_and_not_removed(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a holder notices that its lease is removed or taken over, and does not remove the new lease."""
    monkeypatch.setattr(lease, "HEARTBEAT", 0.02)
    with leased(tmp_path) as lost:
        if how == "removed":
            (tmp_path / lease.NAME).unlink()
        else:
            write(tmp_path / "new", FAR)
            os.replace(tmp_path / "new" / lease.NAME, tmp_path / lease.NAME)
        assert lost.wait(60)
    assert holder(tmp_path) == (FAR if how == "taken over" else None)
