"""Run trials in processes of this machine, without Ray (`--backend local`).

Each process is forked from a fork server that has already imported the training code, so that it starts fast.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from fewbits.sweeps.planning.plan import Planned
from fewbits.sweeps.planning.sweep import Resources
from fewbits.sweeps.running.driver import Ended, Job, Outcome
from fewbits.sweeps.running.worker import work

_PR_SET_PDEATHSIG = 1
_HERE = "127.0.0.1"
ATTEMPTS = 100  # the number of attempts to fork a worker, with 0.1 s between them


@dataclass
class _Running:
    processes: list[ForkServerProcess]
    answer: Connection  # the pipe on which rank 0 sends its outcome
    cpus: float
    gpus: list[int]  # the indices of the trial's GPUs
    served: TCPStore | None  # the store where several ranks meet; it is open as long as this reference exists


class Local:
    """The backend that runs trials in processes of this machine."""

    def __init__(self, parallel: int | None = None) -> None:
        """Start no process yet. parallel: the largest number of trials at a time; None: as many as the cores allow."""
        self._parallel, self._cpus = parallel, len(os.sched_getaffinity(0))
        self._gpus = list(range(torch.cuda.device_count()))  # indices of the GPUs that no trial uses
        self._running: dict[str, _Running] = {}
        self._context = multiprocessing.get_context("forkserver")
        # A pipe: workers have one end, and only this process has the other. When this process ends, its end closes,
        # which tells the workers (`_die_with_driver`).
        self._lifeline, self._our_end = self._context.Pipe(duplex=False)

    def require(self, trials: Sequence[Planned]) -> None:
        for planned in trials:
            wanted = replace(planned.resources, gpus=math.ceil(planned.resources.gpus or 0))
            cpus = float(max(self._cpus, wanted.ranks))  # ranks may share cores, slowly
            require_here(planned.folder.path.name, wanted, {"CPU": cpus, "GPU": float(len(self._gpus))})

    def room(self, resources: Resources) -> bool:
        if _gpus(resources) > len(self._gpus) or len(self._running) == self._parallel:
            return False
        used = sum(running.cpus for running in self._running.values())
        return not self._running or used + _cpus(resources) <= self._cpus

    def start(self, job: Job, resources: Resources) -> None:
        of_ranks = ["torch.distributed.fsdp"] if resources.ranks > 1 else []  # slow to import, so only if it is needed
        # The modules that the fork server imports; this has no effect after the first process has started.
        self._context.set_forkserver_preload(["fewbits.sweeps.running.preload", *of_ranks])
        ours, theirs = self._context.Pipe(duplex=False)
        gpus, self._gpus = self._gpus[: _gpus(resources)], self._gpus[_gpus(resources) :]
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if gpus else {}
        processes: list[ForkServerProcess] = []
        served = meeting_place() if resources.ranks > 1 else None
        for of_rank in [{}] if served is None else environments_at(served, resources.ranks):
            answer = theirs if not processes else None
            rank_job = replace(job, environment={**of_rank, **visible})
            processes.append(self._fork(rank_job, answer))
        theirs.close()
        self._running[job.id] = _Running(processes, ours, _cpus(resources), gpus, served)

    def _fork(self, job: Job, answer: Connection | None) -> ForkServerProcess:
        """Start a worker process; try again if the fork server was killed: multiprocessing then starts a new one.

        answer: the end of a pipe through which the worker sends its outcome; None: it sends none (all ranks but 0).
        """
        for attempt in range(1, ATTEMPTS + 1):
            process = self._context.Process(target=_child, args=(job, answer, self._lifeline))
            try:
                process.start()
                break
            except (ConnectionError, EOFError):
                if attempt == ATTEMPTS:
                    raise
                time.sleep(0.1)  # time for multiprocessing to notice that the fork server is gone
        return process

    def wait(self, seconds: float) -> list[Ended]:
        ready = wait([running.answer for running in self._running.values()], seconds)
        return [self._ended(trial) for trial, running in list(self._running.items()) if running.answer in ready]

    def _ended(self, trial: str) -> Ended:
        running = self._running.pop(trial)
        self._gpus += running.gpus
        outcome: Outcome | None = None
        with contextlib.suppress(EOFError, OSError):
            outcome = running.answer.recv()
        first = running.processes[0]
        first.join(10)
        for process in running.processes:
            if outcome is None or outcome.kind != "over":
                process.kill()  # otherwise the other ranks would wait for ever for the one that failed
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        return Ended(trial, outcome, "" if outcome else _cause(first.exitcode))

    def kill(self, trial: str) -> None:
        if trial in self._running:
            for process in self._running[trial].processes:
                process.kill()

    def close(self) -> None:
        for trial in list(self._running):
            self.kill(trial)
            self._ended(trial)
        self._lifeline.close()
        self._our_end.close()


def _child(job: Job, answer: Connection | None, lifeline: Connection) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # as in preload.py, without which other code may have forked
        signal.signal(number, signal.SIG_IGN)
    _die_with_parent()
    threading.Thread(target=_die_with_driver, args=(lifeline,), daemon=True).start()
    outcome = work(job)
    if answer is not None:
        answer.send(outcome)


def _die_with_parent() -> None:
    """Make Linux kill this worker when the fork server ends: the driver then assumes that all workers have ended."""
    server = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if server == 1 or os.getppid() != server:  # the fork server ended before prctl was called
        os._exit(1)


def _die_with_driver(lifeline: Connection) -> None:
    """Kill this process when the driver has ended; otherwise the next driver would wait for the trials.

    lifeline: a pipe whose other end is open only in the driver.
    """
    with contextlib.suppress(EOFError, OSError):
        lifeline.recv_bytes()  # returns only when the driver's end is closed, since the driver sends nothing
    os.kill(os.getpid(), signal.SIGKILL)


def meeting_place() -> TCPStore:
    """Return a TCP store, served by this process, through which the ranks of one trial find each other.

    It is open as long as a reference to it exists. Rank 0 does not serve it, since another program might take the port
    before rank 0 opens it.
    """
    return TCPStore(_HERE, 0, is_master=True, wait_for_workers=False)


def environments_at(served: TCPStore, ranks: int) -> list[Mapping[str, str]]:
    """Return for each rank the environment variables with which it finds the other ranks through the store `served`."""
    of_ranks = rank_environments(ranks, _HERE, served.port)
    return [{**rank, "LOCAL_RANK": rank["RANK"], "TORCHELASTIC_USE_AGENT_STORE": "True"} for rank in of_ranks]


def rank_environments(ranks: int, address: str, port: int) -> list[Mapping[str, str]]:
    """Return for each rank the environment variables that torchrun would set.

    address, port: the TCP store's, where the ranks meet. LOCAL_RANK is 0, which is right if each rank sees one GPU.
    """
    common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": address, "MASTER_PORT": str(port), "LOCAL_RANK": "0"}
    return [{**common, "RANK": str(rank)} for rank in range(ranks)]


# -------------------------------------------------------------------------------- resources


def bundle(resources: Resources) -> dict[str, float]:
    """Return the CPUs and GPUs that one rank needs, by Ray's names; amounts of 0 are left out."""
    return {name: amount for name, amount in (("CPU", resources.cpus), ("GPU", resources.gpus)) if amount}


