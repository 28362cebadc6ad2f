"""Test sweeps that start Ray on this machine: killed processes, trials with ranks, and no process left at the end.

`ray stop` is never called, since it would end other users' Ray. Ray's processes end with their driver; to find them,
each test sets a variable (MARK) in their environment.
"""

import os
import random
import secrets
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from fewbits import cli
from fewbits.sweeps.planning import store
from tests.effort import DEEP
from tests.messages import names
from tests.ray_head import AT_NORMAL_PRIORITY, MARK, joining, kill_all, marked, ray_head, short_folder
from tests.sweeps.conftest import Undisturbed
from tests.sweeps.sweep_inputs import (
    SOME,
    Command,
    all_left,
    attempts,
    folders,
    kill_workers,
    node_killed,
    planned,
    running,
    started,
    steps_done,
    tiny_file,
    trained_twice,
    until,
)


@pytest.fixture(scope="module")
def environments() -> Iterator[list[dict[str, str]]]:
    """Yield a list to which each test appends its environment; at the end, kill all processes with their marks."""
    used: list[dict[str, str]] = []
    try:
        yield used
    finally:
        for environment in used:
            kill_all(mark_of(environment))


@pytest.fixture(scope="module")
def folder_of_ray() -> Iterator[Path]:
    with short_folder() as folder:
        yield folder


@pytest.fixture
def on_ray(folder_of_ray: Path, environments: list[dict[str, str]]) -> dict[str, str]:
    """Return the environment variables for a test's commands, with a new mark."""
    own = {MARK: secrets.token_hex(16), "RAY_TMPDIR": str(folder_of_ray), "RAY_ADDRESS": ""}
    environments.append(AT_NORMAL_PRIORITY | own)
    return environments[-1]


def mark_of(environment: dict[str, str]) -> bytes:
    return f"{MARK}={environment[MARK]}".encode()


KILLS = 2 if DEEP else 1
INTERVAL = 0.05  # seconds between two looks at a sweep; longer than elsewhere, since Ray takes many seconds to start


def test_workers_and_the_driver_are_killed_and_the_same_command_finishes(
    undisturbed: Undisturbed, tmp_path: Path, on_ray: dict[str, str]
) -> None:
    """If workers and the driver are killed, the repeated command gives the results of an uninterrupted sweep.

    The results are equal bit for bit, although the uninterrupted sweep used the local backend.
    """
    runs = tmp_path / "runs"
    plan = planned(undisturbed.file, f"runtime.runs={runs}", *SOME)

    def command(name: str, backend: str) -> Command:
        arguments = ("sweep", undisturbed.file, "--runs", runs, "--backend", backend, "--parallel", "2", *SOME)
        return started(tmp_path / name, *arguments, environment=on_ray)

    first = command("first", "ray")
    try:
        kill_workers(first, plan, KILLS, INTERVAL)
        first.until(lambda: bool(running(plan)), INTERVAL)
        time.sleep(random.uniform(0, 1))
    finally:
        first.kill()
    until(lambda: not running(plan))
    again = command("again", "local")
    assert again.end() == 0, again.printed
    assert all_left(plan) == undisturbed.of(plan)
    assert [trained_twice(folder) for folder in folders(plan)] == [[]] * 4


def test_ranks_share_a_placement_group_and_ctrl_c_stops_a_sweep(
    cache: Path, tmp_path: Path, on_ray: dict[str, str]
) -> None:
    """Two ranks on Ray give the same bits as two ranks on the local backend. Ctrl-C then stops a trial of two ranks."""
    short: dict[str, Any] = {"resources": {"ranks": 2, "cpus": 1}, "arms": {"short": {}}}
    short["overrides"] = ["training.batch=8", "recipe=nvfp4"]
    long = {"overrides": ["training.steps=100000", "evaluation.every=100000"], "parent": "short"}
    alone = tiny_file(tmp_path, cache, short, "alone")
    both = tiny_file(tmp_path, cache, short | {"arms": {"short": {}, "long": long}, "seeds": [0, 1]}, "both")
    assert cli.main(["sweep", str(alone), "--runs", str(tmp_path / "local"), "--backend", "local"]) == 0
    local, first, plan = (
        planned(file, f"runtime.runs={tmp_path / name}")
        for file, name in ((alone, "local"), (alone, "ray"), (both, "ray"))
    )
    longs = [one.folder for one in plan.trials.values() if one.parent]
    command = started(tmp_path / "out", "sweep", both, "--runs", tmp_path / "ray", environment=on_ray)
    command.until(lambda: any(map(steps_done, longs)), INTERVAL)
    os.killpg(command.pid, signal.SIGINT)
    assert command.end() == 130, command.printed
    assert "Traceback" not in command.printed
    assert not running(plan)
    assert sorted(map(attempts, longs)) == [0, 2]  # one trial has not started; two ranks of the other wrote its log
    assert [store.failure(folder) for folder in longs] == [None, None]
    assert all_left(first) == all_left(local)


def test_an_address_where_no_ray_is_is_one_line(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tiny_file(tmp_path, cache, {})
    assert cli.main(["sweep", str(file), "--runs", str(tmp_path / "runs"), "--address", "127.0.0.1:9"]) == 2
    shown = capsys.readouterr().err.splitlines()[-1]
    assert shown.startswith("fewbits: no Ray at 127.0.0.1:9")


def test_a_ray_that_does_not_start_is_one_line_with_the_command_that_needs_none(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["sweep", str(tiny_file(tmp_path, cache, {})), "--runs", str(tmp_path / "runs")]
    monkeypatch.setattr(sys, "argv", ["/usr/bin/fewbits", *command])
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", "/proc/none")
    assert cli.main(command) == 2
    shown = capsys.readouterr().err.splitlines()[-1]
    assert names(shown, "on this machine", f"`fewbits {shlex.join(command)} --backend local`")
    assert "None" not in shown


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
        logged = StringIO()
        with node_killed(plan, lambda trial: steps_done(trial) > 4) as killed, joining(head), redirect_stderr(logged):
            status = cli.main(["sweep", str(file), "--runs", str(tmp_path / "spread"), "--address", head.gcs])
    assert (status, len(killed)) == (0, 1), logged.getvalue()
    assert attempts(folders(plan)[0]) >= 8  # two attempts of four ranks; each rank is a process
    assert all_left(plan) == all_left(alone)


def test_no_process_of_ray_stays_behind_a_driver_that_ended_or_was_killed(environments: list[dict[str, str]]) -> None:
    """All Ray processes that the tests of this file started end, whether their driver has ended or was killed.

    This has to be the file's last test. It waits about a minute.
    """
    # Half a second, since each look reads the environments of all processes of this machine.
    until(lambda: not any(marked(mark_of(each)) for each in environments), 0.5)
