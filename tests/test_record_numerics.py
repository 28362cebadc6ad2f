"""Test `make numerics`: sources are recorded under the same version only if all golden digests are equal."""

import json
from pathlib import Path
from typing import Any

import pytest

from fewbits.experiments.numerics import recorded, running
from tests import record_numerics as tool
from tests.effort import DEEP
from tests.golden import digests
from tests.kernels.backends.gpu import stubbed

ELSEWHERE = {"sse, torch 1": {"quantizer": "x"}}
BEFORE = {"kernels": {"e4m3": "a", "noise": "b"}, "here": {"quantizer": "c"}}


class World:
    """The tool with files in a temporary folder, and with digests that the test sets."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.golden, self.recorded = folder / "numerics.json", folder / "numerics.txt"
        self.files = ["models/recipe.py"]
        self.rows: dict[str, Any] = json.loads(json.dumps(BEFORE))
        self.head: dict[str, Any] | None = None
        self.wrong: list[str] = []
        self.golden.write_text(json.dumps(BEFORE | ELSEWHERE))
        patch.setattr(tool, "GOLDEN", self.golden)
        patch.setattr(tool, "here", lambda: "here")
        patch.setattr(tool, "changed", lambda: self.files)
        patch.setattr(tool, "digests", lambda root: (self.rows, self.wrong))
        patch.setattr(tool, "recorded_digests", lambda: self.head)
        patch.setattr(tool, "record", lambda version, _: self.recorded.write_text(str(version)))
        patch.setattr(tool, "recorded", lambda: (2, {}))
        patch.setattr(tool, "has_gpu", lambda: False)
        patch.setattr(stubbed, "unavailable", lambda: "CuPy is not installed")

    def run(self, *arguments: str) -> str | None:
        """Run the tool; return the version that it recorded, or None if it refused."""
        status = tool.main([*arguments])
        assert status == (0 if self.recorded.exists() else 1)
        return self.recorded.read_text() if self.recorded.exists() else None


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def test_equal_bits_keep_the_version_and_the_digests_of_other_machines(world: World) -> None:
    assert world.run() == "2"
    assert json.loads(world.golden.read_text()) == BEFORE | ELSEWHERE


def test_other_bits_need_a_new_version_without_other_machines(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.rows["here"]["quantizer"] = "other"
    assert world.run() is None
    assert "quantizer" in (printed := capsys.readouterr().out)
    assert "--new-version" in printed
    assert json.loads(world.golden.read_text()) == BEFORE | ELSEWHERE
    assert world.run("--new-version") == "3"
    assert json.loads(world.golden.read_text()) == world.rows


@pytest.mark.parametrize(("of_head", "version"), [("c", "2"), ("other", None)])
def test_missing_digests_are_those_of_the_parent_commit(world: World, of_head: str, version: str | None) -> None:
    world.golden.write_text(json.dumps({"kernels": BEFORE["kernels"]} | ELSEWHERE))
    world.head = {"kernels": BEFORE["kernels"], "here": {"quantizer": of_head}}
    assert world.run() == version


def test_missing_digests_are_never_those_of_sources_that_were_not_recorded() -> None:
    sources = dict(running())
    tool.require_recorded("1a2b3c4d5e6f", recorded()[1])
    sources["models/recipe.py"] = "0" * 32
    with pytest.raises(SystemExit, match=r"models/recipe\.py"):
        tool.require_recorded("1a2b3c4d5e6f", sources)


def test_a_quantizer_that_the_parent_commit_does_not_know_is_added(world: World) -> None:
    world.rows["kernels"]["new"], world.head = "n", BEFORE
    assert world.run() == "2"
    assert json.loads(world.golden.read_text())["kernels"]["new"] == "n"


def test_an_edit_of_gpu_code_is_recorded_there_or_as_a_new_version(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.files = [tool.ON_A_GPU[0]]
    assert world.run() is None
    assert f"{tool.ON_A_GPU[0]} is not executed here: run this command on a machine" in capsys.readouterr().out
    assert world.run("--new-version") == "3"


def test_backends_that_differ_are_never_recorded(world: World) -> None:
    world.wrong = ["the reference: e4m3"]
    assert world.run() is None
    assert world.run("--new-version") is None


def test_the_files_that_need_a_gpu_exist_and_compute() -> None:
    assert set(tool.ON_A_GPU) <= set(running())


def test_the_kernels_give_the_golden_digests() -> None:
    golden = tool.read(tool.GOLDEN)[tool.EVERYWHERE]
    chosen = digests.BASES if DEEP else {base: digests.BASES[base] for base in digests.ON_CUDA}
    rows = digests.kernels(chosen)
    assert rows == {name: golden.get(name) for name in rows}, "run `make numerics` to compare with all sources"