def bundles_that_fit(machine: Mapping[str, float], wanted: Mapping[str, float]) -> float:
    """Return how many copies of a bundle fit on a machine while nothing else runs there; infinity for an empty bundle.

    machine: the machine's resources, by Ray's names. wanted: the bundle.
    """
    return min(((machine.get(name, 0.0) + 1e-9) // amount for name, amount in wanted.items()), default=float("inf"))


def require_here(trial: str, resources: Resources, machine: Mapping[str, float]) -> None:
    """Raise ValueError if a trial requests more than this machine has. trial: the name of its run folder."""
    if bundles_that_fit(machine, wanted := bundle(resources)) < resources.ranks:
        raise ValueError(
            f"trial {trial} asks for {resources.ranks} × ({amounts(wanted)}), but this machine has {amounts(machine)}: "
            "lower `resources` (ranks × what each rank needs), or use --address with a cluster"
        )


def amounts(resources: Mapping[str, float]) -> str:
    """Return resources as text, for example `1 GPU, 16 CPUs`. resources: amounts by Ray's names."""
    parts = [f"{count:g} {name}{'s' * (count != 1)}" for name in ("GPU", "CPU") if (count := resources.get(name, 0.0))]
    return ", ".join(parts) or "no resources"


def _cpus(resources: Resources) -> float:
    return (resources.cpus or 0) * resources.ranks


def _gpus(resources: Resources) -> int:
    return math.ceil(resources.gpus or 0) * resources.ranks


def _cause(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        name = signal.Signals(-exit_code).name
        return f"its process was ended by {name}" + (", possibly for lack of memory" if name == "SIGKILL" else "")
    return f"its process ended with status {exit_code}"
