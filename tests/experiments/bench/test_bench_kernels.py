"""Test the benchmark: all cases appear with their limits, peers do the same work or are skipped, errors are one line.

No test requires a speed, which depends on the machine and on other programs.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fewbits import cli
from fewbits.experiments.bench import kernels as bench_peers
from fewbits.experiments.bench.kernel_cases import CASES, Case
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


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--device", "cuda"], ["--device cuda", "cpu"]),
        (["--size", "0"], ["--size", "'0'", "≥ 1"]),
        (["--only", "nvfp5"], ["nvfp5", *(case.name for case in CASES)]),
        (["--json", "/no/such/folder/out.json"], ["--json", "/no/such/folder/out.json"]),
        (["--json", os.devnull], ["--json"]),
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
