"""Test that `make test-portable` runs all test files that train, under the right instruction sets."""

from pathlib import Path

import pytest

from tests import portable


def test_the_files_that_train_are_run() -> None:
    files = portable.test_files()
    assert {"kernels/test_products.py", "models/networks/test_decoder.py", "experiments/test_titan.py"} <= set(files)
    assert "kernels/test_formats.py" not in files
    assert all((portable.TESTS / file).is_file() for file in files)


AVX2 = {"sse4_2", "popcnt", "avx", "pclmulqdq", "avx2", "fma", "f16c", "bmi2"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


@pytest.mark.parametrize(
    ("flags", "levels"),
    [
        (AVX512 | {"avx512_bf16", "amx_bf16"}, ["own", "avx512", "avx2"]),
        (AVX512, ["own", "avx2", "avx"]),
        (AVX2, ["own", "avx", "sse"]),
        ({"sse4_2", "popcnt"}, ["own"]),
        (set(), ["own"]),  # a processor of another architecture than x86-64
    ],
)
def test_a_processor_runs_its_own_level_and_the_next_two_below(flags: set[str], levels: list[str]) -> None:
    run, reasons = portable.choose(flags)
    assert [level.name for level in run] == levels
    assert {*levels, *reasons} == {"own", "avx512", "avx2", "avx", "sse"}
    assert not set(levels) & set(reasons)


@pytest.mark.skipif("sse4_2" not in portable.cpu_flags(), reason="the levels of x86-64 are tried")
def test_a_level_limits_torch_and_a_failure_under_one_level_is_the_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_level.py").write_text(
        "import torch\ndef test_level():\n    assert torch.backends.cpu.get_cpu_capability() != 'DEFAULT'\n"
    )
    monkeypatch.setattr(portable, "ROOT", tmp_path)
    monkeypatch.setattr(portable, "test_files", lambda: ["test_level.py"])
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")  # a limit that the user has set must not limit the level `own`
    sse = portable.LOWER[-1]
    monkeypatch.setattr(portable, "choose", lambda flags: ([portable.OWN, sse], {}))
    assert portable.main(["-q"]) == 1
    lines = capfd.readouterr().out.splitlines()
    expected = "passed" if "avx2" in portable.cpu_flags() else "FAILED"
    assert any(line.startswith(f"own: {expected}") for line in lines)
    assert any(line.startswith("sse: FAILED") for line in lines)
