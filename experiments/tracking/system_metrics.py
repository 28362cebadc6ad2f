"""Sample the use of processor, memory, disk, network and GPUs while a trial trains.

The environment variable MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING=true enables sampling, and
MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL is the number of seconds between samples, as in MLflow itself. The metrics have
MLflow's names. The samples are appended to the file system.jsonl in the run folder, which is later sent to MLflow with
the other data of the run, because the workers of a sweep do not connect to MLflow.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

SYSTEM = "system.jsonl"  # the file in the run folder
ENABLE, INTERVAL = "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING", "MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL"
DEFAULT_INTERVAL = 10.0  # seconds, as in MLflow


@contextmanager
def sampled(folder: Path) -> Iterator[None]:
    """Append samples of system metrics to system.jsonl in a run folder while the `with` block runs.

    Without MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING=true in the environment, nothing is sampled.
    """
    ended = threading.Event()
    thread = None
    if os.environ.get(ENABLE, "").strip().lower() in ("true", "1"):
        thread = threading.Thread(target=_sample_until, args=(ended, folder / SYSTEM, _interval()), daemon=True)
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if thread is not None:
            thread.join()


def _interval() -> float:
    """Return the seconds between samples from the environment; raise ValueError if they are not a number above 0."""
    text = os.environ.get(INTERVAL) or str(DEFAULT_INTERVAL)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if seconds <= 0:
        raise ValueError(f"{INTERVAL} {text}: a number of seconds above 0 is expected")
    return seconds


def _sample_until(ended: threading.Event, path: Path, interval: float) -> None:
    try:
        import psutil
    except ImportError:
        message = f"{ENABLE} is set, but psutil is not installed: pip install 'fewbits[system-metrics]'"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
        return
    network = psutil.net_io_counters()
    gpus = _gpus()
    psutil.cpu_percent()  # each call returns the mean use since the call before, so the first result is discarded
    while not ended.wait(interval):
        sample = _of_machine(psutil, network, path.parent) | _of_gpus(*gpus)
        with contextlib.suppress(OSError), path.open("a") as file:  # a full disk must not stop the trial
            file.write(json.dumps({"time": time.time(), **{key: round(value, 1) for key, value in sample.items()}}))
            file.write("\n")


def _of_machine(psutil: ModuleType, before: Any, folder: Path) -> dict[str, float]:
    """Return the metrics of processor, memory, disk and network.

    before: the network counters at the start of sampling. folder: a folder on the disk that is measured.
    """
    memory, disk, network = psutil.virtual_memory(), psutil.disk_usage(str(folder)), psutil.net_io_counters()
    return {
        "cpu_utilization_percentage": psutil.cpu_percent(),
        "system_memory_usage_megabytes": memory.used / 1e6,
        "system_memory_usage_percentage": 100 * memory.used / memory.total,
        "disk_usage_percentage": disk.percent,
        "disk_usage_megabytes": disk.used / 1e6,
        "disk_available_megabytes": disk.free / 1e6,
        "network_receive_megabytes": (network.bytes_recv - before.bytes_recv) / 1e6,
        "network_transmit_megabytes": (network.bytes_sent - before.bytes_sent) / 1e6,
    }


def _gpus() -> tuple[Any, list[Any]]:
    """Return the module pynvml and the machine's GPUs; (None, []) without nvidia-ml-py or without a driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return pynvml, [pynvml.nvmlDeviceGetHandleByIndex(gpu) for gpu in range(pynvml.nvmlDeviceGetCount())]
    except Exception:  # not installed, or no driver
        return None, []


def _of_gpus(nvml: Any, gpus: list[Any]) -> dict[str, float]:
    sample: dict[str, float] = {}
    for number, gpu in enumerate(gpus):
        with contextlib.suppress(nvml.NVMLError):
            memory, power = nvml.nvmlDeviceGetMemoryInfo(gpu), nvml.nvmlDeviceGetPowerUsage(gpu)
            sample |= {
                f"gpu_{number}_utilization_percentage": nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
                f"gpu_{number}_memory_usage_megabytes": memory.used / 1e6,
                f"gpu_{number}_memory_usage_percentage": 100 * memory.used / memory.total,
                f"gpu_{number}_power_usage_watts": power / 1000,
                f"gpu_{number}_power_usage_percentage": 100 * power / nvml.nvmlDeviceGetEnforcedPowerLimit(gpu),
            }
    return sample
