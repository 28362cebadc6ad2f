"""Test that a trial whose ranks are on two nodes survives the loss of a node."""

import os
import signal
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from fewbits import cli
from tests.ray_head import joining, parent_of, ray_head
from tests.sweeps.sweep_inputs import all_left, attempts, folders, holder_of, planned, running, steps_done, tiny_file


@pytest.mark.deep
def test_four_ranks_over_two_nodes_survive_the_loss_of_one_with_the_same_bits(cache: Path, tmp_path: Path) -> None:
    """A trial of four ranks, on a cluster of three nodes with room for two ranks each, resumes after a node is killed.

    Its results equal those of the local backend bit for bit.
    """
    data: dict[str, Any] = {"resources": {"ranks": 4, "cpus": 0.5, "attempts": 9}}
    data["overrides"] = ["recipe=nvfp4", "training.steps=30", "training.batch=16", "training.micro_batch=2"]
    file = tiny_file(tmp_path, cache, data)
    assert cli.main(["sweep", str(file), "--runs", str(tmp_path / "alone"), "--backend", "local"]) == 0
    alone, plan = (planned(file, f"runtime.runs={tmp_path / name}") for name in ("alone", "spread"))
    with ray_head(nodes=({}, {}, {})) as head:
        head.wait_for_nodes()
        logged, ended = StringIO(), Event()
        killed: list[int] = []

        def kill_the_node_of_rank_0() -> None:
            (folder,) = folders(plan)
            while not ended.wait(0.02):
                holder = holder_of(folder) if running(plan) and steps_done(folder) > 4 else None
                if holder is not None:
                    killed.append(parent_of(holder))
                    os.kill(killed[0], signal.SIGKILL)
                    return

        killer = Thread(target=kill_the_node_of_rank_0)
        killer.start()
        with joining(head), redirect_stderr(logged):
            status = cli.main(["sweep", str(file), "--runs", str(tmp_path / "spread"), "--address", head.gcs])
        ended.set()
        killer.join()
    assert (status, len(killed)) == (0, 1), logged.getvalue()
    assert attempts(folders(plan)[0]) >= 8  # two attempts of four ranks; each rank is a process
    assert all_left(plan) == all_left(alone)
