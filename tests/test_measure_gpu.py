"""Test `make measure-gpu`: results are written when parts end, passed parts are not run again, time limits hold."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fewbits.commands import bench
from fewbits.experiments.config import load_trial
from fewbits.kernels.backends.gpu import cuda
from tests import gpu_parts, measure_gpu
from tests.measure_gpu import FAILED, PAGE, PASSED, SKIPPED, TIMED_OUT, Part, measure

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
    for quick, minutes in ((False, measure_gpu.MINUTES), (True, measure_gpu.QUICK_MINUTES)):
        assert sum(part.seconds for part in measure_gpu.parts(tmp_path, quick=quick)) <= 60 * minutes


@pytest.mark.parametrize(("capability", "lacks"), [((8, 0), True), ((8, 6), True), ((8, 9), False), ((9, 0), False)])
def test_fp8_products_are_skipped_on_a_gpu_that_has_none(
    tmp_path: Path, capability: tuple[int, int], lacks: bool
) -> None:
    by_name = {part.name: part for part in measure_gpu.parts(tmp_path, capability)}
    assert bool(by_name["fp8"].lacks) == lacks
    if lacks:
        assert run(tmp_path / "results", by_name["fp8"]) == [SKIPPED]
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


@pytest.mark.parametrize("quick", [False, True])
def test_the_commands_of_all_parts_are_understood(tmp_path: Path, quick: bool) -> None:
    """Parse the arguments of each part: those of pytest, of fewbits, and of the parts in gpu_parts.py."""
    for part in measure_gpu.parts(tmp_path, sanitizer="compute-sanitizer", quick=quick):
        words = list(part.command)
        if "fewbits.cli" in words:
            command, *rest = words[words.index("fewbits.cli") + 1 :]
            if command == "train":
                load_trial(rest)
            elif rest[0] == "train":
                bench._train_options(rest[1:])
            elif not torch.cuda.is_available():
                with pytest.raises(ValueError, match="bench kernels: --device cuda"):
                    bench.kernels(rest[1:])
        elif "tests.gpu_parts" in words:
            gpu_parts.options_of(words[words.index("tests.gpu_parts") + 1 :])
        else:
            words[words.index("-n") + 1] = "0"
            done = subprocess.run([*words, "--collect-only"], cwd=measure_gpu.ROOT, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout


TINY = (
    *("model.layers=2", "model.width=64", "model.heads=2", "model.kv_heads=2", "model.head_dim=32", "model.ffn=128"),
    *("data=synthetic", "data.size=65536", "training.batch=4", "training.micro_batch=2", "training.length=128"),
)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (("smoke", "--only", "128x128, both"), "1 classes: 0 differ; self-test: 0 rules fail"),
        (("profile", "--model", "gpt2-nano", "--recipes", "bf16,nvfp4", "--batch", "1", "--length", "32"), "gaps"),
        (("products",), "fp8, rows"),
        (("repeat", "{folder}", *TINY, "evaluation.windows=4", "recipe=nvfp4"), "resumed one: the same numbers"),
    ],
)
def test_parts_run_on_a_cpu(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], words: tuple[str, ...], shown: str
) -> None:
    part, *rest = (word.format(folder=tmp_path) for word in words)
    assert gpu_parts.main([part, *rest, "--device", "cpu"]) == 0
    assert shown in capfd.readouterr().out


@pytest.mark.skipif(bool(gpu_parts.lacks_titan()), reason="torchtitan is not installed")
def test_torchtitan_understands_the_arguments(tmp_path: Path) -> None:
    script = (
        "import sys; from tests.experiments.titan_on_cpu import ConfigManager; "
        "c = ConfigManager().parse_args(sys.argv[1:]); print(c.training.steps, c.checkpoint.enable, c.fewbits.recipe)"
    )
    command = [sys.executable, "-c", script, *gpu_parts.titan_arguments(tmp_path)]
    done = subprocess.run(command, cwd=measure_gpu.ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["10 False gaussws"], done.stderr[-2000:]


@pytest.mark.parametrize("name", ["memcheck", "racecheck", "initcheck"])
def test_errors_that_a_sanitizer_reports_are_a_failure(tmp_path: Path, name: str) -> None:
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
    part = next(part for part in measure_gpu.parts(tmp_path, sanitizer=str(tool)) if part.name == name)
    assert part.lacks == ""
    assert run(tmp_path / "results", part) == [FAILED]
    without = next(part for part in measure_gpu.parts(tmp_path) if part.name == name)
    assert run(tmp_path / "results", without) == [SKIPPED]


@pytest.mark.skipif(cuda.complaint() is None, reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert measure_gpu.main(["--folder", str(tmp_path / "results")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "nothing was measured" in err
    assert not (tmp_path / "results").exists()
