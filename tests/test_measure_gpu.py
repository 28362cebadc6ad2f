"""Test `make measure-gpu`: results are written as parts end, what passed is not repeated, and limits hold."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from fewbits.kernels.backends.gpu import cuda
from fewbits.kernels.bench import cases
from tests import measure_gpu
from tests.measure_gpu import BEGIN, BENCH, END, FAILED, PASSED, SKIPPED, TIMED_OUT, Part, measure, stored

GPU, COMMIT = "NVIDIA Test", "c0ffee" * 7


def python(name: str, code: str, seconds: int = 60, lacks: str = "") -> Part:
    return Part(name, (sys.executable, "-c", code), seconds, lacks)


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "page.md"
    path.write_text(f"# Kernels\n\nBefore.\n\n{BEGIN}\nnothing\n{END}\n\nAfter.\n")
    return path


def run(folder: Path, page: Path, *parts: Part, gpu: str = GPU, **how: float) -> list[str]:
    return [result.status for result in measure(parts, folder, gpu, COMMIT, page=page, **how)]  # type: ignore[arg-type]


def test_each_result_is_written_when_its_part_ends_and_the_page_with_it(tmp_path: Path, page: Path) -> None:
    """The second part reads the result and the page of the first; the third fails, and the fourth lacks a program."""
    folder = tmp_path / "results"
    reads = (
        f"import json, pathlib; r = json.loads(pathlib.Path({str(folder / 'one.json')!r}).read_text()); "
        f"assert r['status'] == 'passed' and 'all | well' in r['tail']; "
        f"assert 'one | passed' in pathlib.Path({str(page)!r}).read_text()"
    )
    parts = (
        python("one", "print('all | well')"),
        python("two", reads),
        python("three", "raise SystemExit('3 of 9 differ')"),
        python("four", "", lacks="no such tool"),
    )
    assert run(folder, page, *parts) == [PASSED, PASSED, FAILED, SKIPPED]
    text = page.read_text()
    assert text.startswith("# Kernels\n\nBefore.")
    assert text.endswith("After.\n")
    assert "nothing" not in text
    assert r"all \| well" in text
    assert all(last in text for last in ("3 of 9 differ", "no such tool", GPU))


def test_only_what_has_not_passed_on_this_gpu_runs_again(tmp_path: Path, page: Path) -> None:
    folder, runs = tmp_path / "results", tmp_path / "runs"
    good = python("good", f"open({str(runs)!r}, 'a').write('g')")
    bad = python("bad", f"open({str(runs)!r}, 'a').write('b'); raise SystemExit(1)")
    assert run(folder, page, good, bad) == run(folder, page, good, bad) == [PASSED, FAILED]
    assert runs.read_text() == "gbb"
    run(folder, page, good, again=True)
    run(folder, page, good, gpu="another GPU")
    assert runs.read_text() == "gbbgg"


def test_a_part_that_takes_too_long_ends_with_all_its_processes(tmp_path: Path, page: Path) -> None:
    pid = tmp_path / "pid"
    code = (
        "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
        f"open({str(pid)!r}, 'w').write(str(p.pid)); time.sleep(60)"
    )
    start = time.monotonic()
    assert run(tmp_path / "results", page, python("slow", code, seconds=2)) == [TIMED_OUT]
    assert time.monotonic() - start < 30
    assert not _runs(int(pid.read_text()))


def _runs(pid: int) -> bool:
    """Tell whether a process runs; a zombie, which nobody has waited for, does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_parts_for_which_no_time_is_left_are_skipped(tmp_path: Path, page: Path) -> None:
    assert run(tmp_path / "results", page, python("late", ""), seconds=0) == [SKIPPED]
    assert sum(part.seconds for part in measure_gpu.parts(tmp_path)) <= 60 * measure_gpu.MINUTES


def test_measured_speeds_stand_beside_the_predicted_ones(tmp_path: Path, page: Path) -> None:
    folder = tmp_path / "results"
    rows = [
        {"case": case, "share": {"median": 0.815, "low": 0.79, "high": 0.83}} for case in measure_gpu.CASES.values()
    ]
    bench = {"rows": 8192, "cols": 8192, "dtype": "bfloat16", "measured": rows}
    write = f"import pathlib; pathlib.Path({str(folder / BENCH)!r}).write_text({json.dumps(bench)!r})"
    run(folder, page, python("bench", write))
    shares = measure_gpu.predictions()
    for name, case in measure_gpu.CASES.items():
        assert f"| {case} | {shares[name]} | 82% (79% to 83%) |" in page.read_text()


def test_predictions_are_shown_for_cases_that_the_benchmark_has() -> None:
    assert set(measure_gpu.CASES.values()) <= {case.name for case in cases.CASES}
    assert set(measure_gpu.CASES) <= set(measure_gpu.predictions())


def test_the_page_has_a_place_for_results(tmp_path: Path) -> None:
    text = measure_gpu.PAGE.read_text()
    assert text.index(BEGIN) < text.index(END)
    empty = tmp_path / "empty.md"
    empty.write_text("# Kernels\n")
    with pytest.raises(ValueError, match="are missing"):
        measure_gpu.write_page(empty, tmp_path)


@pytest.mark.skipif(cuda.complaint() is None, reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert measure_gpu.main(["--folder", str(tmp_path / "results")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "nothing was measured" in err
    assert not (tmp_path / "results").exists()


def test_results_are_read_as_they_were_written(tmp_path: Path, page: Path) -> None:
    (result,) = measure([python("one", "print(1)")], tmp_path, GPU, COMMIT, page=page)
    assert stored(tmp_path, ["one", "other"]) == {"one": replace(result)}
