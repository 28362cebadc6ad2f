"""Test `fewbits bench kernels --generators`: it times all generators over matrix shapes and stores the times."""

import json
from pathlib import Path

import pytest

from fewbits import cli
from fewbits.kernels.backends import build

SMALL = ["--shapes", "64x96,32x32", "--runs", "2"]


def bench(*arguments: str) -> int:
    return cli.main(["bench", "kernels", "--generators", *arguments])


def test_generators_are_measured_over_shapes_and_kept_for_reports(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert bench(*SMALL, "--store", str(tmp_path)) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[-2:]] == ["64x96", "32x32"]
    answer = json.loads((tmp_path / "bench" / "generators-cpu.json").read_text())
    places = {(one["rows"], one["cols"], one["what"], one["arm"]) for one in answer["timed"]}
    arms = {"bitwise", "torch"} | ({"box-muller"} if build.compiler() else set())
    assert {arm for rows, _, what, arm in places if (rows, what) == (64, "generator")} == arms
    assert {arm for rows, _, what, arm in places if (rows, what) == (32, "forward")} == {"bitwise", "torch"}
    assert all(len(one["seconds"]) == 2 and min(one["seconds"]) > 0 for one in answer["timed"])
    assert {"git", "processor", "device", "load", "time", "command"} <= set(answer["machine"])


def test_once_measures_only_what_the_store_lacks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "bench" / "generators-cpu.json"
    assert bench(*SMALL, "--store", str(tmp_path), "--once") == 0
    first = file.read_bytes()
    assert bench(*SMALL, "--store", str(tmp_path), "--once") == 0
    assert f"{file} exists" in capsys.readouterr().out
    assert file.read_bytes() == first


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "64"], "shapes such as 2048x512"),
        (["--shapes", "0x32"], "shapes such as 2048x512"),
        (["--shapes", "33x64"], "multiples of 32"),
        (["--once"], "--once requires --store"),
        (["--size", "64"], "--size"),
        (["--device", "cuda"], "--device cuda"),
    ],
)
def test_wrong_options_are_one_line_and_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(*arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
