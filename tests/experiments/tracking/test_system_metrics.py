"""Test system metrics: they are sampled only if enabled, and each sample is sent to MLflow once, by MLflow's names."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from fewbits.experiments.storage.run_folder import RunFolder
from fewbits.experiments.tracking import points, system_metrics
from fewbits.experiments.tracking.system_metrics import ENABLE, INTERVAL, SYSTEM, sampled

pytest.importorskip("psutil")


def test_nothing_is_recorded_without_a_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENABLE, raising=False)
    monkeypatch.setenv(INTERVAL, "0.001")
    with sampled(tmp_path):
        time.sleep(0.05)
    assert list(tmp_path.iterdir()) == []


def test_samples_have_mlflows_names_and_go_on_after_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENABLE, "true")
    monkeypatch.setenv(INTERVAL, "0.05")
    for wanted in (2, 4):
        with sampled(tmp_path):
            until = time.monotonic() + 60
            while not (tmp_path / SYSTEM).exists() or len((tmp_path / SYSTEM).read_text().splitlines()) < wanted:
                assert time.monotonic() < until
                time.sleep(0.01)
    with (tmp_path / SYSTEM).open("a") as file:
        file.write('{"time": 1')  # a worker was killed while it wrote the line
    monitor = pytest.importorskip("mlflow.system_metrics.metrics.cpu_monitor").CPUMonitor()
    monitor.collect_metrics()
    samples = list(points.system_points(RunFolder(tmp_path, ""), after=1))
    assert [number for number, _ in samples] == list(range(2, len(samples) + 2))
    for number, sample in samples:
        assert {f"system/{name}" for name in monitor.metrics} <= {point.key for point in sample}
        assert {point.step for point in sample} == {number}


def test_an_invalid_interval_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENABLE, "1")
    for wrong in ("often", "0", "-1"):
        monkeypatch.setenv(INTERVAL, wrong)
        with pytest.raises(ValueError, match=INTERVAL), sampled(tmp_path):
            pass


def test_a_gpu_is_sampled_by_nvidias_library() -> None:
    """Check the metrics of a GPU. Functions with the names of NVIDIA's library replace it, so no GPU is needed."""
    nvml = SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlDeviceGetMemoryInfo=lambda gpu: SimpleNamespace(used=3e9, total=12e9),
        nvmlDeviceGetPowerUsage=lambda gpu: 350_000,
        nvmlDeviceGetEnforcedPowerLimit=lambda gpu: 700_000,
        nvmlDeviceGetUtilizationRates=lambda gpu: SimpleNamespace(gpu=90),
    )
    assert system_metrics._of_gpus(nvml, ["handle"]) == {
        "gpu_0_utilization_percentage": 90,
        "gpu_0_memory_usage_megabytes": 3000.0,
        "gpu_0_memory_usage_percentage": 25.0,
        "gpu_0_power_usage_watts": 350.0,
        "gpu_0_power_usage_percentage": 50.0,
    }
