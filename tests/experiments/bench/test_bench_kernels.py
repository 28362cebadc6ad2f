"""Test the benchmark: all cases appear with their limits, peers do the same work or are skipped, errors are one line.

No test requires a speed, which depends on the machine and on other programs.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import torch

from fewbits import cli
from fewbits.experiments.bench import kernel_cases as bench_cases
from fewbits.experiments.bench import kernels as bench_run
from fewbits.experiments.bench import measure as bench_measure
from fewbits.experiments.bench import peers as bench_peers
from fewbits.experiments.bench.kernel_cases import CASES, Case
from fewbits.experiments.bench.kernels import Bench, Measured, show
from fewbits.experiments.bench.measure import Ratio, TouchedMemory
from fewbits.kernels.packed import Packed

SMALL = ["--size", "256", "--runs", "1", "--threads", "1"]  # one thread, because threads wait on a busy machine


def bench(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = cli.main(["bench", "kernels", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    """Restore torch's number of threads after each test, because the command changes it."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def no_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace torch.compile, which takes seconds for each case, by a function that returns its argument."""
    monkeypatch.setattr(torch, "compile", lambda work, **_: work)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, dict[str, Any]]:
    """Run the command without peers in a process, and return its stdout, its stderr and its JSON file."""
    file = tmp_path_factory.mktemp("bench") / "out.json"
    command = [sys.executable, "-m", "fewbits.cli", "bench", "kernels", *SMALL, "--no-peers", "--json", str(file)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    return answer.stdout, answer.stderr, json.loads(file.read_text())


# The command


def test_every_case_is_in_the_table_the_progress_and_the_json(run: tuple[str, str, dict[str, Any]]) -> None:
    table, progress, answer = run
    assert [entry["case"] for entry in answer["measured"]] == [case.name for case in CASES]
    assert len({case.name for case in CASES}) == len(CASES)
    for case in CASES:
        assert sum(line.startswith(f"{case.name}  ") for line in table.splitlines()) == 1
        assert sum(line.partition(" ")[2] == case.name for line in progress.splitlines()) == 1
    assert max(map(len, table.splitlines())) <= 120
    for shown in (str(answer["machine"]["processor"]), f"torch {torch.__version__}", "tensor 256x256 bfloat16"):
        assert shown in table


def test_the_json_holds_every_single_time(run: tuple[str, str, dict[str, Any]]) -> None:
    _, _, answer = run
    for entry in answer["measured"]:
        assert set(entry["seconds"]) == {"copy", "into"}
        assert all(len(times) == answer["runs"] == 1 for times in entry["seconds"].values())
        assert all(seconds > 0 for times in entry["seconds"].values() for seconds in times)
        assert entry["share"]["median"] == entry["seconds"]["copy"][0] / entry["seconds"]["into"][0]
        assert isfinite(entry["memory"])


def test_the_json_keeps_the_cases_that_were_measured_before_the_command_ended(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file, measure = tmp_path / "out.json", bench_run._measure

    def end_at_the_third(case: Case, *others: Any) -> Measured:
        if case is CASES[2]:
            raise KeyboardInterrupt
        return measure(case, *others)

    monkeypatch.setattr(bench_run, "_measure", end_at_the_third)
    status, _, _ = bench(capsys, *SMALL, "--no-peers", "--json", str(file))
    assert status == 128 + signal.SIGINT
    answer = json.loads(file.read_text())
    assert [entry["case"] for entry in answer["measured"]] == [case.name for case in CASES[:2]]
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


@pytest.mark.usefixtures("no_compiling")
def test_peers_stand_beside_the_cases_they_implement(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    status, table, _ = bench(capsys, *SMALL, "--only", "e4m3", "--json", str(file))
    assert status == 0
    answer = json.loads(file.read_text())
    by_peer = {name: {e["case"] for e in answer["measured"] if name in e["peers"]} for name in answer["peers"]}
    assert by_peer["torch eager"] == by_peer["torch.compile"]
    assert {"e4m3", "e4m3:tensor:amax", "e4m3:channel:amax axis=0"} <= by_peer["torch eager"]
    assert not any(case.startswith(("encode", "decode", "mix")) for case in by_peer["torch eager"])
    assert "×eager" in table
    assert "×compile" in table
    for name, cases in {"torchao": {"e4m3:1x32:e8m0"}, "ml_dtypes": {"e4m3"}}.items():
        assert by_peer.get(name, cases) == cases
        assert (name in by_peer) == (f"×{name}" in table)
        assert (name in by_peer) != (f"{name} skipped" in table)


@pytest.mark.usefixtures("no_compiling")
def test_an_absent_peer_is_skipped(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("torchao", "ml_dtypes"):
        monkeypatch.setitem(sys.modules, package, None)
    status, table, _ = bench(capsys, *SMALL, "--only", "e4m3:1x128")
    assert status == 0
    assert {f"{package} skipped: it is not installed" for package in ("torchao", "ml_dtypes")} <= {*table.splitlines()}
    assert "×torchao" not in table
    assert "×eager" in table


def test_a_peer_that_fails_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no C++ compiler\nand a long story")

    monkeypatch.setattr(torch, "compile", fail)
    status, table, _ = bench(capsys, *SMALL, "--only", "e2m1:16x16")
    assert status == 0
    assert "torch.compile failed on e2m1:16x16:nvfp4: RuntimeError: no C++ compiler" in table.splitlines()
    assert "×compile" not in table


def test_ragged_tensors_are_measured_without_peers(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads() + 1
    settings = ("--size", "99", "--runs", "1", "--threads", str(threads), "--only", "e4m3:128x128:gam")
    status, table, _ = bench(capsys, *settings)
    assert status == 0
    assert "tensor 99x99 bfloat16" in table
    assert "no peers were timed: they need whole blocks" in table
    assert f"{threads} of " in table.splitlines()[0]
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--device", "cuda"], ["--device cuda", "cpu"]),
        (["--size", "0"], ["--size", "'0'", "≥ 1"]),
        (["--runs", "many"], ["--runs", "'many'"]),
        (["--only", "nvfp5"], ["nvfp5", *(case.name for case in CASES)]),
        (["--json", "/no/such/folder/out.json"], ["--json", "/no/such/folder/out.json"]),
        (["--json", "."], ["--json"]),
        (["--json", os.devnull], ["--json"]),
        (["now"], ["now"]),
    ],
)
def test_wrong_options_are_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], named: list[str]) -> None:
    status, out, err = bench(capsys, *arguments)
    assert status == 2
    assert out == ""
    assert err.startswith("fewbits: bench kernels: ")
    assert err.count("\n") == 1
    assert all(name in err for name in named)


# Peers


@pytest.mark.parametrize("case", [c for c in CASES if bench_peers.eager(c)], ids=lambda c: c.name)
def test_peers_do_the_same_work(case: Case) -> None:
    """Check that peers' values equal ours, except where the last bit of a scale differs.

    For random values, only the root mean square distance from x is compared.
    """
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(3)).to(case.dtype or torch.bfloat16)
    for peer in bench_peers.PEERS:
        if peer.name == "torch.compile" or peer.missing("cpu"):
            continue
        with bench_peers.quiet():
            work = peer.work(case)
        if work is None:
            continue
        theirs: Any = work(x)
        ours: Any = case.call(x)
        a, b = _first(theirs), _first(ours)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if "sample" in case.name:
            far = [float((y.float() - x.float()).square().mean().sqrt()) for y in (a, b)]
            assert far[0] == pytest.approx(far[1], rel=0.1)
        else:
            assert float((a == b).float().mean()) > 0.99


