"""Trials in processes of this machine, without Ray: each in its own, forked from one that has everything loaded."""

from __future__ import annotations

import contextlib
import ctypes
import math
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from fewbits.sweeps.cluster.capacity import Demand
from fewbits.sweeps.planning.sweep import Resources
from fewbits.sweeps.running.backend import Ended
from fewbits.sweeps.running.machine_kinds import Machine, this_machine
from fewbits.sweeps.running.worker import Job, Outcome, work

_PR_SET_PDEATHSIG = 1
_HERE = "127.0.0.1"
ATTEMPTS = 100  # to fork a worker, 0.1 s apart


@dataclass
class _Running:
    processes: list[ForkServerProcess]
    answer: Connection  # of rank 0
    cpus: float
    gpus: list[int]
    served: TCPStore | None  # where several ranks meet, while they run


class Local:
    alone = True

    def __init__(self, cpus: float | None = None) -> None:
        self._cpus = cpus or len(os.sched_getaffinity(0))
        self._gpus = list(range(torch.cuda.device_count()))  # that no trial has
        self._running: dict[str, _Running] = {}
        self._context = multiprocessing.get_context("forkserver")
        self._machine: Machine | None = None

    def require(self, demands: Sequence[Demand], say: Callable[[str], None]) -> None:
        cores, gpus = len(os.sched_getaffinity(0)), torch.cuda.device_count()
        for demand in demands:
            wanted = demand.resources
            if _gpus(wanted) > gpus or _cpus(wanted) > max(cores, wanted.ranks):
                raise ValueError(
                    f"{demand.trial} takes {wanted.ranks} × ({wanted.cpus:g} cpus, {wanted.gpus:g} gpus), and this "
                    f"machine has {cores} cpus and {gpus} gpus: change resources, or --address a cluster"
                )

    def machines(self) -> Sequence[Machine]:
        """Return this machine, with the room that trials get here."""
        if self._machine is None:
            here = this_machine()
            self._machine = replace(here, resources={**here.resources, "CPU": max(self._cpus, 1.0)})
        return [self._machine]

    def room(self, resources: Resources, like: str | None = None) -> bool:
        used = sum(running.cpus for running in self._running.values())
        if _gpus(resources) > len(self._gpus):
            return False
        return not self._running or used + _cpus(resources) <= self._cpus

    def start(self, job: Job, resources: Resources, like: str | None = None) -> None:
        of_ranks = ["torch._dynamo"] if resources.ranks > 1 else []  # loaded by torch's DistributedDataParallel
        # Only the first process that is started heeds this.
        self._context.set_forkserver_preload(["fewbits.sweeps.running.preload", *of_ranks])
        ours, theirs = self._context.Pipe(duplex=False)
        gpus, self._gpus = self._gpus[: _gpus(resources)], self._gpus[_gpus(resources) :]
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if gpus else {}
        processes: list[ForkServerProcess] = []
        served = meeting_place() if resources.ranks > 1 else None
        for of_rank in [{}] if served is None else environments_at(served, resources.ranks):
            answer = theirs if not processes else None
            its_job = replace(job, environment={**of_rank, **visible})
            processes.append(self._forked(its_job, answer))
        theirs.close()
        self._running[job.id] = _Running(processes, ours, _cpus(resources), gpus, served)

    def _forked(self, job: Job, answer: Connection | None) -> ForkServerProcess:
        """Start a worker. The process that workers are forked from may have been killed (by the kernel, when memory
        ran out): multiprocessing starts another one on the next attempt."""
        for attempt in range(1, ATTEMPTS + 1):
            process = self._context.Process(target=_child, args=(job, answer))
            try:
                process.start()
                break
            except (ConnectionError, EOFError):
                if attempt == ATTEMPTS:
                    raise
                time.sleep(0.1)  # until it is gone, and seen to be
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
                process.kill()  # ranks wait for each other for ever
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


def _child(job: Job, answer: Connection | None) -> None:
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # as in fewbits.sweeps.running.preload, where the server is somebody else's
    _die_with_parent()
    outcome = work(job)
    if answer is not None:
        answer.send(outcome)


def _die_with_parent() -> None:
    """A driver that was killed leaves no trials behind that its successor would wait for: the process that they are
    forked from ends when the driver has."""
    server = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if server == 1 or os.getppid() != server:  # it has ended already
        os._exit(1)


def meeting_place() -> TCPStore:
    """Where the ranks of one trial meet on this machine, served by this process while somebody holds it, as torchrun's
    agent does: a port that was found free and is served by rank 0 later may be another program's by then."""
    return TCPStore(_HERE, 0, is_master=True, wait_for_workers=False)


def environments_at(served: TCPStore, ranks: int) -> list[Mapping[str, str]]:
    """Of ranks that meet there."""
    of_ranks = rank_environments(ranks, _HERE, served.port)
    return [{**words, "LOCAL_RANK": words["RANK"], "TORCHELASTIC_USE_AGENT_STORE": "True"} for words in of_ranks]


def rank_environments(ranks: int, address: str, port: int) -> list[Mapping[str, str]]:
    """torchrun's words for each of the processes of one trial, each of which sees its own device alone."""
    common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": address, "MASTER_PORT": str(port), "LOCAL_RANK": "0"}
    return [{**common, "RANK": str(rank)} for rank in range(ranks)]


def _cpus(resources: Resources) -> float:
    return (resources.cpus or 0) * resources.ranks


def _gpus(resources: Resources) -> int:
    return math.ceil(resources.gpus or 0) * resources.ranks


def _cause(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        name = signal.Signals(-exit_code).name
        return f"its process was ended by {name}" + (", as when memory is short" if name == "SIGKILL" else "")
    return f"its process ended with status {exit_code}"
