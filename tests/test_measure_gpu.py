"""Test `make measure-gpu`: results are written when parts end, passed parts are not run again, time limits hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from fewbits.kernels.backends.gpu import cuda
from tests import measure_gpu
from tests.measure_gpu import BENCH, FAILED, PAGE, PASSED, SKIPPED, TIMED_OUT, Part, measure

GPU, COMMIT = "NVIDIA Test", "c0ffee" * 7


def python(name: str, code: str, seconds: int = 60, lacks: str = "") -> Part:
    return Part(name, (sys.executable, "-c", code), seconds, lacks)


def run(folder: Path, *parts: Part, gpu: str = GPU, **how: float) -> list[str]:
    return [result.status for result in measure(parts, folder, gpu, COMMIT, **how)]  # type: ignore[arg-type]


def page(folder: Path) -> str:
    return (folder / PAGE).read_text()


def test_each_result_is_written_when_its_part_ends_and_the_page_with_it(tmp_path: Path) -> None:
    """A part's result and the page are written when the part ends, and not only when all parts have ended.

    The second part checks that the first part's result and page exist; the third part fails, and the last lacks a tool.
    """
    folder = tmp_path / "results"
    reads = (
        f"import json, pathlib; r = json.loads(pathlib.Path({str(folder / 'one.json')!r}).read_text()); "
        f"assert r['status'] == 'passed' and 'all | well' in r['tail']; "
        f"assert 'one | passed' in pathlib.Path({str(folder / PAGE)!r}).read_text()"
    )
    parts = (
        python("one", "print('all | well')"),
        python("two", reads),
        python("three", "raise SystemExit('3 of 9 differ')"),
        python("four", "", lacks="no such tool"),
    )
    assert run(folder, *parts) == [PASSED, PASSED, FAILED, SKIPPED]
    text = page(folder)
    assert r"all \| well" in text
    assert all(last in text for last in ("3 of 9 differ", "no such tool", GPU))


def test_only_what_has_not_passed_on_this_gpu_runs_again(tmp_path: Path) -> None:
    folder, runs = tmp_path / "results", tmp_path / "runs"
    good = python("good", f"open({str(runs)!r}, 'a').write('g')")
    bad = python("bad", f"open({str(runs)!r}, 'a').write('b'); raise SystemExit(1)")
    assert run(folder, good, bad) == run(folder, good, bad) == [PASSED, FAILED]
    assert runs.read_text() == "gbb"
    run(folder, good, again=True)
    run(folder, good, gpu="another GPU")
    assert runs.read_text() == "gbbgg"
    rows = {line.split("|")[1].strip(): line for line in page(folder).splitlines() if line.startswith("|")}
    assert GPU in rows["bad"]
    assert "another GPU" in rows["good"]


def test_a_part_that_takes_too_long_ends_with_all_its_processes(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = (
        "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
        f"open({str(pid)!r}, 'w').write(str(p.pid)); time.sleep(60)"
    )
    start = time.monotonic()
    assert run(tmp_path / "results", python("slow", code, seconds=2)) == [TIMED_OUT]
    assert time.monotonic() - start < 30
    assert not _runs(int(pid.read_text()))


def test_a_signal_that_ends_the_measurement_ends_the_part_that_runs(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    script = (
        "import pathlib, signal, sys; from tests import measure_gpu as m; signal.signal(signal.SIGTERM, m._stop); "
        f"part = m.Part('slow', (sys.executable, '-c', {code!r}), 60); "
        f"m.measure([part], pathlib.Path({str(tmp_path)!r}), 'GPU', 'commit')"
    )
    measuring = subprocess.Popen([sys.executable, "-c", script], cwd=measure_gpu.ROOT, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 60
    while not (pid.exists() and pid.read_text()) and time.monotonic() < end:
        time.sleep(0.05)
    measuring.terminate()
    assert measuring.wait(60) != 0
    assert not _runs(int(pid.read_text()))
    assert not (tmp_path / "slow.json").exists()


def test_changes_that_are_not_committed_are_another_version(tmp_path: Path) -> None:
    git = ("git", "-c", "user.name=A", "-c", "user.email=a@b.c", "-C", str(tmp_path))
    (tmp_path / "kernel.cu").write_text("one\n")
    for command in (("init", "-q"), ("add", "-A"), ("commit", "-qm", "one")):
        subprocess.run((*git, *command), check=True)
    committed = measure_gpu.version(tmp_path)
    assert len(committed) == 10
    changed = set()
    for text in ("two\n", "three\n"):
        (tmp_path / "kernel.cu").write_text(text)
        changed.add(measure_gpu.version(tmp_path))
    assert len(changed) == 2
    assert all(version.startswith(f"{committed}+") for version in changed)


def _runs(pid: int) -> bool:
    """Tell whether a process runs; a zombie (it has ended, but its parent has not waited for it) does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_parts_for_which_no_time_is_left_are_skipped(tmp_path: Path) -> None:
    assert run(tmp_path / "results", python("late", ""), seconds=0) == [SKIPPED]
    assert sum(part.seconds for part in measure_gpu.parts(tmp_path)) <= 60 * measure_gpu.MINUTES