def _first(result: Any) -> torch.Tensor:
    if isinstance(result, Packed):
        return result.codes
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize(
    ("case", "traffic"),
    [
        (bench_cases.quantize("e4m3"), 1.0),
        (bench_cases.quantize("e4m3:tensor:amax"), 1.5),
        (bench_cases.quantize("e4m3:channel:amax", axis=0), 1.5),
        (bench_cases.quantize("e2m1:1x16:nvfp4:rht16"), 1.5),
        (bench_cases.both_axes("e2m1:1x16:nvfp4"), 2.0),
        (bench_cases.mix("m", "e4m3:128x128:amax @ error<0.1 | bf16 ; per=block"), 1.0),
        (bench_cases.encode("e2m1:1x16:nvfp4"), (4 + 0.5 + 1 / 16) / 4),
        (bench_cases.decode("e4m3:128x128:amax"), (1 + 4 / 128**2 + 2) / 4),
        (bench_cases.sample_weight("gaussian"), 1.25),
        (bench_cases.generate("gaussian"), 0.125),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_the_bytes_a_perfect_kernel_moves_beside_those_of_the_copy(case: Case, traffic: float) -> None:
    assert case.traffic(itemsize=2) == traffic


# Measurement and report


def test_a_share_is_printed_with_its_range_and_what_memory_allows(capsys: pytest.CaptureFixture[str]) -> None:
    facts = dict.fromkeys(("device", "fewbits", "backend", "torch", "python", "compiler", "load"), "?")
    entry = Measured("made up", Ratio(0.6, 0.3, 1.2), 0.8, 1e10, {"into": [2e-6, 1e-6, 3e-6]})
    bench = Bench({**facts}, "cpu", "bfloat16", 8192, 8192, 7, [entry])
    show(bench)
    table = re.sub(r" +", " ", capsys.readouterr().out)
    assert "made up 60 30–120 80 75" in table
    assert "small tensor" not in table
    show(dataclasses.replace(bench, device="cuda"))
    table = re.sub(r" +", " ", capsys.readouterr().out)
    assert "case µs copy range mem at" in table
    assert "made up 2.0 60 30–120 80 75" in table


def test_turns_end_when_patience_does_and_untimed_turns_do_not_count() -> None:
    assert len(bench_measure.take_turns([lambda: 1.0], runs=5, patience=0.0)[0]) == 1
    assert len(bench_measure.take_turns([lambda: 1.0], runs=5, patience=60.0)[0]) == 5
    clock = itertools.count()
    assert bench_measure.take_turns([lambda: float(next(clock))], runs=2, untimed=3) == [[3.0, 4.0]]


@pytest.mark.parametrize("case", [c for c in CASES if c.backend], ids=lambda c: c.name)
def test_what_has_no_out_writes_the_same_values_into_touched_memory(case: Case) -> None:
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(3)).bfloat16()
    memory = TouchedMemory()
    for _ in range(2):
        with memory:
            values: Any = case.into(x, x)
    public: Any = case.call(x)
    assert torch.equal(_first(values), _first(public))


def test_more_load_than_cores_is_busy(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    for load in (2.0, 6.8):  # the load average includes processes that ended a minute ago
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        bench_measure.warn_if_busy()
    warning = capsys.readouterr().err
    assert warning.count("busy") == 1
    assert "load 6.8, cores 2" in warning


# Other processes


def spin(seconds: float = 0.2) -> float:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
    return seconds


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="the kernel does not count processor time there")
def test_other_processes_are_measured_and_our_own_work_is_not() -> None:
    """Start processes that use at least half of the machine (more if other programs run), and check their share."""
    alone = bench_measure.OtherProcesses()
    bench_measure.take_turns([spin], 3, patience=math.inf, others=alone)
    with contextlib.ExitStack() as stack:
        for _ in range(-(-(os.cpu_count() or 1) // 2)):
            other = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(other.kill)
        beside = bench_measure.OtherProcesses()
        bench_measure.take_turns([spin], 3, patience=math.inf, others=beside)
    assert len(alone.shares) == len(beside.shares) == 3
    assert all(share is not None and 0 <= share <= 1 for share in (*alone.shares, *beside.shares))
    assert max(share or 0 for share in beside.shares) > 0.3
