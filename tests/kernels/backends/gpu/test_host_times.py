"""Test host_times.py: the calls that it measures launch kernels, and it counts how often the observer waits."""

from collections.abc import Callable
from typing import Any

import pytest

from fewbits.kernels import operators
from fewbits.models.observer import ObserverConfig
from tests.kernels.backends.gpu import host_times, stubbed
from tests.kernels.backends.gpu.host_times import REFERENCE, calls, seconds, waits
from tests.models.copies import CountedObserver

reason = stubbed.unavailable()


@pytest.mark.skipif(reason is not None, reason=str(reason))
def test_each_call_launches_a_kernel_through_torchs_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    directly: list[object] = []

    def recorded(run: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            directly.append(run)
            return run(*arguments)

        return call

    for operator, run in operators._DIRECT.items():
        monkeypatch.setitem(operators._DIRECT, operator, recorded(run))
    with calls() as measured:
        driver, _ = stubbed.stand_ins()
        for name, call in measured.items():
            before = driver.stub_launch_count()
            call()
            assert (driver.stub_launch_count() > before) == (name != REFERENCE), name
        assert all(0 < each < 1 for each in seconds(measured, bursts=1).values())
    assert not directly


def test_the_observer_waits_once_in_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ObserverConfig(window=3)
    assert waits(2, 2, config) == [0, 0, 0, 1]

    class Eager(CountedObserver):
        def record(self, *arguments: Any, **others: Any) -> None:
            super().record(*arguments, **others)
            with self.copies:
                self.settle()

    monkeypatch.setattr(host_times, "CountedObserver", Eager)
    *steps, _ = waits(2, 2, config)
    assert steps == [2 * (2 * 4 + 2)] * 3, "two layers, four operands in each of two micro-batches, and two of weights"