def writing_bench(folder: Path, then: str = "") -> Part:
    """Return a part that writes a benchmark with one row, and then executes the statement `then`."""
    row = {"case": "e4m3:channel:amax", "share": {"median": 0.815, "low": 0.79, "high": 0.83}}
    bench = {"rows": 64, "cols": 64, "dtype": "bfloat16", "measured": [row]}
    code = f"import pathlib, time; pathlib.Path({str(folder / BENCH)!r}).write_text({json.dumps(bench)!r}); {then}"
    return replace(python("bench", code, seconds=5), target=folder / BENCH)


def test_speeds_are_those_of_the_last_benchmark_that_ran(tmp_path: Path) -> None:
    """The page shows no old speeds after a benchmark that failed or did not start, and those before a time-out."""
    for seconds, status in ((60, FAILED), (0, SKIPPED)):
        folder = tmp_path / status
        run(folder, writing_bench(folder))
        assert "Speed as a share" in page(folder)
        assert "did not end" not in page(folder)
        failing = replace(python("bench", "raise SystemExit(1)"), target=folder / BENCH)
        assert run(folder, failing, gpu="another GPU", seconds=seconds) == [status]
        assert "Speed as a share" not in page(folder)
    folder = tmp_path / "late"
    assert run(folder, writing_bench(folder, then="time.sleep(60)")) == [TIMED_OUT]
    assert "| e4m3:channel:amax | 82% (79% to 83%) |" in page(folder)
    assert "did not end (out of time)" in page(folder)


@pytest.mark.parametrize(("capability", "lacks"), [((8, 0), True), ((8, 6), True), ((8, 9), False), ((9, 0), False)])
def test_fp8_products_are_skipped_on_a_gpu_that_has_none(
    tmp_path: Path, capability: tuple[int, int], lacks: bool
) -> None:
    by_name = {part.name: part for part in measure_gpu.parts(tmp_path, capability)}
    assert bool(by_name["fp8-executed"].lacks) == lacks
    assert not by_name["fp8-emulated"].lacks
    if lacks:
        assert run(tmp_path / "results", by_name["fp8-executed"]) == [SKIPPED]
        assert "FP8 products need 8.9 or later" in page(tmp_path / "results")


def test_a_trial_that_finished_earlier_trains_again(tmp_path: Path) -> None:
    """The store of a part that trains is deleted first, since `fewbits train` does nothing if the result exists.

    The command in this test also trains only if its result does not exist.
    """
    store = tmp_path / "results" / "runs" / "trial"
    code = (
        f"import pathlib; p = pathlib.Path({str(store)!r}, 'result'); "
        "print('done before' if p.exists() else 'trained'); p.parent.mkdir(parents=True, exist_ok=True); p.touch()"
    )
    part = replace(python("trial", code), target=store)
    for _ in range(2):
        (result,) = measure([part], tmp_path / "results", GPU, COMMIT, again=True)
        assert result.tail == ("trained",)


def test_parts_write_where_their_results_are_read(tmp_path: Path) -> None:
    """Each part that trains has a store of its own, in the folder of results; the benchmark writes the page's file."""
    by_name = {part.name: part for part in measure_gpu.parts(tmp_path)}
    trained = [name for name, part in by_name.items() if "train" in part.command]
    assert trained == ["trial", "fp8-emulated", "fp8-executed"]
    for name in trained:
        assert by_name[name].target == tmp_path / "runs" / name
        assert by_name[name].command[-1] == f"runtime.runs={by_name[name].target}"
    assert by_name["bench"].target == tmp_path / BENCH
    assert by_name["bench"].command[-2:] == ("--json", str(tmp_path / BENCH))


@pytest.mark.parametrize("name", ["memcheck", "racecheck"])
def test_errors_that_a_sanitizer_reports_are_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A part fails if the sanitizer reports errors although the tests pass.

    Like NVIDIA's sanitizer, the script that replaces it here fails after such errors only if --error-exitcode is set.
    """
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(
        f"#!{sys.executable}\nimport sys\nprint('========= SUMMARY: 1 error')\n"
        "at = sys.argv.index('--error-exitcode') if '--error-exitcode' in sys.argv else None\n"
        "sys.exit(int(sys.argv[at + 1]) if at else 0)\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    part = next(part for part in measure_gpu.parts(tmp_path) if part.name == name)
    assert part.lacks == ""
    assert run(tmp_path / "results", part) == [FAILED]


def test_the_page_shows_the_line_that_a_part_names(tmp_path: Path) -> None:
    part = python("trial", "print('step 1  9 tokens/s'); print('\\x1b[31mstep 2\\x1b[0m  8 tokens/s'); print('done')")
    run(tmp_path, replace(part, shows="tokens/s"))
    assert "| step 2  8 tokens/s |" in page(tmp_path)
    run(tmp_path, replace(part, shows="no such text"), again=True)
    assert "| done |" in page(tmp_path)


@pytest.mark.skipif(cuda.complaint() is None, reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert measure_gpu.main(["--folder", str(tmp_path / "results")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "nothing was measured" in err
    assert not (tmp_path / "results").exists()
