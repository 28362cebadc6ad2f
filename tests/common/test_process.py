"""Test that environment variables and signal handlers are set for a `with` block only."""

import os
import signal

import pytest

from fewbits.common.process import environment, handled


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
