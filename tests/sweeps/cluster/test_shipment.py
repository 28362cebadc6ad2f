"""Test the zip that is shipped to a cluster: it contains all sources of fewbits, unchanged, and the user's files."""

import zipfile
from io import BytesIO
from pathlib import Path

import pytest

from fewbits.sweeps.cluster import submit as submit_module
from fewbits.sweeps.cluster.submit import pack

ROOT = Path(__file__).parents[3]


def names(package: bytes) -> set[str]:
    return set(zipfile.ZipFile(BytesIO(package)).namelist())


def test_each_source_of_each_package_is_shipped_unchanged() -> None:
    archive = zipfile.ZipFile(BytesIO(pack()))
    package = ROOT / "src" / "fewbits"
    wanted = {f"fewbits/{file.name}": file for file in package.glob("*.py")}
    for name in ("kernels", "models", "experiments", "sweeps", "analysis"):
        sources = [*(ROOT / name).rglob("*.py"), *(ROOT / name).rglob("csrc/*"), *(ROOT / name).rglob("*.yaml")]
        wanted |= {f"fewbits/{file.relative_to(ROOT)}": file for file in sources if file.is_file()}
    assert set(wanted) <= set(archive.namelist())
    for name, file in wanted.items():
        assert archive.read(name) == file.read_bytes()


def test_it_is_small_and_carries_nothing_that_python_or_editors_leave() -> None:
    package = pack()
    assert len(package) < 5 * 2**20
    assert all(name.startswith("fewbits/") for name in names(package))
    assert not [name for name in names(package) if "__pycache__" in name or "/." in name or name.endswith(".pyc")]


def test_the_same_sources_are_the_same_bytes_wherever_and_whenever(tmp_path: Path) -> None:
    sources = {"fewbits/__init__.py": "one", "fewbits/kernels/a.py": "two", "fewbits/kernels/csrc/a.h": "three"}
    packages = []
    for tree, order in (("here", sorted(sources)), ("there", sorted(sources, reverse=True))):
        for name in order:
            file = tmp_path / tree / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(sources[name])
        packages.append(pack(tmp_path / tree / "fewbits"))
    assert packages[0] == packages[1]
    (tmp_path / "there/fewbits/kernels/a.py").write_text("2")
    assert pack(tmp_path / "there/fewbits") != packages[0]


def test_a_linked_package_is_shipped_as_a_folder(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "a.py").write_text("one")
    (tmp_path / "src" / "fewbits").mkdir(parents=True)
    (tmp_path / "src" / "fewbits" / "kernels").symlink_to("../../kernels")
    assert names(pack(tmp_path / "src" / "fewbits")) == {"fewbits/kernels/a.py"}


def test_a_sweep_file_of_ones_own_lies_beside_it_with_its_scales(tmp_path: Path) -> None:
    (tmp_path / "fewbits").mkdir()
    (tmp_path / "mine" / "scale").mkdir(parents=True)
    for name in ("mine/lr.yaml", "mine/scale/cpu.yaml", "mine/else.yaml"):
        (tmp_path / name).write_text(name)
    archive = zipfile.ZipFile(BytesIO(pack(tmp_path / "fewbits", [tmp_path / "mine" / "lr.yaml"])))
    assert {name: archive.read(name) for name in archive.namelist()} == {
        "lr.yaml": b"mine/lr.yaml",
        "scale/cpu.yaml": b"mine/scale/cpu.yaml",
    }


def test_what_is_too_large_is_refused_by_the_name_of_its_largest_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit_module, "LARGEST", 10)
    (tmp_path / "small.py").write_bytes(b"x" * 5)
    (tmp_path / "large.bin").write_bytes(b"x" * 6)
    with pytest.raises(ValueError, match=r"the largest is .*large\.bin"):
        pack(tmp_path)
