"""Test environment variables, signal handlers and file locks of a `with` block."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from fewbits.common import process
from fewbits.common.process import environment, handled, locked

TRY = """
import sys
from fewbits.common.process import locked
with open(sys.argv[1], "a") as file, locked(file, "nothing", wait=False):
    pass
"""


def taken(path: Path) -> bool:
    """Return True if another process cannot get the lock of this file."""
    done = subprocess.run([sys.executable, "-c", TRY, str(path)], capture_output=True, text=True)
    assert done.returncode == 0 or "BlockingIOError" in done.stderr
    return done.returncode != 0


def test_a_lock_keeps_another_process_out_until_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with path.open("a") as file:
        with locked(file, "nothing"):
            assert taken(path)
        assert not taken(path)  # free again, although this process still has the file open


def without_locks(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(file: Any, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(process, "_warned", set())


@pytest.mark.parametrize("number", [errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL])
def test_a_file_system_without_locks_is_announced_once(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_locks(monkeypatch, number)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with (tmp_path / "lock").open("a") as file, locked(file, "leases protect trials", wait=False):
                pass
    (message,) = (str(one.message) for one in caught)
    assert "\n" not in message
    assert str(tmp_path) in message
    assert "leases protect trials" in message


def test_other_errors_of_a_lock_are_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_locks(monkeypatch, errno.EIO)
    with (tmp_path / "lock").open("a") as file, pytest.raises(OSError, match="Input/output"), locked(file, "nothing"):
        pass


def test_signals_are_handled_within_the_block_only() -> None:
    received: list[int] = []
    before = [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)]
    with handled(lambda number, frame: received.append(number), signal.SIGUSR1, signal.SIGUSR2):
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            os.kill(os.getpid(), number)
    assert received == [signal.SIGUSR1, signal.SIGUSR2]
    assert [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)] == before


def test_variables_are_set_within_the_block_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEWBITS_ONE", "outside")
    monkeypatch.delenv("FEWBITS_OTHER", raising=False)
    with environment({"FEWBITS_ONE": "inside", "FEWBITS_OTHER": "inside"}):
        assert (os.environ["FEWBITS_ONE"], os.environ["FEWBITS_OTHER"]) == ("inside", "inside")
    assert os.environ["FEWBITS_ONE"] == "outside"
    assert "FEWBITS_OTHER" not in os.environ
